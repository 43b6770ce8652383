"""Hangs or crashes on one rank, in the first attempt or in every one; otherwise trains to its end.

attempts.py hang|raise first|always|moving
"""

import os
import sys
import time

import torch
import torch.distributed as dist

how, when = sys.argv[1:3]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
bad_step = 5 + (attempt if when == "moving" else 0)
for step in range(1, 21):
    optimizer.step()
    dist.barrier()
    if dist.get_rank() == 1 and step == bad_step and (when != "first" or attempt == 0):
        if how == "raise":
            raise ValueError("a bad batch")
        time.sleep(3600)
print(f"finished in attempt {attempt}", flush=True)
dist.destroy_process_group()
