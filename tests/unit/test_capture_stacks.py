"""Parsing of py-spy's output and errors, and the way to call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from safelaunch.capture import command, proc, ptrace, stacks
from safelaunch.model import CallArguments, Frame, ProcessState, StackSample, Thread, ThreadState
from safelaunch.system.errors import CaptureError
from safelaunch.system.task import BackgroundTask


def spy_thread(**changes: object) -> dict[str, object]:
    frame = {"name": "step", "filename": "/home/me/train.py", "short_filename": "train.py", "module": None, "line": 7}
    outer = {"name": "<module>", "filename": "/home/me/train.py", "line": 9, "is_entry": True}
    return {
        "pid": 10,
        "thread_id": 140283,
        "thread_name": "MainThread",
        "os_thread_id": 10,
        "active": True,
        "owns_gil": True,
        "frames": [frame, outer],
        "process_info": None,
        **changes,
    }


def test_py_spy_output_keeps_order_and_ignores_new_keys() -> None:
    data = json.dumps([spy_thread(new_key={"x": 1}), spy_thread(thread_name=None, os_thread_id=None, frames=[])])
    sample = stacks.parse(data.encode(), pid=10, at_s=1.5, how="py-spy dump --json")
    assert sample.threads == (
        Thread(
            frames=(Frame("/home/me/train.py", 7, "step"), Frame("/home/me/train.py", 9, "<module>")),
            name="MainThread",
            os_tid=10,
            active=True,
            owns_gil=True,
            ident=140283,
        ),
        Thread(frames=(), active=True, owns_gil=True, ident=140283),
    )
    assert sample.main_thread is sample.threads[0]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'[{"frames": 3}]', b'[{"pid": 10', b"\xff\xfe"])
def test_py_spy_parser_rejects_other_output(data: bytes) -> None:
    with pytest.raises(CaptureError, match="unreadable output"):
        stacks.parse(data, pid=10, at_s=0.0, how="py-spy")


def state(letter: str = "S", *, frozen: bool = False, worker: str = "S", call: str = "") -> ProcessState:
    threads = (ThreadState(10, "python", letter, syscall_name=call), ThreadState(11, "python", worker))
    return ProcessState(10, 1, 5, 0.0, "python", ("python", "t.py"), letter, threads, frozen=frozen)


@pytest.mark.parametrize(
    ("now", "before", "why"),
    [
        (state("S"), None, ""),
        (state("R"), state("D"), ""),
        (state("T"), None, "the process is stopped"),
        (state("t"), None, "the process is stopped"),
        (state("S", frozen=True), None, "its cgroup is frozen"),
        (state("D"), None, "thread 10 is in uninterruptible sleep"),
        (state("D"), state("D"), "thread 10 is in uninterruptible sleep"),
        (state("D"), state("S"), ""),  # most likely a short wait for a disk
        (state("S"), state("S", call="write"), "thread 10 waits in a write, which a stop would cut short"),
        (state("R"), state("S", call="write"), ""),  # the write has finished
        (state("S"), state("S", call="read"), ""),
        (state("S", worker="D"), state("S", worker="D"), "thread 11 is in uninterruptible sleep"),
    ],
)
def test_nonblocking_reason_if_target_must_not_be_stopped(
    now: ProcessState, before: ProcessState | None, why: str
) -> None:
    assert stacks.why_nonblocking(now, before) == why


def test_stack_capture_does_not_cut_write_short() -> None:
    """Unbuffered Python takes a short write for a complete one, so the output would be cut in the middle."""
    code = "import sys; sys.stdout.write('x' * 300_000)"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            before = wait_for_write(writer.pid)
            stack = stacks.stack_of(writer.pid, state=before, deadline_s=20)
            assert stack.value is not None
            assert len(writer.stdout.read()) == 300_000
        finally:
            writer.kill()


def wait_for_write(pid: int) -> ProcessState:
    while (state := proc.read_process(pid)).threads[0].syscall_name != "write" or state.state != "S":
        time.sleep(0.02)
    return state


def test_stack_text_has_process_threads_and_frames() -> None:
    sample = StackSample(
        10,
        0.0,
        "py-spy dump --json",
        (
            Thread((Frame("/lib/threading.py", 982, "Thread.run"),), "bg", 11),
            Thread((Frame("/a/train.py", 7, "read"), Frame("libc.so.6", 0, "poll")), "MainThread", 10, owns_gil=True),
        ),
    )
    main = ThreadState(10, "python", "S", "anon_pipe_read", 0, "read", 5, "pipe:[123]")
    process = ProcessState(10, 1, 5, 0.0, "python", ("python", "t.py"), "S", (main, ThreadState(11, "bg", "S")))
    assert stacks.to_text(sample, process) == (
        "Process 10: python t.py\n"
        "State S (sleeping)\n"
        "Read by py-spy dump --json\n"
        "\n"
        'Thread 10 (idle+gil): "MainThread" [S, read(fd 5 -> pipe:[123]), in anon_pipe_read]\n'
        "    read (/a/train.py:7)\n"
        "    poll (libc.so.6)\n"
        'Thread 11 (idle): "bg" [S]\n'
        "    Thread.run (/lib/threading.py:982)\n"
    )


def test_stack_text_without_stacks_has_kernel_threads() -> None:
    text = stacks.to_text(None, state("D"), missing="py-spy is not installed")
    assert "State D (uninterruptible sleep)" in text
    assert "No Python stacks: py-spy is not installed" in text
    assert "Kernel thread 11 'python' [S]" in text


# --- errors -----------------------------------------------------------------------------------------------------------

FACTS = ptrace.PtraceFacts(
    alive=True, same_user=True, capable=True, yama=None, container=False, executable="python3.12"
)
NO_CAPABILITY = """Error: Failed to get process executable name. Check that the process is running.

