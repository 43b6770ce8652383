"""Whose code a frame is, and what the kernel says a thread waits for."""

from __future__ import annotations

import pytest
from evidence import (
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
    in_user,
    in_worker,
    process,
)
from msgspec import structs

from safelaunch.model import Frame, ProcessEvidence, ProcessState, ThreadState
from safelaunch.verdict.reading import calls
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.reading.kernel import kernel_wait


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
        (f"{SITE}/safelaunch/cli/demos/lock_deadlock.py", True),
        (f"{SITE}/safelaunch/supervise/watch.py", False),
        ("/home/me/.pyenv/versions/3.11.7/bin/python3.11", False),  # C++ stacks of the Flight Recorder
        ("/opt/py/bin/python3.13t", False),
        ("??", False),
        ("./Include/internal/pycore_ceval.h", False),
        ("/home/me/python_trainer", True),
        ("/home/me/pytorch/torch/distributed/distributed_c10d.py", False),  # torch built from its source
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
def test_is_user(path: str, mine: bool) -> None:
    assert fr.is_user(Frame(path, 3, "f")) is mine


def test_code_roots_are_libraries() -> None:
    frame = Frame("/custom/py/Lib/queue.py", 3, "get")
    assert fr.is_user(frame)
    assert not fr.is_user(frame, ("/custom/py/Lib",))
    assert fr.is_user(frame, ("/custom/py/Li",))


def test_user_frame_is_the_innermost_of_the_user() -> None:
    helper = at(7, "save", "/home/me/util.py")
    assert fr.Stack((Frame(f"{STDLIB}/socket.py", 1, "f"), helper, at(40), MODULE)).user_frame == helper
    assert fr.Stack(in_c10d("barrier", 41)).user_frame == at(41)
    assert fr.Stack(()).user_frame is None


def test_user_frame_of_a_forked_worker_is_not_its_parents() -> None:
    assert fr.Stack(WORKER_IDLE).user_frame is None
    assert fr.Stack(in_worker(12)).user_frame == at(12, "Data.__getitem__", "/home/me/data.py")


def test_user_frame_where_no_file_is_the_users() -> None:
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
def test_torch_wait(frames: tuple[Frame, ...], kind: str, op: str) -> None:
    assert calls.torch_wait(fr.Stack(frames)) == calls.TorchWait(kind, op)


@pytest.mark.parametrize(
    "frames",
    [
        (at(5), MODULE),
        in_backward(5),
        in_loader(5),
        # computing inside an object collective, not waiting in it
        (Frame(f"{SITE}/torch/serialization.py", 1, "save"), Frame(C10D, 2, "all_gather_object"), at(5)),
        # a user's function of the same name
        (at(3, "all_reduce"), MODULE),
    ],
)
def test_no_torch_wait(frames: tuple[Frame, ...]) -> None:
    assert calls.torch_wait(fr.Stack(frames)) is None


def test_loader_and_idle_worker() -> None:
    assert calls.LOADER_WAIT.on(fr.Stack(in_loader(5)).called)
    assert not calls.LOADER_WAIT.on(fr.Stack(in_c10d("all_reduce", 5)).called)
    own = (at(9, "Data.__getitem__"), Frame(LOADER, 785, "_SingleProcessDataLoaderIter._next_data"), at(5))
    assert not calls.LOADER_WAIT.on(fr.Stack(own).called)
    assert calls.worker_idle(WORKER_IDLE)
    assert not calls.worker_idle(in_worker(12))


def test_leaving() -> None:
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
def test_kernel_wait(kernel: str, kind: str) -> None:
    assert kernel_wait(process(10, (at(1),), kernel)).kind == kind


def test_a_passing_state_is_not_a_wait() -> None:
    def sample(at_s: float, letter: str) -> ProcessState:
        thread = ThreadState(10, "python", letter, wchan="hrtimer_nanosleep")
        return ProcessState(10, 1, 5, at_s, "python", (), letter, (thread,))

    assert kernel_wait(ProcessEvidence("main", (sample(0, "D"), sample(1, "S")))).kind == "sleep"
    assert kernel_wait(ProcessEvidence("main", (sample(0, "T"), sample(1, "S")))).kind == "sleep"
    assert kernel_wait(ProcessEvidence("main", (sample(0, "D"), sample(1, "D")))).kind == "disk"


