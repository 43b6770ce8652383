"""A rank of the second node dies in native code, as of a bad memory module. ``faulty_host.py PLACE``: at which line."""

import ctypes
import sys

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401

dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5):
    optimizer.step()
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1 and sys.argv[1] == "first":
    ctypes.string_at(0)
if dist.get_rank() == 1 and sys.argv[1] == "second":
    ctypes.string_at(0)
dist.all_reduce(torch.ones(4))
