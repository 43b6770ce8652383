"""One rank enters a collective that its peers skip or enter with another shape or dtype."""

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


def gather_metric(loss: torch.Tensor, world: int) -> float:
    everyone = [torch.zeros_like(loss) for _ in range(world)]
    dist.all_gather(everyone, loss)  # HANGS: all_gather
    return float(torch.stack(everyone).mean())


def wait_for_all() -> None:
    dist.barrier()  # HANGS: barrier


def share_threshold(loss: torch.Tensor, rank: int) -> None:
    dist.broadcast(loss, src=rank)  # HANGS: broadcast
    loss.add_(1)
    dist.broadcast(loss, src=(rank + 1) % dist.get_world_size())  # HANGS: broadcast


def sum_lengths(job: Training, odd: bool) -> None:
    lengths = torch.zeros(4097 if odd else 4096)
    dist.all_reduce(lengths)  # HANGS: shape


def sum_counts(job: Training, odd: bool) -> None:
    counts = torch.zeros(4096, dtype=torch.float64 if odd else torch.float32)
    dist.all_reduce(counts)  # HANGS: dtype


def share_schedule(root: int) -> None:
    schedule = torch.ones(4)
    dist.broadcast(schedule, src=root)  # HANGS: roots


def main() -> None:
    with Training(options) as job:
        for step, batch in job.batches():
            loss = job.train(batch)
            if options.how == "shape":
                sum_lengths(job, job.misbehaves(step))
            elif options.how == "dtype":
                sum_counts(job, job.misbehaves(step))
            elif options.how == "roots":
                share_schedule((job.rank + 1) % job.world if job.misbehaves(step) else options.culprit)
            elif job.misbehaves(step):
                if options.how == "all_gather":
                    gather_metric(loss, job.world)
                elif options.how == "barrier":
                    wait_for_all()
                else:
                    share_threshold(loss, job.rank)


if __name__ == "__main__":
    main()
