"""A slow round in a group with its own timeout, then a collective that rank 1 never enters in a group without one."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

SLOW_S = 8.0  # longer than the --pg-timeout of the test

dist.init_process_group("gloo", timeout=timedelta(minutes=10))
hasty = dist.new_group()
late = dist.get_rank() == 1
if late:
    time.sleep(SLOW_S)
dist.all_reduce(torch.ones(1))
print("the slow round is over", flush=True)
if late:
    time.sleep(3600)
dist.all_reduce(torch.ones(1), group=hasty)
