"""The first steps are slow, as with torch.compile, and now and then a new shape is compiled on all ranks."""

import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

WARM_UP, NEW_SHAPE_EVERY = 200, 400


def compile_s(step: int) -> float:
    if step <= WARM_UP:
        return 0.15 * (1 - step / WARM_UP) + (1.0 if step in (1, 2, 3, 50) else 0.0)
    return 2.0 if step % NEW_SHAPE_EVERY < 3 else 0.0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        time.sleep(0.1 + compile_s(step))
        return self.inner(x)


args = planting.parser().parse_args()
dist.init_process_group("gloo")
plant = planting.Plant(args, dist.get_rank())
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
step = 1
while plant.more(step):
    model(torch.randn(4, 16), step).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    step += 1
planting.finish()
