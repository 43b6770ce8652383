"""Demo: rank 1 cannot read one sample. Its DataLoader worker waits forever, and so does every rank."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    """A dataset with one bad sample: a pipe that nobody writes to, which blocks like a file on a dead mount."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad
        self.pipe = Path(tempfile.mkdtemp(prefix="safelaunch-demo-")) / "sample"
        os.mkfifo(self.pipe)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            with open(self.pipe, "rb") as file:  # never returns
                file.read()
        return torch.full((32,), float(index % 7))


def main() -> None:
    dist.init_process_group("gloo")
    bad = 200 if dist.get_rank() == 1 else None
    model = DistributedDataParallel(torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Samples(bad), batch_size=8, num_workers=2):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
