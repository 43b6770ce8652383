"""Encodes records, signed if the job has a key, and packs evidence into compressed chunks.

The store has no authentication, so its contents are untrusted until ``Codec.decode`` has checked them.
"""

from __future__ import annotations

import struct
import zlib
from typing import TypeVar

import msgspec

from safelaunch.supervise.cluster.store import LARGEST_VALUE
from safelaunch.system.decoding import from_msgpack

MOST_MESSAGE = 1 << 20  # bytes of a record; evidence can be larger
CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 8  # of one node's evidence
MOST_OF_NODE = CHUNK_BYTES * MOST_CHUNKS
MOST_EVIDENCE, LEAST_SHARE = 128 << 20, 64 << 10  # bytes of all nodes; of each node at least
MOST_UNPACKED = 128 << 20
_MAC_BYTES = 32
assert CHUNK_BYTES + _MAC_BYTES < LARGEST_VALUE

_Record = TypeVar("_Record")


class BadMessage(ValueError):
    """Raised for bytes that are damaged, too large, of another type, or not signed with the job's key."""


def parse(data: bytes, kind: type[_Record]) -> _Record:
    """Decodes a record. Raises BadMessage."""
    try:
        return from_msgpack(data, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise BadMessage(str(error)) from error


class Codec:
    """Encodes, signs and decodes records. Without a key, nothing is signed.

    The signature covers the run, the store key and the body, so a message copied to another key is invalid. The reader
    must detect a message replayed under the same key: its count doesn't grow.
    """

    def __init__(self, run: str, key: bytes = b"") -> None:
        self._run = run
        self._key = b""
        if key:
            import hashlib  # late: it loads OpenSSL, 4 MB

            self._key = hashlib.blake2b(key, digest_size=32).digest()

    @property
    def signs(self) -> bool:
        return bool(self._key)

    def encode(self, place: str, message: msgspec.Struct) -> bytes:
        return self.seal(place, msgspec.msgpack.encode(message))

    def decode(self, place: str, data: bytes, kind: type[_Record]) -> _Record:
        """Checks and decodes a record from store key ``place``. Raises BadMessage."""
        if len(data) > MOST_MESSAGE:
            raise BadMessage(f"a message of {len(data)} bytes")
        return parse(self.open(place, data), kind)

    def seal(self, place: str, body: bytes) -> bytes:
        return self._signature(place, body) + body

    def open(self, place: str, data: bytes) -> bytes:
        """Returns the body passed to ``seal``. Raises BadMessage."""
        if not self._key:
            return data
        import hmac

        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._signature(place, body)):
            raise BadMessage("it is not signed with this job's key")
        return body

    def _signature(self, place: str, body: bytes) -> bytes:
        if not self._key:
            return b""
        import hmac

        about = b"".join(struct.pack("<I", len(part)) + part for part in (self._run.encode(), place.encode()))
        return hmac.new(self._key, about + body, "sha256").digest()


def share_of(nodes: int) -> int:
    """Returns how many bytes of evidence each node can send, given that the leader and the store hold all of it."""
    return max(LEAST_SHARE, min(MOST_OF_NODE, MOST_EVIDENCE // max(nodes, 1)))


def pack(data: bytes, most: int = MOST_OF_NODE) -> list[bytes] | None:
    """Compresses data into chunks; returns None if they exceed ``most`` bytes or a node's limit."""
    small = zlib.compress(data, 6)
    if len(small) > most or len(data) > MOST_UNPACKED:
        return None
    return [small[at : at + CHUNK_BYTES] for at in range(0, len(small), CHUNK_BYTES)]


def unpack(chunks: list[bytes]) -> bytes:
    """Reverses ``pack``, with a limit on memory. Raises BadMessage."""
    engine = zlib.decompressobj()
    try:
        data = engine.decompress(b"".join(chunks), MOST_UNPACKED)
    except zlib.error as error:
        raise BadMessage(str(error)) from error
    if not engine.eof or engine.unused_data:
        raise BadMessage("compressed data that is truncated or too large")
    return data
