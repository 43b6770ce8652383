"""Ranks that mark their own steps, for a while or forever.

``--how sleep``: one of them hangs; ``later``: once there is a file ``rest``. ``--how slow``: one is slower.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import safelaunch

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="", choices=["", "sleep", "later", "lag", "slow"])
parser.add_argument("--until", default="/", help="train until this file exists")


def rest_for_a_while():
    while not Path(options.until).exists():
        time.sleep(3600)


if __name__ == "__main__":
    options = parser.parse_args()
    dist.init_process_group("gloo")
    step, done = 0, torch.zeros(1)
    while not done:
        step += 1
        time.sleep(0.1 if options.how == "slow" and dist.get_rank() == 1 else 0.02)
        tired = step == 10 if options.how == "sleep" else options.how == "later" and Path("rest").exists()
        if tired and dist.get_rank() == 1:
            rest_for_a_while()
        done = torch.tensor(float(Path(options.until).exists()))
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
        if not (options.how == "lag" and dist.get_rank() == 1 and step > 5):
            safelaunch.step()
    print(f"rank {dist.get_rank()} finished\n", end="", flush=True)  # one write: nothing comes between
    dist.destroy_process_group()
