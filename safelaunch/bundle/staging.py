"""A bundle being assembled on the local disk: every file private, without secrets, of bounded size, and listed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from safelaunch.capture.job_secrets import Redactor
from safelaunch.model import Artifact

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
ENOUGH_BYTES = 64 << 20  # Flight Recorders of a node's ranks, with frames, are the largest part
LIMIT_BYTES = 64 << 20
LOG_BYTES = 8 << 20  # looking for secrets takes a quarter of a second for each megabyte
OURS = "safelaunch"  # verdict, reports, launch: small, and what the rest is for
_TAILS = ("log_tail.txt", "kernel_log.txt", ".log")


def make_private(directory: Path) -> None:
    """Makes a directory and those of its parents that are missing, all of them 0700. Raises OSError."""
    if not directory.parent.exists():
        make_private(directory.parent)  # mkdir(parents=True) would leave them open to others
    _mkdir(directory)


def _mkdir(directory: Path) -> None:
    try:
        directory.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return
    directory.chmod(DIRECTORY_MODE)  # whatever the umask takes away


def roomier(wanted: Path, other: Path, *, enough_bytes: int = ENOUGH_BYTES) -> Path:
    """``wanted`` where its disk has room for a bundle, else whichever of the two has more. They need not exist."""
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


class Staging:
    """A bundle being assembled: every file is written as soon as it is there, and every artifact is listed.

    All text passes ``redactor``. An artifact of more than ``limit_bytes`` is cut where it is text (a log keeps its end,
    anything else its beginning), and left out where a part of it is of no use.
    """

    def __init__(self, root: Path, redactor: Redactor | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.root = root
        self.artifacts: list[Artifact] = []
        self.redactor = redactor or Redactor()
        self._limit = limit_bytes
        with suppress(OSError):
            make_private(root)  # else each file says so; what is done about the job does not depend on it

    def add(self, artifact: Artifact, data: bytes | str | None) -> None:
        """Writes ``data`` to ``artifact.path``; None lists it as missing. A full disk costs this file only."""
        if isinstance(data, str):
            content = self.redactor.text(data).encode("utf-8", "backslashreplace")
            if len(content) > self._limit and artifact.how != OURS:
                tail = artifact.path.endswith(_TAILS)
                self._put(_noted(artifact, _cut_note(tail, len(content), self._limit)), cut(content, self._limit, tail))
                return
            self._put(artifact, content)
        else:
            self._add_whole(artifact, self.redactor.binary(data) if data is not None else None)

    def add_json(self, artifact: Artifact, value: object) -> None:
        """``value``: records, lists, dicts; None lists the artifact as missing."""
        if value is None:
            self._put(artifact, None)
            return
        tree = self.redactor.tree(msgspec.to_builtins(value))
        self._add_whole(artifact, msgspec.json.format(msgspec.json.encode(tree), indent=1))

    def add_report(self, artifact: Artifact, text: str | None) -> None:
        """Markdown or HTML, made of evidence without secrets: to replace more than that would damage it."""
        content = self.redactor.markup(text).encode("utf-8", "backslashreplace") if text is not None else None
        self._put(artifact, content)

    def add_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> None:
        """A copy of a file that the job wrote: a ``dump`` whole or not at all, of a log the end."""
        try:
            info = source.lstat()
            if not stat.S_ISREG(info.st_mode):
                raise OSError(None, "not a regular file")  # to open a FIFO would take for ever
            with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                dump = dump or _is_binary(file.read(4096))
                most = self._limit if dump else min(self._limit, LOG_BYTES)
                if dump and info.st_size > most:
                    self._put(_missing(artifact, self._too_large(info.st_size)), None)
                    return
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - most - 1))
                data = file.read(most + 1)
        except OSError as error:
            self._put(_missing(artifact, f"{source.name}: {error.strerror or error}"), None)
            return
        if dump:
            self._add_whole(artifact, self.redactor.binary(data))
            return
        if len(data) > most:
            artifact = _noted(artifact, _cut_note(True, size, most))
            data = cut(data, most, tail=True)
        self.add(artifact, data.decode("utf-8", "backslashreplace"))

    def write(self, path: str, content: bytes) -> str:
        """Writes one file below the root; returns why it could not, or an empty string."""
        target = self.root / path
        try:
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

    def _add_whole(self, artifact: Artifact, content: bytes | None) -> None:
        if content is not None and len(content) > self._limit and artifact.how != OURS:
            artifact, content = _missing(artifact, self._too_large(len(content))), None
        self._put(artifact, content)

    def _put(self, artifact: Artifact, content: bytes | None) -> None:
        if content is not None:
            problem = self.write(artifact.path, content)
            size = 0 if problem else len(content)
            artifact = msgspec.structs.replace(artifact, bytes=size, missing=artifact.missing or problem)
        self.artifacts.append(self._listed(artifact))

    def _listed(self, artifact: Artifact) -> Artifact:
        """Its line of the manifest; the reason why something is missing may quote anything."""
        text = self.redactor.text
        return msgspec.structs.replace(artifact, missing=text(artifact.missing), note=text(artifact.note))

    def _too_large(self, size: int) -> str:
        return f"it has {size} bytes, more than --artifact-limit ({self._limit})"


def cut(content: bytes, limit: int, tail: bool) -> bytes:
    """The last (or first) whole lines of UTF-8 text, at most ``limit`` bytes; part of a line where one is longer."""
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
