"""The Python API, as far as it starts no rank: names, options, errors."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import safelaunch
from safelaunch.addons.embed.keywords import flags_of
from safelaunch.addons.embed.launching import Launch, LaunchOptions
from safelaunch.addons.embed.supervisor import from_the_start
from safelaunch.addons.embed.wire import Connection, Done, FromCaller, FromSupervisor, RanksEnded, Ready, Stop, Stopping
from safelaunch.settings.config import resolve
from safelaunch.settings.options import OWN_OPTIONS
from safelaunch.supervise.watch.progress import policy_of
from tests.support import incidents

IMPORTS = """
import sys
before = set(sys.modules)
import safelaunch
safelaunch.step()
print(*sorted(set(sys.modules) - before))
print([name for name in sys.modules if name.startswith("safelaunch.")])
for found in (safelaunch.launch, safelaunch.diagnose):
    print(found.__name__, callable(found))
from unittest.mock import patch
with patch("safelaunch.launch", "a fake"):
    print(safelaunch.launch)
from safelaunch import launch, probes, schemas
print(launch is safelaunch.launch, callable(probes.memory), callable(schemas.path), "torch" in sys.modules)
"""


def test_public_names_are_imported_lazily() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    new, ours, *rest = done.stdout.splitlines()
    dear = {"typing", "msgspec", "json", "subprocess", "dataclasses", "inspect", "pathlib", "re", "importlib", "torch"}
    assert not dear & set(new.split())
    assert ours == "[]"
    assert rest[:2] == ["launch True", "diagnose True"]
    assert rest[2:] == ["a fake", "True True True False"], "they can be replaced in tests"


def test_public_names_all_exist() -> None:
    assert set(safelaunch.__all__) <= set(dir(safelaunch))
    assert all(getattr(safelaunch, name) is not None for name in safelaunch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = safelaunch.lunch


def test_keywords_match_options() -> None:
    flags = {flag for flag, _ in flags_of(dict.fromkeys(LaunchOptions.__annotations__, "1"))}
    flags |= {flag for flag, _ in flags_of({"watch": False})}
    assert flags == {option.flag for option in OWN_OPTIONS if "run" in option.commands} - {"--dry-run"}


def test_options_become_flags() -> None:
    options = {
        "preset": ["hang-debug", Path("mine.yaml")],
        "stall_timeout": 90,
        "config_file": "other.toml",
        "no_early_look": True,
        "no_lease": False,
        "watch": True,
        "gpus": None,
    }
    assert flags_of(options) == (
        ("--preset", "hang-debug"),
        ("--preset", "mine.yaml"),
        ("--stall-timeout", "90"),
        ("--config", "other.toml"),
        ("--no-early-look", None),
    )
    assert isinstance(safelaunch.launch(None, "train.py", stall_timeout=3), Launch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "startup_s", "origin"),
    [
        ({"stall_timeout": 4}, 4.0, "stall-timeout"),
        ({"stall_timeout": 4, "startup_timeout": 9}, 9.0, "command line"),
        ({"stall_timeout": "auto"}, 1800.0, "default"),
        ({}, 1800.0, "default"),
    ],
)
def test_stall_timeout_keyword_applies_before_first_step(
    words: dict[str, object], startup_s: float, origin: str, tmp_path: Path
) -> None:
    settings = from_the_start(resolve(flags_of(words), {}, tmp_path, lambda: None))
    assert (settings.startup_timeout_s, settings.origin("startup-timeout")) == (startup_s, origin)
    assert policy_of(settings).has_one_limit == (startup_s == 4.0)


def test_stall_timeout_variable_does_not_change_startup_timeout(tmp_path: Path) -> None:
    """The variable also applies to the command line, which needs time for torchrun and imports."""
    settings = from_the_start(resolve((), {"SAFELAUNCH_STALL_TIMEOUT": "4"}, tmp_path, lambda: None))
    assert (settings.stall_timeout_s, settings.startup_timeout_s) == (4.0, 1800.0)


def test_hang_error_names_bundle_and_can_be_pickled() -> None:
    verdict = incidents.ALL["two"]().verdict if "two" in incidents.ALL else next(iter(incidents.ALL.values()))().verdict
    error = pickle.loads(pickle.dumps(safelaunch.HangError(verdict, Path("/bundles/one"))))
    assert (error.verdict, error.bundle) == (verdict, Path("/bundles/one"))
    assert verdict.summary in str(error)
    assert "/bundles/one" in str(error)
    assert "hung" in str(safelaunch.HangError())


def test_path_without_evidence_raises(tmp_path: Path) -> None:
    with pytest.raises(safelaunch.UsageError, match="does not exist"):
        safelaunch.diagnose(tmp_path / "nothing")


def test_messages_arrive_on_both_sides() -> None:
    ours, theirs = socket.socketpair()
    caller, supervisor = Connection(ours, FromSupervisor), Connection(theirs, FromCaller)
    assert caller.received() == []
    supervisor.send(Ready({"A": "1"}, "/run"))
    supervisor.send(Stop())
    assert caller.wait() == Ready({"A": "1"}, "/run")
    assert caller.received() == [Stop()]
    caller.send(Stopping())
    caller.send(RanksEnded(failed=True))
    assert supervisor.received() == [Stopping(), RanksEnded(True)]
    supervisor.send(Done(hung=True))
    supervisor.close()
    assert caller.received() == [Done(hung=True)], "the last words of one that is gone"
    assert not caller.is_open
    assert caller.wait() is None
    caller.send(Stopping())  # the other end is gone
    caller.close()
