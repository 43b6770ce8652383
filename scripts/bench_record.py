"""Measures what `safelaunch record` costs the run that it samples: the same run's steps with and without, in turns.

    python scripts/bench_record.py [--pairs 10] [--duration 10] [--nproc 2] [--json FILE]

One job trains all the while. A pair is a window of the job's steps while it is sampled and one of the same length while
it is not, in changing order, so that what else the machine does meets both. Beside it, two windows without sampling.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchlib import BenchError, Figure, environment, figure, program, progress, run, run_bench, started, workplace

TRAIN = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(1024, 512)
steps = 0
while True:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    steps += 1
    if dist.get_rank() == 0 and steps % 10 == 0:
        with open("steps", "w") as file:
            file.write(f"{steps} {time.perf_counter()}")
"""
START_S = 180.0


def steps_of(place: Path) -> tuple[int, float]:
    """How many steps the job has made, and when it said so."""
    for _ in range(1000):
        try:
            steps, at_s = (place / "steps").read_text().split()
            return int(steps), float(at_s)
        except (OSError, ValueError):  # it is being written
            time.sleep(0.01)
    raise BenchError("the job made no steps")


def rate(place: Path, seconds: float, argv: list[str] | None) -> float:
    """Steps a second over so long, meanwhile with a recording of that duration, if ``argv`` says so."""
    before, begin_s = steps_of(place)
    if argv is None:
        time.sleep(seconds)
    else:
        run(argv, place, environment())
    after, end_s = steps_of(place)
    if after <= before:
        raise BenchError("the job made no steps")
    return (after - before) / (end_s - begin_s)


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> list[Figure]:
    """The loss in per cent, and that of a run against itself."""
    sampled: list[float] = []
    itself: list[float] = []
    cpu: list[float] = []
    record = [
        program("safelaunch"),
        "record",
        "bench-record",
        "--duration",
        str(options.duration),
        "--bundle-dir",
        "out",
    ]
    with workplace() as place:
        (place / "train.py").write_text(TRAIN)
        job = [program("safelaunch"), "--run-name", "bench-record", f"--nproc-per-node={options.nproc}", "train.py"]
        with started(job, place, environment()) as supervisor:
            until = time.monotonic() + START_S
            while not (place / "steps").exists() or steps_of(place)[0] < 100:
                if time.monotonic() > until:
                    raise BenchError("the job did not start")
                time.sleep(0.2)
            for number in range(options.pairs):
                order = (record, None, None) if number % 2 else (None, None, record)
                before_s = cpu_s(supervisor.pid)
                rates = [rate(place, options.duration, argv) for argv in order]
                node_s = options.duration * (os.cpu_count() or 1)
                cpu.append(100 * (cpu_s(supervisor.pid) - before_s) / node_s)
                middle = rates[1]
                with_it, without = (rates[0], rates[2]) if number % 2 else (rates[2], rates[0])
                sampled.append(100 * (1 - with_it / middle))
                itself.append(100 * (1 - without / middle))
                progress(f"pair {number + 1} of {options.pairs}: {sampled[-1]:+.2f} %, itself {itself[-1]:+.2f} %")
    return [
        figure("throughput lost while it is sampled", sampled, "%", "<= 2"),
        figure("the same run against itself", itself, "%"),
        figure("CPU of py-spy and the supervisor, of all cores", cpu, "%", "<= 2"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of a recording")
    parser.add_argument("--nproc", type=int, default=min(2, os.cpu_count() or 1), help="ranks")
    return run_bench("bench_record", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
