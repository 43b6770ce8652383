"""Reads another process's memory without stopping it: mappings, symbols, environment."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

MAX_TABLE_BYTES = 64 << 20
MAX_VARIABLES, MAX_VARIABLE_BYTES = 8192, 32 << 10
FUNCTION, OBJECT = 2, 1


class Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    path: str
    executable: bool = True
    identity: str = ""  # device and inode of the file, which renaming or deleting doesn't change

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Symbol(NamedTuple):
    begin: int
    end: int
    name: str


class ProcessMemory:
    """Memory of process ``pid``. ``fd`` is a descriptor for it that the process sent, or -1."""

    def __init__(self, pid: int, fd: int = -1) -> None:
        self.pid = pid
        self._fd = fd

    def read(self, address: int, size: int) -> bytes:
        """Returns up to ``size`` bytes; empty if not permitted."""
        try:
            if self._fd >= 0:
                return os.pread(self._fd, size, address)
            with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
                return os.pread(memory.fileno(), size, address)
        except (OSError, OverflowError):
            return b""

    @cached_property
    def regions(self) -> list[Mapping]:
        """Returns all mappings by address. Anonymous mappings have an empty path. Raises OSError."""
        mappings = []
        for line in Path(f"/proc/{self.pid}/maps").read_text("utf-8", "replace").splitlines():
            bounds, access, offset, device, inode, *path = line.split(maxsplit=5)
            start, _, end = bounds.partition("-")
            begins, ends = int(start, 16), int(end, 16)
            name = path[0] if path else ""
            mappings.append(Mapping(begins, ends, int(offset, 16), name, "x" in access, f"{device} {inode}"))
        return mappings

    @cached_property
    def mappings(self) -> list[Mapping]:
        return [region for region in self.regions if region.path]

    def symbols(self, mapping: Mapping, wanted: re.Pattern[bytes], kind: int = FUNCTION) -> tuple[Symbol, ...]:
        """Returns the symbols that match ``wanted`` and are exported by the file mapped here as code."""
        path = f"/proc/{self.pid}/root{mapping.path}"
        with suppress(OSError, OverflowError, IndexError, struct.error):  # the file might be damaged
            status = Path(path).stat()
            delta, symbols = _exported(path, (status.st_dev, status.st_ino, status.st_mtime_ns), wanted, kind)
            base = mapping.start - mapping.offset - delta
            return tuple(Symbol(base + symbol.begin, base + symbol.end, symbol.name) for symbol in symbols)
        return ()

    def environment(self) -> dict[str, str]:
        """Returns the process's current variables. Empty if unreadable.

        The variables are read from memory, because ``/proc`` doesn't show changes that the program makes. The list is
        the C library's, but an executable that refers to that list by name has its own copy.
        """
        with suppress(OSError):
            code = [mapping for mapping in self.mappings if mapping.executable]
            images = (*code[:1], *(image for image in code if image.name.startswith(("libc.", "libc-", "ld-musl"))))
            for image in images:
                for symbol in self.symbols(image, _ENVIRONMENT, OBJECT):
                    return self._variables(symbol.begin)
        return {}

    def _variables(self, address: int) -> dict[str, str]:
        first = int.from_bytes(self.read(address, 8), "little")
        pointers = self.read(first, 8 * MAX_VARIABLES) if first else b""
        variables: dict[str, str] = {}
        for (at,) in struct.iter_unpack("=Q", pointers[: len(pointers) & ~7]):
            if not at:
                break
            name, _, value = self.read(at, MAX_VARIABLE_BYTES).partition(b"\0")[0].partition(b"=")
            variables.setdefault(os.fsdecode(name), os.fsdecode(value))
        return variables


_ENVIRONMENT = re.compile(rb"environ")


@lru_cache(maxsize=32)
def _exported(
    path: str, identity: tuple[int, int, int], wanted: re.Pattern[bytes], kind: int
) -> tuple[int, tuple[Symbol, ...]]:
    """Returns an ELF file's symbols, and the difference between the addresses and file offsets of its code."""
    with open(path, "rb") as file:

        def part(offset: int, size: int) -> bytes:
            return os.pread(file.fileno(), min(size, MAX_TABLE_BYTES), offset)

        head = part(0, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            return 0, ()
        programs, sections = struct.unpack_from("<QQ", head, 32)
        program_count, _, section_count = struct.unpack_from("<HHH", head, 56)
        loaded = struct.iter_unpack("<IIQQQQQQ", part(programs, 56 * program_count))
        delta = next((segment[3] - segment[2] for segment in loaded if segment[0] == 1 and segment[1] & 1), 0)
        table = list(struct.iter_unpack("<IIQQQQIIQQ", part(sections, 64 * section_count)))
        symbols = []
        for section in (section for section in table if section[1] == 11):  # dynamic symbols, which strip keeps
            names = part(*table[section[6]][4:6])
            symbols += list(_named(part(*section[4:6]), names, wanted, kind))
    return delta, tuple(symbols)


def _named(symbols: bytes, names: bytes, wanted: re.Pattern[bytes], kind: int) -> Iterator[Symbol]:
    for name, info, _, _, value, size in struct.iter_unpack("<IBBHQQ", symbols[: len(symbols) // 24 * 24]):
        if info & 15 == kind and value:
            match = wanted.match(names, name)
            if match is not None and names[match.end() : match.end() + 1] == b"\0":
                yield Symbol(value, value + size, match[0].decode())
