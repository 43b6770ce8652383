"""Stacks that a process reports about itself, and the supervisor's request for them, both in this process."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from safelaunch.beacon import inside as beacon
from safelaunch.beacon import layout, server
from safelaunch.capture import inside
from safelaunch.capture.memory import ProcessMemory


class Page:
    """Page with only the words that count questions and answers."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(layout.SIZE)).cast("Q")

    @property
    def owes_answer(self) -> bool:
        return self.words[layout.ANSWERED] < self.words[layout.ASKED]

    def begin_question(self) -> bool:
        self.words[layout.ASKED] += 1
        return True

    def withdraw_question(self) -> None:
        self.words[layout.ASKED] -= 1


class Token:
    pass


def rests(go: SimpleQueue[None], started: threading.Event, number: int, token: object) -> None:
    key = f"key/{number}"  # noqa: F841 - read from outside
    huge = 10**5000  # noqa: F841
    started.set()
    go.get()


def rests_with_its_own_locals(go: SimpleQueue[None], there: threading.Event, seen: list[Any]) -> None:
    mine = locals()
    there.set()
    go.get()
    seen.append(dict(mine))


@contextmanager
def resting(target: Any, *args: object) -> Iterator[threading.Thread]:
    go, started = SimpleQueue[None](), threading.Event()
    thread = threading.Thread(target=target, args=(go, started, *args), name="rests")
    thread.start()
    started.wait()
    try:
        yield thread
    finally:
        go.put(None)
        thread.join()


def stack_of(thread: threading.Thread) -> dict[str, Any]:
    threads: Any = beacon.snapshot()["threads"]
    return next(stack for stack in threads if stack["thread_id"] == thread.ident)


def test_stack_has_thread_function_line_and_native_id() -> None:
    with resting(rests, 7, None) as thread:
        stack = stack_of(thread)
        answer: Any = beacon.snapshot()

    frame = next(entry for entry in stack["frames"] if entry["name"] == "rests")
    assert (frame["filename"], frame["line"]) == (__file__, rests.__code__.co_firstlineno + 4)
    shown = {variable["name"]: variable["repr"] for variable in frame["locals"]}
    assert shown == {"number": "7", "key": "'key/7'"}
    assert (stack["thread_name"], stack["os_thread_id"]) == ("rests", thread.native_id)
    own = next(thread_stack for thread_stack in answer["threads"] if thread_stack["thread_id"] == threading.get_ident())
    assert own["os_thread_id"] == threading.get_native_id()


def test_stack_capture_keeps_no_script_object_alive() -> None:
    token = Token()
    alive = weakref.ref(token)
    with resting(rests, 7, token) as thread:
        stack_of(thread)
        del token
    gc.collect()
    assert alive() is None


def test_stack_capture_leaves_locals_dict_of_function_unchanged() -> None:
    results: list[dict[str, Any]] = []
    with resting(rests_with_its_own_locals, results) as thread:
        stack_of(thread)
    assert set(results[0]) >= {"go", "there", "seen"}


def test_system_calls_are_reported_for_each_thread() -> None:
    with resting(rests, 7, None) as thread:
        calls: Any = beacon.snapshot()["calls"]
    assert calls.keys() >= {str(os.getpid()), str(thread.native_id)}


def test_beacon_thread_answers_if_server_takes_no_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = types.ModuleType("torch._C._distributed_c10d")
    c10d._WorkerServer = lambda path: types.SimpleNamespace(path=path)  # type: ignore[attr-defined]
    parent = types.ModuleType("torch._C")
    parent._distributed_c10d = c10d  # type: ignore[attr-defined]
    for module in (types.ModuleType("torch"), parent, c10d):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    page, base = Page(), tmp_path / "0-0-1"
    assert server.start(os.fspath(base), page.words)
    socket_path = base.with_name("0-0-1.sock")

    number = 0x1234567
    with (
        resting(rests, number, None) as thread,
        inside.asked(socket_path, os.getpid(), page, deadline_s=30.0) as answer,
    ):
        assert answer.stack.value is not None, answer.stack.missing
        stack = next(thread_stack for thread_stack in answer.stack.value.threads if thread_stack.ident == thread.ident)
        assert (stack.os_tid, stack.name) == (thread.native_id, "rests")
        assert [frame.function for frame in stack.frames if frame.file == __file__] == ["rests"]
        assert answer.own.of("syscall", thread.native_id or 0)
        assert len(ProcessMemory(os.getpid(), answer.own.memory).read(id(number), 8)) == 8
    assert answer.stack.value.how == inside.HOW
    descriptor = answer.own.memory
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_unanswered_question_is_missing_stack(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(os.fspath(tmp_path / "0-0-1.stk"))
        silent.listen(1)
        with inside.asked(tmp_path / "0-0-1.sock", os.getpid(), Page(), deadline_s=0.05) as answer:
            assert (answer.stack.value, answer.stack.kind) == (None, "timeout")
