"""Faults of py-spy: it is missing, not executable, hangs, lacks permission, or prints something else.

Each fault occurs from the start, or from the suspicion on. In the latter case, the first sample still succeeds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from fault_processes import kill
from row import DIES, NAMED, Row
from scene import Scene, Setting

DENIED = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"


def bare_interpreter(home: Path) -> Path:
    """Makes an interpreter with this one's packages but without its programs. Returns its directory."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (home / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (home / "lib").symlink_to(Path(sys.prefix) / "lib")
    return home / "bin"


def _needs() -> str:
    if sys.prefix == sys.base_prefix:
        return "needs a virtual environment, to make another one like it"
    return "there is a py-spy in /usr/bin" if Path("/usr/bin/py-spy").exists() else ""


def missing(place: Path) -> None:
    place.unlink(missing_ok=True)


def not_executable(place: Path) -> None:
    _script(place, "exit 0", 0o644)


def hanging(place: Path) -> None:
    _script(place, "exec sleep 3606")


def denied(place: Path) -> None:
    _script(place, DENIED)


def gibberish(place: Path) -> None:
    _script(place, "echo gibberish")


def killed_by_a_signal(place: Path) -> None:
    _script(place, "kill -SEGV $$")


def flooding(place: Path) -> None:
    _script(place, "exec yes")


def _script(place: Path, does: str, mode: int = 0o755) -> None:
    """Replaces py-spy by a script. Processes that have the old file open keep it."""
    place.unlink(missing_ok=True)
    place.write_text(f"#!/bin/sh\n{does}\n")
    place.chmod(mode)


def _arranged(fault: Callable[[Path], None] | None) -> Callable[[Setting], AbstractContextManager[object]]:
    """Provides an interpreter whose py-spy is broken from the start, or works (None)."""

    @contextmanager
    def arrange(setting: Setting) -> Iterator[None]:
        beside = bare_interpreter(setting.scratch / "bare")
        if fault is None:
            (beside / "py-spy").symlink_to(Path(sys.prefix) / "bin" / "py-spy")
        else:
            fault(beside / "py-spy")
        setting.interpreter = (os.fspath(beside / "python"), "-m", "safelaunch")
        setting.env["PATH"] = "/usr/bin:/bin"
        yield

    return arrange


def _broken(fault: Callable[[Path], None]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        fault(scene.scratch / "bare" / "bin" / "py-spy")
        scene.steer("hang")  # if it has not begun

    return inject


def without_rights(home: Path) -> tuple[str, ...]:
    """Returns the words that start safelaunch with a py-spy that may trace nothing."""
    beside = bare_interpreter(home)
    denied(beside / "py-spy")
    return os.fspath(beside / "python"), "-m", "safelaunch"


FAULTS = {
    "missing": missing,
    "not executable": not_executable,
    "hanging": hanging,
    "denied": denied,
    "says gibberish": gibberish,
    "killed by a signal": killed_by_a_signal,
    "never stops talking": flooding,
}

LATER = ("missing", "hanging", "denied")
WITHOUT = replace(NAMED, said=("no stack could be read",))
ROWS = [
    *(
        Row(f"py-spy {name}", "suspicion", WITHOUT if name in ("missing", "denied") else NAMED,
            arrange=_arranged(fault), needs=_needs)
        for name, fault in FAULTS.items()
    ),
    *(
        Row(f"py-spy {name} from now on", at, NAMED, _broken(fault), arrange=_arranged(None), needs=_needs)
        for at, names in (("training", ("missing",)), ("suspicion", LATER), ("capture", ("missing",)))
        for name, fault in FAULTS.items()
        if name in names
    ),
    Row("py-spy hanging, kill -9 safelaunch", "suspicion", DIES, kill("safelaunch"), arrange=_arranged(hanging),
        needs=_needs),
]  # fmt: skip
