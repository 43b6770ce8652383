"""Measures the cost of a lease: taking one GPU of eight and releasing it, with 50 contenders, without NVML.

    python -m scripts.bench leases [--contenders 50] [--rounds 40] [--hold-ms 20] [--json FILE]

Every contender retries until it gets a GPU, then holds it for a while. The result is the time of the successful attempt
and of the release, including waits for the lock. It excludes the time until a GPU is free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping

from safelaunch.leases.holder import LeaseHolder, ourselves
from safelaunch.leases.store import LeaseStore
from scripts.bench.lib import BenchError, Figure, figure, progress, run_bench

GPUS = [f"GPU-{number:08d}-0000-4000-8000-000000000000" for number in range(8)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", type=int, default=50, help="processes that compete for a GPU (50)")
    parser.add_argument("--rounds", type=int, default=40, help="leases per process (40)")
    parser.add_argument("--hold-ms", type=float, default=20.0, help="mean hold time of a lease (20)")
    return run_bench("bench_leases", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for contenders, target in ((1, ""), (options.contenders, "<= 2.0")):
        progress(f"{contenders} contender(s), {options.rounds} leases each")
        took = contend(contenders, options.rounds, options.hold_ms / 1000)
        both = [take + release for take, release, _ in took]
        name = f"take and release, {contenders} contender{'s' * (contenders != 1)}"
        figures += [
            figure(name, both, "ms", target),
            figure("  take", [take for take, _, _ in took], "ms"),
            figure("  release", [release for _, release, _ in took], "ms"),
            figure("  an attempt in vain", [refused for *_, many in took for refused in many] or [0.0], "ms"),
        ]
    return figures


def contend(contenders: int, rounds: int, hold_s: float) -> list[tuple[float, float, list[float]]]:
    """Returns ``(take, release, failed attempts)`` in ms for each lease."""
    with tempfile.TemporaryDirectory(prefix="bench") as place:
        start_at = time.monotonic() + 0.5 + contenders * 0.02
        children = [_child(LeaseStore(f"{place}/leases"), rounds, hold_s, start_at) for _ in range(contenders)]
        took = []
        for pid, read in children:
            with os.fdopen(read) as file:
                text = file.read()
            if os.waitpid(pid, 0)[1]:
                raise BenchError("a contender failed")
            took += [(take, release, vain) for take, release, vain in json.loads(text)]
    return took


def _child(store: LeaseStore, rounds: int, hold_s: float, start_at: float) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        text = json.dumps(_take_often(store, rounds, hold_s, start_at))
        with os.fdopen(write, "w") as file:
            file.write(text)
        os._exit(0)
    finally:
        os._exit(1)


def _take_often(
    store: LeaseStore, rounds: int, hold_s: float, start_at: float
) -> list[tuple[float, float, list[float]]]:
    random.seed(os.getpid())
    about = ourselves("bench", "leases.py")
    time.sleep(max(0.0, start_at - time.monotonic()))
    took = []
    for _ in range(rounds):
        vain = []
        while True:
            begin = time.perf_counter()
            lease = store.attempt(GPUS, _first_free, about).lease
            spent = 1000 * (time.perf_counter() - begin)
            if lease is not None:
                break
            vain.append(spent)
            time.sleep(random.uniform(0.5, 1.5) * 0.1)  # the interval of a real waiter
        time.sleep(hold_s * random.uniform(0.5, 1.5))
        begin = time.perf_counter()
        lease.release()
        took.append((spent, 1000 * (time.perf_counter() - begin), vain))
    return took


def _first_free(held: Mapping[str, LeaseHolder]) -> list[str] | None:
    free = [gpu for gpu in GPUS if gpu not in held]
    return free[:1] or None


if __name__ == "__main__":
    sys.exit(main())
