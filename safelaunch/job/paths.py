"""Paths in a run directory, and the life cycle of run directories and unfinished bundles.

A run's directory is locked (flock) while its supervisor or guardian lives; later runs remove unlocked ones. Pids can't
identify runs, because the same pid can occur in several containers that share /tmp.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safelaunch.beacon import layout
from safelaunch.beacon.page import start_ticks
from safelaunch.system.files import try_lock

# A unix socket's path has at most 107 bytes: 38 of them come after the run directory.
LONGEST_RUN_DIR = 64
TMP = "/tmp"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ABANDONED_S = 3600.0  # age without an owner
UNFINISHED_S = 60.0  # age without a lock
LOCK_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class RunPaths:
    """A run directory. It is private, has a short path, is on a local disk, and is removed when the run ends."""

    root: Path
    lock: int = -1  # the supervisor's descriptor, or -1

    @property
    def owner(self) -> Path:
        """File with the supervisor's pid and start time, as seen in its pid namespace."""
        return self.root / "owner"

    @property
    def early(self) -> Path:
        """File with the results of early looks, for other programs."""
        return self.root / "early.json"

    @property
    def wrong(self) -> Path:
        """File with the wrong results that monitors found, for other programs."""
        return self.root / "wrong.json"

    @property
    def control(self) -> Path:
        """Socket through which ``safelaunch status`` and ``safelaunch dump`` reach the supervisor."""
        return self.root / "control"

    @property
    def pages(self) -> Path:
        return self.root / "pages"

    @property
    def flight_recorder(self) -> Path:
        """Directory for Flight Recorder dumps of torch and NCCL."""
        return self.root / "flight_recorder"

    @property
    def agent_events(self) -> Path:
        return self.root / layout.EVENTS

    @property
    def agent_page(self) -> Path:
        return self.root / layout.AGENT_PAGE

    @property
    def life(self) -> Path:
        """Pipe that the supervisor holds open. Its readers notice when the supervisor dies."""
        return self.root / layout.LIFE

    @property
    def keepers(self) -> Path:
        """Pipe held open by every process that ends the job if the supervisor is killed."""
        return self.root / layout.KEEPERS

    @property
    def rescue(self) -> Path:
        """File with the interpreter and code that start another guardian."""
        return self.root / layout.RESCUE

    @property
    def members(self) -> Path:
        """File with the processes and control group of the job, so that another guardian can find them."""
        return self.root / layout.MEMBERS

    def of_page(self, name: str, suffix: str) -> Path:
        """Returns the file of page ``name`` with this suffix: its socket, ring, fault file, ..."""
        return self.pages / (name + suffix)


