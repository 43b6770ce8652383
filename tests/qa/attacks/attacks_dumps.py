"""Flight Recorder dumps of every format, with one rank's dump damaged: in a field, in its structure, or in its bytes.

The intact folder blames no rank: three ranks wait in the same collective. Whatever one dump contains, ``diagnose`` must
end soon, in little memory and with one of its exit codes. No malformed field must make it certain of a culprit.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.qa.attacks.attack import Attack
from tests.qa.attacks.reader import diagnosed
from tests.support.nccl_formats import FORMATS, Op, Recorder
from tests.support.sample_dumps import GLOO, as_json, places

MARKER = "@@ here @@"
RANKS = 3
Path_ = tuple[Any, ...]


def attacks(count: int, random: Random) -> Iterator[Attack]:
    for base in BASES:
        yield Attack(f"undamaged {base.name}", lambda scratch, base=base: _undamaged(base, scratch))
    for number in range(count - len(BASES)):
        seed = random.getrandbits(48)
        yield Attack(f"draw {number} (seed {seed})", lambda scratch, seed=seed: _drawn(seed, scratch))


# --- what is damaged --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """Intact dumps of a job, by rank, as pickles (``pickled``) or JSON."""

    name: str
    dumps: tuple[dict[str, Any], ...]
    pickled: bool

    def written(self, dump: Any) -> bytes:
        if self.pickled:
            return pickle.dumps(dump, protocol=2)
        return json.dumps(dump).encode("utf-8", "surrogatepass")


def _bases() -> Iterator[Base]:
    for pickled in (True, False):
        form = "pickle" if pickled else "json"
        gloo = GLOO if pickled else json.loads(as_json(GLOO))
        yield Base(f"gloo {form}", (gloo,) * RANKS, pickled)
        for layout in FORMATS:
            recorders = [Recorder(rank, {"0": range(RANKS), "1": (0, 1)}, layout) for rank in range(RANKS)]
            for one in recorders:
                for _ in range(3):
                    one.collective(line=40).collective("all_gather", size=(2, 3), output=(6, 3), line=41)
                    one.block([Op("all_reduce"), Op("broadcast", (5,))])
                if one.rank < 2:
                    one.collective(group="1", line=45).send(1 - one.rank, group="1")
                one.collective("barrier", "scheduled", size=(1,), line=50)
            dumps = tuple(one.dump() if pickled else json.loads(one.json()) for one in recorders)
            yield Base(f"{layout.version} of torch {layout.torch} {form}", dumps, pickled)


BASES = tuple(_bases())


def _undamaged(base: Base, scratch: Path) -> str:
    told = diagnosed(_folder(base, base.written(base.dumps[0]), scratch), scratch)
    return told.wrong((0, 1)) or ("it accuses somebody" if told.accuses else "")


def _folder(base: Base, first: bytes, scratch: Path) -> Path:
    folder = scratch / "dumps"
    folder.mkdir()
    for rank, dump in enumerate(base.dumps):
        data = first if rank == 0 else base.written(dump)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder


def _drawn(seed: int, scratch: Path) -> str:
    random = Random(seed)
    base = random.choice(BASES)
    name, data, malformed = random.choices(WAYS, (5, 3, 3, 2))[0](base, random)
    told = diagnosed(_folder(base, data, scratch), scratch)
    wrong = told.wrong()
    if not wrong and malformed and told.accuses:
        wrong = "sure of a culprit because of malformed data"
    return wrong and f"{base.name}: {name}: {wrong}"


# --- one field --------------------------------------------------------------------------------------------------------


def _field(base: Base, random: Random) -> tuple[str, bytes, bool]:
    """Yields fields with a value of another type, or outside the range that torch writes."""
    dump = copy.deepcopy(base.dumps[0])
    where = random.choice(places(dump))
    name, value = random.choice(list(VALUES.items()))
    # A string in place of a string, or a number of a number, is a different record, not a malformed one.
    plausible = type(_at(dump, where)) is type(value)
    plausible |= (where[-1], name) == ("process_group", "texts")  # the JSON form of a group's name: a different group
    _put(dump, where, value)
    try:
        data = base.written(dump)
    except (TypeError, ValueError):  # JSON has no bytes, no complex numbers
        _put(dump, where, None)
        data, plausible = base.written(dump), True
    return f"{where} = {name}", data, not plausible and value not in (None, 0, 1, "", [], (), [[]]) and value == value


def _raw(base: Base, random: Random) -> tuple[str, bytes, bool]:
    """Returns raw opcodes or JSON text that no dump in memory could hold."""
    dump = copy.deepcopy(base.dumps[0])
    where = random.choice(places(dump))
    as_key = random.random() < 0.2
    if as_key and isinstance(parent := _at(dump, where[:-1]), dict):
        parent[MARKER] = parent.pop(where[-1])
    else:
        as_key = False
        _put(dump, where, MARKER)
    data = base.written(dump)
    if base.pickled:
        name, made = random.choice(list(OPCODES.items()))
        data = data.replace(b"X" + struct.pack("<I", len(MARKER)) + MARKER.encode(), made(), 1)
    else:
        name, text = random.choice(list(TEXTS.items()))
        data = data.replace(json.dumps(MARKER).encode(), text(), 1)
    return f"{where}{' as a key' if as_key else ''} = {name}", data, False


def _at(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Any, path: Path_, value: Any) -> None:
    parent = _at(tree, path[:-1])
    if isinstance(parent, tuple):
        _put(tree, path[:-1], tuple(value if at == path[-1] else one for at, one in enumerate(parent)))
    else:
        parent[path[-1]] = value


VALUES: dict[str, Any] = {
    "None": None, "True": True, "0": 0, "1": 1, "-1": -1, "1.5": 1.5, "not a number": float("nan"),
    "infinity": float("inf"), "1 << 62": 1 << 62, "1 << 64": 1 << 64, "-1 << 63": -1 << 63, "1 << 13000": 1 << 13_000,
    "no text": "", "long text": "x" * 300_000, "NUL": "\0", "override": "\u202e\u2066", "CSI": "\x9b31m",
    "ESC": "\x1b]0;x\x07", "superscript": "²", "text -1": "-1", "5000 digits": "9" * 5000, "surrogate": "\ud800",
    "newlines": "\n\n", "[]": [], "{}": {}, "[[]]": [[]], "5000 numbers": [1] * 5000, "5000 lists": [[1] * 10] * 5000,
    "texts": ["x", "y"], "sizes of texts": [["x"]], "negative sizes": [[-1, -5]], "big sizes": [[1 << 80]],
    "dictionaries": {"a": {"b": {}}}, "a list of None": [None], "bytes": b"x",
    "depth 50": json.loads("[" * 50 + "]" * 50),
    "depth 400": json.loads("[" * 400 + "]" * 400), "text ranks": "[0, 1, 99999999999]",
    "many ranks": str([*range(70_000)]),
    "negative ranks": "[-5, 0]", "far ranks": "[0, 1, 2, 65535]", "a rank of 2 ** 100": [0, 1 << 100],
}  # fmt: skip


def _memo_bomb(levels: int, begin: bytes, end: bytes) -> bytes:
    # Nested lists that double in size; ``begin`` and ``end`` enclose a list.
    made = [b"]r" + struct.pack("<I", 5000)]
    for level in range(levels):
        twice = (b"j" + struct.pack("<I", 5000 + level)) * 2
        made.append(b"0" + begin + twice + end + b"r" + struct.pack("<I", 5001 + level))
    return b"".join(made)


OPCODES: dict[str, Callable[[], bytes]] = {
    "deep tuples": lambda: b")" + b"\x85" * 300_000,
    "deep lists": lambda: b"]" * 200_000 + b"a" * 199_999,
    "deep dictionaries": lambda: b"}K\x01" * 100_000 + b"N" + b"s" * 100_000,
    "tuple bomb": lambda: b")" + b"2\x86" * 500,
    "tuple bomb of numbers": lambda: b"K\x01" + b"2\x86" * 60,
    "list bomb": lambda: _memo_bomb(100, b"](", b"e"),
    "dictionary bomb": lambda: _memo_bomb(100, b"}(K\x01", b"\x86u").replace(b"\x86u", b"\x86s"),
    "wide lists": lambda: b"](" + b"K\x01" * 4000 + b"er\x88\x13\x00\x00(" + b"j\x88\x13\x00\x00" * 4000 + b"l",
    "a list in itself": lambda: b"]r\x88\x13\x00\x00j\x88\x13\x00\x00a",
    "long number": lambda: b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000,
    "long number of digits": lambda: b"L" + b"9" * 100_000 + b"L\n",
    "number of digits": lambda: b"I" + b"9" * 4000 + b"\n",
    "nan": lambda: b"G\x7f\xf8\0\0\0\0\0\0",
    "surrogate": lambda: b"X\x03\0\0\0\xed\xa0\x80",
    "bytes": lambda: b"C\x03abc",
    "bytes of 2 ** 50": lambda: b"\x8e" + struct.pack("<Q", 1 << 50),
    "text of 2 ** 62": lambda: b"\x8d" + struct.pack("<Q", 1 << 62),
    "text of 2 ** 31": lambda: b"X" + struct.pack("<I", (1 << 32) - 1),
    "bytearray of 2 ** 36": lambda: b"\x96" + struct.pack("<Q", 1 << 36),
    "frame of 2 ** 60": lambda: b"\x95" + struct.pack("<Q", 1 << 60),
    "memo of 2 ** 31": lambda: b"Nr" + struct.pack("<I", (1 << 31) - 1),
    "memo of 2 ** 26": lambda: b"Nr" + struct.pack("<I", 1 << 26),
    "no such memo": lambda: b"j\xff\xff\xff\x0f",
    "a set": lambda: b"\x8f(K\x01K\x02\x90",
    "a set of tuple bombs": lambda: b"\x8f()" + b"2\x86" * 100 + b"\x90",
    "a frozen set": lambda: b"(K\x01K\x02\x91",
    "many sets": lambda: b"](" + b"\x8f" * 3_000_000 + b"e",
    "many dictionaries": lambda: b"](" + b"}" * 3_000_000 + b"e",
    "many marks": lambda: b"N" + b"(" * 3_000_000,
    "colliding keys": lambda: b"}(" + b"".join(_number(n * ((1 << 61) - 1)) + b"N" for n in range(60_000)) + b"u",
    "a function": lambda: b"cposix\nsystem\n",
    "a call": lambda: b"cposix\nsystem\n(X\x04\0\0\0truetR",
    "a call of nothing": lambda: b"N)R",
    "an instance": lambda: b"(iposix\nsystem\n",
    "an object": lambda: b"(N)o",
    "built": lambda: b"]}b",
    "an extension": lambda: b"\x82\x01",
    "a persistent one": lambda: b"Px\n",
    "no stack": lambda: b"0000000",
    "an end": lambda: b".",
    "another pickle": lambda: pickle.dumps(GLOO, protocol=4),
}


def _number(value: int) -> bytes:
    data = value.to_bytes(10, "little")
    return b"\x8a" + bytes([len(data)]) + data


TEXTS: dict[str, Callable[[], bytes]] = {
    "open lists": lambda: b"[" * 100_000,
    "deep lists": lambda: b"[" * 100_000 + b"]" * 100_000,
    "lists of 900": lambda: b"[" * 900 + b"]" * 900,
    "deep dictionaries": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "1e999": lambda: b"1e999",
    "-1e999": lambda: b"-1e999",
    "NaN": lambda: b"NaN",
    "5000 digits": lambda: b"9" * 5000,
    "4000 digits": lambda: b"9" * 4000,
    "surrogate": lambda: b'"\\ud800"',
    "NUL": lambda: b'"\\u0000"',
    "raw control": lambda: b'"\x9b\x01"',
    "twice the same key": lambda: b'{"a": 1, "a": [2], "ranks": "[0]", "ranks": [1]}',
    "a million numbers": lambda: b"[" + b"0," * 1_000_000 + b"0]",
    "a million lists": lambda: b"[" + b"[]," * 1_000_000 + b"0]",
    "a million dictionaries": lambda: b"[" + b"{}," * 1_000_000 + b"0]",
    "nothing": lambda: b"",
}


# --- its structure, its bytes -----------------------------------------------------------------------------------------


def _structure(base: Base, random: Random) -> tuple[str, bytes, bool]:
    dump = copy.deepcopy(base.dumps[0])
    entries = dump["entries"]
    what = random.choice(["gone", "renamed", "repeated", "shuffled", "replaced", "dropped", "alone", "groups"])
    where = random.choice(places(dump))
    parent = _at(dump, where[:-1])
    if what == "gone" and not isinstance(parent, tuple):
        del parent[where[-1]]
    elif what == "renamed" and isinstance(parent, dict):
        parent[where[-1] + random.choice("x\0²")] = parent.pop(where[-1])
    elif what == "repeated":
        dump["entries"] = entries * random.choice([2, 100, 3000])
    elif what == "shuffled":
        random.shuffle(entries)
    elif what == "replaced":
        entries[random.randrange(len(entries))] = random.choice([None, 1, "x", [], {}, [[]], {"x": {}}])
    elif what == "dropped":
        del entries[random.randrange(len(entries)) :]
    elif what == "alone":
        dump = {"entries": entries} if random.random() < 0.5 else {"version": dump["version"]}
    elif what == "groups":
        config = {str(n): {"ranks": str([n, n + 1, n * 7])} for n in range(random.choice([10, 20_000]))}
        dump["pg_config"] = config
    return f"{what} {where}", base.written(dump), False


def _bytes(base: Base, random: Random) -> tuple[str, bytes, bool]:
    data = bytearray(base.written(base.dumps[0]))
    what = random.choice(["flipped", "cut", "inserted", "doubled", "zeroed", "spliced"])
    at = random.randrange(len(data))
    size = random.choice([1, 1, 4, 30, 500])
    if what == "flipped":
        for _ in range(size):
            data[random.randrange(len(data))] = random.randrange(256)
    elif what == "cut":
        del data[at : at + (size if random.random() < 0.5 else len(data))]
    elif what == "inserted":
        data[at:at] = random.randbytes(size)
    elif what == "doubled":
        data[at:at] = data[at : at + size] * random.choice([1, 100])
    elif what == "zeroed":
        data[at : at + size] = bytes(size)
    elif what == "spliced":
        other = random.choice(BASES)
        data[at:] = other.written(other.dumps[1])[at:]
    return f"{what} {size} at {at}", bytes(data), False


WAYS = (_field, _raw, _structure, _bytes)
