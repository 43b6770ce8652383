"""One short gloo job of a sweep: it makes some optimizer steps, prints numbered lines, and marks its end."""

import fcntl
import os
import sys
from pathlib import Path

import torch
import uncompiled  # noqa: F401
import torch.distributed as dist

LINES = 40

name, steps = sys.argv[1], int(sys.argv[2])
marks = Path("marks")
marks.mkdir(exist_ok=True)
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    lock = (marks / f"{name}.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (marks / f"{name}.twice").touch()
    with (marks / f"{name}.begun").open("a") as file:
        file.write(f"{os.getpid()}\n")
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(steps):
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    assert total == 3.0
    optimizer.zero_grad()
    (weight.sum() * 0.1).backward()
    optimizer.step()
    for line in range(LINES):
        # torchrun runs ranks with -u: print would write the newline separately, and another rank could write in between.
        sys.stdout.write(f"{name} rank {rank} step {step} line {line}\n")
if rank == 0:
    sys.stdout.write(f"val_loss={weight.sum().item():.4f}\n")
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    with (marks / f"{name}.done").open("a") as file:
        file.write(f"{os.getpid()}\n")
