"""Threads that decode the same new type at the same time all get their records."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import safelaunch
from safelaunch.system import decoding
from safelaunch.system.decoding import from_json, from_msgpack

PACKAGE = Path(safelaunch.__file__).parent
# The first thread stops while msgspec knows Outer only partly, until the second has begun to decode it.
TWO_THREADS = """
import threading, time
import msgspec
from safelaunch.system.decoding import from_json, from_msgpack

def slow():
    half_known.set()
    second_begins.wait()
    time.sleep(0.2)
    return int

class Inner(msgspec.Struct):
    number: "slow()"

class Outer(msgspec.Struct):
    inner: Inner
    others: list[Inner]

def second():
    half_known.wait()
    second_begins.set()
    found.append(from_msgpack(msgspec.msgpack.encode(RAW), Outer))

RAW = {"inner": {"number": 1}, "others": [{"number": 2}]}
found = []
half_known, second_begins = threading.Event(), threading.Event()
thread = threading.Thread(target=second)
thread.start()
found.append(from_json(msgspec.json.encode(RAW), Outer))
thread.join()
assert found == [Outer(Inner(1), [Inner(2)])] * 2, found
"""


def test_decoding_second_thread_waits_until_type_is_known() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("decode", "text"), [(from_json, b'"\xff"'), (from_msgpack, b"\xa1\xff")])
def test_decoding_invalid_utf8_raises_decode_error(decode: Callable[[bytes, type[str]], str], text: bytes) -> None:
    """Otherwise each reader of other users' files would need to handle it.

    a damaged bundle made the next one lose its verdict.
    """
    with pytest.raises(msgspec.DecodeError):
        decode(text, str)


def test_product_decodes_only_through_decoding_module() -> None:
    """msgspec's own calls would end the process if two threads meet."""
    own = {f"msgspec.{form}.{name}" for form in ("json", "msgpack") for name in ("decode", "Decoder")} | {
        "msgspec.convert"
    }
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(decoding.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in own
    ]
    assert calls == []
