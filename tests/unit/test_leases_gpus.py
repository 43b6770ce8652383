"""Taking GPUs: NVML through the real binding and a stand-in library, use without a lease, waiting and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from safelaunch.cli import gpus
from safelaunch.leases.choose import GpuRequest, GpuUser, Inventory, LeasableGpu, pool_of, wish_of
from safelaunch.leases.gpus import LeaseRequest, Patience, Survey, Taken
from safelaunch.leases.gpus import take as take_claimed
from safelaunch.leases.holder import LeaseHolder, User, look, ourselves
from safelaunch.leases.inventory import has_driver, inventory
from safelaunch.leases.store import LeaseStore
from safelaunch.system.errors import InterruptedWait, ResourceError
from tests.support.nvml import stub

FOUR = Inventory(tuple(LeasableGpu(str(n), f"GPU-{n}") for n in range(4)))


@pytest.fixture
def store(tmp_path: Path) -> LeaseStore:
    return LeaseStore(os.fspath(tmp_path / "leases"))


class Clock:
    """Clock that only sleeping advances; each of its events is called when its time has passed."""

    def __init__(self, **events: Callable[[], object]) -> None:
        self.now = 0.0
        self.events = {float(at.removeprefix("at").replace("_", ".")): deed for at, deed in events.items()}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()

    def patience(self, timeout_s: float | None = None, said: list[str] | None = None) -> Patience:
        say = said.append if said is not None else lambda text: None
        return Patience(True, timeout_s, say, lambda: self.now, self.sleep)


def wish(request: str | None, environ: dict[str, str] | None = None, found: Inventory = FOUR) -> GpuRequest:
    found_wish = wish_of(request, 1, pool_of(environ or {}, found.gpus), found)
    assert found_wish is not None
    return found_wish


def claim(store: LeaseStore, wanted: GpuRequest, survey: Survey) -> LeaseRequest:
    return LeaseRequest(store, wanted, ourselves("", f"train.py {wanted.count}"), survey)


def take(store: LeaseStore, wanted: GpuRequest, survey: Survey, patience: Patience) -> Taken:
    return take_claimed(claim(store, wanted, survey), patience)


def would_take(store: LeaseStore, wanted: GpuRequest, survey: Survey) -> tuple[LeasableGpu, ...] | None:
    return claim(store, wanted, survey).foresee()


def still(node_inventory: Inventory) -> Survey:
    return Survey(node_inventory, lambda: node_inventory, lambda: 0.0)


# --- NVML -------------------------------------------------------------------------------------------------------------


def see(node: stub.Node, deadline_s: float = 20.0) -> Inventory:
    return inventory({**os.environ, **node.environ}, deadline_s=deadline_s)


def test_inventory_lists_gpus_with_processes(node: stub.Node) -> None:
    node.write(f"process 2 4711 {3 * stub.GIB}", "process 2 4712 7", used=[6])
    listing = see(node)
    assert [gpu.uuid for gpu in listing.gpus] == [stub.uuid(n) for n in range(8)]
    assert listing.gpus[2].processes == (GpuUser(4711, 3 * stub.GIB), GpuUser(4712, 7))
    # The driver's own reservation (600 MiB in the stand-in) doesn't count as used.
    assert [gpu.memory_used_bytes for gpu in listing.gpus[5:7]] == [4 << 20, 10 * stub.GIB]
    assert not listing.missing


def test_inventory_lists_mig_instances_instead_of_gpu(node: stub.Node) -> None:
    node.write(
        f"mig 1 0 {stub.mig_uuid(1, 0)} 1000 {10 * stub.GIB}",
        f"mig 1 3 {stub.mig_uuid(1, 3)} 1000 {10 * stub.GIB}",
        "migprocess 1 3 99 5",
        gpus=2,
    )
    listing = see(node)
    assert [(gpu.label, gpu.parent) for gpu in listing.gpus] == [
        ("0", ""),
        ("1.0", stub.uuid(1)),
        ("1.3", stub.uuid(1)),
    ]
    assert listing.gpus[2].uuid == stub.mig_uuid(1, 3) and listing.gpus[2].processes == (GpuUser(99, 5),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fail nvmlInitWithFlags 9", "Driver Not Loaded"),
        ("fail nvmlDeviceGetCount_v2 3", "Not Supported"),
        ("hang nvmlInitWithFlags", "did not answer within 1 s"),
        ("hang nvmlDeviceGetUUID", "did not answer within 1 s"),
    ],
)
def test_inventory_of_failing_driver_is_missing(node: stub.Node, line: str, words: str) -> None:
    node.write(line)
    begin = time.monotonic()
    listing = see(node, deadline_s=1.0 if line.startswith("hang") else 20.0)
    assert words in listing.missing and not listing.gpus
    assert time.monotonic() - begin < 60


def test_gpu_with_error_is_not_free(node: stub.Node) -> None:
    node.write("fail nvmlDeviceGetHandleByIndex_v2 15 1", "fail nvmlDeviceGetMemoryInfo_v2 3",
               "fail nvmlDeviceGetMigMode 3", "fail nvmlDeviceGetP2PStatus 3", gpus=2)  # fmt: skip
    listing = see(node)
    assert listing.gpus[1].error == "GPU is lost"
    assert listing.gpus[0].memory_used_bytes == (604 << 20), "without version 2 of the question it is in there"
    assert would_take(LeaseStore("/nonexistent/leases"), wish("2", found=listing), still(listing)) is None


def test_inventory_without_driver_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_driver({}):
        pytest.skip("this machine has one")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert inventory({}).missing == "no NVIDIA driver on this node"


# --- taking -----------------------------------------------------------------------------------------------------------


def test_first_free_gpus_are_taken(store: LeaseStore) -> None:
    first = take(store, wish("2"), still(FOUR), Patience())
    assert first.visible == "GPU-0,GPU-1"
    assert would_take(store, wish("2"), still(FOUR)) == (FOUR.gpus[2], FOUR.gpus[3])
    second = take(store, wish("2"), still(FOUR), Patience())
    assert second.visible == "GPU-2,GPU-3"
    with pytest.raises(ResourceError) as refused:
        take(store, wish("1"), still(FOUR), Patience())
    assert f"GPU 0    leased by pid {os.getpid()} (" in str(refused.value)
    assert ": train.py 2" in str(refused.value) and "--wait" in str(refused.value)
    first.lease.release()
    third = take(store, wish("1"), still(FOUR), Patience())
    second.lease.release(), third.lease.release()


def test_gpu_used_without_lease_is_taken_only_if_named(store: LeaseStore) -> None:
    busy = replace(FOUR, gpus=(replace(FOUR.gpus[0], processes=(GpuUser(os.getpid()),)), *FOUR.gpus[1:]))
    taken = take(store, wish("1"), still(busy), Patience())
    assert taken.visible == "GPU-1"
    with pytest.raises(ResourceError) as refused:
        take(store, wish("0,"), still(busy), Patience())
    assert f"used without a lease by pid {os.getpid()}" in str(refused.value)
    assert f"pid {os.getpid()} ({LeaseHolder(uid=os.getuid()).user}) since" in str(refused.value)
    named = take(store, wish(None, {"CUDA_VISIBLE_DEVICES": "0"}), still(busy), Patience())
    assert named.visible == "GPU-0" and "used without a lease" in named.notes[0]
    taken.lease.release(), named.lease.release()


def test_wait_ends_when_lease_is_released(store: LeaseStore) -> None:
    taken = take(store, wish("all"), still(FOUR), Patience())
    clock, messages = Clock(at2=taken.lease.release), list[str]()
    waited = take(store, wish("3"), still(FOUR), clock.patience(said=messages))
    assert waited.visible == "GPU-0,GPU-1,GPU-2" and 2 <= clock.now < 2.5
    assert messages[0].startswith("waiting for 3 of 4 GPUs (--gpus 3)") and "leased by pid" in messages[0]
    assert store.waiting() == []
    waited.lease.release()


def test_wait_ends_when_use_without_lease_ends(store: LeaseStore) -> None:
    busy = replace(FOUR, gpus=tuple(replace(gpu, memory_used_bytes=1 << 30) for gpu in FOUR.gpus))
    now = [busy]
    asked: list[float] = []
    clock = Clock(at7=lambda: now.__setitem__(0, FOUR))

    def query() -> Inventory:
        asked.append(clock.now)
        return now[0]

    survey = Survey(busy, query, lambda: clock.now)
    waited = take(store, wish("4"), survey, clock.patience())
    assert 7 <= clock.now < 10
    assert all(later - earlier >= 2 for earlier, later in pairwise(asked)), "not at every turn"
    waited.lease.release()


def test_wait_ends_at_timeout_or_interrupt(store: LeaseStore) -> None:
    taken = take(store, wish("all"), still(FOUR), Patience())
    with pytest.raises(ResourceError, match="Wait longer"):
        take(store, wish("1"), still(FOUR), Clock().patience(timeout_s=5))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedWait):
        take(store, wish("1"), still(FOUR), Clock(at1=interrupt).patience())
    assert store.waiting() == [] and not list(Path(store.directory).glob("ticket.*"))
    taken.lease.release()


def test_large_job_in_queue_is_not_starved(store: LeaseStore) -> None:
    """Two GPUs are free. A waiting job wants four, so a later job that wants one waits for it."""
    half = take(store, wish("2"), still(FOUR), Patience())
    large = store.queue([gpu.uuid for gpu in FOUR.gpus], 3, ourselves("", "large.py"))
    with pytest.raises(ResourceError, match=r"ahead of this job in the queue: .*large.py"):
        take(store, wish("1"), still(FOUR), Patience())
    clock = Clock(at3=lambda: store.leave(large))
    small = take(store, wish("1"), still(FOUR), clock.patience())
    assert clock.now >= 3
    half.lease.release(), small.lease.release()


# --- display ----------------------------------------------------------------------------------------------------------


def test_process_user_and_command_are_shown() -> None:
    here = look(os.getpid())
    assert here.user == LeaseHolder(uid=os.getuid()).user and "python" in here.command and not here.left_over
    assert abs(here.since_unix_s - time.time()) < 86400
    assert look(2**22 + 5) == User(2**22 + 5)


def test_gpus_marks_processes_left_behind_by_ended_run(node: stub.Node) -> None:
    """A variable has the pid of the run's supervisor, which has ended, or whose pid was reused."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    sleeps = {}
    for name, number in (("left", gone.pid), ("of a run", os.getpid()), ("of nobody", 0)):
        env = {"SAFELAUNCH_SUPERVISOR_PID": str(number)} if number else {}
        sleeps[name] = subprocess.Popen(["sleep", "600"], env={**os.environ, **env})
    try:
        left_over = {name: look(process.pid).left_over for name, process in sleeps.items()}
        assert left_over == {"left": True, "of a run": False, "of nobody": False}
        node.write(f"process 6 {sleeps['left'].pid} {stub.GIB}")
        shown = subprocess.run(
            [sys.executable, "-m", "safelaunch", "gpus", "--json"],
            env={**os.environ, **node.environ}, capture_output=True, check=True,
        )  # fmt: skip
        document = json.loads(shown.stdout)
        assert [gpu["state"] for gpu in document["gpus"]] == ["free"] * 6 + ["left behind", "free"]
        assert document["gpus"][6]["processes"][0]["command"] == "sleep 600"
    finally:
        for process in sleeps.values():
            process.kill()
            process.wait()


