"""Finds this user's live runs on this node by their run directories, and queries them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from safelaunch.job.paths import RunPaths, is_held, is_private, other_roots, run_root
from safelaunch.job.process import ProcessId
from safelaunch.supervise.control.protocol import ControlRequest, RunStatus, ask
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import SafelaunchError

STATUS_DEADLINE_S = 3.0
ASK_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Run:
    directory: Path
    supervisor: ProcessId | None  # None: the owner file is missing or unreadable
    status: RunStatus | None = None
    problem: str = ""
    alive: bool = True  # a process, perhaps in another pid namespace, holds the directory

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def pid(self) -> int | None:
        return self.supervisor.pid if self.supervisor is not None else None

    @property
    def name(self) -> str:
        return self.status.name if self.status is not None else ""

    @property
    def label(self) -> str:
        """Returns the run's id and name, such as ``r4711 (train)``, or its id and problem."""
        return f"{self.id} ({self.name or self.problem})"


def roots(environ: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Returns the private directories that might contain this user's run directories.

    A run can have a different ``XDG_RUNTIME_DIR``, or none.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    named = [Path(runtime) / "safelaunch"] if runtime else []
    login = [Path(f"/run/user/{uid}/safelaunch")]
    candidates = [run_root(environ, uid), *named, *login, run_root({}, uid), *other_roots(uid)]
    return tuple(path for path in dict.fromkeys(candidates) if is_private(path, uid))


def find(places: Sequence[Path]) -> tuple[Run, ...]:
    """Returns every run that has a directory, even if it was killed, oldest first."""
    runs = [Run(entry, _owner(entry), alive=is_held(entry)) for place in places for entry in place.glob("r[0-9]*")]
    return tuple(sorted(runs, key=lambda item: (item.supervisor.start_ticks if item.supervisor else 0, item.id)))


def _owner(directory: Path) -> ProcessId | None:
    try:
        pid, ticks = RunPaths(directory).owner.read_text().split()
        return ProcessId(int(pid), int(ticks))
    except (OSError, ValueError):
        return None


def look(places: Sequence[Path], *, deadline_s: float = STATUS_DEADLINE_S) -> tuple[Run, ...]:
    """Returns every run below ``places`` with its status. Queries all at once, each for at most ``deadline_s``."""
    found = find(places)
    if not found:
        return ()
    with ThreadPoolExecutor(min(ASK_AT_ONCE, len(found))) as pool:
        runs = list(pool.map(lambda run: _asked(run, deadline_s), found))
    return tuple(run for run in runs if run.directory.exists())


def _asked(run: Run, deadline_s: float) -> Run:
    supervisor = run.supervisor
    if supervisor is None:
        return replace(run, problem="starting, or not a run directory: it has no owner file")
    if not run.alive:
        return replace(run, problem="gone: its supervisor was killed; the next run removes its directory")
    path = RunPaths(run.directory).control
    if not path.exists():
        return replace(run, problem="starting, or without a control socket: see its first messages")
    try:
        return replace(run, status=from_json(ask(path, ControlRequest("status"), deadline_s=deadline_s), RunStatus))
    except msgspec.DecodeError as error:
        return replace(run, problem=f"it runs under another version of safelaunch: {error}")
    except SafelaunchError as error:
        # The supervisor no longer listens; its guardian holds the directory.
        if isinstance(error.__cause__, ConnectionRefusedError) and not supervisor.is_alive():
            return replace(run, problem="gone: its supervisor was killed; its guardian ends the job", alive=False)
        return replace(run, problem=_why_silent(run.directory, supervisor, error.message))


def _why_silent(directory: Path, supervisor: ProcessId, otherwise: str) -> str:
    if not is_held(directory):
        return "it ended just now"
    if supervisor.is_stopped():
        return f"a signal stopped its supervisor: kill -CONT {supervisor.pid} resumes the watch"
    return otherwise


def select(runs: Sequence[Run], word: str | None) -> tuple[Run, ...]:
    """Returns the runs that have ``word`` as id (``r4711``), supervisor's pid or name; all if ``word`` is None."""
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


def one_of_each_job(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple({(run.status.job if run.status is not None else "") or run.id: run for run in runs}.values())


def describe(runs: Sequence[Run]) -> str:
    if not runs:
        return "You have no runs on this node."
    named = [f"{run.id} ({run.name} in {run.status.cwd})" if run.status is not None else run.label for run in runs]
    return f"Your runs: {', '.join(named)}."


def our_roots() -> tuple[Path, ...]:
    return roots(os.environ, os.getuid())
