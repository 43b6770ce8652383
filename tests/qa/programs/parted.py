"""Ranks diverge in a thread, in a loop, at a condition on the rank, or in the peer or root that they name."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()
NEIGHBOURS = (options.culprit, (options.culprit + 1) % int(os.environ["WORLD_SIZE"]))


def gather(value: torch.Tensor, world: int) -> None:
    dist.all_gather([torch.zeros_like(value) for _ in range(world)], value)  # HANGS: trainer, loop-break


def train_in_a_thread(job: Training) -> None:
    """The main thread has nothing to do but to wait for the one that trains."""

    def loop() -> None:
        for step, batch in job.batches():
            loss = job.train(batch)
            if job.misbehaves(step):
                gather(loss, job.world)

    trainer = threading.Thread(target=loop, name="trainer")
    trainer.start()
    trainer.join()


def evaluate(stuck: bool) -> float:
    if stuck:
        threading.Event().wait()  # HANGS: future
    return 0.5


def evaluate_in_a_future(job: Training) -> None:
    with ThreadPoolExecutor(1) as pool:
        for step, batch in job.batches():
            job.train(batch)
            pool.submit(evaluate, job.misbehaves(step)).result()


def reduce_each(job: Training) -> None:
    """A loop in each step, and after it a call that one rank makes alone."""
    weights = [torch.ones(4) for _ in range(6)]
    for step, batch in job.batches():
        job.train(batch)
        for one in weights:
            dist.all_reduce(one)
        if job.misbehaves(step):
            dist.barrier()  # HANGS: loop-barrier


def reduce_used(job: Training) -> None:
    """An expert that sees no token has no gradient, and its rank leaves it out."""
    experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    for step, batch in job.batches():
        job.train(batch)
        used = [0, 2] if job.misbehaves(step) else [0, 1, 2]
        torch.stack([experts[number](torch.ones(4)) for number in used]).sum().backward()
        for weight in experts.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        experts.zero_grad()
        dist.barrier()  # HANGS: unused


def break_early(job: Training) -> None:
    """One rank leaves the inner loop a round early, and calls what follows it."""
    for step, batch in job.batches():
        loss = job.train(batch)
        for micro in range(8):
            if micro == 6 and job.misbehaves(step):
                break
            dist.all_reduce(torch.ones(4))
        gather(loss, job.world)


def log_of_some(job: Training) -> None:
    for step, batch in job.batches():
        job.train(batch)
        if step == options.after and job.rank in NEIGHBOURS:
            dist.broadcast(torch.ones(2), src=NEIGHBOURS[0])  # HANGS: guard-tuple


def save(job: Training, step: int) -> None:
    if step != options.after or job.rank != options.culprit:
        return
    dist.barrier()  # HANGS: guard-return


def save_on_one(job: Training) -> None:
    for step, batch in job.batches():
        job.train(batch)
        save(job, step)


def exchange(job: Training, halo: torch.Tensor, receives: bool) -> None:
    after, before = (job.rank + 1) % job.world, (job.rank - 1) % job.world
    ops = [dist.P2POp(dist.isend, halo, after)]
    if receives:
        ops.append(dist.P2POp(dist.irecv, torch.empty_like(halo), before))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def exchange_in_a_ring(job: Training) -> None:
    for step, batch in job.batches():
        job.train(batch)
        exchange(job, torch.ones(200_000), receives=not job.misbehaves(step))


def share_plan(root: int, plan: list[object]) -> None:
    dist.broadcast_object_list(plan, src=root)  # HANGS: object-roots


def share_from_two(job: Training) -> None:
    usual = (options.culprit + 1) % job.world
    for step, batch in job.batches():
        job.train(batch)
        if step == options.after:
            share_plan(job.rank if job.rank == options.culprit else usual, [{"step": step}, "x" * 100_000])


WAYS = {
    "trainer": train_in_a_thread, "future": evaluate_in_a_future, "loop-barrier": reduce_each, "unused": reduce_used,
    "loop-break": break_early, "guard-tuple": log_of_some, "guard-return": save_on_one, "ring": exchange_in_a_ring,
    "object-roots": share_from_two,
}  # fmt: skip


def main() -> None:
    with Training(options) as job:
        WAYS[options.how](job)


if __name__ == "__main__":
    main()
