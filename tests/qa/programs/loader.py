"""One rank's DataLoader worker hangs and delivers no batch."""

import os
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset
from training import Training, parser, rank

options = parser.parse_args()
cache_lock = threading.Lock()


class Samples(Dataset):
    def __init__(self, how: str, epoch: int) -> None:
        self.how = how
        self.epoch = epoch
        if how in ("fifo", "inline"):
            self.path = os.path.join(options.scratch, f"sample-{epoch}")
            os.mkfifo(self.path)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.epoch and index == 40:
            self.load_bad_sample()
        if self.how == "lock":
            with cache_lock:  # HANGS: lock
                return torch.zeros(32)
        return torch.zeros(32)

    def load_bad_sample(self) -> None:
        if self.how == "asleep":
            time.sleep(86_400)  # HANGS: asleep
        if self.how in ("fifo", "inline"):
            with open(self.path, "rb") as file:  # HANGS: fifo, inline
                file.read()


def refresh_cache() -> None:
    with cache_lock:
        time.sleep(1.5)


def main() -> None:
    how = options.how if rank() == options.culprit else ""
    with Training(options) as job:
        for epoch in range(1000):
            if how == "lock" and epoch == 1:
                # The workers of the next epoch are forked while this thread holds the lock.
                threading.Thread(target=refresh_cache, name="cache", daemon=True).start()
                time.sleep(0.3)
            workers = 0 if options.how == "inline" else 2
            for batch in DataLoader(Samples(how, epoch), batch_size=8, num_workers=workers):
                job.train(batch)


if __name__ == "__main__":
    main()