Caused by:
    0: Permission denied (os error 13)
    1: Permission denied (os error 13)

Stack backtrace:
   0: <E as anyhow::context::ext::StdError>::ext_context
"""
OTHER_USER = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'\n"


def facts(**changes: object) -> ptrace.PtraceFacts:
    return ptrace.PtraceFacts(**{**FACTS.__dict__, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stderr", "known", "expected", "kind"),
    [
        (NO_CAPABILITY, facts(capable=False, container=True), "--cap-add=SYS_PTRACE", "denied"),
        (NO_CAPABILITY, facts(capable=False, yama=1), "sysctl kernel.yama.ptrace_scope=0", "denied"),
        (NO_CAPABILITY, facts(yama=3), "no process may trace another until the next reboot", "denied"),
        (NO_CAPABILITY, facts(alive=False), "the process is gone", ""),
        (OTHER_USER, facts(capable=False, same_user=False), "run safelaunch as that user", "denied"),
        ("Error: Failed to suspend process\n", FACTS, "the process is stopped", ""),
        ("Error: Failed to find python version from target process\n", FACTS, "not a Python process", "absent"),
        ("Error: Unsupported version of Python: 3.19.0\n", FACTS, "upgrade py-spy", "outdated"),
        ("Error: Failed to find a python interpreter in the .data section\n", FACTS, "the process is starting", ""),
        (
            "Error: Strange\n\nCaused by:\n    0: Deep\n    1: Deep\n\nStack backtrace:\n   0: x\n",
            FACTS,
            "Strange: Deep",
            "",
        ),
        ("", FACTS, "py-spy failed without a message", ""),
    ],
)
def test_py_spy_error_is_explained_with_fix(stderr: str, known: ptrace.PtraceFacts, expected: str, kind: str) -> None:
    explained = ptrace.explain(stderr, known)
    assert expected in str(explained) and explained.kind == kind
    assert "\n" not in explained.message + explained.fix


def test_find_py_spy_uses_option_or_names_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert stacks.find_py_spy("/opt/py-spy") == "/opt/py-spy"
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CaptureError) as caught:
        stacks.find_py_spy()
    assert "pip install py-spy" in caught.value.fix
    (tmp_path / "py-spy").touch(mode=0o755)
    assert stacks.find_py_spy() == str(tmp_path / "py-spy")


def in_call(
    name: str, *variables: tuple[str, str | None], file: str = "/x/torch/distributed/distributed_c10d.py"
) -> dict[str, object]:
    local_variables = [{"name": name, "addr": 1, "arg": True, "repr": shown} for name, shown in variables]
    return {"name": name, "filename": file, "line": 3, "locals": local_variables}


def call_of(*frames: dict[str, object]) -> CallArguments | None:
    data = json.dumps([spy_thread(frames=frames)]).encode()
    return stacks.parse(data, pid=10, at_s=0.0, how="py-spy").threads[0].call


def test_call_arguments_keep_only_peers_of_locals() -> None:
    user = in_call("train", ("password", "'hunter2'"), ("src", "5"), file="/home/me/train.py")
    inner = in_call("recv", ("tensor", "<Tensor>"), ("src", "1"), ("tag", "7"), ("group_src", "None"), ("x", "9"))
    outer = in_call("recv_object_list", ("src", "4"))
    data = json.dumps([spy_thread(frames=[inner, outer, user])]).encode()
    (thread,) = stacks.parse(data, pid=10, at_s=0.0, how="py-spy").threads
    assert thread.call == CallArguments(src=1, tag=7)
    assert b"hunter2" not in msgspec.json.encode(thread)


@pytest.mark.parametrize(
    "frames",
    [
        [in_call("train", ("src", "1"), file="/home/me/train.py")],
        [in_call("wait", ("timeout", "3"))],
        [in_call("recv", ("src", "'1'"), ("dst", None), ("tag", "1e3"), ("group_src", "9" * 40))],
        [{"name": "recv", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3, "locals": None}],
        [],
    ],
)
def test_call_without_peers_has_no_arguments(frames: list[dict[str, object]]) -> None:
    assert call_of(*frames) is None


def fake(folder: Path, text: str) -> str:
    """Returns a py-spy that runs this shell script."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


