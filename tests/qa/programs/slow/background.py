"""A trainer with a helper thread for statistics, and a log that a filter process reads."""

import ctypes
import fcntl
import logging
import random
import subprocess
import sys
import threading
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

args = planting.parser().parse_args()
FILTER = """
import os, sys, time
while block := os.read(0, 1024):
    time.sleep(float(sys.argv[1]) if os.path.exists(sys.argv[2]) else 0)
"""
F_SETPIPE_SZ = 1031
STEP_S = 0.17


class Statistics(threading.Thread):
    """Summarizes with a C library that keeps the GIL."""

    def __init__(self, plant: planting.Plant) -> None:
        super().__init__(daemon=True)
        self.plant = plant
        self.library = ctypes.PyDLL(None)

    def run(self) -> None:
        while True:
            if self.plant.hits("gil"):
                self.library.usleep(int(1e6 * self.plant.extra_s))
            time.sleep(random.uniform(0.002, 0.012))


def open_log(plant: planting.Plant, rank: int) -> logging.Logger:
    """Logs through a pipe to a filter, like ``2>&1 | ts``; the planted rank's filter is slow."""
    slow = STEP_S + args.extra if rank == args.slow_rank and args.how == "pipe" else 0.0
    words = [sys.executable, "-c", FILTER, str(slow / 4), f"{args.scratch}/onset.json"]
    reader = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
    fcntl.fcntl(reader.stdin, F_SETPIPE_SZ, 4096)
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(reader.stdin))
    return logger


def log_weights(logger: logging.Logger, step: int) -> None:
    for layer in range(4):
        logger.info("step %d layer %d %s", step, layer, "0" * 1000)  # SLOW: pipe


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    logger = open_log(plant, rank)
    if args.how == "gil":
        Statistics(plant).start()
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 1
    while plant.more(step):
        loss = torch.zeros(())
        for _ in range(4):
            time.sleep(0.04)
            loss = loss + model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log_weights(logger, step)
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
