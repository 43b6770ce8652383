"""DeepSpeed's engine on CPU and gloo. ``--how asleep``: one rank sleeps in its own code."""

import argparse
import time

import deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
parser.add_argument("--local_rank", type=int, default=-1)
words = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(1, words.steps + 1):
    loss = torch.nn.functional.mse_loss(engine(torch.randn(8, 8)), torch.randn(8, 1))
    engine.backward(loss)
    engine.step()
    time.sleep(0.02)
    if step == 12 and dist.get_rank() == words.culprit:
        if words.how == "barrier":
            dist.barrier()  # HANGS: barrier
        elif words.how == "asleep":
            time.sleep(3600)  # HANGS: asleep
dist.barrier()
