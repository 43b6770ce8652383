"""The culprit and the next rank wait for each other, and the rest wait for both."""

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


def reduce_in_order(first: dist.ProcessGroup, second: dist.ProcessGroup, *, careless: bool = False) -> None:
    value = torch.ones(4)
    if not careless:
        dist.all_reduce(value, group=first)  # HANGS: groups, leaves-out
    dist.all_reduce(value, group=second)


def exchange(peer: int) -> None:
    activations = torch.zeros(16)
    dist.recv(activations, src=peer)  # HANGS: recv
    dist.send(activations, dst=peer)


def pass_on(sender: bool, peer: int, tag: int) -> None:
    activations = torch.zeros(16)
    if sender:
        dist.send(activations, dst=peer, tag=tag)  # HANGS: tags, no-send
    else:
        dist.recv(activations, src=peer)  # HANGS: tags


def main() -> None:
    with Training(options) as job:
        pair = sorted({options.culprit, (options.culprit + 1) % job.world})
        tensor_parallel, pipeline = dist.new_group(pair), dist.new_group(pair)
        for step, batch in job.batches():
            job.train(batch)
            if job.rank not in pair:
                continue
            peer = next(rank for rank in pair if rank != job.rank)
            if options.how == "groups":
                swapped = step == options.after and job.rank == pair[1]
                groups = (pipeline, tensor_parallel) if swapped else (tensor_parallel, pipeline)
                reduce_in_order(*groups)
            elif options.how == "leaves-out":
                reduce_in_order(tensor_parallel, pipeline, careless=job.misbehaves(step))
            elif options.how == "tags":
                pass_on(job.rank == options.culprit, peer, 7 if job.misbehaves(step) else 0)
            elif options.how == "no-send":
                if not job.misbehaves(step):
                    pass_on(job.rank == options.culprit, peer, 0)
            elif step == options.after:
                exchange(peer)


if __name__ == "__main__":
    main()
