"""Report pages of made-up incidents, for the tests that open them and for ``scripts/build/report_shots.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from safelaunch.model import (
    Artifact,
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    Gpu,
    GpuProcess,
    Launched,
    ProcessState,
    Progress,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.model.entries import Entries, Kinds
from safelaunch.report.about import LaunchFacts, Link, NodeSummary, ReportHeader
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import C10D, LOGGER, SITE, at, entry, in_c10d, in_user, job, process, rank, record

SOURCE = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import loader


def evaluate(model, batches):
    model.eval()
    losses = [model(x).pow(2).mean() for x in batches]
    total = torch.stack(losses).mean()
    dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], total.reshape(1))
    model.train()
    return float(total)


def train(model, optimizer, rank):
    for step, batch in enumerate(loader(rank), start=1):
        if batch is None:
            continue
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 and rank == 0:
            print(step, evaluate(model, [batch]))
        else:
            dist.all_reduce(loss)
    return step


def main():
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(32, 8))
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), dist.get_rank())


main()
"""
SCRIPT = "/home/me/train.py"
_GATHER, _EVALUATE, _REDUCE, _TRAIN = at(12, "evaluate"), at(25, "train"), at(27, "train"), at(34, "main")
_END = (_TRAIN, at(37, "<module>"))
_OWN = "document.title='owned'"
EVIL = f"\x1b]0;owned\x07<img src=x onerror={_OWN}></script><script>{_OWN}</script>\u202e&lt;"


def read_source(path: str) -> str | None:
    return SOURCE if path == SCRIPT else None


@dataclass(frozen=True)
class Incident:
    """The content of a page. Its ``verdict`` is diagnosed, unless it is given."""

    evidence: Evidence
    artifacts: tuple[Artifact, ...] = ()
    about: ReportHeader = field(default_factory=ReportHeader)
    told: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        return self.told or diagnose(self.evidence, read_source=read_source)


