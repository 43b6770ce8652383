"""The runs of this user on this node: found by their run directories, asked all at once, chosen by a word."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from safelaunch.errors import SafelaunchError
from safelaunch.launch.paths import RunPaths, run_root
from safelaunch.launch.process import ProcessId
from safelaunch.session.control import Request, RunStatus, ask

STATUS_DEADLINE_S = 3.0
ASK_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Found:
    """A run directory and whose it is (None: its owner file is not there or not readable)."""

    directory: Path
    supervisor: ProcessId | None

    @property
    def run(self) -> str:
        return self.directory.name


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what its supervisor said. ``status`` None: nothing, for the reason in ``problem``."""

    found: Found
    status: RunStatus | None = None
    problem: str = ""
    alive: bool = True

    @property
    def id(self) -> str:
        return self.found.run

    @property
    def pid(self) -> int | None:
        """The supervisor's."""
        return self.found.supervisor.pid if self.found.supervisor is not None else None

    @property
    def name(self) -> str:
        """The run's name; empty while its supervisor does not answer."""
        return self.status.name if self.status is not None else ""

    @property
    def label(self) -> str:
        """``r4711 (train)``, or what is known of it."""
        return f"{self.id} ({self.name or self.problem})"


def roots(environ: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """The directories that can hold run directories of this user: a run may have been started with another
    ``XDG_RUNTIME_DIR`` than ours, or with none. Those that are not this user's alone are left out.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    named = [Path(runtime) / "safelaunch"] if runtime else []
    login = [Path(f"/run/user/{uid}/safelaunch")]
    candidates = [run_root(environ, uid), *named, *login, run_root({}, uid)]
    return tuple(path for path in dict.fromkeys(candidates) if _is_ours(path, uid))


def _is_ours(path: Path, uid: int) -> bool:
    """What another user can write to may hold anything, sockets that lead elsewhere included."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == uid and not info.st_mode & 0o077


def find(places: Sequence[Path]) -> tuple[Found, ...]:
    """Every run directory below ``places``, those of dead runs included, the oldest first."""
    found = [Found(entry, _owner(entry)) for place in places for entry in place.glob("r[0-9]*")]
    # Start times count from boot: the supervisors' order, whatever has been written since.
    return tuple(sorted(found, key=lambda item: (item.supervisor.start_ticks if item.supervisor else 0, item.run)))


def _owner(directory: Path) -> ProcessId | None:
    try:
        pid, ticks = RunPaths(directory).owner.read_text().split()
        return ProcessId(int(pid), int(ticks))
    except (OSError, ValueError):
        return None


def look(places: Sequence[Path], *, deadline_s: float = STATUS_DEADLINE_S) -> tuple[Run, ...]:
    """Every run below ``places`` with its status, asked in parallel, each for at most ``deadline_s`` seconds."""
    found = find(places)
    if not found:
        return ()
    with ThreadPoolExecutor(min(ASK_AT_ONCE, len(found))) as pool:
        runs = list(pool.map(lambda item: _ask(item, deadline_s), found))
    return tuple(run for run in runs if run.found.directory.exists())


def _ask(found: Found, deadline_s: float) -> Run:
    supervisor = found.supervisor
    if supervisor is None:
        return Run(found, problem="starting, or not a run's directory: it says no owner", alive=False)
    if not supervisor.is_alive():
        return Run(found, problem="gone: its supervisor was killed; the next run removes what is left", alive=False)
    path = RunPaths(found.directory).control
    if not path.exists():
        return Run(found, problem="starting, or without a control socket: see what it said when it started")
    try:
        return Run(found, msgspec.json.decode(ask(path, Request("status"), deadline_s=deadline_s), type=RunStatus))
    except msgspec.DecodeError as error:
        return Run(found, problem=f"it is of another version of safelaunch: {error}")
    except SafelaunchError as error:
        return Run(found, problem=_why_silent(supervisor, error.message))


def _why_silent(supervisor: ProcessId, said: str) -> str:
    if not supervisor.is_alive():
        return "it ended just now"
    if supervisor.is_stopped():
        return f"its supervisor is stopped by a signal: kill -CONT {supervisor.pid} lets it watch on"
    return said


def select(runs: Sequence[Run], word: str | None) -> tuple[Run, ...]:
    """The runs that ``word`` means: a run id (``r4711``), else a supervisor's pid, else a name; all for None."""
    if word is None:
        return tuple(runs)
    for matches in (
        [run for run in runs if run.id == word],
        [run for run in runs if word.isdigit() and run.pid == int(word)],
        [run for run in runs if run.name == word],
    ):
        if matches:
            return tuple(matches)
    return ()


def describe(runs: Sequence[Run]) -> str:
    """What there is, for an error's last line."""
    return f"There are: {', '.join(run.label for run in runs)}." if runs else "No run of yours is on this node."


def our_roots() -> tuple[Path, ...]:
    """``roots`` for this process."""
    return roots(os.environ, os.getuid())
