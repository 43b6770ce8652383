"""Client of c10d's TCPStore without torch, for the store of torchrun's agents.

It speaks the protocol of torch 2.6 to 2.15 (libuv and the older server): little-endian, strings as u64 length and
bytes, ``/`` before each key. The server has one thread and no time limits, so each operation has a deadline. After a
missed deadline, the connection is closed, because its next bytes would answer the earlier request.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.model import Lost, ServerProbe

_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _DELETE, _MULTI_GET, _PING = 0, 1, 2, 3, 4, 5, 8, 10, 13
_MAGIC = 0x3C85F7CE
_FOUND = 0

LONGEST_KEY = 8000  # bytes; libuv's server closes the connection at 8192
LARGEST_VALUE = 4 << 20  # bytes; half of what libuv's server takes
CONNECT_S = 15.0  # the server's only thread resolves each client's name, 5 s if that fails
_MOST_ANSWERED = 64 << 20  # bytes; no answer of a TCPStore is longer


class NodeStoreError(Exception):
    """Raised if the store doesn't respond as a TCPStore does. Its connection is closed.

    Attribute ``lost`` says what this means for the store's host.
    """

    def __init__(self, message: str, lost: Lost = "") -> None:
        super().__init__(message)
        self.lost = lost


class ValueTooLarge(ValueError):
    """Raised for a key or value that is too large for some servers, before anything is sent."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class StoreClient:
    """A connection; not thread-safe. Every method raises NodeStoreError.

    Time limits, in seconds, include sending; for ``__init__``, also the server's greeting.
    """

    def __init__(self, address: Address, *, deadline_s: float = CONNECT_S) -> None:
        self.address = address
        self._deadline = time.monotonic() + deadline_s
        try:
            place, patience_s = (address.host, address.port), min(deadline_s, CONNECT_S)
            self._socket = socket.create_connection(place, timeout=patience_s)
        except OSError as error:
            raise NodeStoreError(f"no store at {address}: {error.strerror or error}", _lost(error)) from error
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._greeting = True
        nonce = os.urandom(4)
        if self._ask(bytes([_VALIDATE]) + struct.pack("<I", _MAGIC) + bytes([_PING]) + nonce, 4) != nonce:
            raise self._broken("what listens there is no TCPStore")
        self._greeting = False

    def close(self) -> None:
        self._socket.close()

    @property
    def is_local(self) -> bool:
        try:
            return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])
        except OSError:
            return False

    @property
    def own_address(self) -> str:
        try:
            return str(self._socket.getsockname()[0])
        except OSError:
            return ""

    def set(self, key: str, value: bytes, *, deadline_s: float) -> None:
        """Stores ``value``. Returns once the server has it. Raises ValueTooLarge."""
        self._deadline = time.monotonic() + deadline_s
        nonce = os.urandom(4)  # the server answers only the PING after SET
        if self._ask(bytes([_SET]) + _key(key) + _value(value) + bytes([_PING]) + nonce, 4) != nonce:
            raise self._broken("an unexpected answer")

    def compare_set(self, key: str, expected: bytes, wanted: bytes, *, deadline_s: float) -> bytes:
        """Stores ``wanted`` if the stored value is ``expected`` (empty for none). Returns the value stored after that.

        If a value was expected but the key has no value, the server returns ``expected``.
        """
        self._deadline = time.monotonic() + deadline_s
        self._send(bytes([_COMPARE_SET]) + _key(key) + _value(expected) + _value(wanted))
        return self._bytes()

    def get(self, key: str, *, deadline_s: float) -> bytes | None:
        """Returns the stored value, or None if there is none.

        Checks first that the key exists, because the older server closes the connection if a key is missing.
        """
        self._deadline = time.monotonic() + deadline_s
        if not self._has([key]):
            return None
        self._send(bytes([_GET]) + _key(key))
        return self._bytes()

    def read(self, key: str, *, deadline_s: float) -> bytes:
        self._deadline = time.monotonic() + deadline_s
        self._send(bytes([_GET]) + _key(key))
        return self._bytes()

    def exchange(self, key: str, value: bytes, wanted: str, *, deadline_s: float) -> bytes:
        self._deadline = time.monotonic() + deadline_s
        self._send(bytes([_SET]) + _key(key) + _value(value) + bytes([_GET]) + _key(wanted))
        return self._bytes()

    def has(self, keys: Sequence[str], *, deadline_s: float) -> bool:
        self._deadline = time.monotonic() + deadline_s
        return self._has(keys)

    def read_all(self, keys: Sequence[str], *, deadline_s: float) -> list[bytes]:
        self._deadline = time.monotonic() + deadline_s
        if not keys:
            return []
        self._send(bytes([_MULTI_GET]) + _count(len(keys)) + b"".join(map(_key, keys)))
        return [self._bytes() for _ in keys]

    def get_all(self, keys: Sequence[str], *, deadline_s: float) -> list[bytes] | None:
        """Returns the values, or None if a key is missing."""
        self._deadline = time.monotonic() + deadline_s
        if keys and not self._has(keys):
            return None
        return self.read_all(keys, deadline_s=self._deadline - time.monotonic())

    def add(self, key: str, amount: int, *, deadline_s: float) -> int:
        self._deadline = time.monotonic() + deadline_s
        return _number(self._ask(bytes([_ADD]) + _key(key) + struct.pack("<q", amount), 8))

    def delete(self, key: str, *, deadline_s: float) -> bool:
        self._deadline = time.monotonic() + deadline_s
        return _number(self._ask(bytes([_DELETE]) + _key(key), 8)) > 0

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[str]) -> bool:
        return self._ask(bytes([_CHECK]) + _count(len(keys)) + b"".join(map(_key, keys)), 1) == bytes([_FOUND])

    def _ask(self, words: bytes, answer_bytes: int) -> bytes:
        self._send(words)
        return self._receive(answer_bytes)

    def _bytes(self) -> bytes:
        length = _number(self._receive(8))
        if not 0 <= length <= _MOST_ANSWERED:
            raise self._broken(f"an answer of {length} bytes")
        return self._receive(length)

    def _send(self, words: bytes) -> None:
        left = memoryview(words)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._await(select.POLLOUT)
            except OSError as error:
                raise self._broken(error.strerror or str(error), _lost(error)) from error

    def _receive(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._socket.recv(min(length - len(parts), 1 << 20))
            except BlockingIOError:
                self._await(select.POLLIN)
                continue
            except OSError as error:
                raise self._broken(error.strerror or str(error), _lost(error)) from error
            if not part:
                raise self._broken("it has closed the connection", "closed")
            parts += part
        return bytes(parts)

    def _await(self, event: int) -> None:
        left_s = self._deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._socket, event)
        if left_s <= 0 or not poll.poll(left_s * 1000):
            # The host might be cut off: a new connection will show it.
            raise self._broken("no answer in time", "silent" if self._greeting else "")

    def _broken(self, reason: str, lost: Lost = "") -> NodeStoreError:
        self._socket.close()
        return NodeStoreError(f"the store at {self.address}: {reason}", lost)