def _call(op: str, seq: int, done: bool, *user: Frame, size: int = 4096, **fields: object) -> Collective:
    frames = (Frame(C10D, 3245, op), Frame(LOGGER, 83, "wrapper"), *user)
    made = replace(
        entry(f"nccl:{op}", seq, done=done, size=(size,)),
        frames=frames,
        created_ns=1_795_000_000_000_000_000 + seq * 31_000_000 + (seq % 7) * 2_000_000,
        state="completed" if done else "started",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def _in(op: str, *user: Frame) -> tuple[Frame, ...]:
    return (Frame(C10D, 3245, op), Frame(LOGGER, 83, "_exception_logger.<locals>.wrapper"), *user)


def _progress(number: int, world: int, step: int, per_step_s: float = 0.4, stopped_s: float = 970.0) -> Progress:
    points = range(max(1, step - 60), step + 1)
    history = tuple((int((stopped_s - ((step - n) + n % 5 / 3) * per_step_s) * 1e9), n) for n in points)
    return Progress(
        number, number % 8, world, 0, 1000 + 10 * number, 5, "torch", step, (step,), 1, history[0][0],
        history[-1][0], history=history,
    )  # fmt: skip


def late(one: RankEvidence, at_s: float = 1000.0) -> RankEvidence:
    """The same, looked at 30 s after its last step."""
    assert one.main is not None
    states: tuple[ProcessState, ...] = tuple(replace(state, at_s=at_s) for state in one.main.states)
    return replace(one, main=replace(one.main, states=states))


def hang(world: int, nodes: int = 1) -> Incident:
    """Rank 0 evaluates alone, in an all_gather; all others are in the next all_reduce."""
    mine = (_GATHER, _EVALUATE, *_END)
    theirs = (_REDUCE, *_END)
    last = 75
    kinds = Kinds()
    shared = [_call("all_reduce", n, True, _REDUCE, *_END) for n in range(1, last)]
    tensor = [_call("all_gather", n, True, _REDUCE, *_END, size=64, group="1", description="mesh_tp") for n in (1, 2)]
    everybody = {"0": tuple(range(world)), **({"1": tuple(range(8))} if world > 8 else {})}

    def flight(number: int) -> FlightRecord:
        stuck = _call("all_gather", last, False, *mine, size=1) if number == 0 else _call(
            "all_reduce", last, False, *theirs, size=1
        )  # fmt: skip
        more = tensor if 1 in everybody.get("1", ()) and number < 8 else []
        entries = Entries.of([*more, *shared, stuck])
        return FlightRecord("2.10", entries.with_kinds(lambda kind: kind, kinds), everybody)

    ranks = []
    for number in range(world):
        frames = _in("all_gather", *mine) if number == 0 else _in("all_reduce", *theirs)
        log = f"[rank {number}] step {last} loss 0.0{number % 97}\n" * 3 if number < 64 else ""
        one = rank(number, frames, flight=flight(number), more={"log_tail": log, "code_roots": (SITE,)})
        host = f"node{number * nodes // world + 1}"
        ranks.append(late(replace(one, host=host, local_rank=number % 8, progress=_progress(number, world, last))))
    evidence = job(*ranks, threshold_s=12.5, threshold_why="31 x the usual step")
    hosts = [f"node{n + 1}" for n in range(nodes)]
    return Incident(evidence, _artifacts(world), _about(hosts, world))


def _artifacts(world: int) -> tuple[Artifact, ...]:
    names = (
        "stack.txt",
        "stack.json",
        "proc.json",
        "progress.json",
        "rank.json",
        "flight_recorder.json",
        "log_tail.txt",
    )
    of_ranks = [Artifact(f"ranks/{n}/{name}", "py-spy dump", 0.2, bytes=2100) for n in range(world) for name in names]
    missing = [
        Artifact(f"ranks/{n}/flight_recorder.pickle", "worker server", 2.0, "no answer within 2 s")
        for n in range(world)
    ]
    own = [
        Artifact(name, "safelaunch", 0.0, bytes=900) for name in ("verdict.json", "launch.json", "node/node1/env.json")
    ]
    return (*own, *of_ranks, *missing)


def _about(hosts: list[str], world: int) -> ReportHeader:
    gib = 1 << 30
    gpus = tuple(
        Gpu(n, "NVIDIA H100 80GB HBM3", 100.0 if n else 3.0, (61 + n % 5) * gib, 80 * gib, 58.0 + n, 402.0,
            processes=(GpuProcess(1000 + 10 * n),))
        for n in range(min(8, world))
    )  # fmt: skip
    ports = [
        Link("eth0", "up", "100000 Mbit/s"),
        *(Link(f"mlx5_{n}/1", "ACTIVE", "400 Gb/sec (4X NDR)") for n in (0, 1)),
    ]
    broken = [*ports[:2], Link("mlx5_1/1", "DOWN", "10 Gb/sec (4X SDR)", "3 link downed")]
    variables = (("NCCL_DEBUG", "WARN"), ("NCCL_SOCKET_IFNAME", "eth0"), ("MASTER_ADDR", hosts[0]))
    versions = (("python", "3.11"), ("torch", "2.13.0"), ("nvidia-nccl-cu13", "2.28.9"), ("safelaunch", "0.1.0"))
    xid = "[  812.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=1010, name=python"
    nodes = tuple(
        NodeSummary(host, gpus, "", 96, (41.2 - at % 9, 40.1, 38.8), 1024 * gib, (610 + at % 40) * gib,
                  (("/dev/shm", 0.04), ("/tmp", 0.97 if at == 0 else 0.4)), versions, () if at else (xid,),
                  tuple(broken if at == 6 else ports), variables)
        for at, host in enumerate(hosts)
    )  # fmt: skip
    command = ("torchrun", "--nproc-per-node", "8", "train.py", "--data", "/data/My Corpus")
    launch = LaunchFacts(
        "train", hosts[0], "me", "/home/me", "2026-11-22T11:00:00Z", command, "0.1.0", "2.13.0", ("hang-debug",)
    )
    return ReportHeader("train-20261122T125623Z-hang", 1_795_352_183.0, launch, nodes)


def crash() -> Incident:
    """Rank 1 raises in the user's code, and then waits in the beacon for the supervisor."""
    beacon = (
        Frame("/tmp/x/_safelaunch_beacon/faults.py", 88, "wait_for_supervisor"),
        Frame("/tmp/x/_safelaunch_beacon/faults.py", 61, "excepthook"),
    )
    where = (Frame(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), at(21, "train"), *_END)
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{SCRIPT}", line 37, in <module>\n    main()\n'
        f'  File "{SCRIPT}", line 34, in main\n    train(model, optimizer, rank)\n'
        f'  File "{SCRIPT}", line 21, in train\n    loss = model(batch).pow(2).mean()\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x31 and 32x8)\n"
    )
    error = RankException(
        "RuntimeError", "mat1 and mat2 shapes cannot be multiplied (16x31 and 32x8)", 90.0, where, text
    )
    ranks = [rank(n, _in("all_reduce", _REDUCE, *_END), more={"code_roots": (SITE,)}) for n in range(4)]
    more = {"exception": error, "exit": RankExit(1, 91.0), "code_roots": (SITE,), "log_tail": "epoch 1\n" + text}
    ranks[1] = rank(1, beacon, "sleep", more=more)
    return Incident(job(*ranks, outcome="crash"), _artifacts(4), _about(["node1"], 4))


