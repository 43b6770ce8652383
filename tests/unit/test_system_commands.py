"""Commands that a message asks the user to run, for each kind of installation."""

from __future__ import annotations

import os
import shutil
import site
import sys
from pathlib import Path

import pytest

from safelaunch.system import commands
from safelaunch.system.console import COMMAND


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python of an environment whose scripts are in the same directory."""
    monkeypatch.setattr(sys, "executable", os.fspath(tmp_path / "python3"))
    return tmp_path / "python3"


def with_script(python: Path) -> Path:
    script = python.with_name("safelaunch")
    script.touch(mode=0o755)
    return script


def test_own_command_is_script_of_environment_if_present(python: Path) -> None:
    assert commands.own(["dump", "--all"]) == [str(python), "-m", "safelaunch", "dump", "--all"]
    script = with_script(python)
    assert commands.own(["dump", "--all"]) == [str(script), "dump", "--all"]


@pytest.mark.parametrize(("sudo", "first"), [("/usr/bin/sudo", ["sudo"]), (None, [])])
def test_as_root_uses_sudo_if_installed(
    sudo: str | None, first: list[str], python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = with_script(python)
    monkeypatch.setattr(shutil, "which", lambda name: sudo)
    assert commands.as_root(["dump"]) == [*first, str(script), "dump"]


def test_as_root_passes_user_base_of_user_installation(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = Path(commands.__file__).parents[2]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/sudo")
    monkeypatch.setattr(site, "getusersitepackages", lambda: os.fspath(packages))
    monkeypatch.setattr(site, "getuserbase", lambda: "/home/me/.local")
    words = commands.as_root(["dump"])
    assert words == ["sudo", "env", "PYTHONUSERBASE=/home/me/.local", str(python), "-m", "safelaunch", "dump"]


@pytest.mark.parametrize(
    ("has_pip", "words"),
    [
        (True, ["{python}", "-m", "pip", "install", "torch"]),
        (False, ["uv", "pip", "install", "--python", "{python}", "torch"]),
    ],
)
def test_pip_install_uses_uv_if_pip_is_missing(
    has_pip: bool, words: list[str], python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: object() if has_pip else None)
    assert commands.pip_install("torch") == [word.format(python=python) for word in words]


def test_command_line_quotes_shell_characters() -> None:
    assert commands.line(["sudo", "/home/a b/safelaunch"]) == f"{COMMAND}sudo '/home/a b/safelaunch'"
