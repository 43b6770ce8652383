"""A bundle: in progress on the local disk, each file private, without secrets, bounded, listed; and its publication."""

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
from threading import Lock
from typing import Any, Literal

import msgspec

from safelaunch.bundle import copier
from safelaunch.capture.sink import FileContent, Sink
from safelaunch.model import Artifact, Outcome
from safelaunch.system.files import is_dir, lexists, replace_file
from safelaunch.system.printable import clean_json
from safelaunch.system.redaction.redactor import Redactor

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
ENOUGH_BYTES = 64 << 20  # Flight Recorders of a node's ranks, with frames, are the largest part
LIMIT_BYTES = 64 << 20
LOG_BYTES = 8 << 20  # the search for secrets takes a quarter of a second per megabyte
OURS = "safelaunch"  # verdict, reports, launch: small, and the purpose of the rest
_TAILS = ("log_tail.txt", "kernel_log.txt", ".log")


def make_private(directory: Path) -> None:
    """Creates a directory and its missing parents, all with mode 0700. Raises OSError."""
    if not directory.parent.exists():
        make_private(directory.parent)  # mkdir(parents=True) would leave them open to others
    _mkdir(directory)


def _mkdir(directory: Path) -> None:
    try:
        directory.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return
    directory.chmod(DIRECTORY_MODE)  # whatever the umask removes


def roomier(wanted: Path, other: Path, *, enough_bytes: int = ENOUGH_BYTES) -> Path:
    """``wanted`` if its disk has room for a bundle, else the one of the two with more room. They need not exist."""
    room = _free_bytes(wanted)
    return wanted if room >= enough_bytes or room >= _free_bytes(other) else other


def _free_bytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def rewrite(path: Path, value: object) -> None:
    """Replaces a file of a published bundle by a record that has been in it before. Raises OSError."""
    replace_file(path, _document(value), mode=FILE_MODE)


def _document(value: object) -> bytes:
    return clean_json(msgspec.json.format(msgspec.json.encode(value), indent=1).decode()).encode()


