"""The training job that all programs here share: a small DDP model over gloo, one optimizer, one batch a step."""

import argparse
import datetime
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--culprit", type=int, default=0, help="the rank that misbehaves")
parser.add_argument("--how", default="", help="in which way")
parser.add_argument("--after", type=int, default=5, help="after this many steps")
parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the whole training")
parser.add_argument("--timeout", type=float, default=1800, help="the process group's own, in seconds")
parser.add_argument("--trainers", type=int, default=0, help="only so many ranks train")
parser.add_argument("--scratch", default=".", help="a directory of this job's own")


class Training:
    """Process group, model and optimizer. ``with Training(options) as job: for step in job.steps(): ...``"""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))
        trainers = dist.new_group(list(range(options.trainers))) if options.trainers else None
        self.model = DistributedDataParallel(layers, process_group=trainers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            # gloo's threads still let go of the last tensors, and need the GIL for that. Torch aborts one that asks
            # for it once Python shuts down.
            time.sleep(0.2)
            dist.destroy_process_group()

    def batches(self):
        """(step, batch) for the whole training."""
        for step in range(1, self.options.steps + 1):
            yield step, torch.randn(8, 32)

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        """One optimizer step; all ranks meet in the gradients' all-reduce."""
        self.optimizer.zero_grad()
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def misbehaves(self, step: int) -> bool:
        return self.rank == self.options.culprit and step == self.options.after


def rank() -> int:
    return int(os.environ["RANK"])
