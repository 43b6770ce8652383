"""Ranks wait for each other outside c10d: over sockets, for files, for work that they poll."""

import os
import socket
import time

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


class Line:
    """A connection from the culprit to the rank after it, outside the process group."""

    def __init__(self, job: Training) -> None:
        self.job, self.other = job, (options.culprit + 1) % job.world
        port = [0]
        if job.rank == options.culprit:
            server = socket.create_server(("127.0.0.1", 0))
            port = [server.getsockname()[1]]
        dist.broadcast_object_list(port, options.culprit)
        if job.rank == self.other:
            self.socket = socket.create_connection(("127.0.0.1", port[0]))
        elif job.rank == options.culprit:
            self.socket, _ = server.accept()

    def send(self) -> None:
        if self.job.rank == self.other:
            self.socket.sendall(b"0.5\n")

    def read(self) -> bytes:
        return self.socket.makefile("rb").readline() if self.job.rank == options.culprit else b""  # HANGS: unsent

    def read_slowly(self, step: int) -> None:
        if self.job.rank == options.culprit and step >= options.after:
            time.sleep(86_400)  # HANGS: unsent-asleep
        elif self.job.rank == options.culprit:
            self.socket.sendall(b"go\n")
        elif self.job.rank == self.other:
            self.socket.recv(3)


def wait_for_index(job: Training, step: int) -> None:
    """The rank that builds the index believes that it is there."""
    path = os.path.join(options.scratch, f"index-{step}")
    if job.rank != options.culprit:
        while not os.path.isfile(path):
            time.sleep(0.3)  # HANGS: flag
    elif step != options.after:
        open(path, "w").close()


def reduce_patiently(job: Training) -> None:
    """All but the culprit look from time to time whether their reduction is complete."""
    if job.rank == options.culprit:
        time.sleep(86_400)  # HANGS: polled-work
    work = dist.all_reduce(torch.ones(8), async_op=True)
    while not work.is_completed():
        time.sleep(0.1)


def share_run_id(job: Training, store: dist.Store, step: int) -> None:
    """The rank that resumes believes that the others know the run."""
    if job.rank == options.culprit:
        if step != options.after:
            store.set(f"run/{step}", "a")  # HANGS: store-key
    else:
        store.get(f"run/{step}")


def download() -> bytes:
    """No server listens there, and an error of the network is thought to pass."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
    while True:
        try:
            with socket.create_connection(address, timeout=5) as server:
                return server.recv(1 << 16)
        except OSError:
            time.sleep(0.2)  # HANGS: attempts


def main() -> None:
    with Training(options) as job:
        store = dist.distributed_c10d._get_default_store()
        line = Line(job) if options.how.startswith("unsent") else None
        for step, batch in job.batches():
            job.train(batch)
            if options.how == "unsent" and line is not None:
                if step != options.after:
                    line.send()
                line.read()
            elif line is not None:
                line.read_slowly(step)
            elif options.how == "flag" and step <= options.after:
                wait_for_index(job, step)
            elif options.how == "store-key" and step <= options.after:
                share_run_id(job, store, step)
            elif options.how == "polled-work" and step == options.after:
                reduce_patiently(job)
            elif options.how == "attempts" and job.misbehaves(step):
                download()


if __name__ == "__main__":
    main()