def run_root(environ: Mapping[str, str], uid: int) -> Path:
    """Returns the directory that holds this user's run directories; it might not exist.

    It is ``$XDG_RUNTIME_DIR/safelaunch`` if that is private and short enough for unix sockets, else
    ``/tmp/safelaunch-<uid>``. If another user owns that name, creates ``/tmp/safelaunch-<uid>-<random>`` immediately,
    so that no other user can take that name, too.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) + len("/safelaunch") <= LONGEST_RUN_DIR - 20 and is_private(Path(runtime), uid):
        return Path(runtime) / "safelaunch"
    usual = Path(TMP) / f"safelaunch-{uid}"
    if not os.path.lexists(usual) or is_private(usual, uid):
        return usual
    return next(iter(other_roots(uid)), None) or _new_root(uid) or usual


def other_roots(uid: int) -> tuple[Path, ...]:
    """Returns the ``/tmp/safelaunch-<uid>-<random>`` directories that ``run_root`` created earlier."""
    try:
        with os.scandir(TMP) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(f"safelaunch-{uid}-"))
    except OSError:
        return ()
    return tuple(path for name in names if is_private(path := Path(TMP) / name, uid))


def _new_root(uid: int) -> Path | None:
    from tempfile import mkdtemp

    try:
        return Path(mkdtemp(prefix=f"safelaunch-{uid}-", dir=TMP))
    except OSError:
        return None


def is_private(path: Path, uid: int) -> bool:
    """Returns whether only this user can write to the directory."""
    try:
        info = path.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(info.st_mode) and info.st_uid == uid and not info.st_mode & 0o077
    return private and os.access(path, os.W_OK | os.X_OK)


def may_be_ours(directory: Path) -> bool:
    return not directory.exists() or is_private(directory, os.getuid())


def create_run(root: Path, pid: int, uid: int) -> RunPaths:
    """Creates and locks ``r<pid>`` below ``root`` (mode 0700). Raises OSError if that is impossible or unsafe.

    Appends a number if the name belongs to a dead run, or to a run in another pid namespace.
    """
    try:
        root.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        if not is_private(root, uid):
            raise PermissionError(f"{root} is not a private directory of user {uid}") from None
    for attempt in range(100):
        path = root / (f"r{pid}" if attempt == 0 else f"r{pid}-{attempt}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            return _furnish(RunPaths(path, _lock(path)), pid)
        except OSError:
            from shutil import rmtree

            rmtree(path, ignore_errors=True)
            raise
    raise FileExistsError(f"{root} is full of run directories")


def _furnish(run: RunPaths, pid: int) -> RunPaths:
    try:
        run.owner.write_text(f"{pid} {start_ticks(pid)}\n")  # from now on, other runs can remove it if it isn't locked
        run.pages.mkdir(mode=0o700)
        run.flight_recorder.mkdir(mode=0o700)
    except OSError:
        os.close(run.lock)
        raise
    return run


def _lock(directory: Path) -> int:
    """Locks a new directory; returns the descriptor. Retries, because another run might be testing the lock."""
    descriptor = os.open(directory, _DIRECTORY)
    deadline = time.monotonic() + LOCK_DEADLINE_S
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(None, f"another process keeps {directory} locked")
            time.sleep(0.001)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(directory: Path) -> bool:
    """Returns whether a live process, in any pid namespace, uses the directory; True if that can't be determined."""
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return True  # a file system without locks
    finally:
        os.close(descriptor)


def _remove_unless_held(directory: Path) -> bool:
    from shutil import rmtree

    try:
        descriptor = os.open(directory, _DIRECTORY)
    except OSError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        rmtree(directory, ignore_errors=True)
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(descriptor)


def working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def seen_from_here(path: str) -> str:
    """Returns a path for display: relative to the working directory if the path is inside that directory."""
    here = working_directory()
    return os.fspath(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def sweep(root: Path) -> int:
    """Removes unlocked run directories below ``root``; returns how many.

    A directory without an owner file might be new, so it is kept for an hour.
    """
    return sum(
        _remove_unless_held(entry)
        for entry in list(root.glob("r[0-9]*"))
        if (entry / "owner").exists() or _is_older(entry, ABANDONED_S)
    )


def _is_older(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > seconds
    except OSError:
        return False


def local_bundles() -> Path:
    """Returns the directory for bundles in progress, and for finished ones that can't be written where they belong."""
    return run_root({}, os.getuid()) / "bundles"


class Unfinished:
    """Bundles in progress. Each has its own locked directory."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def name(self, place: Path, run_dir: Path, outcome: str) -> Path:
        """Returns a hidden path for a new bundle in ``place``."""
        return place / f".{run_dir.name}-{outcome}-{time.time_ns()}"

    def hold(self, directory: Path) -> None:
        """Locks a directory, if possible. Call it right after creating one: while young, it is safe even unlocked."""
        self.let_go(directory)
        try:
            self._held[directory] = _lock(directory)
        except OSError:
            return

    def let_go(self, directory: Path) -> None:
        """Unlocks a bundle after it was published or abandoned."""
        descriptor = self._held.pop(directory, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def discard(self) -> None:
        from shutil import rmtree

        for directory in list(self._held):
            rmtree(directory, ignore_errors=True)
            self.let_go(directory)


def discard_unfinished(run_name: str) -> None:
    """Removes the unfinished bundles left by the run ``run_name`` (``r4711``), whose supervisor was killed."""
    for entry in local_bundles().glob(f".{run_name}-*"):
        if re.fullmatch(re.escape(f".{run_name}") + r"-[a-z]+-\d+", entry.name):  # not r4711-1 for r4711
            _remove_unless_held(entry)


def sweep_unfinished(directory: Path) -> int:
    """Removes unfinished bundles that killed supervisors left in ``directory``; returns how many."""
    entries = [entry for entry in directory.glob(".r[0-9]*-*-*") if _is_older(entry, UNFINISHED_S)]
    return sum(_remove_unless_held(entry) for entry in entries)
