"""Owner of a frame's code, and the kernel's information on what a thread waits for."""

from __future__ import annotations

from typing import Any

import pytest

from safelaunch.model import Frame, ProcessEvidence, ProcessState, ThreadState
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.kernel import kernel_wait
from tests.support.evidence import (
    C10D,
    LOADER,
    MODULE,
    SITE,
    STDLIB,
    WORKER_IDLE,
    at,
    in_backward,
    in_c10d,
    in_init,
    in_loader,
    in_worker,
    process,
)


@pytest.mark.parametrize(
    ("path", "mine"),
    [
        ("/home/me/train.py", True),
        ("/home/me/site-packages-fork/train.py", True),
        ("/srv/project/lib/pythonic/train.py", True),
        ("/usr/local/lib/project/train.py", True),
        (f"{SITE}/torch/nn/modules/module.py", False),
        (f"{STDLIB}/threading.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("/opt/py/lib64/python3.13t/queue.py", False),
        ("/opt/py/lib/python310.zip/queue.py", False),
        ("<frozen runpy>", False),
        ("<string>", False),
        ("", False),
        ("/run/user/0/safelaunch/_safelaunch_beacon/sitecustomize.py", False),
        (f"{SITE}/safelaunch/beacon/faults.py", False),
        ("/home/me/safelaunch/beacon/faults.py", False),
        ("/home/me/safelaunch/addons/consistency/probe.py", False),
        (f"{SITE}/safelaunch/cli/demos/lock_deadlock.py", True),
        (f"{SITE}/safelaunch/supervise/watch.py", False),
        ("/home/me/.pyenv/versions/3.11.7/bin/python3.11", False),  # C++ stacks of the Flight Recorder
        ("/opt/py/bin/python3.13t", False),
        ("??", False),
        ("./Include/internal/pycore_ceval.h", False),
        ("/home/me/python_trainer", True),
        ("/home/me/pytorch/torch/distributed/distributed_c10d.py", False),  # torch built from source
        ("/home/me/pytorch/torch/nn/modules/module.py", False),
        ("/home/me/pytorch/torch/_dynamo/eval_frame.py", False),
        ("/home/me/pytorch/torch/_tensor.py", False),
        ("/home/me/examples/torch/distributed/train.py", True),
        ("/home/me/torch/train.py", True),
        ("/home/me/transformers/src/transformers/trainer.py", False),
        ("/home/me/transformers/examples/pytorch/run_glue.py", True),
        ("/srv/lightning/src/lightning/pytorch/loops/fit_loop.py", False),
        ("/srv/DeepSpeed/deepspeed/runtime/engine.py", False),
        ("/srv/deepspeed/train.py", True),
        ("<eval_with_key>.17", False),
        ("<eval_with_key>.17 from /home/me/train.py:3 in forward", False),
        (f"/tmp/torchinductor_me/qx/cqx{'a5' * 24}b.py", False),
        (f"/scratch/cache/qx/cqx{'a5' * 24}b.py", False),
        (f"/scratch/cache/ab/cqx{'a5' * 24}b.py", True),
        ("/tmp/tmp1234/_remote_module_non_scriptable.py", False),
    ],
)
def test_frame_is_user_code_by_path(path: str, mine: bool) -> None:
    assert fr.is_user(Frame(path, 3, "f")) is mine


def test_code_roots_count_as_libraries() -> None:
    frame = Frame("/custom/py/Lib/queue.py", 3, "get")
    assert fr.is_user(frame)
    assert not fr.is_user(frame, ("/custom/py/Lib",))
    assert fr.is_user(frame, ("/custom/py/Li",))


def test_user_frame_is_innermost_user_code() -> None:
    helper = at(7, "save", "/home/me/util.py")
    assert fr.Stack((Frame(f"{STDLIB}/socket.py", 1, "f"), helper, at(40), MODULE)).user_frame == helper
    assert fr.Stack(in_c10d("barrier", 41)).user_frame == at(41)
    assert fr.Stack(()).user_frame is None


def test_user_frame_of_forked_worker_ignores_parent_frames() -> None:
    assert fr.Stack(WORKER_IDLE).user_frame is None
    assert fr.Stack(in_worker(12)).user_frame == at(12, "Data.__getitem__", "/home/me/data.py")


def test_user_frame_without_user_file_is_nearest_candidate() -> None:
    typed = Frame("<string>", 1, "<module>")
    assert fr.Stack((Frame(f"{STDLIB}/queue.py", 1, "get"), typed)).user_frame == typed
    inner = Frame(f"{SITE}/tool/engine.py", 9, "run")
    main = Frame(f"{SITE}/tool/cli.py", 5, "<module>")
    runpy = Frame("<frozen runpy>", 88, "_run_code")
    assert fr.Stack((Frame(f"{SITE}/torch/x.py", 1, "f"), inner, main, runpy)).user_frame == inner


@pytest.mark.parametrize(
    ("frames", "kind", "op"),
    [
        (in_c10d("all_reduce", 5), "collective", "all_reduce"),
        ((Frame(C10D, 1, "all_gather"), Frame(C10D, 2, "all_gather_object"), at(5)), "collective", "all_gather_object"),
        (in_c10d("monitored_barrier", 5), "collective", "monitored_barrier"),
        (in_c10d("recv", 5), "p2p", "recv"),
        (in_c10d("destroy_process_group", 5), "teardown", "destroy_process_group"),
        (in_init(), "init", "init_process_group"),
        (
            (Frame(C10D, 1, "_new_process_group_helper"), Frame(C10D, 2, "new_group"), at(5)),
            "collective",
            "new_group",
        ),
        (
            (
                Frame(f"{SITE}/torch/distributed/utils.py", 286, "_verify_param_shape_across_processes"),
                Frame(f"{SITE}/torch/nn/parallel/distributed.py", 1064, "DistributedDataParallel.__init__"),
                at(5),
            ),
            "collective",
            "verify_param_shape_across_processes",
        ),
    ],
)
def test_torch_wait_is_recognized_in_stack(frames: tuple[Frame, ...], kind: str, op: str) -> None:
    assert calls.torch_wait(fr.Stack(frames)) == calls.TorchWait(kind, op)


@pytest.mark.parametrize(
    "frames",
    [
        (at(5), MODULE),
        in_backward(5),
        in_loader(5),
        # computes inside an object collective instead of waiting in it
        (Frame(f"{SITE}/torch/serialization.py", 1, "save"), Frame(C10D, 2, "all_gather_object"), at(5)),
        # user function with the same name
        (at(3, "all_reduce"), MODULE),
    ],
)
def test_stack_outside_torch_calls_is_no_torch_wait(frames: tuple[Frame, ...]) -> None:
    assert calls.torch_wait(fr.Stack(frames)) is None


def test_loader_wait_and_idle_worker_are_recognized() -> None:
    assert calls.LOADER_WAIT.on(fr.Stack(in_loader(5)).called)
    assert not calls.LOADER_WAIT.on(fr.Stack(in_c10d("all_reduce", 5)).called)
    own = (at(9, "Data.__getitem__"), Frame(LOADER, 785, "_SingleProcessDataLoaderIter._next_data"), at(5))
    assert not calls.LOADER_WAIT.on(fr.Stack(own).called)
    assert calls.worker_idle(WORKER_IDLE)
    assert not calls.worker_idle(in_worker(12))


def test_leaving_interpreter_is_recognized() -> None:
    threading_exit = (Frame(f"{STDLIB}/threading.py", 1, "_shutdown"),)
    assert "remaining threads" in calls.leaving(threading_exit)
    assert "exit handlers" in calls.leaving((at(9, "close_log"),))
    assert calls.leaving((at(9, "close_log"), MODULE)) == ""
    assert calls.leaving(()) == ""


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sleep", "sleep"),
        ("futex", "lock"),
        ("restart_futex", "lock"),
        ("pipe", "io"),
        ("fifo", "io"),
        ("connect", "io"),
        ("poll", "poll"),
        ("epoll", "poll"),
        ("wait4", "child"),
        ("select", "select"),
        ("run", "running"),
        ("disk", "disk"),
        ("stop", "stopped"),
        ("zombie", "dead"),
        ("", "unknown"),
    ],
)
def test_kernel_wait_has_kind_of_system_call(kernel: str, kind: str) -> None:
    assert kernel_wait(process(10, (at(1),), kernel)).kind == kind


