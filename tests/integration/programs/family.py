"""Ranks with descendants: a sleeping DataLoader worker, a child in its own session, an orphaned grandchild."""

import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Asleep(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(3600)
        return torch.zeros(1)


subprocess.Popen(["sleep", "3601"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 3602 & exit 0"]).wait()
iterator = iter(DataLoader(Asleep(), num_workers=1))
Path(sys.argv[1], f"ready-{time.monotonic_ns()}").touch()
next(iterator)
