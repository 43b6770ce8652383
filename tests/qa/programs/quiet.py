"""A short training with a quiet spell (``--case``, a function of ``spells``): steps, the spell, more steps, the end.

``--outside``: the process that is not of the job and does something to it or for it.
"""

import argparse
import datetime
import os
import sys
import threading
import time
from pathlib import Path

import spells
from spells.table import Outside, Spell

parser = argparse.ArgumentParser()
parser.add_argument("--case", required=True)
parser.add_argument("--scratch", type=Path, required=True)
parser.add_argument("--quiet", type=float, default=12.0)
parser.add_argument("--outside", action="store_true")
parser.add_argument("--reader", action="store_true", help="pass stdin on, but rest for the spell")
parser.add_argument("--before", type=int, default=40)
parser.add_argument("--behind", type=int, default=10)


def outside(case: spells.Case, options: argparse.Namespace) -> None:
    assert case.outside is not None
    case.outside(Outside(options.scratch, options.quiet, case.ranks))


def read(case: spells.Case, options: argparse.Namespace) -> None:
    reader = Outside(options.scratch, options.quiet, case.ranks)
    resumes = threading.Event()
    threading.Thread(target=lambda: (reader.rest(), resumes.set()), daemon=True).start()
    while block := os.read(0, 4096):
        if not resumes.is_set() and list(options.scratch.glob("begun-?")):
            resumes.wait()
        sys.stdout.buffer.write(block)
        sys.stdout.flush()


def train(case: spells.Case, options: argparse.Namespace) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spell = Spell(options.scratch, options.quiet, world, rank)
    if case.at == "start" and case.has_spell(rank, world):
        spell.begin()
        case.spell(spell)

    import torch
    import torch.distributed as dist
    import uncompiled  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    torch.manual_seed(0)
    spell.model = DistributedDataParallel(torch.nn.Linear(32, 4))
    spell.optimizer = torch.optim.SGD(spell.model.parameters(), lr=1e-3)

    def step() -> None:
        spell.optimizer.zero_grad()
        spell.model(torch.randn(8, 32)).pow(2).mean().backward()
        spell.optimizer.step()
        time.sleep(0.03)

    spell.step = step
    for _ in range(options.before if case.at != "whole" else 0):
        step()
    if case.at != "start" and case.has_spell(rank, world):
        spell.begin()
        case.spell(spell)
        spell.say(f"over-{rank}")
    for _ in range(options.behind if case.at != "whole" else 0):
        step()
    weights = spell.model.module.weight.detach()
    ours = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(ours, weights)
    assert all(torch.equal(one, weights) for one in ours), "the replicas differ"
    dist.barrier()
    time.sleep(0.3)  # gloo's threads release the last tensors
    dist.destroy_process_group()
    print(f"rank {rank} ended well\n", end="", flush=True)


def main() -> None:
    options = parser.parse_args()
    case = spells.CASES[options.case]
    (outside if options.outside else read if options.reader else train)(case, options)


if __name__ == "__main__":
    main()
