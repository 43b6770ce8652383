"""The result of a source of evidence, the guards around each, and where they put what they found.

``attempt`` turns any failure into a result with the reason. ``within`` bounds code that may block in the kernel.
``gather`` runs several at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Generic, TypeVar

from safelaunch.model import Artifact
from safelaunch.system.console import say
from safelaunch.system.errors import CaptureError, Failure
from safelaunch.system.redaction.redactor import Redactor

T = TypeVar("T")


NO_ANSWER = "no answer from the kernel"


@dataclass(frozen=True)
class Result(Generic[T]):
    """One look at one source: ``value``, or None and the reason in ``missing``.

    ``how`` names the source as the manifest shows it (``py-spy dump --json``); ``note`` qualifies the value; ``kind``
    is the reason for code that must decide.
    """

    value: T | None
    how: str
    duration_s: float
    missing: str = ""
    note: str = ""
    kind: Failure = ""

    def artifact(self, path: str) -> Artifact:
        """The manifest's entry for the file ``path`` that holds this result."""
        return Artifact(path, self.how, round(self.duration_s, 6), self.missing, note=self.note)


def attempt(how: str, source: Callable[[], T]) -> Result[T]:
    """Calls ``source``. A ``CaptureError`` gives its message as the reason, any other error its type and text."""
    begin = time.monotonic()
    try:
        value = source()
    except CaptureError as error:
        return Result(None, how, time.monotonic() - begin, missing=why(error), kind=error.kind)
    except Exception as error:  # noqa: BLE001 - the boundary: one source that fails costs only itself
        return Result(None, how, time.monotonic() - begin, missing=f"{type(error).__name__}: {error}")
    return Result(value, how, time.monotonic() - begin)


def within(deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """Runs ``source`` in a daemon thread, and abandons it after ``deadline_s`` seconds.

    For reads that the kernel may not finish: files of ``/proc`` behind a lock of a process in D state, a dead
    mount. The abandoned thread stays until the kernel releases it. Raises ``CaptureError`` (kind ``timeout``) on the
    deadline, and whatever ``source`` raises.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            values.append(source())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=call, name=f"capture {what}", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline_s))
    if errors:
        raise errors[0]
    if not values:
        raise CaptureError(f"{what}: {NO_ANSWER} within {deadline_s:g} s", kind="timeout")
    return values[0]


def within_or(default: T, deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """As ``within``, and ``default`` where there is no answer, or none may be read."""
    try:
        return within(deadline_s, what, source)
    except (CaptureError, OSError):
        return default


def left(until: float) -> float:
    """The seconds until then (CLOCK_MONOTONIC), as the next step's limit. Raises TimeoutError if there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def why(error: CaptureError) -> str:
    """Why a source failed, and its remedy, on one line."""
    return f"{error.message} ({error.fix})" if error.fix else error.message


# --- where sources put what they found, and how a late one is kept out ------------------------------------------------
# The verdict is made of what was there in time. So a source that misses its deadline must leave in the bundle exactly
# what it has told the verdict: each of its steps, files and evidence together, counts as a whole or not at all.

FileContent = tuple[Artifact, bytes | None]  # None: it is missing


class Late(Exception):
    """The source's time is over: nothing that it brings is taken any more."""


class Sink:
    """Takes artifacts. ``redactor`` removes secrets. What is slow is in ``made`` and its kin; ``put`` is short.

    This one writes none. ``maker``: the sink behind this one, which makes what that puts.
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
        """Writes ``data`` to ``artifact.path``; None lists it as missing."""
        self.put(self.maker.made(artifact, data))

    def add_json(self, artifact: Artifact, value: object) -> None:
        """``value``: records, lists, dicts; None lists the artifact as missing."""
        self.put(self.maker.made_json(artifact, value))

    def add_file(self, artifact: Artifact, source: Path, *, dump: bool = False) -> None:
        """Copies a file that the job wrote: a ``dump`` whole or not at all, a log's end."""
        self.put(self.maker.made_file(artifact, source, dump=dump))


class Gate(Sink):
    """One source's way to ``sink``, until ``close``: then each attempt raises ``Late``."""

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


class FileGroup(Sink):
    """Files that belong together, kept until ``done`` puts them."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.redactor, gate.maker)
        self._gate = gate
        self._made: list[FileContent] = []

    def put(self, made: FileContent) -> None:
        self._made.append(made)

    def done(self, then: Callable[[], object]) -> None:
        """Puts the files; ``then`` gives the evidence in them to whoever waits for it."""
        self._gate.put_all(self._made, then)
        self._made = []


# --- several at once --------------------------------------------------------------------------------------------------


def gather(calls: Sequence[Callable[[], T]], *, deadline_s: float, workers: int = 16) -> list[T | None]:
    """The results of ``calls`` in order; None for one that did not return within ``deadline_s`` seconds in all.

    Calls must not raise (sources return their failures). One that does gives None and prints a message.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    done: SimpleQueue[tuple[int, T | None]] = SimpleQueue()
    for index in range(len(calls)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except Empty:
                return
            result: T | None = None
            try:
                result = calls[index]()
            except Late:
                pass
            except Exception as error:  # noqa: BLE001 - an internal error costs only this look
                say(f"a source of evidence failed ({type(error).__name__}: {error})")
            finally:
                done.put((index, result))

    for number in range(min(workers, len(calls))):
        threading.Thread(target=work, name=f"capture-{number}", daemon=True).start()
    results: list[T | None] = [None] * len(calls)
    until = time.monotonic() + deadline_s
    for _ in calls:
        try:
            index, result = done.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        results[index] = result
    return results


def gather_into(sink: Sink, calls: Mapping[str, Callable[[Gate], object]], *, deadline_s: float) -> None:
    """Makes ``calls``, which write to ``sink`` through a gate that closes at the deadline.

    One that is late or fails is listed there as missing, by its key.
    """
    gates = {path: Gate(sink) for path in calls}

    def made(path: str) -> bool:
        calls[path](gates[path])
        return True

    results = gather([lambda path=path: made(path) for path in calls], deadline_s=deadline_s)  # type: ignore[misc]
    for path, result in zip(calls, results, strict=True):
        gates[path].close()
        if result is None:
            sink.add(Artifact(path, "safelaunch", deadline_s, late(deadline_s)), None)


def late(deadline_s: float) -> str:
    """Why something is missing of which ``gather`` has no result."""
    return f"not collected within {deadline_s:g} s"
