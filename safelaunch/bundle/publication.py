"""Publishes a staged bundle atomically.

The bundle directory might be on a slow or dead network disk, so a helper process copies the bundle under a deadline. If
that fails, the bundle stays in a local directory.
"""

from __future__ import annotations

import errno
import glob
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safelaunch.bundle import copier
from safelaunch.bundle.staging import make_private
from safelaunch.model import Outcome
from safelaunch.system.files import is_dir, lexists

ENOUGH_BYTES = 64 << 20  # mostly for Flight Recorder dumps with frames, of a node's ranks


def roomier_directory(wanted: Path, alternative: Path, *, enough_bytes: int = ENOUGH_BYTES) -> Path:
    """Returns ``wanted`` if its disk has enough space, else the path with more space.

    Neither directory needs to exist.
    """
    room = _free_bytes(wanted)
    return wanted if room >= enough_bytes or room >= _free_bytes(alternative) else alternative


def _free_bytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


PUBLISH_DEADLINE_S = 60.0
CHECK_DEADLINE_S = 15.0  # afterwards a job is refused, so busy disks and machines must manage within it
REMOVE_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Retention:
    newest: int = 0  # bundles to keep; 0: all
    whole: str = ""  # bundle with all ranks, if this one has only its node's


@dataclass(frozen=True, slots=True)
class Publication:
    path: Path
    problem: str = ""  # why it isn't in the requested directory
    note: str = ""  # other failures
    lost: bool = False  # the staged files were removed

    @property
    def shown(self) -> str:
        return "lost" if self.lost else str(self.path)


@dataclass(frozen=True, slots=True)
class BundleOwner:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def owner_under_sudo(environ: Mapping[str, str]) -> BundleOwner | None:
    uid, gid = environ.get("SUDO_UID", ""), environ.get("SUDO_GID", "")
    if os.geteuid() != 0 or not (uid.isdecimal() and gid.isdecimal() and int(uid)):
        return None
    try:
        groups = os.getgrouplist(pwd.getpwuid(int(uid)).pw_name, int(gid))
    except KeyError:
        groups = []
    return BundleOwner(int(uid), int(gid), tuple(groups))


def name_of(run_name: str, unix_s: float, outcome: Outcome | Literal["record"]) -> str:
    return f"{run_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix_s))}-{outcome}"


def publish(
    staged: Path,
    directory: Path,
    name: str,
    fallback: Path,
    keeping: Retention | None = None,
    *,
    owner: BundleOwner | None = None,
    deadline_s: float,
) -> Publication:
    """Copies the staged bundle to ``directory/name`` within ``deadline_s`` seconds. Never raises.

    The copy has a hidden name until it is complete. If copying fails, the bundle moves to ``fallback``, without
    retention. The copy is made as user ``owner``, so that root doesn't write where other users can rename files. If
    that fails, it is made as root.
    """
    problem = ""
    for user in (
        (owner, None) if owner is not None else (None,)
    ):  # the owner might lack access to the directory, or to our Python
        published, problem = _copy_bundle(staged, directory, name, keeping or Retention(), user, deadline_s)
        if published is not None:
            shutil.rmtree(staged, ignore_errors=True)
            return published
    return _keep_locally(staged, fallback, name, problem)


def _copy_bundle(
    staged: Path, directory: Path, name: str, keeping: Retention, owner: BundleOwner | None, deadline_s: float
) -> tuple[Publication | None, str]:
    helper = [sys.executable, "-I", "-S", os.fspath(Path(__file__).parent / "copier.py")]
    limits = [str(keeping.newest)]
    limits += [keeping.whole] if keeping.whole else []
    try:
        process = subprocess.Popen(
            [*helper, ".", os.fspath(directory.absolute()), name, *limits],
            cwd=staged,  # a private parent directory hides the path from the owner
            **_user_arguments(owner, staged),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return None, f"the copy could not be started: {error.strerror or error}"
    try:
        out, err = process.communicate(timeout=deadline_s)
        problem = err.decode("utf-8", "replace").strip() or f"the copy failed with exit code {process.returncode}"
    except subprocess.TimeoutExpired as error:
        _abandon(process)
        problem = f"no answer from {directory} within {deadline_s:g} s"
        out = (error.output or b"") + (f"{problem}\n".encode() if b"\0" in (error.output or b"") else b"")
    path, published, notes = out.partition(b"\0")
    if not published:
        _remove_partial(directory, name, process.pid)
        return None, problem
    return Publication(Path(os.fsdecode(path)), note="; ".join(notes.decode("utf-8", "replace").splitlines())), ""


def _user_arguments(owner: BundleOwner | None, staged: Path) -> dict[str, Any]:
    """Gives the staged files to ``owner``. Returns the ``Popen`` arguments that start a process as that user."""
    if owner is None:
        return {}
    for folder, _, files in os.walk(staged):
        for path in (folder, *(os.path.join(folder, file) for file in files)):  # noqa: PTH118
            os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
    return {"user": owner.uid, "group": owner.gid, "extra_groups": list(owner.groups)}


def _abandon(process: subprocess.Popen[bytes]) -> None:
    # A write to a dead disk might never return, so a thread waits for the helper.
    process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    threading.Thread(target=process.wait, name="publish reap", daemon=True).start()


def _remove_partial(directory: Path, name: str, pid: int) -> None:
    """Removes what a killed copy left, in a thread, because the disk might not respond.

    Does nothing if other users can rename files there, because the name might then refer to any of our files.
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


def _keep_locally(staged: Path, fallback: Path, name: str, problem: str) -> Publication:
    for place in (fallback, None):
        if not staged.is_dir():
            return Publication(staged, "something removed the staged bundle before it could be copied", lost=True)
        try:
            return Publication(_move(staged, place or Path(tempfile.mkdtemp(prefix="safelaunch-")), name), problem)
        except OSError as error:
            problem += f"; and {place or tempfile.gettempdir()}: {error.strerror or error}"
    return Publication(staged, problem)


def _move(staged: Path, directory: Path, name: str) -> Path:
    make_private(directory)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    target = next(directory / name for name in names if not (directory / name).exists())
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
    """Extends ``copier.why_unsafe``: also rejects another user's directory within a world-writable one."""
    info, above = directory.stat(), directory.resolve().parent.stat()
    if info.st_uid not in (0, os.geteuid()) and above.st_mode & stat.S_IWOTH:
        return f"it belongs to user {info.st_uid}, who may replace files in it"
    link, beside = directory.lstat(), directory.parent.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()) and beside.st_mode & stat.S_IWOTH:
        return f"it is a link of user {link.st_uid}, who may point it anywhere"
    return copier.why_unsafe(info)


def check_directory(directory: Path) -> str:
    """Returns why a bundle can't be written to ``directory``; empty if it can.

    Tries to write, because to root, and on the kernel's own file systems, every directory looks writable. Gives up
    after ``CHECK_DEADLINE_S`` seconds.
    """
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.append(_try_directory(directory)), daemon=True)
    thread.start()
    thread.join(CHECK_DEADLINE_S)
    return problems[0] if problems else f"no answer within {CHECK_DEADLINE_S:g} s"


def _try_directory(directory: Path) -> str:
    existing = directory
    while not lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not is_dir(existing):
        return copier.what_is_in_the_way(os.fspath(existing))
    try:
        if existing == directory and (reason := _why_unsafe(directory)):
            return reason
        trial = tempfile.mkdtemp(prefix=".safelaunch-", dir=existing)
        Path(trial).rmdir()
    except OSError as error:
        return f"{existing} is not writable: {error.strerror or error}"
    return ""
