"""Reads a rank's stacks from inside the rank, if py-spy is denied, is missing or fails; see ``beacon/inside.py``.

The request briefly needs the rank's GIL, which nearly every wait releases. The report has no C frames, and of the
rank's children only their roles. But it adds facts that the kernel shows only to the rank itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from safelaunch.beacon import inside, layout
from safelaunch.capture import proc, stacks
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.proc import NOTHING, Own
from safelaunch.capture.result import Result, attempt, left
from safelaunch.capture.worker_server import Questions, Unanswered, post_to_python
from safelaunch.model import StackSample, Thread
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError

HOW = "the rank's beacon"
ASK_S = 1.0  # per request: the GIL is free, or it isn't
MOST_BYTES = 32 << 20


class _InsideReply(msgspec.Struct):
    threads: msgspec.Raw
    calls: dict[int, str] = {}
    waits: dict[int, str] = {}
    roles: dict[int, str] = {}


@dataclass(frozen=True, slots=True)
class InsideReport:
    stack: Result[StackSample]
    own: Own = NOTHING  # has a descriptor
    roles: Mapping[int, str] = field(default_factory=dict)  # its children's purposes, by pid


@contextmanager
def asked(server: Path, pid: int, questions: Questions, *, deadline_s: float) -> Iterator[InsideReport]:
    """Yields the stacks that the rank with this pid reports about itself, within ``deadline_s`` seconds; never raises.

    ``server`` is its worker server's socket. The report's descriptor is closed at the end.
    """
    until = time.monotonic() + deadline_s
    owns: list[Own] = []
    roles: dict[int, str] = {}

    def read() -> StackSample:
        begin = time.monotonic()
        data, fd = _answer(server, questions, min(until, begin + ASK_S))
        owns.append(Own({}, {}, fd))
        try:
            reply = from_json(data, _InsideReply)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CaptureError(f"{HOW}: unreadable answer: {error}") from error
        owns[-1] = Own(reply.calls, reply.waits, fd)
        roles.update(reply.roles)
        return _with_tids(stacks.parse(bytes(reply.threads), pid=pid, at_s=begin, how=HOW), ProcessMemory(pid, fd))

    try:
        stack = stacks.settled(pid, until, lambda: attempt(HOW, read))
        yield InsideReport(stack, owns[-1] if owns else NOTHING, roles)
    finally:
        for own in owns:
            if own.memory >= 0:
                os.close(own.memory)


def _with_tids(sample: StackSample, memory: ProcessMemory) -> StackSample:
    tids = proc.scheduled(sample.pid)

    def with_tid(thread: Thread) -> Thread:
        tid = thread.os_tid or proc.tid_of(memory, thread.ident, tids)
        return msgspec.structs.replace(thread, os_tid=tid, active=tid in tids and tids[tid].runs)

    return msgspec.structs.replace(sample, threads=tuple(map(with_tid, sample.threads)))


def _answer(server: Path, questions: Questions, until: float) -> tuple[bytes, int]:
    base = server.with_suffix("")
    own = Path(f"{base}{layout.STACKS_SUFFIX}")
    try:
        if own.exists():
            return _from_thread(own, questions, until)
        return _from_handler(server, Path(f"{base}{layout.ASK_SUFFIX}"), questions, until)
    except TimeoutError as error:
        raise CaptureError(f"{HOW}: no answer in time: its GIL isn't free", kind="timeout") from error
    except OSError as error:
        raise CaptureError(f"{HOW}: {error.strerror or error}") from error


def _from_thread(path: Path, questions: Questions, until: float) -> tuple[bytes, int]:
    """Queries the rank's own thread that serves stacks. It is needed if the rank's torch accepts no handlers."""
    if not questions.begin_question():
        raise Unanswered("absent", "the rank is exiting")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(left(until))
            connection.connect(os.fspath(path))
        except OSError:
            questions.withdraw_question()
            raise
        return _receive(connection, until)


def _from_handler(server: Path, path: Path, questions: Questions, until: float) -> tuple[bytes, int]:
    failed: list[CaptureError] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        listener.listen(1)

        def post() -> None:
            try:
                post_to_python(os.fspath(server), inside.HANDLER, questions, deadline_s=left(until))
            except CaptureError as error:
                failed.append(error)
            except OSError:
                pass  # too late
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the other thread if it is still waiting

        asking = threading.Thread(target=post, name="ask a rank for its stacks", daemon=True)
        asking.start()
        try:
            listener.settimeout(left(until))
            connection, _ = listener.accept()
            with connection:
                return _receive(connection, until)
        except OSError:
            if failed:
                raise failed[0] from None
            raise
        finally:
            path.unlink(missing_ok=True)
            asking.join(max(0.0, until - time.monotonic()))


def _receive(connection: socket.socket, until: float) -> tuple[bytes, int]:
    connection.settimeout(left(until))
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    memory = descriptors[0] if descriptors else -1
    try:
        parts, size = [data], len(data)
        while data:
            connection.settimeout(left(until))
            data = connection.recv(1 << 18)
            parts.append(data)
            size += len(data)
            if size > MOST_BYTES:
                raise CaptureError(f"{HOW}: the answer is too long")
        return b"".join(parts), memory
    except BaseException:
        if memory >= 0:
            os.close(memory)
        raise
