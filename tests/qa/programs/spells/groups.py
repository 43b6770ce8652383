"""Waits between ranks: late partners, long phases, shapes of progress, and ways to launch."""

import datetime
import fcntl
import os
import subprocess
import sys
import threading
import time

from .table import Outside, Spell, case


def _works(spell: Spell) -> None:
    import torch

    weights = torch.randn(64, 64)
    while spell.lasts:
        weights = (weights @ weights).clamp(-1, 1)


def _store(spell: Spell):  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


# --- the store --------------------------------------------------------------------------------------------------------


@case(on="all")
def a_key_set_late(spell: Spell) -> None:
    store = _store(spell)
    if spell.rank == 0:
        time.sleep(spell.quiet)
        store.set("vocabulary", "made")
    assert store.get("vocabulary") == b"made"


@case(on="all", ranks=4)
def a_key_checked(spell: Spell) -> None:
    store = _store(spell)
    if spell.rank == 1:
        time.sleep(spell.quiet)
        store.set("go", "1")
    while not store.check(["go"]):
        time.sleep(0.5)


@case(on="all")
def a_key_waited_for_with_timeouts(spell: Spell) -> None:
    store = _store(spell)
    if spell.rank == 1:
        time.sleep(spell.quiet)
        store.set("go", "1")
    while True:
        try:
            store.wait(["go"], datetime.timedelta(seconds=2))
            return
        except Exception:
            pass


@case(on="all")
def a_counter_of_the_store(spell: Spell) -> None:
    """A barrier that people write themselves."""
    store = _store(spell)
    time.sleep(spell.quiet if spell.rank == 0 else 0.0)
    store.add("arrived", 1)
    while store.add("arrived", 0) < spell.world:
        time.sleep(0.2)


# --- collectives ------------------------------------------------------------------------------------------------------


@case(on="all", ranks=4)
def a_monitored_barrier(spell: Spell) -> None:
    import torch.distributed as dist

    time.sleep(spell.quiet if spell.rank == 2 else 0.0)
    dist.monitored_barrier(timeout=datetime.timedelta(minutes=20))


@case(on="all", ranks=4)
def a_barrier_before_a_download(spell: Spell) -> None:
    """Rank 0 fetches the data set, and the others wait."""
    import torch.distributed as dist

    if spell.rank == 0:
        subprocess.run(["sleep", str(spell.quiet)], check=True)
    dist.barrier()


