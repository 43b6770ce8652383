"""Healthy training, unless it is to be deaf. It ends when the file ``finish`` appears in its scratch directory."""

import os
import signal
import time

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


def finished(job: Training) -> bool:
    """Returns whether to stop, with the same answer on all ranks."""
    there = torch.tensor(float(os.path.exists(os.path.join(options.scratch, "finish"))))
    dist.all_reduce(there)
    return bool(there)


def main() -> None:
    if options.how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if step == options.after:
                open(os.path.join(options.scratch, f"training-{job.rank}"), "w").close()
            if job.misbehaves(step) and options.how == "deaf":
                time.sleep(86_400)  # HANGS: deaf
            if step > options.after and finished(job):
                break
            time.sleep(0.01)
        print(f"rank {job.rank} trained\n", end="", flush=True)  # one write: ranks share the file


if __name__ == "__main__":
    main()
