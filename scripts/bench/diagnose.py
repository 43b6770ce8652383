"""Measures the cost of a verdict from a folder of Flight Recorder dumps, next to torchfrtrace and plain unpickling.

    python -m scripts.bench diagnose [--ranks 256] [--entries 2000] [--rounds 3] [--json FILE]
    python -m scripts.bench diagnose --many 4096     # also 4096 ranks (1.4 GB in /tmp), safelaunch only
    python -m scripts.bench diagnose --many 4096 --hard   # and with two culprits, and a cycle over two groups
    python -m scripts.bench diagnose --live          # also a live hang of 8 ranks: its diagnosis and reports
    python -m scripts.bench diagnose --log 1000      # also a log of 1,000 MB in which nothing went wrong

The dumps have the form that NCCL's recorder writes: version 2.10, eight frames per entry, frame dictionaries shared
between entries. One rank's last operation differs from its peers'; ``--hard``: two ranks' operations differ, or one
rank enters two groups in the opposite order. The log has steps, warnings and progress bars of
eight ranks. Each program runs in its own process; times are CPU times.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.bench.detect import RANKS, hang
from scripts.bench.lib import BenchError, Figure, environment, figure, program, progress, run_bench, workplace

NOTHING_WRONG = 1  # the exit code
TWO_CULPRITS, GROUP_ORDER = "two culprits", "a cycle over two groups"
FAULTS = ("one culprit", TWO_CULPRITS, GROUP_ORDER)
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
UNPICKLE = """
import pathlib, pickle, sys
for path in pathlib.Path(sys.argv[1]).iterdir():
    with path.open("rb") as file:
        pickle.load(file)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=0, metavar="RANKS")
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--log", type=int, default=0, metavar="MB")
    return run_bench("bench_diagnose", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    found = measure_folder(options.ranks, options.entries, options.rounds)
    if options.many:
        per_rank_s = median(found[0].values) / options.ranks
        for fault in FAULTS if options.hard else FAULTS[:1]:
            found += measure_many(options.many, options.entries, fault, per_rank_s)
    if options.live:
        found += measure_live(options.rounds)
    if options.log:
        found += measure_log(options.log, options.rounds)
    return found


def measure_folder(ranks: int, entries: int, rounds: int) -> list[Figure]:
    with workplace(unpickle=UNPICKLE) as here:
        folder = write(here, ranks, entries)
        ours = [program("safelaunch"), "diagnose", str(folder), "--json"]
        theirs = [program("torchfrtrace"), str(folder), "-p", "nccl_trace_rank_"]
        alone = [sys.executable, str(here / "unpickle.py"), str(folder)]
        found: dict[str, list[Cost]] = {"safelaunch": [], "torchfrtrace": [], "unpickling": []}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for name, argv in zip(found, (ours, theirs, alone), strict=True):
                found[name].append(cost(argv, here))
    cpu = {name: [row.cpu_s for row in rows] for name, rows in found.items()}
    wall = {name: [row.wall_s for row in rows] for name, rows in found.items()}
    faster = [theirs / ours for theirs, ours in zip(wall["torchfrtrace"], wall["safelaunch"], strict=True)]
    cheaper = [theirs / ours for theirs, ours in zip(cpu["torchfrtrace"], cpu["safelaunch"], strict=True)]
    above = [ours / alone for ours, alone in zip(cpu["safelaunch"], cpu["unpickling"], strict=True)]
    size = f"{ranks} ranks x {entries} entries"
    return [
        figure(f"safelaunch diagnose, {size}: CPU", cpu["safelaunch"], "s"),
        figure("  wall", wall["safelaunch"], "s"),
        figure("  CPU, relative to just unpickling the same files", above, "x", "<= 1.5"),
        figure("  faster than torchfrtrace (wall)", faster, "x", ">= 10"),
        figure("  less CPU than torchfrtrace", cheaper, "x"),
        figure("  peak memory", [row.peak_mb for row in found["safelaunch"]], "MB", "<= 300"),
        figure("torchfrtrace: CPU", cpu["torchfrtrace"], "s"),
        figure("  wall", wall["torchfrtrace"], "s"),
        figure("  peak memory", [row.peak_mb for row in found["torchfrtrace"]], "MB"),
        figure("unpickling the same files alone: CPU", cpu["unpickling"], "s"),
    ]


def measure_many(ranks: int, entries: int, fault: str, cpu_s_per_rank: float) -> list[Figure]:
    with workplace() as here:
        folder = write(here, ranks, entries, fault)
        progress(f"reading {ranks} dumps")
        spent = cost([program("safelaunch"), "diagnose", str(folder), "--json"], here)
    size = f"{ranks} ranks x {entries} entries, {fault}"
    return [
        figure(f"safelaunch diagnose, {size}: wall", [spent.wall_s], "s", "<= 60"),
        figure("  CPU", [spent.cpu_s], "s"),
        figure("  CPU per rank, relative to the smaller folder", [spent.cpu_s / ranks / cpu_s_per_rank], "x"),
        figure("  peak memory", [spent.peak_mb], "MB", "<= 1000"),
    ]


def measure_live(rounds: int) -> list[Figure]:
    runs = [hang(number * 3 % RANKS, ("--stall-timeout", "3")) for number in range(rounds)]
    taken = [run.stages["written"] - run.stages["evidence complete"] for run in runs]
    return [figure(f"a live hang of {RANKS} ranks: diagnosis and reports, wall", taken, "s", "<= 0.5")]


def measure_log(size_mb: int, rounds: int) -> list[Figure]:
    with workplace() as here:
        write_log(here / "job.log", size_mb)
        spent = []
        for number in range(rounds):
            progress(f"reading the log, {number + 1} of {rounds}")
            spent.append(cost([program("safelaunch"), "diagnose", str(here / "job.log")], here, code=NOTHING_WRONG))
    return [
        figure(f"safelaunch diagnose, a log of {size_mb} MB: CPU", [row.cpu_s for row in spent], "s"),
        figure("  MB per second of CPU", [size_mb / row.cpu_s for row in spent], "MB/s", ">= 50"),
        figure("  peak memory", [row.peak_mb for row in spent], "MB", "<= 300"),
    ]


def write_log(path: Path, size_mb: int) -> None:
    """Writes what a job of eight ranks prints while nothing goes wrong."""
    with path.open("w") as file:
        for step in itertools.count():
            for rank in range(8):
                file.write(
                    f"[rank{rank}]: 2026-03-01 12:{step // 60 % 60:02}:{step % 60:02},{rank}17 INFO train: step={step} "
                    f"loss={8 / (step + 2):.4f} lr=3.0e-04 grad_norm={1 + rank / 7:.3f} tokens/s={12000 + step % 97}\n"
                )
            if step % 10 == 0:
                file.write(
                    f"\rEpoch 0:  {step % 100}%|###       | {step}/100000 [00:12<1:02:44, 26.49it/s, loss=0.1]\n"
                )
            if step % 50 == 0:
                file.write("[rank0]: .../torch/utils/checkpoint.py:85: UserWarning: None of the inputs have grad\n")
            if step % 200 == 0 and file.tell() >= size_mb << 20:
                return


def write(here: Path, ranks: int, entries: int, fault: str = FAULTS[0]) -> Path:
    """Writes a folder of dumps. The rank a third of the way through is at fault, and with two culprits the next one."""
    folder = here / "dumps"
    folder.mkdir()
    progress(f"writing {ranks} dumps")
    culprits = {ranks // 3, ranks // 3 + 1} if fault == TWO_CULPRITS else {ranks // 3}
    if fault == GROUP_ORDER:
        entries -= 1 - entries % 2  # the peers stop at the first of two calls, and the culprit at the second
    for rank in range(ranks):
        dump = make(rank, ranks, entries, fault if rank in culprits else "", groups=2 if fault == GROUP_ORDER else 1)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return folder


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one command: seconds, and the peak resident memory of it and its children in MB."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def cost(argv: Sequence[str], here: Path, code: int = 0) -> Cost:
    """Measures a command, run by a separate parent process. Raises BenchError if it ends with another code."""
    script = (
        "import resource, subprocess, sys, time\n"
        "begin = time.monotonic()\n"
        "code = subprocess.run(sys.argv[1:], stdout=-3, stderr=-3).returncode\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(code, time.monotonic() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=here, env=environment(), capture_output=True, text=True, check=True
    )
    ended, *numbers = done.stdout.split()
    if ended != str(code):
        raise BenchError(f"{' '.join(argv[:2])} ... ended with {ended}")
    return Cost(*map(float, numbers))


def make(rank: int, world: int, entries: int, fault: str = "", groups: int = 1) -> dict[str, object]:
    """Returns one rank's dump.

    Args:
        fault: Its last collective differs from the others' by its operation; with ``GROUP_ORDER``, by its group.
        groups: Number of groups of all ranks, which take turns.
    """
    inner = [
        {"name": "all_reduce", "filename": f"{LIBRARY}/distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": f"{LIBRARY}/c10d_logger.py", "line": 83},
    ]
    places = [
        [*inner, *({"name": f"f{n}", "filename": "/home/me/train.py", "line": line + n} for n in range(6))]
        for line in (30, 35, 40, 50, 60)
    ]
    made = []
    for number in range(entries):
        done, at_ns = number < entries - 1, 1_724_779_239_936_775_119 + number * 10**6
        other = fault if not done else ""
        place = (number + (other == GROUP_ORDER)) % (len(places) if groups == 1 else groups)
        group = place % groups
        made.append({
            "frames": list(places[place]), "record_id": number, "pg_id": group,
            "process_group": (str(group), ("default_pg", "undefined")[group]),
            "collective_seq_id": number // groups + 1, "p2p_seq_id": 0, "op_id": number // groups + 1,
            "profiling_name": "nccl:all_gather" if other not in ("", GROUP_ORDER) else "nccl:all_reduce",
            "time_created_ns": at_ns, "time_discovered_started_ns": at_ns if done else None,
            "time_discovered_completed_ns": at_ns if done else None,
            "input_sizes": [[1024 * (place + 1)]], "input_dtypes": ["Float"],
            "output_sizes": [[1024 * (place + 1)]], "output_dtypes": ["Float"],
            "state": "completed" if done else "scheduled", "retired": done, "timeout_ms": 600_000, "is_p2p": False,
            "thread_id": "140298925697920", "thread_name": "python3",
        })  # fmt: skip
    last = entries // groups
    status = {
        "last_enqueued_collective": last,
        "last_started_collective": last - 1,
        "last_completed_collective": last - 1,
    }
    config = {"desc": "default_pg", "ranks": str(list(range(world)))}
    return {
        "version": "2.10",
        "entries": made,
        "pg_config": {str(group): {"name": str(group), **config} for group in range(groups)},
        "pg_status": {str(group): status for group in range(groups)},
    }


if __name__ == "__main__":
    sys.exit(main())
