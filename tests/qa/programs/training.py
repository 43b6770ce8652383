"""The training job of most programs here: a small DDP model over gloo, one optimizer, one batch per step."""

import argparse
import datetime
import os
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--culprit", type=int, default=0, help="the rank that misbehaves")
parser.add_argument("--culprits", type=int, default=1, help="how many ranks misbehave, the first of them the culprit")
parser.add_argument("--how", default="", help="how it misbehaves")
parser.add_argument("--after", type=int, default=5, help="steps before it misbehaves")
parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the whole training")
parser.add_argument("--timeout", type=float, default=1800, help="timeout of the process group in seconds")
parser.add_argument("--trainers", type=int, default=0, help="number of ranks that train; 0: all")
parser.add_argument("--backend", default="gloo", help="relay: site-packages/relay.py")
parser.add_argument("--scratch", default=".", help="a private directory of this job")


class Training:
    """Process group, model and optimizer. ``with Training(options) as job: for step in job.steps(): ...``"""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        if options.backend == "relay":
            import relay  # noqa: F401
        dist.init_process_group(options.backend, timeout=datetime.timedelta(seconds=options.timeout))
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
            # gloo's threads still release the last tensors and need the GIL for that. Torch aborts one that asks
            # for it once Python shuts down.
            time.sleep(0.2)
            dist.destroy_process_group()

    def batches(self):
        """Yields (step, batch) for the whole training."""
        for step in range(1, self.options.steps + 1):
            yield step, torch.randn(8, 32)

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        """Makes one optimizer step. All ranks meet in the gradient all-reduce."""
        self.optimizer.zero_grad()
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def misbehaves(self, step: int) -> bool:
        behind = (self.rank - self.options.culprit) % self.world
        return behind < self.options.culprits and step == self.options.after


def train_until(options: argparse.Namespace, ways: Mapping[str, Callable[[], object]]) -> None:
    """Trains on all ranks, until the culprit does between two steps what ``--how`` says of ``ways``."""
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if job.misbehaves(step):
                ways[options.how]()


def rank() -> int:
    return int(os.environ["RANK"])
