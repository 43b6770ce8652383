"""A model with large gradients, for slow links."""

import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def run(args) -> None:
    plant = planting.Plant(args, dist.get_rank())
    model = DistributedDataParallel(build(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = 1
    while plant.more(step):
        loss = model(torch.randn(4, args.width)).square().mean()
        time.sleep(args.pace)
        if plant.hits("compute"):
            time.sleep(plant.extra_s)  # SLOW: compute
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    planting.finish()


if __name__ == "__main__":
    parser = planting.parser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pace", type=float, default=0.15)
    dist.init_process_group("gloo")
    run(parser.parse_args())