def test_stack_dump_falls_back_to_no_locals(tmp_path: Path) -> None:
    spy = fake(tmp_path, 'case "$*" in *--locals*) echo "Error: bad dict" >&2; exit 1;; esac\necho "[]"\n')
    result = stacks.dump(os.getpid(), py_spy=spy)
    assert result.value is not None and result.value.threads == ()


@pytest.mark.parametrize(
    ("folder", "file"),
    [("'/root/ext/mine'", "/root/ext/mine/lock"), ("'/root/very/long...", ""), (None, "")],
)
def test_lock_file_of_extension_build_is_found(folder: str | None, file: str) -> None:
    """py-spy cuts long values short, and a partial path is useless."""
    waits = {"name": "wait", "filename": "/x/torch/utils/file_baton.py", "line": 3, "locals": None}
    build = in_call(
        "_jit_compile", ("name", "'m'"), ("build_directory", folder), file="/x/torch/utils/cpp_extension.py"
    )
    data = json.dumps([spy_thread(frames=[waits, build])]).encode()
    assert stacks.parse(data, pid=10, at_s=0.0, how="py-spy").threads[0].lock_file == file


READ = """\
echo x >> {log}
case $(wc -l < {log}) in
1) echo "Error: torn" >&2; exit 1;;
2) echo "Error: torn" >&2; exit 1;;
*) echo '{stack}';;
esac
"""


def test_torn_stack_of_running_threads_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread keeps the first stack that was read while it did not run."""
    stack = json.dumps([spy_thread(pid=0, os_thread_id=n, frames=[]) for n in (10, 11)])
    spy = fake(tmp_path, READ.format(log=tmp_path / "log", stack=stack))
    at_rest, running = proc.Scheduled(False, ("1",)), proc.Scheduled(True, ("1",))
    moments = iter([{10: running}, {10: running}, {10: at_rest, 11: running}, {10: at_rest, 11: running}])
    monkeypatch.setattr(proc, "scheduled", lambda pid: next(moments))
    sample = stacks.stack_of(os.getpid(), py_spy=spy).value
    assert sample is not None and [thread.torn for thread in sample.threads] == [False, True]


def test_torn_stack_of_resting_process_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, log = fake(tmp_path, READ.format(log=tmp_path / "log", stack="[]")), tmp_path / "log"
    monkeypatch.setattr(proc, "scheduled", lambda pid: {10: proc.Scheduled(False, ("1",))})
    assert "torn" in stacks.stack_of(os.getpid(), py_spy=spy).missing
    assert log.read_text().count("x") == 2  # with and without local variables


def test_running_helper_is_ended_with_supervisor() -> None:
    started = threading.Event()
    command.helper_reports.send_to(lambda pid: started.set())
    task = BackgroundTask("helper", lambda: command.run(["sleep", "600"], deadline_s=600))
    assert started.wait(30)
    command.helper_reports.end_all()
    assert task.wait(30)
    assert task.result().returncode == -signal.SIGKILL