def _lost(error: OSError) -> Lost:
    if isinstance(error, ConnectionError):
        return "closed"
    if isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return "unreachable"
    return ""


def probe(address: str, port: int, *, deadline_s: float) -> ServerProbe:
    """Checks whether the host at ``address`` responds. A refused connection counts as a response. Never raises."""
    try:
        ipaddress.ip_address(address)  # a peer wrote the address, so don't resolve a name
        socket.create_connection((address, port), timeout=deadline_s).close()
    except ValueError:
        return ""
    except OSError as error:
        if error.errno == errno.ENETUNREACH:
            return "no route"
        return {"closed": "answers", "unreachable": "no answer"}.get(_lost(error), "")  # type: ignore[return-value]
    return "answers"


def _key(key: str) -> bytes:
    data = f"/{key}".encode()
    if len(data) > LONGEST_KEY:
        raise ValueTooLarge(f"a key of {len(data)} bytes")
    return _count(len(data)) + data


def _value(value: bytes) -> bytes:
    if len(value) > LARGEST_VALUE:
        raise ValueTooLarge(f"a value of {len(value)} bytes")
    return _count(len(value)) + value


def _count(number: int) -> bytes:
    return struct.pack("<Q", number)


def _number(data: bytes) -> int:
    (number,) = struct.unpack("<q", data)
    return int(number)
