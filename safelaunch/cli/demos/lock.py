"""Demo: on rank 1 the training loop and a checkpoint thread take the same two locks in opposite orders."""

import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

weights_lock = threading.Lock()
queue_lock = threading.Lock()


def save_checkpoints() -> None:
    while True:
        with queue_lock:
            time.sleep(0.002)
            with weights_lock:  # weights second here ...
                pass


def enqueue(step: int) -> None:
    with weights_lock:
        time.sleep(0.002)
        with queue_lock:  # ... and first here
            pass


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 10_000):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).pow(2).mean().backward()
        optimizer.step()
        if rank == 1 and step == 30:
            threading.Thread(target=save_checkpoints, name="checkpoints", daemon=True).start()
        if rank == 1 and step >= 30:
            enqueue(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
