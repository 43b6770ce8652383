"""Rank 1 waits for a GPU that never answers, in the first two attempts at other lines; then it says which GPU it has.

Without a process group: a second initialisation of gloo under one torchrun is unreliable.
"""

import contextlib
import functools
import os
import time

import torch
import uncompiled  # noqa: F401

torch.cuda._lazy_init = lambda: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch._C._cuda_synchronize = functools.partial(time.sleep, 3600)

optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5):
    optimizer.step()
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("0", "1"):
    torch.cuda.synchronize()
if (attempt, rank) == ("1", "1"):
    torch.cuda.synchronize()
if rank == "1":
    print(f"finished with {os.environ['CUDA_VISIBLE_DEVICES']}", flush=True)
