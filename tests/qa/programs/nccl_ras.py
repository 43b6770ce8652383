"""Rank 1 stops itself in its third step. NCCL is played: a library of its name, and a RAS service in rank 0.

``--service``: the directory of the stand-in, ``--nccl``: the version that it plays.
"""

import argparse
import mmap
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401

parser = argparse.ArgumentParser()
parser.add_argument("--service", required=True)
parser.add_argument("--nccl", required=True)
options = parser.parse_args()
sys.path.insert(0, options.service)


def load_library() -> mmap.mmap:
    path = Path(f"libnccl.so.{options.nccl}")
    path.write_bytes(b"\0" * 4096)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def serve(pids: list[int]) -> object:
    from ras_service import Process, Service, as_json

    states = ["answers"] + ["unresponsive"] * (len(pids) - 1)
    processes = [Process(n, pid, gpu=n, state=state) for n, (pid, state) in enumerate(zip(pids, states, strict=True))]
    port = int(os.environ["NCCL_RAS_ADDR"].rpartition(":")[2])
    return Service(json=as_json(processes, version=options.nccl), port=port)


def main() -> None:
    library = load_library() if os.environ["RANK"] == "0" else None
    dist.init_process_group("gloo")
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    service = serve(pids) if dist.get_rank() == 0 else None
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10_000):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        time.sleep(0.05)
    del library, service


if __name__ == "__main__":
    main()
