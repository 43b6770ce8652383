"""Measures what safelaunch adds to a job that does nothing, and what the supervisor itself uses while watching a job.

    python -m scripts.bench launch [--pairs 15] [--seconds 30] [--json FILE]

Measures the wall time of ``print("hi")`` on 2 ranks under safelaunch and under torchrun. Then it measures the resident
memory and CPU of the supervisor (and of its helpers, if any) while 8 ranks step every 50 ms.
"""

from __future__ import annotations

import argparse
import sys
import time

import psutil

from scripts.bench.lib import (
    BenchError,
    Figure,
    Pairs,
    Took,
    figure,
    interleave,
    program,
    progress,
    ratios,
    run,
    run_bench,
    started,
    wait_for,
    workplace,
)

HI = 'print("hi")\n'
STEPS = """
import os, time
from pathlib import Path
import safelaunch

safelaunch.step()
Path(f"stepping-{os.environ['RANK']}").touch()
while True:
    safelaunch.step()
    time.sleep(0.05)
"""
RANKS = 8
SETTLE_S = 5.0  # by then the supervisor has done its imports and one-time work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs (15)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure the CPU (30)")
    return run_bench("bench_launch", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    return [
        *wall_time(options.pairs),
        *own_needs(options.seconds, []),
        *own_needs(options.seconds, ["--preset", "hang-debug"]),
    ]


def wall_time(pairs: int) -> list[Figure]:
    """Compares safelaunch with torchrun on a script that ends at once."""
    with workplace(hi=HI) as here:

        def launch(name: str) -> Took:
            return run([program(name), "--nproc-per-node=2", "hi.py"], here)

        launch("safelaunch"), launch("torchrun")  # the first run fills the disk cache
        ab, aa = interleave(pairs, lambda: launch("safelaunch"), lambda: launch("torchrun"), "hi")

    def part(took: Pairs[Took], what: str) -> Pairs[float]:
        return [(getattr(a, what), getattr(b, what)) for a, b in took]

    wall, cpu = part(ab, "wall_s"), part(ab, "cpu_s")
    return [
        *ratios('print("hi"), 2 ranks: safelaunch / torchrun', wall, part(aa, "wall_s"), "<= 1.05"),
        figure("  torchrun alone", [b for _, b in wall], "s"),
        figure("  added by safelaunch", [1000 * (a - b) for a, b in wall], "ms"),
        *ratios("  the same in CPU time", cpu, part(aa, "cpu_s")),
        figure("  CPU added by safelaunch", [1000 * (a - b) for a, b in cpu], "ms"),
    ]


def own_needs(seconds: float, options: list[str]) -> list[Figure]:
    """Measures memory and CPU of the supervisor while it watches a job."""
    with workplace(steps=STEPS) as here:
        argv = [program("safelaunch"), *options, f"--nproc-per-node={RANKS}", "steps.py"]
        with started(argv, here) as process:
            wait_for(lambda: len(list(here.glob("stepping-*"))) == RANKS, process, "all ranks step", timeout_s=120)
            time.sleep(SETTLE_S)
            progress(f"watching {RANKS} ranks for {seconds:g} s {' '.join(options)}")
            own = own_processes(process.pid)
            before, begin = cpu_s(own), time.monotonic()
            time.sleep(seconds)
            percent = 100 * (cpu_s(own) - before) / (time.monotonic() - begin)
            if process.poll() is not None:
                raise BenchError(f"the job ended with {process.returncode} while it was watched")
            memory = [one.memory_full_info() for one in own]
    name = f"{RANKS} ranks{', ' if options else ''}{' '.join(options)}"
    mib = 1 << 20
    note = "" if len(own) == 1 else f"the supervisor and {len(own) - 1} helper(s) together"
    return [
        figure(f"own memory, resident ({name})", [sum(m.rss for m in memory) / mib], "MiB", "<= 40", note),
        figure("  proportional (PSS)", [sum(m.pss for m in memory) / mib], "MiB"),
        figure("  unshared (USS)", [sum(m.uss for m in memory) / mib], "MiB"),
        figure(f"own CPU ({name})", [percent], "% of a core", "<= 0.5", f"over {seconds:g} s"),
    ]


def own_processes(supervisor: int) -> list[psutil.Process]:
    """Returns the supervisor and its children. One of them, the guardian, is the parent of the job."""
    parent = psutil.Process(supervisor)
    return [parent, *parent.children()]


def cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


if __name__ == "__main__":
    sys.exit(main())
