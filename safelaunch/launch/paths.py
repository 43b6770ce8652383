"""Where everything of one run lives: all file names of the run directory and of a bundle in one place."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safelaunch.beacon import layout
from safelaunch.beacon.page import start_ticks

# A unix socket's path is limited to 107 bytes; ours adds at most 38 to the run directory.
LONGEST_RUN_DIR = 64


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The run directory: private, short, on a local disk, removed when the run ends."""

    root: Path

    @property
    def owner(self) -> Path:
        """The supervisor's pid and start time: when it is gone, the directory is nobody's."""
        return self.root / "owner"

    @property
    def control(self) -> Path:
        """The supervisor's socket, for ``safelaunch status`` and ``safelaunch dump``."""
        return self.root / "control"

    @property
    def pages(self) -> Path:
        return self.root / "pages"

    @property
    def flight_recorder(self) -> Path:
        """Where the presets let torch and NCCL dump on their own."""
        return self.root / "flight_recorder"

    @property
    def agent_events(self) -> Path:
        return self.root / layout.EVENTS

    @property
    def agent_page(self) -> Path:
        return self.root / layout.AGENT_PAGE

    def of_page(self, name: str, suffix: str) -> Path:
        """A companion of the page ``name``: its socket, ring, fault file, ..."""
        return self.pages / (name + suffix)


def run_root(environ: Mapping[str, str], uid: int) -> Path:
    """The directory that holds this user's run directories; not created yet.

    ``$XDG_RUNTIME_DIR/safelaunch`` where that is a private directory of this user and short enough for unix sockets,
    else ``/tmp/safelaunch-<uid>``.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) + len("/safelaunch") <= LONGEST_RUN_DIR - 20 and _is_private(Path(runtime), uid):
        return Path(runtime) / "safelaunch"
    return Path(f"/tmp/safelaunch-{uid}")


def _is_private(path: Path, uid: int) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(info.st_mode) and info.st_uid == uid and not info.st_mode & 0o077
    return private and os.access(path, os.W_OK | os.X_OK)


def may_be_ours(directory: Path) -> bool:
    """Whether ``directory`` is private to this user, or not there yet: nobody else may look into it or move it."""
    return not directory.exists() or _is_private(directory, os.getuid())


def create_run(root: Path, pid: int, uid: int) -> RunPaths:
    """Makes a new run directory below ``root`` (mode 0700). Raises OSError when that is not possible or not safe."""
    try:
        root.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        if not _is_private(root, uid):
            raise PermissionError(f"{root} is not a private directory of user {uid}") from None
    for attempt in range(100):
        run = RunPaths(root / (f"r{pid}" if attempt == 0 else f"r{pid}-{attempt}"))
        try:
            run.root.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            run.owner.write_text(f"{pid} {start_ticks(pid)}\n")
            run.pages.mkdir(mode=0o700)
            run.flight_recorder.mkdir(mode=0o700)
        except OSError:  # no room: half of a run directory is of no use to anybody
            from shutil import rmtree

            rmtree(run.root, ignore_errors=True)
            raise
        return run
    raise FileExistsError(f"{root} is full of run directories")


def working_directory() -> Path:
    """Where we are; ``/`` when that directory has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def sweep(root: Path) -> int:
    """Removes the run directories below ``root`` whose supervisor is gone; returns how many.

    A directory without an owner file is being made, or was left by a crash in that moment: it goes after an hour.
    """
    from shutil import rmtree

    removed = 0
    for entry in list(root.glob("r[0-9]*")):
        try:
            pid, ticks = (int(word) for word in (entry / "owner").read_text().split())
            dead = not _lives(pid, ticks)
        except FileNotFoundError:
            dead = time.time() - entry.lstat().st_mtime > 3600 if entry.exists() else False
        except (OSError, ValueError):
            continue  # not ours to judge
        if dead:
            rmtree(entry, ignore_errors=True)
            removed += 1
    return removed


def local_bundles() -> Path:
    """Where bundles are assembled, and kept when they cannot be written where they were wanted."""
    return run_root({}, os.getuid()) / "bundles"


def new_unfinished_bundle(place: Path, run_dir: Path, outcome: str) -> Path:
    """Where a bundle is assembled in ``place``. Its name begins with a dot and the run's name, which holds the pid."""
    return place / f".{run_dir.name}-{outcome}-{time.time_ns()}"


def unfinished_bundles(run_name: str) -> list[Path]:
    """What the supervisor of run ``run_name`` (``r4711``) was assembling."""
    return list(local_bundles().glob(f".{run_name}-*-*"))


def discard_unfinished(run_name: str) -> None:
    """Removes what ``unfinished_bundles`` finds: its run has ended, or nobody is left to finish it."""
    from shutil import rmtree

    for unfinished in unfinished_bundles(run_name):
        rmtree(unfinished, ignore_errors=True)


def sweep_unfinished(directory: Path) -> int:
    """Removes bundles that supervisors were assembling in ``directory`` when they were killed; returns how many."""
    from shutil import rmtree

    removed = 0
    for entry in list(directory.glob(".r[0-9]*-*-*")):
        pid = entry.name[2:].partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            rmtree(entry, ignore_errors=True)
            removed += 1
    return removed


def _lives(pid: int, ticks: int) -> bool:
    try:
        return start_ticks(pid) == ticks
    except (OSError, IndexError, ValueError):
        return False
