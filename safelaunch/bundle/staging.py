"""Assembles a bundle on the local disk. Every file is private, redacted, limited in size, and listed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec

from safelaunch.capture.sink import FileContent, Sink
from safelaunch.model import Artifact
from safelaunch.system.files import replace_file
from safelaunch.system.printable import clean_json
from safelaunch.system.redaction.redactor import Redactor

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
LIMIT_BYTES = 64 << 20
LOG_BYTES = 8 << 20  # redaction takes a quarter of a second per megabyte
OURS = "safelaunch"  # origin of verdict, reports and launch: small, and never cut
_TAILS = ("log_tail.txt", "kernel_log.txt", ".log")


def make_private(directory: Path) -> None:
    """Creates a directory and its missing parents with mode 0700. Raises OSError."""
    if not directory.parent.exists():
        make_private(directory.parent)  # mkdir(parents=True) would leave them open to other users
    _mkdir(directory)


def _mkdir(directory: Path) -> None:
    try:
        directory.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return
    directory.chmod(DIRECTORY_MODE)


def rewrite(path: Path, value: object) -> None:
    replace_file(path, _document(value), mode=FILE_MODE)


def _document(value: object) -> bytes:
    return clean_json(msgspec.json.format(msgspec.json.encode(value), indent=1).decode()).encode()


class Staging(Sink):
    """A bundle in progress. Redacts and writes each file when it arrives, and lists all artifacts.

    Text longer than ``limit_bytes`` is cut (logs keep their end, other text its beginning); other artifacts above that
    size are left out. Files that a late thread adds after ``close`` are dropped.
    """

    def __init__(self, root: Path, redactor: Redactor | None = None, *, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(redactor or Redactor())
        self.root = root
        self.artifacts: list[Artifact] = []
        self._limit = limit_bytes
        self._closed, self._writing = False, Lock()
        with suppress(OSError):
            make_private(root)  # if this fails, each file reports it; the job's end doesn't depend on it

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
        """Adds a report. Doesn't search it for assignments, because its evidence is already redacted."""
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
        return self.made(artifact, self.redactor.job_text(data.decode("utf-8", "backslashreplace")))

    def finish(self, manifest: object) -> None:
        """Writes ``manifest.json``, which lists all other files. If that fails, the manifest is listed as missing."""
        problem = self._write("manifest.json", _document(self.redactor.tree(msgspec.to_builtins(manifest))))
        if problem:
            self.artifacts.append(Artifact("manifest.json", OURS, 0.0, problem))

    def _write(self, path: str, content: bytes) -> str:
        target = self.root / path
        try:
            if not self.root.is_dir():
                make_private(self.root)  # something cleaned it up: keep what arrives from now on
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
        """Returns the artifacts by path, each once. Lists files that have been removed as missing."""
        with self._writing:
            return self._settled()

    def close(self) -> tuple[Artifact, ...]:
        """Calls ``settle``, and from then on accepts only the manifest."""
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

    def put(self, content_of: FileContent) -> None:
        """Writes and lists one file. If the disk is full, only this file is lost."""
        artifact, content = content_of
        artifact = msgspec.structs.replace(artifact, path=self.redactor.text(artifact.path))  # paths can have secrets
        with self._writing:  # so that each written file is listed
            if self._closed:
                return
            if content is not None:
                problem = self._write(artifact.path, content)
                size = 0 if problem else len(content)
                artifact = msgspec.structs.replace(artifact, bytes=size, missing=artifact.missing or problem)
            self.artifacts.append(self._listed(artifact))

    def _listed(self, artifact: Artifact) -> Artifact:
        # The reason can quote anything.
        text = self.redactor.text
        return msgspec.structs.replace(artifact, missing=text(artifact.missing), note=text(artifact.note))

    def _too_large(self, size: int) -> str:
        return f"it has {size} bytes, more than {self._limit}"


def cut(content: bytes, limit: int, tail: bool) -> bytes:
    """Returns the last (or first) whole lines of UTF-8 text that fit in ``limit`` bytes, or part of one long line."""
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
