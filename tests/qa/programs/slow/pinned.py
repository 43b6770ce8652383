"""Computes on the CPU; like many launch scripts, it pins each rank to a core."""

import os
import subprocess
import sys
import threading
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

options = planting.parser()
options.add_argument("--work", type=float, default=0.05, help="CPU seconds of a step")
options.add_argument("--pause", type=float, default=0.12)
options.add_argument("--pin", choices=("apart", "none"), default="apart")
args = options.parse_args()
EVALUATES = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"


def pin(rank: int) -> None:
    """Pins the planted rank to the first core, the others to the last one."""
    cores = sorted(os.sched_getaffinity(0))
    if args.pin == "apart":
        os.sched_setaffinity(0, {cores[0] if rank == args.slow_rank else cores[-1]})


def preprocess(table: torch.Tensor) -> torch.Tensor:
    enough = time.thread_time() + args.work
    while time.thread_time() < enough:
        table = (table * 1.0001).clamp(-3, 3)
    return table


def spin(plant: planting.Plant) -> None:
    # a helper thread that was meant to sleep, in code that releases the GIL
    big = torch.ones(1 << 20)
    while True:
        if plant.hits("threads"):
            big.mul_(1.0000001)
        else:
            time.sleep(0.01)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    pin(rank)
    if args.how == "threads" and rank == args.slow_rank:
        for _ in range(2):
            threading.Thread(target=spin, args=(plant,), daemon=True).start()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    evaluators: list[subprocess.Popen] = []  # they inherit the rank's core
    step = 1
    while plant.more(step):
        if plant.hits("evaluator") and not evaluators:
            evaluators = [subprocess.Popen([sys.executable, "-c", EVALUATES]) for _ in range(2)]
        features = preprocess(torch.randn(32, 64))
        loss = model(features).square().mean()
        loss.backward()
        time.sleep(args.pause)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
