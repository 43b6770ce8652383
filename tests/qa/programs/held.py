"""A rank meets its peers with a file locked that they need, or does not meet them in a background thread."""

import os
import sqlite3
import threading
import time

import torch
import torch.distributed as dist
from filelock import FileLock
from training import Training, parser

options = parser.parse_args()


def log_to_database(job: Training) -> None:
    """The culprit meets its peers with its transaction open, so these do not come to it."""
    database = sqlite3.connect(os.path.join(options.scratch, "log.db"), timeout=86_400, isolation_level=None)
    if job.rank != options.culprit:
        time.sleep(1)
    database.execute("BEGIN EXCLUSIVE")  # HANGS: sqlite
    dist.barrier()  # HANGS: sqlite
    database.execute("COMMIT")


def download(job: Training) -> None:
    if job.rank != options.culprit:
        time.sleep(1)
    with FileLock(os.path.join(options.scratch, "model.lock")):  # HANGS: filelock
        dist.barrier()  # HANGS: filelock


def share_metrics(job: Training, group: dist.ProcessGroup) -> None:
    if job.rank == options.culprit:
        time.sleep(86_400)  # HANGS: thread
    dist.all_reduce(torch.ones(1), group=group)


def train_with_metrics(job: Training, group: dist.ProcessGroup) -> None:
    """The culprit waits for its peers in the step; they wait for their threads, which wait for the culprit's thread."""
    sharing = threading.Thread(target=share_metrics, args=(job, group), name="metrics", daemon=True)
    sharing.start()
    if job.rank != options.culprit:
        sharing.join()
    job.train(torch.randn(8, 32))


def main() -> None:
    with Training(options) as job:
        metrics = dist.new_group()
        for step, batch in job.batches():
            job.train(batch)
            if step < options.after:
                continue
            if options.how == "sqlite":
                log_to_database(job)
            elif options.how == "filelock":
                download(job)
            else:
                train_with_metrics(job, metrics)


if __name__ == "__main__":
    main()
