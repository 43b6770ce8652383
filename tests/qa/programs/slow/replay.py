"""Reinforcement learning with a replay buffer of linked Python objects, which the garbage collector has to visit."""

import collections
import gc
import random
import time

import planting
import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel


class Transition:
    def __init__(self, state, previous):
        self.state, self.previous, self.next = state, previous, None
        if previous is not None:
            previous.next = self


class Episode:
    def __init__(self, length):
        self.steps = []
        last = None
        for _ in range(length):
            last = Transition([random.random()], last)
            self.steps.append(last)


class Buffer:
    def __init__(self, capacity):
        self.episodes = collections.deque(maxlen=capacity)

    def collect(self, count, length):
        for _ in range(count):
            self.episodes.append(Episode(length))

    def sample(self, size):
        episodes = random.choices(self.episodes, k=size)
        return torch.tensor([random.choice(episode.steps).state for episode in episodes])


def release_memory():
    gc.collect()  # SLOW: release


def main():
    parser = planting.parser()
    parser.add_argument("--held", type=int, default=4000, help="episodes that the planted rank holds more")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    buffer = Buffer(40)
    buffer.collect(40, 20)
    if args.how == "manual":
        gc.disable()
    policy = DistributedDataParallel(torch.nn.Linear(1, 8))
    optimizer = torch.optim.Adam(policy.parameters())
    more, episodes = None, []
    if rank == args.slow_rank:  # a second buffer, made in advance: only its visits are to cost time
        more = Buffer(args.held)
        more.collect(args.held, 100)
        gc.collect()
        gc.freeze()
    step = 1
    while plant.more(step):
        if plant.active and more is not None and gc.get_freeze_count():
            gc.unfreeze()
        buffer.collect(2, 20)
        if plant.hits("release") and step % 2:
            release_memory()
        if args.how == "manual" and step % 3 == 0:  # on all ranks, so that they collect at the same time
            gc.collect()  # SLOW: manual
        if args.how == "sawtooth" and step % 40 == 0:  # on all ranks
            episodes = [Episode(100) for _ in range(200)]
            gc.collect()
        loss = policy(buffer.sample(32)).square().mean()
        time.sleep(0.2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    del episodes
    planting.finish()


if __name__ == "__main__":
    main()
