"""Reads tokens from a file that is mapped into memory, and embeddings from a table in anonymous memory."""

import ctypes
import mmap
import os
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel as Parallel

PAGE = mmap.PAGESIZE
MADV_PAGEOUT = 21


class TokenFile:
    def __init__(self, path: str, mib: int) -> None:
        with open(path, "wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        self.file = os.open(path, os.O_RDONLY)
        self.map = mmap.mmap(self.file, 0, prot=mmap.PROT_READ)
        self.map.madvise(mmap.MADV_RANDOM)
        self.pages = mib * (1 << 20) // PAGE
        self.at = 0

    def forget(self) -> None:
        """Drops the file from memory, as if the node had too little of it."""
        self.map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def next_tokens(self, count: int, cost_s: float) -> torch.Tensor:
        enough = time.monotonic() + cost_s
        found = []
        while len(found) < count or time.monotonic() < enough:  # SLOW: faults
            self.at = (self.at + 1) % self.pages  # SLOW: faults
            found.append(self.map[self.at * PAGE])  # SLOW: faults
        return torch.tensor(found[:count])


class Table:
    """Embeddings that are rarely used, so the kernel writes them to the swap."""

    def __init__(self, mib: int) -> None:
        self.size = mib << 20
        self.memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[:] = b"\1" * self.size
        self.at = 0

    def page_out(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size), MADV_PAGEOUT)

    def look_up(self, rows: int) -> int:
        total = 0
        for _ in range(rows):  # SLOW: swap
            self.at = (self.at + 37 * PAGE) % self.size  # SLOW: swap
            total += self.memory[self.at]  # SLOW: swap
        return total


parser = planting.parser()
parser.add_argument("--rows", type=int, default=3000)
args = parser.parse_args()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    tokens = TokenFile(f"{args.scratch}/tokens-{rank}.bin", 16)
    table = Table(24)
    model = Parallel(torch.nn.Embedding(256, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 1
    while plant.more(step):
        if plant.hits("faults"):
            tokens.forget()
        batch = tokens.next_tokens(32, plant.extra_s)
        if args.how == "swap":
            if rank == args.slow_rank:
                table.page_out()  # does nothing without swap
            table.look_up(args.rows)
        loss = model(batch).square().mean()
        time.sleep(0.15)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    os.remove(f"{args.scratch}/tokens-{rank}.bin")
    planting.finish()


if __name__ == "__main__":
    main()
