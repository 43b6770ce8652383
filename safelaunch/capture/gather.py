"""Reads several sources of evidence in parallel, within one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from safelaunch.capture.sink import Gate, Late, Sink
from safelaunch.model import Artifact
from safelaunch.system.console import say

T = TypeVar("T")


def gather(calls: Sequence[Callable[[], T]], *, deadline_s: float, workers: int = 16) -> list[T | None]:
    """Makes ``calls`` in parallel and returns their results in order; None for each that exceeds ``deadline_s``.

    Calls must not raise (sources return their failures). If one does, its result is None and a message is printed.
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
    """Makes ``calls``, which write to ``sink`` through gates that close at the deadline.

    A call that is late or fails is listed as missing under its key.
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
    return f"not collected within {deadline_s:g} s"
