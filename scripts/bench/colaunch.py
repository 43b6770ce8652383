"""Measures the scheduling overhead of ``safelaunch colaunch``: how much longer a sweep takes than its jobs need.

    python -m scripts.bench colaunch [--jobs 30] [--seconds 3] [--slots 4] [--ranks 0] [--json FILE]

The ideal makespan is the number of rounds (30 jobs on 4 slots: 8) times the median time of a single launch of the same
job, measured on its own. With ``--ranks N``, jobs are torchrun jobs of N ranks. The default 0 runs plain processes
(``exec``), whose start does not depend on how many others start at the same moment. With torch on few cores, jobs that
import it at the same time slow each other down, which the scheduler can't help. The script measures that effect as
well: it starts ``--slots`` single launches at once, without colaunch.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from scripts.bench.lib import BenchError, Figure, environment, figure, program, progress, run, run_bench, workplace

JOB = """
import sys, time
time.sleep(float(sys.argv[1]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30, help="jobs of the sweep (30)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each job sleeps (3)")
    parser.add_argument("--slots", type=int, default=4, help="concurrent jobs (4)")
    parser.add_argument("--ranks", type=int, default=0, help="ranks per job; 0: a plain process (0)")
    parser.add_argument("--singles", type=int, default=5, help="single launches to measure (5)")
    parser.add_argument("--sweeps", type=int, default=1, help="runs of the sweep (1)")
    return run_bench("bench_colaunch", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    words = (
        ["exec", "--", sys.executable, "job.py"]
        if not options.ranks
        else [f"--nproc-per-node={options.ranks}", "job.py"]
    )
    words += [str(options.seconds)]
    with workplace(job=JOB) as here:
        single = [program("safelaunch"), *words]
        run(single, here)  # the first run fills the disk cache
        progress(f"{options.singles} single launches")
        alone = [run(single, here).wall_s for _ in range(options.singles)]
        progress(f"{options.slots} launches at once")
        together = [_at_once(single, options.slots, here) for _ in range(2)]
        sweeps, took = [], []
        for number in range(options.sweeps):
            progress(f"sweep {number + 1} of {options.sweeps}: {options.jobs} jobs on {options.slots} slots")
            sweeps.append(_sweep(options, words, here, f"sweep{number}"))
            took += _durations(here / f"sweep{number}")
    rounds = math.ceil(options.jobs / options.slots)
    kind = f"{options.ranks} ranks each" if options.ranks else "a plain process each"
    return [
        figure(f"single launch of a job that sleeps {options.seconds:g} s ({kind})", alone, "s"),
        figure(f"  {options.slots} at once, without colaunch: until the last has ended", together, "s"),
        figure(f"sweep of {options.jobs} jobs on {options.slots} slots", sweeps, "s"),
        figure("  a job's time within the sweep", took, "s"),
        figure(
            f"makespan / ideal ({rounds} rounds x the single launch)",
            [each / (rounds * median(alone)) for each in sweeps],
            "",
            "<= 1.1",
        ),
        figure(
            f"  the same with {rounds} x {options.slots} launches at once",
            [s / (rounds * median(together)) for s in sweeps],
        ),
    ]


def _at_once(argv: list[str], count: int, here: Path) -> float:
    begin = time.perf_counter()
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(argv, cwd=here, env=environment(), **quiet) for _ in range(count)]
    if any(process.wait() for process in started):
        raise BenchError(f"one of {count} jobs at once failed")
    return time.perf_counter() - begin


def _sweep(options: argparse.Namespace, words: list[str], here: Path, name: str) -> float:
    argv = [program("safelaunch"), "colaunch", "--sweep-dir", name, "--slots", str(options.slots)]
    argv += ["--grid", f"n=1..{options.jobs}", "--", *words, "{n}"]
    return run(argv, here, timeout_s=60 + 20 * options.jobs).wall_s


def _durations(sweep: Path) -> list[float]:
    with (sweep / "summary.csv").open(newline="") as file:
        return [float(row["duration_s"]) for row in csv.DictReader(file)]


if __name__ == "__main__":
    sys.exit(main())
