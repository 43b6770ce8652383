"""A signal handler that stands on the stack of the code which it has interrupted."""

from __future__ import annotations

from safelaunch.model import Frame
from safelaunch.verdict.reading.innermost import interruption

FILE = "/home/me/preempt.py"
SOURCE = """\
import signal, threading
class Writer:
    def __init__(self):
        self.lock = threading.Lock()
        signal.signal(signal.SIGTERM, self.on_notice)
    def write(self, rows):
        with self.lock:
            for row in rows:
                self.drain(row)
    def drain(self, row):
        self.sink.append(row)
    def flush(self):
        with self.lock:
            self.rows.clear()
    def on_notice(self, number, frame):
        self.flush()
    def stop(self):
        self.on_notice(0, None)
    def wait(self):
        self.lock.acquire()
"""


def at(line: int, function: str, file: str = FILE) -> Frame:
    return Frame(file, line, f"Writer.{function}")


def read(path: str) -> str | None:
    return SOURCE if path == FILE else None


FLUSH, HANDLER, DRAIN, WRITE = at(13, "flush"), at(16, "on_notice"), at(11, "drain"), at(9, "write")


def test_the_frame_that_holds_the_same_lock_is_found() -> None:
    found = interruption((FLUSH, HANDLER, DRAIN, WRITE), read)
    assert found is not None and (found.handler, found.holder) == (HANDLER, WRITE)


def test_a_handler_that_is_interrupted_by_itself() -> None:
    """A signal that is sent again and again: the code below all of the handlers is what holds the lock."""
    found = interruption((FLUSH, HANDLER, FLUSH, HANDLER, FLUSH, HANDLER, DRAIN, WRITE), read)
    assert found is not None and found.holder == WRITE


def test_without_a_block_of_that_lock_the_interrupted_line_is_told() -> None:
    found = interruption((FLUSH, HANDLER, DRAIN), read)
    assert found is not None and found.holder == DRAIN
    acquires = interruption((at(20, "wait"), HANDLER, DRAIN, WRITE), read)
    assert acquires is not None and acquires.holder == WRITE


def test_what_is_no_interruption() -> None:
    assert interruption((FLUSH, HANDLER, at(18, "stop"), WRITE), read) is None, "the line calls the handler itself"
    assert interruption((FLUSH, at(16, "notice"), DRAIN, WRITE), read) is None, "no such handler is registered"
    assert interruption((FLUSH, HANDLER), read) is None, "nothing below it"
    assert interruption((FLUSH, HANDLER, DRAIN, WRITE), lambda path: None) is None, "no source"
    assert interruption((FLUSH, HANDLER, DRAIN, WRITE), lambda path: "def broken(:") is None
    assert interruption((), read) is None
