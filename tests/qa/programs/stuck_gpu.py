"""Rank 1 waits for a GPU that never answers: torch's own synchronize, whose call into the driver sleeps."""

import contextlib
import functools
import time

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401

torch.cuda._lazy_init = lambda: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch._C._cuda_synchronize = functools.partial(time.sleep, 3600)

dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5):
    optimizer.step()
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    torch.cuda.synchronize()
dist.all_reduce(torch.ones(4))
