"""Rank 1's GPU reports an uncorrectable error, in the first two attempts at other lines; then it says which one it has.

Without a process group: a second initialisation of gloo under one torchrun is unreliable.
"""

import os

import torch
import uncompiled  # noqa: F401

ERROR = "CUDA error: uncorrectable ECC error encountered"

optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5):
    optimizer.step()
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("0", "1"):
    raise torch.AcceleratorError(ERROR)
if (attempt, rank) == ("1", "1"):
    raise torch.AcceleratorError(ERROR)
if rank == "1":
    print(f"finished with {os.environ['CUDA_VISIBLE_DEVICES']}", flush=True)
