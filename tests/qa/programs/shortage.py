"""A rank runs out of GPU memory, with a stand-in for CUDA: it says what torch's allocator would say, in its own words.

The model is sharded by FSDP2 in part: its embedding is held whole.
"""

import argparse
import os

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.distributed.fsdp import fully_shard

GIB = 1 << 30

parser = argparse.ArgumentParser()
parser.add_argument("--culprit", type=int, default=1)
parser.add_argument("--caught", action="store_true", help="an earlier shortage, which the script catches")
parser.add_argument("--beside", type=int, help="the pid of a process that has 9 GiB of the culprit's GPU")
options = parser.parse_args()


class Allocator:
    """Stands in for CUDA's caching allocator: one segment, whose blocks are at the line that asked for them."""

    def __init__(self) -> None:
        self.observers, self.history, self.live = [], None, []

    def record(self, enabled, *, stacks, max_entries):
        self.history = (enabled, stacks, max_entries)

    def stats(self, device):
        allocated = sum(size for size, _ in self.live)
        return {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": allocated,
            "reserved_bytes.all.current": allocated + GIB,
            "num_alloc_retries": 2,
        }

    def segments(self):
        blocks = [
            {"size": size, "state": "active_allocated", "frames": frames if self.history else []}
            for size, frames in self.live
        ]
        return [{"device": 0, "blocks": [*blocks, {"size": GIB // 2, "state": "inactive", "frames": []}]}]

    def snapshot(self):
        return {"segments": self.segments(), "device_traces": [[{"action": "alloc", "size": GIB}]]}

    def take(self, size, line):
        frames = [{"filename": __file__, "line": line, "name": "fill"}]
        self.live.append((size, frames))

    def fail(self, size):
        for observer in self.observers:
            observer(0, size, 80 * GIB, GIB)
        self.live = self.live[:2]  # what unwinding frees is no longer to be seen at the end
        beside = f"Process {options.beside} has 9.00 GiB memory in use. " if options.beside else ""
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB "
            f"is free. {beside}Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated memory "
            "77.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
        )


def stand_in(allocator: Allocator) -> None:
    torch.cuda.memory._record_memory_history = allocator.record
    torch.cuda.memory._snapshot = allocator.snapshot
    torch.cuda.memory_snapshot = allocator.segments
    torch.cuda.memory_stats = allocator.stats
    torch._C._cuda_attach_out_of_memory_observer = allocator.observers.append
    for call, _ in torch.cuda._queued_calls:  # as torch does when CUDA is initialized
        if "safelaunch" in getattr(call, "__module__", ""):
            call()


def fill(allocator: Allocator) -> None:
    for _ in range(60):
        allocator.take(GIB, 1)  # the activations
    allocator.take(17 * GIB, 2)


def share_gpu(rank: int) -> None:
    """Tells the stand-in for the driver which processes are on the rank's GPU."""
    with open(os.environ["NVML_STUB_STATE"], "a") as state:
        state.write(f"process {rank} {os.getpid()} {70 * GIB}\nprocess {rank} {options.beside} {9 * GIB}\n")


def train(allocator: Allocator, rank: int) -> None:
    if options.caught:
        try:
            allocator.fail(64 * GIB)
        except torch.OutOfMemoryError:
            pass
    fill(allocator)
    if rank == options.culprit:
        share_gpu(rank)
        allocator.fail(4 * GIB)  # FAILS
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = torch.nn.Sequential(torch.nn.Embedding(40_000, 64), torch.nn.Linear(64, 64))
    fully_shard(model[1], mesh=mesh)
    allocator = Allocator()
    stand_in(allocator)
    train(allocator, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
