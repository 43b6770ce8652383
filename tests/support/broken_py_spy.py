"""Removes py-spy from safelaunch, or breaks it, in a separate interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DENIED = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"


def bare_interpreter(home: Path) -> Path:
    """Makes an interpreter with this one's packages but without its programs. Returns its directory."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (home / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (home / "lib").symlink_to(Path(sys.prefix) / "lib")
    return home / "bin"


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
    # Processes that have the old file open keep it.
    place.unlink(missing_ok=True)
    place.write_text(f"#!/bin/sh\n{does}\n")
    place.chmod(mode)


def without_rights(home: Path) -> tuple[str, ...]:
    """Returns the words that start safelaunch with a py-spy that isn't allowed to trace."""
    beside = bare_interpreter(home)
    denied(beside / "py-spy")
    return os.fspath(beside / "python"), "-m", "safelaunch"
