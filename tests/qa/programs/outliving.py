"""Ranks that raise and never exit: what runs on their way out waits for the peers, which wait for them."""

from __future__ import annotations

import argparse
import atexit
import sys
import threading

import uncompiled  # noqa: F401
import torch
import torch.distributed as dist


def close() -> None:
    dist.barrier()  # WAITS: close


def guard(*error: object) -> None:
    sys.__excepthook__(*error)
    dist.barrier()  # WAITS: hook


def report() -> None:
    threading.Event().wait()  # WAITS: thread


def batch(data: list[torch.Tensor], step: int) -> torch.Tensor:
    return data[step]  # FAILS: batch


def train(data: list[torch.Tensor]) -> None:
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(1_000_000):
        (weight * batch(data, step % 1000)).sum().backward()
        dist.all_reduce(weight.grad)  # WAITS: peer
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("handler", "hook", "thread", "finally"), required=True)
    parser.add_argument("--raise-on", default="1", help="the ranks that raise, as in 0,2")
    parser.add_argument("--steps", type=int, default=5, help="before that")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    raises = str(dist.get_rank()) in args.raise_on.split(",")
    data = [torch.ones(4)] * (args.steps if raises else 1000)
    if args.how == "handler":
        atexit.register(close)
    elif args.how == "hook":
        sys.excepthook = guard
    elif args.how == "thread" and raises:
        threading.Thread(target=report, name="reporter").start()
    try:
        train(data)
    finally:
        if args.how == "finally":
            dist.barrier()  # WAITS: finally


if __name__ == "__main__":
    main()
