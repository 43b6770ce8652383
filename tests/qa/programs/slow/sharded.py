"""FSDP2 on the CPU: every layer is sharded over all ranks."""

import time

import planting
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class FeedForward(nn.Module):
    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        if self.index == 1:
            self.route(x)
        return x + self.down(torch.relu(self.up(x)))

    def route(self, x: torch.Tensor) -> None:
        if plant.hits("forward"):
            time.sleep(plant.extra_s)  # SLOW: forward


class WarmSgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        if plant.hits("optimizer"):
            time.sleep(plant.extra_s)  # SLOW: optimizer
        return super().step(closure)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.03)
    if plant.hits("collate"):
        for _ in samples:
            time.sleep(plant.extra_s / len(samples))  # SLOW: collate
    return torch.stack(samples)


args = planting.parser().parse_args()
dist.init_process_group("gloo")
plant = planting.Plant(args, dist.get_rank())
torch.manual_seed(0)
model = nn.Sequential(*(FeedForward(32, index) for index in range(3)))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = WarmSgd(model.parameters(), lr=1e-3)
step = 1
while plant.more(step):
    loss = model(collate([torch.randn(32) for _ in range(4)])).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
planting.finish()