MIB = 1 << 20
ROWS = [
    (LeasableGpu("0", "GPU-0"), {}, {}, "free", "-"),
    (LeasableGpu("0", "GPU-0"), {"GPU-0": LeaseHolder(7, 1, "", "train.py", 1.0, 0)}, {}, "leased", "train.py"),
    (LeasableGpu("0", "GPU-0"), {"GPU-0": LeaseHolder(7, 1, "", "train.py", 1.0, 0, "ranks")}, {}, "ranks only",
     "train.py"),
    (LeasableGpu("0", "GPU-0", processes=(GpuUser(5), GpuUser(6))), {}, {5: User(5, "ann", "python x.py")},
     "unleased use", "python x.py (and pid 6)"),
    (LeasableGpu("0", "GPU-0", processes=(GpuUser(5),)), {}, {}, "unleased use", "not visible from here"),
    (LeasableGpu("0", "GPU-0", processes=(GpuUser(5),)), {}, {5: User(5, "ann", "a\x1b[31mb", 1.0, True)},
     "left behind", "ab"),
    (LeasableGpu("0", "GPU-0", memory_used_bytes=999 * MIB), {}, {}, "unleased use", "no process is visible on it"),
    (LeasableGpu("0", "unknown-0", error="GPU is lost"), {}, {}, "fault", "not answering: GPU is lost"),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "held", "users", "state", "words"), ROWS)
