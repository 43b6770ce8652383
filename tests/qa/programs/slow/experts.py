"""Experts: how much work a rank has changes with each batch. No rank has always more."""

import random
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel


def work_of(how: str, dice: random.Random, step: int, seconds: float, rank: int, world: int) -> float:
    if how == "heavy-tail":
        return 0.08 + min(0.6, 0.02 * dice.paretovariate(1.3))
    if how == "alternating":  # another rank is slow each 20 s
        return 0.12 + (0.05 if int(seconds // 20) % world == rank else 0.0)
    if how == "last-batch":  # an epoch's last batch has another size on each rank
        return 0.12 if step % 60 else 0.04 + 0.3 * rank / world
    return dice.uniform(0.08, 0.22)


def main() -> None:
    args = planting.parser().parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plant = planting.Plant(args, rank)
    dice = random.Random(rank)
    experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
    model = DistributedDataParallel(torch.nn.Sequential(*experts))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 1
    while plant.more(step):
        tokens = torch.randn(16, 16)
        time.sleep(work_of(args.how, dice, step, plant.seconds, rank, world))
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
