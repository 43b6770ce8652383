"""Two kinds of groups: tensor parallel pairs, and data parallel ranks across the pairs."""

import time
from dataclasses import dataclass

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401


@dataclass
class Groups:
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    data_size: int


def make_groups(width: int) -> Groups:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [list(range(first, first + width)) for first in range(0, world, width)]
    columns = [list(range(first, world, width)) for first in range(width)]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in rows + columns}
    row, column = (next(ranks for ranks in kind if rank in ranks) for kind in (rows, columns))
    return Groups(groups[tuple(row)], groups[tuple(column)], len(column))


class RowParallel(torch.nn.Module):
    def __init__(self, groups: Groups, plant: planting.Plant) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 16) / 8)
        self.groups, self.plant = groups, plant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = x @ self.weight.T
        time.sleep(0.05)
        if self.plant.hits("shard"):
            time.sleep(self.plant.extra_s / 2)  # SLOW: shard
        whole = partial.detach().clone()
        dist.all_reduce(whole, group=self.groups.tensor)
        return partial + (whole - partial.detach())


def sync_gradients(model: torch.nn.Module, groups: Groups) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups.data)
        parameter.grad /= groups.data_size


def read_batch(plant: planting.Plant) -> torch.Tensor:
    time.sleep(0.04)
    if plant.hits("read"):
        time.sleep(plant.extra_s)  # SLOW: read
    return torch.randn(8, 16)


if __name__ == "__main__":
    args = planting.parser().parse_args()
    dist.init_process_group("gloo")
    plant = planting.Plant(args, dist.get_rank())
    groups = make_groups(2)
    layers = torch.nn.ModuleList([RowParallel(groups, plant), RowParallel(groups, plant)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    step = 1
    while plant.more(step):
        x = read_batch(plant)
        loss = sum(layer(x).pow(2).mean() for layer in layers)
        loss.backward()
        sync_gradients(layers, groups)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    planting.finish()
