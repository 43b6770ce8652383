"""torch's pipeline parallelism on gloo: one stage per rank, 1F1B. ``--how fifo``: a stage blocks in its forward."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
words = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
done = 0


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if words.how == "fifo" and rank == words.culprit and done == 12:
            self.table()
        return self.layer(x)

    def table(self) -> None:
        path = f"{words.scratch}/table"
        if not os.path.exists(path):
            os.mkfifo(path)
        open(path).read()  # HANGS: fifo


torch.manual_seed(0)
module = Stage()
stage = PipelineStage(module, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).pow(2).mean())
optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
for step in range(words.steps):
    done = step
    optimizer.zero_grad()
    if words.how == "skip" and rank == words.culprit and step == 12:
        continue  # a bad batch that only one stage skips
    if rank == 0:
        schedule.step(torch.randn(8, 16))
    elif rank == world - 1:
        schedule.step(target=torch.randn(8, 16), losses=[])
    else:
        schedule.step()
    optimizer.step()
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
