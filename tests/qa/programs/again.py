"""Raises in every attempt, with another message each time. again.py SECOND: in that attempt, at another line."""

import os
import sys

import torch
import uncompiled  # noqa: F401

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5 + attempt):
    optimizer.step()
if attempt == int(sys.argv[1]):
    raise KeyError("another one")  # FAILS: other
raise ValueError(f"loss {attempt}.5 is above the limit")  # FAILS: same