def test_gpu_row_shows_state_and_holder(
    gpu: LeasableGpu, held: dict[str, LeaseHolder], users: dict[int, User], state: str, words: str
) -> None:
    (row,) = gpus.rows([gpu], held, users)
    assert (row.state, row.cells[-1]) == (state, words)
    (shown,) = gpus.document([row], [], "").gpus
    assert shown.state == state
    # The lock shows whether a holder lives; pid 7 is no process of this test.
    assert not held or (shown.lease is not None and shown.lease.alive == (state == "leased"))


def test_gpu_table_columns_are_aligned() -> None:
    gpu = LeasableGpu("10", "GPU-0", "NVIDIA H100", memory_used_bytes=MIB, memory_total_bytes=80 << 30)
    lines = gpus.as_table(gpus.rows([gpu, replace(gpu, label="1")], {}, {})).lines()
    assert [line.split()[0] for line in lines] == ["gpu", "10", "1"]
    assert len({line.index("H100") for line in lines[1:]}) == 1 and "0.0/80 GiB" in lines[1]


def test_gpu_table_on_narrow_terminal_cuts_names_not_numbers() -> None:
    import io

    from rich.console import Console

    gpu = LeasableGpu("0", "GPU-0", "NVIDIA H100 80GB HBM3", memory_used_bytes=10 << 30, memory_total_bytes=80 << 30)
    leases = {"GPU-0": LeaseHolder(4194304, 1, "", "train.py --lr 1e-3 " + "x" * 60, time.time(), 0)}
    console = Console(file=io.StringIO(), width=80)
    console.print(gpus.picture(gpus.rows([gpu], leases, {}), 80))
    header, line = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert header.split() == list(gpus.COLUMNS) and len(line) <= 80
    assert "10.0/80 GiB" in line and "leased" in line and "4194304" in line and "train.py --" in line
