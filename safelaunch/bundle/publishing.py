"""Publishes a bundle, whole or not at all.

The bundle directory may be on a slow or dead network disk, so a helper process copies the bundle under a deadline. If
it fails, the bundle stays in a local directory, which the message names.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safelaunch.bundle import copier
from safelaunch.bundle.staging import make_private
from safelaunch.model import Outcome
from safelaunch.system import untrusted_paths

PUBLISH_DEADLINE_S = 60.0
CHECK_DEADLINE_S = 15.0  # a job is refused then: a busy network disk, or a busy machine, must not come to that
REMOVE_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which bundles to keep: the ``newest`` ones (0: all).

    ``whole``: the name of the bundle that has every rank, if this one has those of its node only.
    """

    newest: int = 0
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Where the bundle is. ``problem``: why it is not in the requested directory; ``note``: other failures.

    ``lost``: the bundle is gone, because somebody removed the staged files.
    """

    path: Path
    problem: str = ""
    note: str = ""
    lost: bool = False

    @property
    def shown(self) -> str:
        """Its path, for people."""
        return "lost" if self.lost else str(self.path)


def name_of(run_name: str, unix_s: float, outcome: Outcome | Literal["record"]) -> str:
    """``<run-name>-<UTC time>-<hang|suspect|crash|dump|record>``."""
    return f"{run_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix_s))}-{outcome}"


def publish(
    staged: Path, directory: Path, name: str, fallback: Path, keeping: Keeping | None = None, *, deadline_s: float
) -> Published:
    """Copies the staged bundle to ``directory/name``; takes at most ``deadline_s`` seconds and never raises.

    The copy has a hidden name until it is complete. If it fails, the staged bundle moves to ``fallback``, without
    retention.
    """
    keeping = keeping or Keeping()
    helper = [sys.executable, "-I", "-S", os.fspath(Path(__file__).parent / "copier.py")]
    limits = [str(keeping.newest)]
    limits += [keeping.whole] if keeping.whole else []
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
        problem = err.decode("utf-8", "replace").strip() or f"the copy failed with exit code {process.returncode}"
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
    """Kills the helper. A thread waits for it, because a write to a dead disk may take for ever."""
    process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    threading.Thread(target=process.wait, name="publish reap", daemon=True).start()


def _remove_partial(directory: Path, name: str, pid: int) -> None:
    """Removes the remains of a killed copy, in a thread, because the disk may not answer.

    It does nothing if others may rename files there: they could give that name to any of our files.
    """

    def remove() -> None:
        with suppress(OSError):
            if not copier.is_ours_alone(directory.stat()):
                return
            for partial in directory.glob(f".{glob.escape(name)}.{pid}-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)

    thread = threading.Thread(target=remove, name="remove partial", daemon=True)
    thread.start()
    thread.join(REMOVE_DEADLINE_S)


def _keep_locally(staged: Path, fallback: Path, name: str, problem: str) -> Published:
    """Moves the bundle to ``fallback``, or to a new directory in $TMPDIR if that fails (another user's, full)."""
    for place in (fallback, None):
        if not staged.is_dir():
            return Published(staged, "something removed the staged bundle before it could be copied", lost=True)
        try:
            return Published(_move(staged, place or Path(tempfile.mkdtemp(prefix="safelaunch-")), name), problem)
        except OSError as error:
            problem += f"; and {place or tempfile.gettempdir()}: {error.strerror or error}"
    return Published(staged, problem)


def _move(staged: Path, directory: Path, name: str) -> Path:
    make_private(directory)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    target = next(directory / one for one in names if not (directory / one).exists())
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_to_other_disk(staged, target)
    return target


def _copy_to_other_disk(staged: Path, target: Path) -> None:
    try:
        make_private(target)
        copier.copy_tree(os.fspath(staged), os.fspath(target))
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    shutil.rmtree(staged, ignore_errors=True)


def _why_unsafe(directory: Path) -> str:
    """Like ``copier.why_unsafe``, but also rejects another user's directory where anybody may create one."""
    info, above = directory.stat(), directory.resolve().parent.stat()
    if info.st_uid not in (0, os.geteuid()) and above.st_mode & stat.S_IWOTH:
        return f"it belongs to user {info.st_uid}, who may replace files in it"
    link, beside = directory.lstat(), directory.parent.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()) and beside.st_mode & stat.S_IWOTH:
        return f"it is a link of user {link.st_uid}, who may point it anywhere"
    return copier.why_unsafe(info)


def check_directory(directory: Path) -> str:
    """Why a bundle can't be written to ``directory``, or an empty string. Leaves nothing behind.

    It tries a write: to root, and on the kernel's own file systems, every directory looks writable. It gives up after
    ``CHECK_DEADLINE_S`` seconds if the disk does not answer.
    """
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.append(_try_directory(directory)), daemon=True)
    thread.start()
    thread.join(CHECK_DEADLINE_S)
    return problems[0] if problems else f"no answer within {CHECK_DEADLINE_S:g} s"


def _try_directory(directory: Path) -> str:
    existing = directory
    while not untrusted_paths.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not untrusted_paths.is_dir(existing):
        return copier.what_is_in_the_way(os.fspath(existing))
    try:
        if existing == directory and (reason := _why_unsafe(directory)):
            return reason
        trial = tempfile.mkdtemp(prefix=".safelaunch-", dir=existing)
        Path(trial).rmdir()
    except OSError as error:
        return f"{existing} is not writable: {error.strerror or error}"
    return ""