def dump() -> Incident:
    """A look at a job that trains."""
    inside = (Frame(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), at(21, "train"), *_END)
    ranks = [rank(n, inside, "run", more={"code_roots": (SITE,)}) for n in range(4)]
    ranks = [late(replace(one, progress=_progress(one.rank, 4, 300 + one.rank, stopped_s=999.8))) for one in ranks]
    return Incident(job(*ranks, outcome="dump", moving=True, stall_s=0.2), (), _about(["node1"], 4))


def dumps() -> Incident:
    """A folder of Flight Recorder dumps, and nothing else."""
    evidence = hang(8).evidence
    ranks = tuple(
        RankEvidence(rank=one.rank, host="", pid=0, flight_record=one.flight_record) for one in evidence.ranks
    )
    return Incident(Evidence("hang", 8, ranks))


def nothing() -> Incident:
    """No evidence at all."""
    return Incident(Evidence("hang", 0, (), launched=Launched()))


def hostile() -> Incident:
    """A job all of whose names want to be markup."""
    evil = Frame(f"/home/me/{EVIL}.py", 7, EVIL)
    error = RankException(EVIL, EVIL, 100.0, (evil,), EVIL)
    more = {"exception": error, "exit": RankExit(1, 100.0), "log_tail": EVIL}
    called = replace(
        entry("all_reduce", 1, line=5), op=EVIL, group=EVIL, description=EVIL, frames=(evil,), input_dtypes=(EVIL,)
    )
    child = process(55, (evil,), "sleep", role=EVIL)
    ranks = [
        rank(0, (evil,), "sleep", more=more, children=[child], threads=[(EVIL, (evil,), "futex")]),
        rank(1, in_c10d("all_reduce", 5), flight=record(called, groups={EVIL: (0, 1)})),
        rank(2, in_user(7, EVIL), "sleep", flight=record(called)),
    ]
    ranks = [replace(one, host=EVIL) for one in ranks]
    evidence = job(*ranks, outcome="crash", notes=(EVIL,), threshold_s=1.0, threshold_why=EVIL)
    files = NodeSummary(EVIL, (Gpu(0, EVIL, error=EVIL),), EVIL, versions=((EVIL, EVIL),), disks=((EVIL, 0.5),))
    launch = LaunchFacts(EVIL, EVIL, EVIL, f"/home/{EVIL}", EVIL, (EVIL,), EVIL, EVIL, (EVIL,))
    files = dataclasses.replace(
        files, kernel_log=(EVIL,), network=(Link(EVIL, EVIL, EVIL, EVIL),), environment=((EVIL, EVIL),)
    )
    other = dataclasses.replace(files, host=f"{EVIL}2")
    about = ReportHeader(EVIL, 1.0, launch, (files, other, dataclasses.replace(other, host="plain", kernel_log=())))
    verdict = diagnose(evidence)
    verdict = replace(verdict, suggestions=(EVIL,), ruled_out=(EVIL,), missing=(EVIL,), summary=EVIL, doubts=(EVIL,))
    return Incident(
        evidence, (Artifact(EVIL, EVIL, 0.0, bytes=1), Artifact(f"ranks/0/{EVIL}", EVIL, 0.0, EVIL)), about, verdict
    )


ALL: dict[str, Callable[[], Incident]] = {
    "two": lambda: hang(2),
    "four": lambda: hang(4),
    "crash": crash,
    "dump": dump,
    "dumps": dumps,
    "nothing": nothing,
    "hostile": hostile,
    "sixty-four": lambda: hang(64, nodes=8),
    "thousands": lambda: hang(4096, nodes=512),
}
