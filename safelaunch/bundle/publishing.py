"""Publishing a bundle, whole or not at all.

The bundle directory may be a slow or dead network disk: a helper process does the copying, under a deadline, and when
it fails the bundle stays in a local place that is named.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.staging import make_private
from safelaunch.model import Outcome

PUBLISH_DEADLINE_S = 60.0
ARCHIVE_SHARE = 0.5  # of the deadline
CHECK_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of bundles: the ``newest`` so many (0: all), with an ``archive`` (.tar.gz) beside each."""

    newest: int = 0
    archive: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """Where the bundle is. ``problem``: why it is not where it was wanted; ``note``: what else could not be done."""

    path: Path
    problem: str = ""
    note: str = ""


def name_of(run_name: str, unix_s: float, outcome: Outcome) -> str:
    """``<run-name>-<UTC time>-<hang|crash|dump>``."""
    return f"{run_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix_s))}-{outcome}"


def publish(
    staged: Path, directory: Path, name: str, fallback: Path, keeping: Keeping | None = None, *, deadline_s: float
) -> Published:
    """Copies the staged bundle to ``directory/name``; never takes longer than ``deadline_s`` seconds, never raises.

    It is written beside under a hidden name and then renamed. When that fails, the staged bundle moves to ``fallback``,
    where nothing is archived or removed.
    """
    keeping = keeping or Keeping()
    helper = [sys.executable, "-I", "-S", os.fspath(Path(__file__).parent / "copier.py")]
    limits = [str(keeping.newest), str(deadline_s * ARCHIVE_SHARE if keeping.archive else 0)]
    try:
        process = subprocess.Popen(
            [*helper, os.fspath(staged), os.fspath(directory), name, *limits],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return _keep_locally(staged, fallback, name, f"the copy could not be started: {error.strerror or error}")
    try:
        out, err = process.communicate(timeout=deadline_s)
        problem = err.decode("utf-8", "replace").strip() or f"the copy ended with {process.returncode}"
    except subprocess.TimeoutExpired as error:
        _give_up(process)
        problem = f"no answer from {directory} within {deadline_s:g} s"
        out = (error.output or b"") + (f"{problem}\n".encode() if b"\0" in (error.output or b"") else b"")
    path, published, notes = out.partition(b"\0")
    if not published:
        _remove_partial(directory, name, process.pid)
        return _keep_locally(staged, fallback, name, problem)
    shutil.rmtree(staged, ignore_errors=True)
    return Published(Path(os.fsdecode(path)), note="; ".join(notes.decode("utf-8", "replace").splitlines()))


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """Kills the helper; a thread waits for it: a write to a dead disk ends when the kernel lets it."""
    process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    threading.Thread(target=process.wait, name="publish reap", daemon=True).start()


def _remove_partial(directory: Path, name: str, pid: int) -> None:
    """What a copy that was killed has left; in a thread, as the disk may not answer."""

    def remove() -> None:
        with suppress(OSError):
            for partial in directory.glob(f".{glob.escape(name)}.{pid}-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)

    thread = threading.Thread(target=remove, name="remove partial", daemon=True)
    thread.start()
    thread.join(CHECK_DEADLINE_S)


def _keep_locally(staged: Path, fallback: Path, name: str, problem: str) -> Published:
    """In ``fallback``, or where that cannot be (somebody else's, full) in a new directory in $TMPDIR."""
    for place in (fallback, None):
        try:
            return Published(_move(staged, place or Path(tempfile.mkdtemp(prefix="safelaunch-")), name), problem)
        except OSError as error:
            problem += f"; and {place or tempfile.gettempdir()}: {error.strerror or error}"
    return Published(staged, problem)


def _move(staged: Path, directory: Path, name: str) -> Path:
    make_private(directory)
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    target = next(directory / one for one in names if not (directory / one).exists())
    try:
        shutil.move(staged, target)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)  # what fitted of a copy to another disk
        raise
    return target


def check_directory(directory: Path) -> str:
    """Why a bundle could not be written to ``directory``, or an empty string. Leaves nothing behind.

    Tried, not asked for: to root, and on file systems of the kernel's, every directory looks writable. A disk that does
    not answer is given up after ``CHECK_DEADLINE_S`` seconds.
    """
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.append(_try_directory(directory)), daemon=True)
    thread.start()
    thread.join(CHECK_DEADLINE_S)
    return problems[0] if problems else f"no answer within {CHECK_DEADLINE_S:g} s"


def _try_directory(directory: Path) -> str:
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a directory"
    try:
        trial = tempfile.mkdtemp(prefix=".safelaunch-", dir=existing)
        Path(trial).rmdir()
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror or error}"
    return ""
