"""Hangs in the first attempt or in every one. Otherwise trains to its end.

attempts.py first|always

It uses one rank and no process group, because the tests only check restarts. A second initialisation of gloo under one
torchrun is unreliable, with or without safelaunch.
"""

import os
import sys
import time

import torch
import uncompiled  # noqa: F401

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for step in range(1, 21):
    optimizer.step()
    if step == 5 and (sys.argv[1] == "always" or attempt == 0):
        time.sleep(3600)
print(f"finished in attempt {attempt}", flush=True)