@pytest.mark.parametrize(
    ("first", "second", "kind", "call"),
    [
        (("poll", "poll_schedule_timeout"), ("clock_nanosleep", "hrtimer_nanosleep"), "sleep", "clock_nanosleep"),
        (("poll", "poll_schedule_timeout"), ("", "hrtimer_nanosleep"), "sleep", "hrtimer_nanosleep"),
        (("clock_nanosleep", "hrtimer_nanosleep"), ("", "hrtimer_nanosleep"), "sleep", "clock_nanosleep"),
        (("select", "poll_schedule_timeout"), ("", "poll_schedule_timeout"), "select", "select"),
        (("read", "pipe_read"), ("", ""), "io", "read"),
    ],
)
def test_the_newest_sample_says_what_a_thread_waits_for(
    first: tuple[str, str], second: tuple[str, str], kind: str, call: str
) -> None:
    """A first look while the rank still connects to the store says nothing of its sleep of later."""
    states = tuple(
        ProcessState(10, 1, 5, at_s, "python", (), "S", (ThreadState(10, "python", "S", wchan=w, syscall_name=name),))
        for at_s, (name, w) in enumerate((first, second))
    )
    wait = kernel_wait(ProcessEvidence("main", states))
    assert (wait.kind, wait.call) == (kind, call)


def looked_at(at_s: float, slices: int, ends_s: float | None, *, awake: bool = False) -> ProcessState:
    letter, call = ("R", "") if awake else ("S", "clock_nanosleep")
    thread = ThreadState(10, "python", letter, syscall_name=call, slices=slices, ends_s=ends_s)
    return ProcessState(10, 1, 5, at_s, "python", (), letter, (thread,))


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (looked_at(5.0, 400, 5.1), looked_at(7.0, 420, 7.1), True),
        (looked_at(5.0, 400, None, awake=True), looked_at(7.0, 420, 7.1), True),
        (looked_at(5.0, 400, 5.1), looked_at(7.0, 420, None, awake=True), True),
        (looked_at(5.0, 400, None), looked_at(7.0, 420, 7.1), True),
        (looked_at(5.0, 400, None, awake=True), looked_at(7.0, 402, 7.1), False),
        (looked_at(5.0, 400, None, awake=True), looked_at(7.0, 420, 9000.0), False),
        (looked_at(5.0, 400, 9000.0), looked_at(7.0, 402, 9000.0), False),
    ],
)
def test_a_thread_that_sleeps_again_and_again(first: ProcessState, second: ProcessState, again: bool) -> None:
    """A look may find it awake between two sleeps: how often it has run since then tells."""
    assert kernel_wait(ProcessEvidence("main", (first, second))).again is again


def test_cpu_time_beats_the_moment_of_the_look() -> None:
    def sample(at_s: float, cpu_ms: int) -> ProcessState:
        thread = ThreadState(10, "python", "S", wchan="futex_do_wait", syscall_name="futex", cpu_ms=cpu_ms)
        return ProcessState(10, 1, 5, at_s, "python", (), "S", (thread,))

    assert kernel_wait(ProcessEvidence("main", (sample(0, 0), sample(2, 1500)))).kind == "running"
    assert kernel_wait(ProcessEvidence("main", (sample(0, 0), sample(2, 20)))).kind == "lock"


def test_what_would_run_and_gets_no_core_is_busy() -> None:
    """A spinning rank beside six others at nice 19: state R in both looks, and hardly any CPU."""
    one = process(1000, in_user(7), "run")
    starved = [
        structs.replace(s, threads=tuple(structs.replace(t, cpu_ms=10 + 3 * n) for t in s.threads))
        for n, s in enumerate(one.states)
    ]
    wait = kernel_wait(structs.replace(one, states=tuple(starved)))
    assert (wait.kind, wait.busy) == ("running", True)