def seen(at_s: float, call: str = "", wchan: str = "", letter: str = "S", **thread: Any) -> ProcessState:
    thread_state = ThreadState(10, "python", letter, wchan, syscall_name=call, **thread)
    return ProcessState(10, 1, 5, at_s, "python", (), letter, (thread_state,))


SLEEP, POLL, FUTEX = "hrtimer_nanosleep", "poll_schedule_timeout", "futex_do_wait"


@pytest.mark.parametrize(
    ("first", "second", "kind", "call"),
    [
        # the first look, while the rank still connects to the store, doesn't affect its later sleep
        (seen(0, "poll", POLL), seen(1, "clock_nanosleep", SLEEP), "sleep", "clock_nanosleep"),
        (seen(0, "poll", POLL), seen(1, "", SLEEP), "sleep", SLEEP),
        (seen(0, "clock_nanosleep", SLEEP), seen(1, "", SLEEP), "sleep", "clock_nanosleep"),
        (seen(0, "select", POLL), seen(1, "", POLL), "select", "select"),
        (seen(0, "read", "pipe_read"), seen(1), "io", "read"),
        # a passing state is no wait
        (seen(0, "", SLEEP, "D"), seen(1, "", SLEEP), "sleep", SLEEP),
        (seen(0, "", SLEEP, "T"), seen(1, "", SLEEP), "sleep", SLEEP),
        (seen(0, "", SLEEP, "D"), seen(1, "", SLEEP, "D"), "disk", SLEEP),
        # CPU time outweighs the state at the look
        (seen(0, "futex", FUTEX, cpu_ms=0), seen(2, "futex", FUTEX, cpu_ms=1500), "running", ""),
        (seen(0, "futex", FUTEX, cpu_ms=0), seen(2, "futex", FUTEX, cpu_ms=20), "lock", "futex"),
        # a runnable thread that gets no core is busy, for example a spinning rank next to six others at nice 19
        (seen(0, letter="R", cpu_ms=10), seen(2, letter="R", cpu_ms=13), "running", ""),
    ],
)
def test_kernel_wait_combines_two_looks(first: ProcessState, second: ProcessState, kind: str, call: str) -> None:
    wait = kernel_wait(ProcessEvidence("main", (first, second)))
    assert (wait.kind, wait.call, wait.busy) == (kind, call, kind == "running")


def asleep(at_s: float, slices: int, ends_s: float | None) -> ProcessState:
    return seen(at_s, "clock_nanosleep", slices=slices, ends_s=ends_s)


def awake(at_s: float, slices: int) -> ProcessState:
    return seen(at_s, letter="R", slices=slices)


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (asleep(5.0, 400, 5.1), asleep(7.0, 420, 7.1), True),
        (awake(5.0, 400), asleep(7.0, 420, 7.1), True),
        (asleep(5.0, 400, 5.1), awake(7.0, 420), True),
        (asleep(5.0, 400, None), asleep(7.0, 420, 7.1), True),
        (awake(5.0, 400), asleep(7.0, 402, 7.1), False),
        (awake(5.0, 400), asleep(7.0, 420, 9000.0), False),
        (asleep(5.0, 400, 9000.0), asleep(7.0, 402, 9000.0), False),
    ],
)
def test_kernel_wait_recognizes_repeated_sleeps(first: ProcessState, second: ProcessState, again: bool) -> None:
    """A look can find the thread awake between two sleeps; the number of its runs since then tells."""
    assert kernel_wait(ProcessEvidence("main", (first, second))).again is again
