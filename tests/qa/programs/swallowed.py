"""One rank can't read a batch, catches the exception and continues with the next, so it skips a step's collectives.

No error follows: its later steps match earlier steps of its peers, until it is done and they are not.
"""

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


def decode(batch: torch.Tensor, broken: bool) -> torch.Tensor:
    if broken:
        raise ValueError("a truncated image")  # HANGS: skip, leave
    return batch.abs()


def trains(job: Training) -> None:
    for step, batch in job.batches():
        try:
            job.train(decode(batch, job.misbehaves(step)))
        except ValueError:
            if options.how == "leave":
                return
            continue


def main() -> None:
    cache: dict[int, int] = {}
    with Training(options) as job:
        try:
            cache[job.rank]
        except KeyError:  # caught on every rank, and harmless
            cache[job.rank] = 1
        trains(job)
        dist.barrier()


if __name__ == "__main__":
    main()
