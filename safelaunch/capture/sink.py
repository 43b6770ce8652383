"""Receives files of evidence, and refuses files that come too late.

The bundle must hold exactly what the verdict used. So each step of a late source, with its files and evidence, counts
either completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import RLock

from safelaunch.model import Artifact
from safelaunch.system.redaction.redactor import Redactor

FileContent = tuple[Artifact, bytes | None]  # None if it is missing


class Late(Exception):
    """Raised because a source's deadline has passed, so its files are refused."""


class Sink:
    """Accepts artifacts; this base class writes none. ``redactor`` removes secrets.

    ``maker``, the innermost sink, does slow work in ``made`` and its variants; ``put`` is short.
    """

    def __init__(self, redactor: Redactor, maker: Sink | None = None) -> None:
        self.redactor = redactor
        self.maker = maker or self

    def made(self, artifact: Artifact, data: bytes | str | None) -> FileContent:
        return artifact, None

    def made_json(self, artifact: Artifact, value: object) -> FileContent:
        return artifact, None

    def made_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> FileContent:
        return artifact, None

    def put(self, made: FileContent) -> None: ...

    def add(self, artifact: Artifact, data: bytes | str | None) -> None:
        """Writes ``data`` to ``artifact.path``, or lists it as missing if it is None."""
        self.put(self.maker.made(artifact, data))

    def add_json(self, artifact: Artifact, value: object) -> None:
        """Writes records, lists or dicts as JSON, or lists the artifact as missing if ``value`` is None."""
        self.put(self.maker.made_json(artifact, value))

    def add_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> None:
        """Copies a file that the job wrote: a ``dump`` completely or not at all, but only the end of a long log."""
        self.put(self.maker.made_file(artifact, source, dump=dump))


class Gate(Sink):
    """A source's access to ``sink`` until ``close``. After that, each attempt raises ``Late``."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink.redactor, sink.maker)
        self._sink = sink
        self._outer = sink if isinstance(sink, Gate) else None
        self._lock: RLock = self._outer._lock if self._outer is not None else RLock()
        self._closed = False

    @property
    def _is_closed(self) -> bool:
        return self._closed or (self._outer is not None and self._outer._is_closed)

    def put(self, made: FileContent) -> None:
        self.put_all([made])

    def put_all(self, several: list[FileContent], then: Callable[[], object] = lambda: None) -> None:
        """Writes all files and calls ``then``, or does neither."""
        with self._lock:
            if self._is_closed:
                raise Late
            for made in several:
                self._sink.put(made)
            then()

    def close(self) -> None:
        with self._lock:
            self._closed = True


class FileGroup(Sink):
    """Files that belong together, held back until ``done`` writes them."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.redactor, gate.maker)
        self._gate = gate
        self._made: list[FileContent] = []

    def put(self, made: FileContent) -> None:
        self._made.append(made)

    def done(self, then: Callable[[], object]) -> None:
        """Writes the files. ``then`` publishes the evidence in them."""
        self._gate.put_all(self._made, then)
        self._made = []
