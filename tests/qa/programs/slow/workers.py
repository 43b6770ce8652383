"""Trains from JPEG-like records that DataLoader workers decode."""

import random
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

parser = planting.parser()
parser.add_argument("--workers", type=int, default=1)
args = parser.parse_args()


class Shards(IterableDataset):
    """An endless stream; the workers learn of the onset from the file that the main process writes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slow = torch.zeros(1).share_memory_()

    def __iter__(self):
        dice = random.Random(self.rank)
        while True:
            yield self.decode(dice)

    def decode(self, dice: random.Random) -> torch.Tensor:
        record = torch.randn(16, 32)
        time.sleep(0.2 * args.workers)
        if self.slow.item():
            time.sleep(self.slow.item() * args.workers)  # SLOW: decode
        if args.how == "rare" and dice.random() < 0.01:
            time.sleep(0.5)  # a record that is larger than the others
        return record


def train() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    shards = Shards(rank)
    loader = iter(DataLoader(shards, batch_size=None, num_workers=args.workers, prefetch_factor=2))
    model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 1
    while plant.more(step):
        shards.slow.fill_(plant.extra_s if plant.hits("decode") else 0.0)
        batch = next(loader)  # SLOW: decode
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        time.sleep(0.15)
        step += 1
    del loader
    planting.finish()


if __name__ == "__main__":
    train()
