"""A small trainer with callbacks, as frameworks have them."""

from __future__ import annotations

import os
import time

import planting
import safelaunch
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel


class Callback:
    def on_batch_start(self, trainer: Trainer) -> None: ...

    def on_batch_end(self, trainer: Trainer) -> None: ...


class ProgressBar(Callback):
    def on_batch_end(self, trainer: Trainer) -> None:
        if trainer.plant.hits("progress"):
            time.sleep(trainer.plant.extra_s)  # SLOW: progress


class Histograms(Callback):
    """Writes the distribution of the weights now and then."""

    def on_batch_start(self, trainer: Trainer) -> None:
        if trainer.plant.hits("histograms"):
            self.write(trainer)

    def write(self, trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            torch.histc(parameter.detach())
        time.sleep(trainer.plant.extra_s)  # SLOW: histograms


class Checkpoint(Callback):
    def __init__(self, every: int, cost_s: float) -> None:
        self.every, self.cost_s = every, cost_s

    def on_batch_end(self, trainer: Trainer) -> None:
        if self.every and trainer.step % self.every == 0 and trainer.rank == 0:
            torch.save(trainer.model.state_dict(), os.path.join(trainer.args.scratch, "last.pt"))
            time.sleep(self.cost_s)


class RankZeroLog(Callback):
    def on_batch_end(self, trainer: Trainer) -> None:
        if trainer.args.how == "log" and trainer.rank == 0:
            time.sleep(0.005)


class Interlude(Callback):
    """Stops for a while: announced to safelaunch as a pause or as a phase."""

    def on_batch_end(self, trainer: Trainer) -> None:
        if trainer.args.how not in ("pauses", "phases") or trainer.step % 400:
            return
        announced = safelaunch.pause() if trainer.args.how == "pauses" else safelaunch.phase("export", "5m")
        with announced:
            time.sleep(4.0 if trainer.rank == 0 else 1.0)
        dist.barrier()


class Trainer:
    def __init__(self, args, callbacks: list[Callback]) -> None:
        self.args, self.callbacks = args, callbacks
        self.rank, self.step = dist.get_rank(), 1
        self.plant = planting.Plant(args, self.rank)
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Tanh()))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def call(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def fit(self) -> None:
        while self.plant.more(self.step):
            self.call("on_batch_start")
            loss = self.training_step(torch.randn(16, 20))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.call("on_batch_end")
            self.step += 1

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.15)
        return self.model(batch).pow(2).mean()


def main() -> None:
    parser = planting.parser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-cost", type=float, default=1.5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    checkpoint = Checkpoint(args.save_every, args.save_cost)
    Trainer(args, [ProgressBar(), Histograms(), checkpoint, RankZeroLog(), Interlude()]).fit()
    planting.finish()


if __name__ == "__main__":
    main()
