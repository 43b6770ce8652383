"""Hangs or crashes in the first attempt, in every attempt, or one step later in each. Otherwise trains to its end.

attempts.py hang|raise first|always|moving

It uses one rank and no process group, because the tests only check restarts. A second initialisation of gloo under one
torchrun is unreliable, with or without safelaunch.
"""

import os
import sys
import time

import torch
import uncompiled  # noqa: F401

how, when = sys.argv[1:3]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
bad_step = 5 + (attempt if when == "moving" else 0)
for step in range(1, 21):
    optimizer.step()
    if step == bad_step and (when != "first" or attempt == 0):
        if how == "raise":
            raise ValueError("a bad batch")
        time.sleep(3600)
print(f"finished in attempt {attempt}", flush=True)
