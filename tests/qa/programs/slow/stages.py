# A pipeline made by hand: activations go down the ranks, gradients come back. No torch.distributed.pipelining.
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401

args = planting.parser().parse_args()
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
FIRST, LAST = RANK == 0, RANK == WORLD - 1
MICRO, SHAPE = 3, (4, 24)
plant = planting.Plant(args, RANK)


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x):
        x = torch.relu(self.a(x))
        self.attend()
        if plant.hits("uneven"):
            self.attend()  # this stage was given one layer more
        return self.b(x)

    def attend(self):
        time.sleep(0.03)


def load(part, x):
    y = part(x)
    if plant.hits("compute"):
        dequantize(y)
    return y


def dequantize(y):
    left = plant.extra_s / MICRO
    while left > 0:
        time.sleep(min(0.01, left))  # SLOW: compute
        left -= 0.01
    return y


def run_step(part):
    kept = []
    for _ in range(MICRO):
        x = torch.randn(SHAPE) if FIRST else torch.empty(SHAPE)
        if not FIRST:
            dist.recv(x, RANK - 1)
        x.requires_grad_()
        y = load(part, x)
        if not LAST:
            dist.send(y.detach(), RANK + 1)
        kept.append((x, y))
    for x, y in kept:
        if LAST:
            y.pow(2).mean().backward()
        else:
            grad = torch.empty(SHAPE)
            dist.recv(grad, RANK + 1)
            y.backward(grad)
        if not FIRST:
            dist.send(x.grad, RANK - 1)


part = Part()
optimizer = torch.optim.Adam(part.parameters(), lr=1e-4)
step = 1
while plant.more(step):
    run_step(part)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
planting.finish()
