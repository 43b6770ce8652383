"""A tiny FSDP2 (fully_shard) job on gloo. ``--how eval``: one rank evaluates the sharded model alone."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
words = parser.parse_args()


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return model(torch.ones(4, 16)).mean().item()  # HANGS: eval


def log(step: int) -> None:
    time.sleep(3600)  # HANGS: asleep


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, words.steps + 1):
    loss = model(torch.randn(8, 16)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if step == 12 and rank == words.culprit:
        if words.how == "eval":
            evaluate(model)
        elif words.how == "asleep":
            log(step)
dist.barrier()
dist.destroy_process_group()
