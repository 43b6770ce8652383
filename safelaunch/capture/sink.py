"""Where sources of evidence put what they found, and how a late one is kept out.

The verdict is made of what was there in time. So a source that misses its deadline must leave in the bundle exactly
what it has told the verdict: each of its steps, files and evidence together, counts as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import RLock

from safelaunch.model import Artifact
from safelaunch.system.redaction.redactor import Redactor

Made = tuple[Artifact, bytes | None]  # None: it is missing


class Late(Exception):
    """The source's time is over: nothing that it brings is taken any more."""


class Sink:
    """Takes artifacts. ``redactor`` removes secrets. What is slow is in ``made`` and its kin; ``put`` is short."""

    redactor: Redactor

    def made(self, artifact: Artifact, data: bytes | str | None) -> Made:
        raise NotImplementedError

    def made_json(self, artifact: Artifact, value: object) -> Made:
        raise NotImplementedError

    def made_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> Made:
        raise NotImplementedError

    def put(self, made: Made) -> None:
        raise NotImplementedError

    def add(self, artifact: Artifact, data: bytes | str | None) -> None:
        """Writes ``data`` to ``artifact.path``; None lists it as missing."""
        self.put(self.made(artifact, data))

    def add_json(self, artifact: Artifact, value: object) -> None:
        """``value``: records, lists, dicts; None lists the artifact as missing."""
        self.put(self.made_json(artifact, value))

    def add_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> None:
        """Copies a file that the job wrote: a ``dump`` whole or not at all, a log's end."""
        self.put(self.made_file(artifact, source, dump=dump))


class Nowhere(Sink):
    """Takes artifacts, and writes none."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor

    def made(self, artifact: Artifact, data: bytes | str | None) -> Made:
        return artifact, None

    def made_json(self, artifact: Artifact, value: object) -> Made:
        return artifact, None

    def made_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> Made:
        return artifact, None

    def put(self, made: Made) -> None: ...


class _Before(Sink):
    """Another sink, with something before it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.redactor = sink.redactor

    def made(self, artifact: Artifact, data: bytes | str | None) -> Made:
        return self._sink.made(artifact, data)

    def made_json(self, artifact: Artifact, value: object) -> Made:
        return self._sink.made_json(artifact, value)

    def made_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> Made:
        return self._sink.made_file(artifact, source, dump=dump)


class Gate(_Before):
    """One source's way to ``sink``, until ``close``: then each attempt raises ``Late``."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._outer = sink if isinstance(sink, Gate) else None
        self._lock: RLock = self._outer._lock if self._outer is not None else RLock()
        self._closed = False

    @property
    def _is_closed(self) -> bool:
        return self._closed or (self._outer is not None and self._outer._is_closed)

    def put(self, made: Made) -> None:
        self.put_all([made])

    def put_all(self, several: list[Made], then: Callable[[], object] = lambda: None) -> None:
        """Puts all of ``several`` and does ``then``, or nothing of it."""
        with self._lock:
            if self._is_closed:
                raise Late
            for made in several:
                self._sink.put(made)
            then()

    def close(self) -> None:
        with self._lock:
            self._closed = True


class Step(_Before):
    """Files that belong together, kept until ``done`` puts them."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._gate = gate
        self._made: list[Made] = []

    def put(self, made: Made) -> None:
        self._made.append(made)

    def done(self, then: Callable[[], object]) -> None:
        """Puts the files; ``then`` gives the evidence in them to whoever waits for it."""
        self._gate.put_all(self._made, then)
        self._made = []
