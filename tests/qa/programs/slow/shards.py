"""Reads each batch from a shard on the disk, past the page cache, and keeps a journal that is safe on the disk."""

import mmap
import os
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

BLOCK, BLOCKS = 1 << 16, 64


class Shard:
    def __init__(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(os.urandom(BLOCK * BLOCKS))
            os.fsync(file.fileno())
        self.file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.buffer = mmap.mmap(-1, BLOCK)
        self.block = 0

    def read(self, blocks: int) -> torch.Tensor:
        for _ in range(blocks):
            self.block = (self.block + 1) % BLOCKS
            os.preadv(self.file, [self.buffer], self.block * BLOCK)  # SLOW: read
        return torch.frombuffer(self.buffer, dtype=torch.uint8)[:64].float() / 255


class Journal:
    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def commit(self, step: int) -> None:
        os.pwrite(self.file, f"{step:>4095}\n".encode(), 0)
        os.fsync(self.file)  # SLOW: fsync


def main() -> None:
    parser = planting.parser()
    parser.add_argument("--blocks", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    shard = Shard(f"{args.scratch}/shard-{rank}")
    journal = Journal(f"{args.scratch}/journal-{rank}")
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 1
    while plant.more(step):
        if args.how != "fsync":
            batch = shard.read(args.blocks)
        else:
            batch = torch.randn(64)
        loss = model(batch).square().mean()
        time.sleep(0.18)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.how == "fsync":
            journal.commit(step)
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
