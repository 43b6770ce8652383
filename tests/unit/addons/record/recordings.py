"""Recordings for tests: synthetic ones, and recordings of real jobs in ``tests/data/recordings``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safelaunch.addons.record.recording import (
    ProcessRecord,
    RankRecord,
    Recording,
    StackNumbering,
    ThreadRecord,
    decode,
)
from safelaunch.model import Frame
from tests.support import paths

DATA = paths.DATA / "recordings"
TORCH = "/venv/lib/python3.11/site-packages/torch"
MODULE = Frame("/home/user/job/train.py", 40, "<module>")

FORWARD = (MODULE, Frame(f"{TORCH}/nn/modules/module.py", 1778, "Module._wrapped_call_impl"))
BACKWARD = (MODULE, Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"))
ALL_REDUCE = (
    Frame("/home/user/job/train.py", 41, "<module>"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
)
LOADER = (MODULE, Frame(f"{TORCH}/utils/data/dataloader.py", 1291, "_MultiProcessingDataLoaderIter._try_get_data"))
OPTIMIZER = (MODULE, Frame(f"{TORCH}/optim/sgd.py", 80, "SGD.step"))
SAVE = (MODULE, Frame(f"{TORCH}/serialization.py", 900, "save"))
AUGMENT = (MODULE, Frame("/home/user/job/data.py", 12, "augment"))
OTHER = (Frame("/usr/lib/python3.11/threading.py", 982, "Thread.run"), Frame("/home/user/job/data.py", 30, "tokenize"))

Stack = tuple[Frame, ...]


def recorded(name: str) -> Recording:
    """A recording of a real job."""
    return decode((DATA / f"{name}.json").read_bytes())


def recording(
    *ranks: Mapping[Stack, float],
    active: Mapping[Stack, float] | None = None,
    gil: Sequence[Mapping[Stack, float]] = (),
    holders: Sequence[Mapping[Stack, float]] = (),
    steps: int | None = None,
    rate_hz: float = 20.0,
) -> Recording:
    """Ten seconds: for each rank its shares of the time by stack.

    ``active``: what part of a stack's time is spent on a CPU, all of it if not given. ``gil``, ``holders``: for each
    rank, the shares in which its main thread, and another one, holds the GIL.
    """
    numbers = StackNumbering()

    def pairs(shares: Mapping[Stack, float]) -> list[tuple[int, float]]:
        return [(numbers.of(stack), 10.0 * share) for stack, share in shares.items()]

    made = []
    for rank, shares in enumerate(ranks):
        on_cpu = {stack: share * (active or {}).get(stack, 1.0) for stack, share in shares.items()}
        main = ThreadRecord(
            "MainThread",
            True,
            pairs(shares),
            pairs(on_cpu),
            pairs(gil[rank]) if gil else [],
        )
        other = [ThreadRecord("prefetch", stacks=[], gil=pairs(holders[rank]))] if holders else []
        made.append(
            RankRecord(rank, "node0", ProcessRecord(100 + rank, threads=[main, *other], tells_active=True), steps=steps)
        )
    return Recording(
        run="r1",
        name="pretrain",
        at_unix_s=1.8e9,
        duration_s=10.0,
        rate_hz=rate_hz,
        world_size=len(ranks),
        frames=list(numbers.frames),
        stacks=list(numbers.stacks),
        ranks=made,
        elapsed_s=10.0,
    )
