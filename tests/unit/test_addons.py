"""The interface to the add-ons, with some of them missing."""

from __future__ import annotations

import pytest

import safelaunch
from safelaunch import addons

CORE = {"exec": "watch", "dump": "write a bundle", "explain": "explain", "help": "show help"}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addons, "is_present", lambda addon: False)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("name", addons.PUBLIC)
def test_a_public_name_of_a_missing_add_on_raises_with_the_reason(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"^safelaunch\.{name} is part of the add-on '\w+', which isn't installed$"
    ):
        getattr(safelaunch, name)
    assert not hasattr(safelaunch, name) and safelaunch.diagnose is not None


@pytest.mark.usefixtures("without")
def test_missing_add_ons_implement_no_hook_and_have_no_command() -> None:
    assert [*addons.readers()] == [] and addons.service("record") is None
    assert all(addons.missing(hook) == [*names] for hook, names in addons.HOOKS.items())
    assert addons.with_commands(CORE) == CORE and not any(map(addons.has_command, addons.COMMANDS))


def test_a_command_of_an_add_on_is_listed_after_the_command_that_its_row_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addons, "COMMANDS", {"files": ("files", "count open files", "dump")})
    monkeypatch.setattr(addons, "is_present", lambda addon: True)
    listed = addons.with_commands(CORE)
    assert [*listed] == ["exec", "dump", "files", "explain", "help"] and listed["files"] == "count open files"