@case(on="all")
def two_groups(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    data, control = dist.new_group(), dist.new_group()
    dist.all_reduce(torch.ones(1), group=data)
    time.sleep(spell.quiet if spell.rank == 1 else 0.0)
    dist.barrier(group=control)
    dist.all_reduce(torch.ones(1), group=data)


def _requests(outside: Outside) -> None:
    outside.begun(2)
    time.sleep(outside.quiet)
    outside.say("request", "7")


@case(on="all", outside=_requests)
def a_thread_that_polls_before_its_first_call(spell: Spell) -> None:
    """The front end of a service: both main threads wait in collectives, and a thread looks for the next request."""
    import torch
    import torch.distributed as dist

    control, data = dist.new_group(), dist.new_group()
    value = torch.zeros(1)

    def front_end() -> None:
        while not (spell.scratch / "request").exists():
            time.sleep(0.2)
        request = float((spell.scratch / "request").read_text())
        dist.broadcast(torch.tensor([request]), src=0, group=control)

    if spell.rank == 0:
        thread = threading.Thread(target=front_end)
        thread.start()
        dist.broadcast(value, src=1, group=data)
        thread.join()
    else:
        dist.broadcast(value, src=0, group=control)
        dist.broadcast(value, src=1, group=data)
    assert value.item() == 7.0


@case(on="all")
def a_late_sender(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    there = torch.full((4,), 7.0) if spell.rank == 0 else torch.zeros(4)
    if spell.rank == 0:
        time.sleep(spell.quiet)
        dist.send(there, 1)
    else:
        dist.recv(there, 0)
    assert there.tolist() == [7.0] * 4


@case(on="all", works=True)
def a_sender_that_computes(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    if spell.rank == 0:
        _works(spell)
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(4))


@case(on="all")
def a_late_batch_of_pairs(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    time.sleep(spell.quiet if spell.rank == 1 else 0.0)
    mine, theirs = torch.full((8,), float(spell.rank)), torch.zeros(8)
    pairs = [dist.P2POp(dist.isend, mine, 1 - spell.rank), dist.P2POp(dist.irecv, theirs, 1 - spell.rank)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert theirs.tolist() == [1.0 - spell.rank] * 8


@case(on="all")
def a_handle_waited_for_late(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    value = torch.ones(4)
    time.sleep(spell.quiet if spell.rank == 0 else 0.0)
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        time.sleep(0.1)
    work.wait()
    assert value.tolist() == [2.0] * 4


@case(on="all", ranks=4)
def objects_of_a_late_rank(spell: Spell) -> None:
    import torch.distributed as dist

    time.sleep(spell.quiet if spell.rank == 3 else 0.0)
    found: list[object] = [None] * spell.world
    dist.all_gather_object(found, {"rank": spell.rank})
    assert found == [{"rank": rank} for rank in range(spell.world)]


@case(on="all", ranks=4)
def a_subgroup_that_rests(spell: Spell) -> None:
    """Ranks 0 and 1 continue together, 2 and 3 have nothing to do until the end."""
    import torch
    import torch.distributed as dist

    busy = dist.new_group([0, 1])
    until = torch.ones(1)
    while spell.rank < 2 and until:
        until.fill_(spell.rank == 1 or spell.lasts)
        dist.broadcast(until, 0, group=busy)
        time.sleep(0.05)
    dist.barrier()


@case(on="all")
def a_lock_that_a_writer_has_inherited(spell: Spell) -> None:
    """Rank 0 is in the barrier; its child, which writes a checkpoint, has the lock on the file that rank 1 wants."""
    import torch.distributed as dist

    writer = None
    with open(spell.scratch / "lock", "w") as file:
        if spell.rank == 1:
            spell.said("held")
        fcntl.flock(file, fcntl.LOCK_EX)
        if spell.rank == 0:
            writer = os.fork()
            if writer == 0:
                time.sleep(spell.quiet)
                os._exit(0)
    spell.say("held")
    dist.barrier()
    assert writer is None or os.waitpid(writer, 0)[1] == 0


@case(on="all", ranks=4)
def a_pipeline_with_a_slow_stage(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    token = torch.ones(1)
    for _ in range(2):
        if spell.rank:
            dist.recv(token, spell.rank - 1)
        time.sleep(spell.quiet / 2 if spell.rank == 1 else 0.01)
        if spell.rank < spell.world - 1:
            dist.send(token, spell.rank + 1)
    dist.barrier()


@case(on="all")
def a_parameter_server(spell: Spell) -> None:
    """Rank 0 answers; the worker asks, rests between episodes, and asks again."""
    import torch
    import torch.distributed as dist

    weights = torch.zeros(4)
    for number in range(5):
        if spell.rank == 0:
            dist.recv(weights, 1)
            dist.send(weights + 1, 1)
        else:
            time.sleep(spell.quiet if number == 4 else 0.05)
            dist.send(weights, 0)
            dist.recv(weights, 0)
    assert spell.rank == 0 or weights.tolist() == [5.0] * 4


@case(on="all")
def scattered_after_a_long_preparation(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    mine = torch.zeros(2)
    if spell.rank == 0:
        time.sleep(spell.quiet)
    dist.scatter(mine, [torch.full((2,), float(n)) for n in range(spell.world)] if spell.rank == 0 else None, src=0)
    assert mine.tolist() == [float(spell.rank)] * 2


@case(on="all")
def a_collective_in_a_thread(spell: Spell) -> None:
    """The main thread sleeps while another one waits for its peer."""
    import torch.distributed as dist

    group = dist.new_group()
    thread = threading.Thread(target=lambda: dist.barrier(group=group))
    if spell.rank == 0:
        time.sleep(spell.quiet)
    thread.start()
    while thread.is_alive():
        time.sleep(0.5)


@case(on="all", works=True)
def evaluation_with_collectives(spell: Spell) -> None:
    """An all_reduce every 0.2 s, and no step of the optimizer."""
    import torch
    import torch.distributed as dist

    more = torch.ones(1)
    while more:
        time.sleep(0.2)
        more.fill_(spell.lasts)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)


@case(on="all", ranks=3)
def one_rank_has_finished(spell: Spell) -> None:
    """It has fewer batches and waits in the last barrier; the others continue in their own group."""
    import torch
    import torch.distributed as dist

    others = dist.new_group([0, 1])
    if spell.rank < 2:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1), process_group=others)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(int(spell.quiet / 0.1)):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            time.sleep(0.1)
    dist.barrier()


@case(on="all", ranks=3)
def one_rank_has_finished_and_uploads(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    others = dist.new_group([0, 1])
    if spell.rank < 2:
        optimizer = torch.optim.SGD([value := torch.ones(1, requires_grad=True)], lr=1e-3)
        for _ in range(int(spell.quiet / 0.1)):
            optimizer.zero_grad()
            (value * 2).sum().backward()
            dist.all_reduce(value.grad, group=others)  # type: ignore[arg-type]
            optimizer.step()
            time.sleep(0.1)
    else:
        subprocess.run(["sleep", str(spell.quiet)], check=True)
    dist.barrier()


# --- phases -----------------------------------------------------------------------------------------------------------


@case()
def a_phase_with_a_timeout(spell: Spell) -> None:
    import safelaunch

    with safelaunch.phase("evaluation", timeout=f"{120 + spell.quiet:g}s"):
        time.sleep(spell.quiet)


@case(ranks=3, at="whole", on="all")
def a_phase_on_a_rank_without_steps(spell: Spell) -> None:
    """Rank 2 only logs; its phase covers what it does, and the others train."""
    import torch
    import torch.distributed as dist

    import safelaunch

    trainers = dist.new_group([0, 1])
    if spell.rank < 2:
        optimizer = torch.optim.SGD([value := torch.ones(1, requires_grad=True)], lr=1e-3)
        for _ in range(int(spell.quiet / 0.1) + 60):
            (value * 2).sum().backward()
            dist.all_reduce(value.grad, group=trainers)  # type: ignore[arg-type]
            optimizer.step()
            time.sleep(0.1)
    else:
        with safelaunch.phase("logging", timeout=120 + spell.quiet):
            time.sleep(spell.quiet + 6)
    dist.barrier()


@case()
def nested_phases(spell: Spell) -> None:
    import safelaunch

    with safelaunch.phase("evaluation", timeout=120 + spell.quiet):
        with safelaunch.phase("warm-up", timeout=60):
            time.sleep(0.5)
        time.sleep(spell.quiet)


@case(on="all")
def a_health_check_beside(spell: Spell) -> None:
    """A group with a timeout of 15 s meets every 5 s in a thread; the training's spell is longer."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=datetime.timedelta(seconds=15))
    beats = int(spell.quiet / 5) + 1

    def beat() -> None:
        for _ in range(beats):
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(5.0)

    thread = threading.Thread(target=beat)
    thread.start()
    if spell.rank == 1:
        time.sleep(spell.quiet)
    dist.barrier()
    thread.join()


@case(on="all", at="whole")
def no_optimizer(spell: Spell) -> None:
    """Inference: rare collectives with sleeps between, and no step that anybody could count."""
    import torch
    import torch.distributed as dist

    for number in range(60):
        dist.all_reduce(torch.ones(1))
        time.sleep(spell.quiet if number == 50 else 0.05)


@case(on="all", at="whole")
def steps_in_bursts(spell: Spell) -> None:
    """Reinforcement learning: ten steps, and then a rollout, which is longer each time."""
    for rollout in (0.5, spell.quiet / 4, spell.quiet / 2, spell.quiet):
        for _ in range(10):
            spell.step()
        time.sleep(rollout)


@case(ranks=1)
def a_single_rank_sleeps(spell: Spell) -> None:
    time.sleep(spell.quiet)


@case(ranks=1, works=True)
def a_single_rank_computes(spell: Spell) -> None:
    _works(spell)


@case(launch="exec", on="all")
def a_helper_beside_the_training(spell: Spell) -> None:
    """Each rank starts a helper that imports torch as well and has the rank's variables."""
    code = f"import torch, time; time.sleep({spell.quiet})"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        for _ in range(20):
            spell.step()
        child.wait()


@case(launch="slow-link", root=True, tools=("ip", "tc", "unshare"), works=True, on="all")
def a_broadcast_over_a_slow_link(spell: Spell) -> None:
    """One tensor, 2 MB a second."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((int(spell.quiet * 2e6 / 4),), float(spell.rank))
    dist.broadcast(tensor, src=1)
    assert float(tensor[-1]) == 1.0


@case(launch="slow-link", root=True, tools=("ip", "tc", "unshare"), works=True, on="all")
def an_all_gather_over_a_slow_link(spell: Spell) -> None:
    import torch
    import torch.distributed as dist

    mine = torch.full((int(spell.quiet * 2e6 / 4 / 2),), float(spell.rank))
    ours = [torch.empty_like(mine) for _ in range(spell.world)]
    dist.all_gather(ours, mine)
    assert [float(one[-1]) for one in ours] == [0.0, 1.0]


def _crowds(outside: Outside) -> None:
    """Six busy neighbours until the ranks have started, and a while longer."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"
    crowd = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(6)]
    try:
        outside.begun()
        time.sleep(outside.quiet)
    finally:
        for one in crowd:
            one.kill()


@case(at="start", on="all", outside=_crowds, works=True)
def a_long_import_on_a_loaded_machine(spell: Spell) -> None:
    (spell.scratch / f"heavy_{spell.rank}.py").write_text(
        f"import time\nend = time.monotonic() + {spell.quiet}\nwhile time.monotonic() < end: sum(range(1000))\n"
    )
    sys.path.insert(0, os.fspath(spell.scratch))
    __import__(f"heavy_{spell.rank}")