class Staging(Sink):
    """A bundle in progress: writes every file as soon as it arrives, and lists every artifact.

    Everything written goes through ``redactor``, and nothing else writes. An artifact of more than ``limit_bytes`` is
    cut if it is text (a log keeps its end, other text its beginning), and left out if a part of it is useless. What a
    thread brings after ``close``, because it missed its deadline, is dropped.
    """

    def __init__(self, root: Path, redactor: Redactor | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(redactor or Redactor())
        self.root = root
        self.artifacts: list[Artifact] = []
        self._limit = limit_bytes
        self._closed, self._writing = False, Lock()
        with suppress(OSError):
            make_private(root)  # otherwise each file reports it; the action on the job does not depend on it

    def made(self, artifact: Artifact, data: bytes | str | None) -> FileContent:
        if isinstance(data, str):
            content = self.redactor.text(data).encode("utf-8", "backslashreplace")
            if len(content) > self._limit and artifact.how != OURS:
                tail = artifact.path.endswith(_TAILS)
                return _noted(artifact, _cut_note(tail, len(content), self._limit)), cut(content, self._limit, tail)
            return artifact, content
        return self._whole(artifact, self.redactor.data(data) if data is not None else None)

    def made_json(self, artifact: Artifact, value: object) -> FileContent:
        if value is None:
            return artifact, None
        return self._whole(artifact, _document(self.redactor.tree(msgspec.to_builtins(value))))

    def add_report(self, artifact: Artifact, text: str | None) -> None:
        """Adds a text made of evidence without secrets: a search for assignments would damage it."""
        content = self.redactor.markup(text).encode("utf-8", "backslashreplace") if text is not None else None
        self.put((artifact, content))

    def made_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> FileContent:
        try:
            info = source.lstat()
            if not stat.S_ISREG(info.st_mode):
                raise OSError(None, "not a regular file")  # opening a FIFO would block
            with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                dump = dump or _is_binary(file.read(4096))
                most = self._limit if dump else min(self._limit, LOG_BYTES)
                if dump and info.st_size > most:
                    return _missing(artifact, self._too_large(info.st_size)), None
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - most - 1))
                data = file.read(most + 1)
        except OSError as error:
            return _missing(artifact, f"{source.name}: {error.strerror or error}"), None
        if dump:
            return self._whole(artifact, self.redactor.data(data))
        if len(data) > most:
            artifact = _noted(artifact, _cut_note(True, size, most))
            data = cut(data, most, tail=True)
        return self.made(artifact, self.redactor.said(data.decode("utf-8", "backslashreplace")))

    def finish(self, manifest: object) -> None:
        """Writes ``manifest.json``, which lists all other files; if that fails, it counts as missing."""
        problem = self._write("manifest.json", _document(self.redactor.tree(msgspec.to_builtins(manifest))))
        if problem:
            self.artifacts.append(Artifact("manifest.json", OURS, 0.0, problem))

    def _write(self, path: str, content: bytes) -> str:
        """Writes one file below the root; returns why that failed, or an empty string."""
        target = self.root / path
        try:
            if not self.root.is_dir():
                make_private(self.root)  # a cleaner removed it: keep what comes now
            for parent in reversed(target.relative_to(self.root).parents[:-1]):
                _mkdir(self.root / parent)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, FILE_MODE)
                file.write(content)
        except OSError as error:
            with suppress(OSError):
                target.unlink()
            return f"could not be written: {error.strerror or error}"
        return ""

    def settle(self) -> tuple[Artifact, ...]:
        """Lists every artifact once, by path; a file that was removed since counts as missing."""
        with self._writing:
            return self._settled()

    def close(self) -> tuple[Artifact, ...]:
        """As ``settle``, for the manifest, which alone may follow."""
        with self._writing:
            self._closed = True
            return self._settled()

    def _settled(self) -> tuple[Artifact, ...]:
        by_path = {artifact.path: self._checked(artifact) for artifact in self.artifacts}
        self.artifacts = [by_path[path] for path in sorted(by_path)]
        return tuple(self.artifacts)

    def _checked(self, artifact: Artifact) -> Artifact:
        if artifact.missing or (self.root / artifact.path).is_file():
            return artifact
        reason = "something removed it while the bundle was being assembled"
        return msgspec.structs.replace(artifact, missing=reason, bytes=0)

    def _whole(self, artifact: Artifact, content: bytes | None) -> FileContent:
        if content is not None and len(content) > self._limit and artifact.how != OURS:
            return _missing(artifact, self._too_large(len(content))), None
        return artifact, content

    def put(self, made: FileContent) -> None:
        """A full disk costs only this file."""
        artifact, content = made
        artifact = msgspec.structs.replace(artifact, path=self.redactor.text(artifact.path))  # the job names its files
        with self._writing:  # a file that is written is listed
            if self._closed:
                return
            if content is not None:
                problem = self._write(artifact.path, content)
                size = 0 if problem else len(content)
                artifact = msgspec.structs.replace(artifact, bytes=size, missing=artifact.missing or problem)
            self.artifacts.append(self._listed(artifact))

    def _listed(self, artifact: Artifact) -> Artifact:
        """Its manifest entry, redacted: the reason for a missing artifact may quote anything."""
        text = self.redactor.text
        return msgspec.structs.replace(artifact, missing=text(artifact.missing), note=text(artifact.note))

    def _too_large(self, size: int) -> str:
        return f"it has {size} bytes, more than {self._limit}"


def cut(content: bytes, limit: int, tail: bool) -> bytes:
    """The last (or first) whole lines of UTF-8 text, at most ``limit`` bytes; part of a line if one is longer."""
    part = content[-limit:] if tail else content[:limit]
    if b"\n" in part[:-1]:
        return part[part.index(b"\n") + 1 :] if tail else part[: part.rindex(b"\n") + 1]
    return part.decode("utf-8", "ignore").encode()


def _cut_note(tail: bool, size: int, limit: int) -> str:
    return f"cut: the {'last' if tail else 'first'} {limit} of {size} bytes"


