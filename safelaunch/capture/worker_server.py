"""Queries c10d's worker server, which runs inside each rank.

The server expects ``POST /handler/<name>`` with a Content-Length; without one, torch 2.6 and 2.9 wait until they time
out. Its response has a Content-Length, and the connection stays open unless the request forbids it.
"""

from __future__ import annotations

import re
import socket
import time
from typing import Protocol

import msgspec
from msgspec import structs

from safelaunch.capture.result import left
from safelaunch.model import GilTest
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError, Failure

MAX_RESPONSE_BYTES = 64 << 20
_MAX_HEADER_BYTES = 64 << 10
_MOST_EXCEPTIONS = 16

_COUNTED = "safelaunch_"  # prefix of handlers that count the requests they answer


class Questions(Protocol):
    """The part of a rank's page that tracks requests to its Python handlers."""

    @property
    def owes_answer(self) -> bool: ...

    def begin_question(self) -> bool: ...

    def withdraw_question(self) -> None: ...


class Unanswered(CaptureError):
    """Raised because a request got no usable response; ``kind`` is absent, timeout, no handler or broken."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message, kind=kind)


def post(socket_path: str, handler: str, *, deadline_s: float) -> bytes:
    """Returns the response body of ``POST /handler/<handler>`` within ``deadline_s`` seconds. Raises ``Unanswered``."""
    return _ask(socket_path, "POST", handler, deadline_s)


def post_to_python(socket_path: str, handler: str, questions: Questions | None, *, deadline_s: float) -> bytes:
    """Posts to a handler that needs the GIL, unless the rank is exiting.

    The request is announced in ``questions``, so that the rank doesn't exit before it has responded.
    """
    if questions is None:
        return post(socket_path, handler, deadline_s=deadline_s)
    if not questions.begin_question():
        raise Unanswered("absent", "the rank is exiting")
    try:
        answer = post(socket_path, handler, deadline_s=deadline_s)
    except Unanswered as error:
        if error.kind in ("absent", "no handler"):
            questions.withdraw_question()
        raise
    if not handler.startswith(_COUNTED):
        questions.withdraw_question()
    return answer


def names(socket_path: str, *, deadline_s: float) -> bytes:
    """Returns the server's list of handlers. Raises ``Unanswered``."""
    return _ask(socket_path, "GET", "", deadline_s)


def _ask(socket_path: str, method: str, handler: str, deadline_s: float) -> bytes:
    until = time.monotonic() + deadline_s
    head = f"{method} /handler/{handler} HTTP/1.1\r\nHost: localhost\r\n"
    request = f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(left(until))
            connection.connect(socket_path)
            connection.sendall(request.encode("ascii"))
            return _answer(connection, handler, until)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise Unanswered("absent", "the worker server isn't running") from error
        except TimeoutError as error:
            raise Unanswered("timeout", f"worker server: {handler}: no answer within {deadline_s:g} s") from error
        except BlockingIOError as error:  # the queue of connections is full: a stopped process accepts none
            raise Unanswered("timeout", "the worker server accepts no connections") from error
        except OSError as error:
            raise Unanswered("broken", f"worker server: {handler}: {error}") from error


def gil_test(socket_path: str, questions: Questions | None = None, *, deadline_s: float = 1.0) -> GilTest:
    """Tests whether the rank's C++ side responds, and whether Python code can run in it; never raises.

    The beacon's handler needs the GIL. It is queried twice, for up to ``deadline_s`` seconds each. That is long enough
    if Python is in a busy loop, which releases the GIL now and then. Both fields stay None if the server isn't running;
    only ``python`` stays None if the handler is missing.
    """
    try:
        post(socket_path, "ping", deadline_s=deadline_s)
    except Unanswered as error:
        return GilTest(ping=False if error.kind == "timeout" else None)
    for _ in range(2):
        try:
            return _decoded(post_to_python(socket_path, "safelaunch_gil", questions, deadline_s=deadline_s))
        except Unanswered as error:
            if error.kind != "timeout":
                return GilTest(ping=True)
    return GilTest(ping=True, python=False)


def _decoded(answer: bytes) -> GilTest:
    try:
        test = from_json(answer, GilTest)
    except (msgspec.DecodeError, RecursionError):  # from another version, or not from a beacon
        test = GilTest()
    return structs.replace(test, ping=True, python=True, handling=test.handling[:_MOST_EXCEPTIONS])


def parse_head(head: bytes) -> tuple[int, int | None]:
    """Parses the status and Content-Length (None if absent) from an HTTP response's head. Raises ``ValueError``."""
    first, _, rest = head.decode("latin-1").partition("\r\n")
    status = re.match(r"HTTP/1\.[01] (\d{3})", first)
    if not status:
        raise ValueError(f"not an HTTP response: {first[:80]!r}")
    if re.search(r"^transfer-encoding:\s*(?!identity)", rest, re.IGNORECASE | re.MULTILINE):
        raise ValueError("an encoded response, which c10d's server doesn't send")
    length = re.search(r"^content-length:\s*(\d+)\s*$", rest, re.IGNORECASE | re.MULTILINE)
    return int(status[1]), int(length[1]) if length else None


def _answer(connection: socket.socket, handler: str, until: float) -> bytes:
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > _MAX_HEADER_BYTES:
            raise Unanswered("broken", f"worker server: {handler}: the header does not end")
        _receive(connection, data, until, handler)
    try:
        status, length = parse_head(bytes(data[:end]))
    except ValueError as error:
        raise Unanswered("broken", f"worker server: {handler}: {error}") from error
    del data[: end + 4]
    if length is not None and length > MAX_RESPONSE_BYTES:
        raise Unanswered("broken", f"worker server: {handler}: the answer is too large ({length} bytes)")
    while length is None or len(data) < length:
        if not _receive(connection, data, until, handler, may_end=length is None):
            break
        if len(data) > MAX_RESPONSE_BYTES:
            raise Unanswered("broken", f"worker server: {handler}: the answer does not end")
    body = bytes(data if length is None else data[:length])
    if status == 404:
        raise Unanswered("no handler", f"this torch's worker server has no handler {handler}")
    if status != 200:
        text = body[:200].decode("utf-8", "replace").strip()
        raise Unanswered("broken", f"worker server: {handler}: status {status}: {text}")
    return body


def _receive(connection: socket.socket, data: bytearray, until: float, handler: str, *, may_end: bool = False) -> bool:
    connection.settimeout(left(until))
    chunk = connection.recv(1 << 18)
    data += chunk
    if not chunk and not may_end:
        raise Unanswered("broken", f"worker server: {handler}: the connection closed before the answer was complete")
    return bool(chunk)