def _noted(artifact: Artifact, note: str) -> Artifact:
    return msgspec.structs.replace(artifact, note=f"{artifact.note}; {note}" if artifact.note else note)


def _missing(artifact: Artifact, reason: str) -> Artifact:
    return msgspec.structs.replace(artifact, missing=reason)


def _is_binary(beginning: bytes) -> bool:
    return beginning.startswith(b"\x80") or b"\0" in beginning


# --- publication, whole or not at all ---------------------------------------------------------------------------------
# The bundle directory may be on a slow or dead network disk, so a helper process copies the bundle under a deadline.
# If it fails, the bundle stays in a local directory, which the message names.

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


@dataclass(frozen=True, slots=True)
class BundleOwner:
    """A user with the groups that its processes have."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def owner_under_sudo(environ: Mapping[str, str]) -> BundleOwner | None:
    """The user who started this process with sudo, if any."""
    uid, gid = environ.get("SUDO_UID", ""), environ.get("SUDO_GID", "")
    if os.geteuid() != 0 or not (uid.isdecimal() and gid.isdecimal() and int(uid)):
        return None
    try:
        groups = os.getgrouplist(pwd.getpwuid(int(uid)).pw_name, int(gid))
    except KeyError:
        groups = []
    return BundleOwner(int(uid), int(gid), tuple(groups))


def name_of(run_name: str, unix_s: float, outcome: Outcome | Literal["record"]) -> str:
    """``<run-name>-<UTC time>-<hang|suspect|crash|dump|record>``."""
    return f"{run_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix_s))}-{outcome}"


def publish(
    staged: Path,
    directory: Path,
    name: str,
    fallback: Path,
    keeping: Keeping | None = None,
    *,
    owner: BundleOwner | None = None,
    deadline_s: float,
) -> Published:
    """Copies the staged bundle to ``directory/name``; takes at most ``deadline_s`` seconds and never raises.

    The copy has a hidden name until it is complete. If it fails, the staged bundle moves to ``fallback``, without
    retention. ``owner``: makes the copy with the rights of this user, not of root, so that it belongs to that user and
    root writes nothing where others may rename files; with those of root only if that fails.
    """
    problem = ""
    for user in (owner, None) if owner is not None else (None,):  # the owner may not write there, or not run our Python
        published, problem = _copied(staged, directory, name, keeping or Keeping(), user, deadline_s)
        if published is not None:
            shutil.rmtree(staged, ignore_errors=True)
            return published
    return _keep_locally(staged, fallback, name, problem)


def _copied(
    staged: Path, directory: Path, name: str, keeping: Keeping, owner: BundleOwner | None, deadline_s: float
) -> tuple[Published | None, str]:
    """The published copy, or None and the reason."""
    helper = [sys.executable, "-I", "-S", os.fspath(Path(__file__).parent / "copier.py")]
    limits = [str(keeping.newest)]
    limits += [keeping.whole] if keeping.whole else []
    try:
        process = subprocess.Popen(
            [*helper, ".", os.fspath(directory.absolute()), name, *limits],
            cwd=staged,  # the owner can't reach it by its name, because a directory above it is private
            **_rights_of(owner, staged),
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
        _give_up(process)
        problem = f"no answer from {directory} within {deadline_s:g} s"
        out = (error.output or b"") + (f"{problem}\n".encode() if b"\0" in (error.output or b"") else b"")
    path, published, notes = out.partition(b"\0")
    if not published:
        _remove_partial(directory, name, process.pid)
        return None, problem
    return Published(Path(os.fsdecode(path)), note="; ".join(notes.decode("utf-8", "replace").splitlines())), ""


def _rights_of(owner: BundleOwner | None, staged: Path) -> dict[str, Any]:
    """The arguments of ``Popen`` that start a process of ``owner``, to whom the staged files belong from then on."""
    if owner is None:
        return {}
    for folder, _, files in os.walk(staged):
        for path in (folder, *(os.path.join(folder, file) for file in files)):  # noqa: PTH118
            os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
    return {"user": owner.uid, "group": owner.gid, "extra_groups": list(owner.groups)}


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
