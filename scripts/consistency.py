"""Runs healthy programs and planted faults under ``--check-every``, and prints what was found of each.

    python scripts/consistency.py [--only NAME,NAME] [--cost]

Every row is a real job of ``tests/integration/programs/replicas.py``. Its steps are checked three by three, so a fault
in step 7 shows at step 9. ``--cost`` measures instead what the checks add to a small training on this machine's CPU:
runs of the same steps with and without them, in turn, by the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "integration" / "programs"
PROGRAM, MORE = PROGRAMS / "replicas.py", PROGRAMS / "replicas_more.py"
EVERY = 3
LINE = r"wrong result: (.+)|(internal error.*|nothing inconsistent.*|the consistency checks.*)"

HEALTHY = {
    "ddp": 2,
    "no-sync": 2,
    "two-optimizers": 2,
    "ema": 2,
    "scaler": 2,
    "lora": 2,
    "local-sgd": 2,
    "alone": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tp": 2,
}
MORE_HEALTHY = {
    "tied": 2,
    "compiled": 2,
    "zero": 2,
    "checkpointed": 2,
    "backbone": 2,
    "outside": 2,
    "pipeline": 2,
    "pipeline-and-data": 4,
    "actors": 3,
    "uneven": 2,
    "gan": 2,
    "averaged": 2,
    "grown": 2,
    "experts": 2,
    "unshared-buffers": 2,
    "compressed": 2,
    "scripted": 2,
    "closures": 2,
    "2d": 4,
    "fsdp1-whole": 2,
    "fsdp1-hybrid": 4,
    "fsdp1-sharded": 2,
}
# ranks, and what the line about it has to say
FAULTS = {
    "seed": (3, r"diverged at step 1: .* parameters, the first is 0\.weight"),
    "forgotten-broadcast": (3, r"diverged at step 1: rank 0 differs from the others in 2\.weight"),
    "left-out": (2, r"diverged at step 1: rank 0 against rank 1 in .*4\.weight"),
    "missing-sync": (2, r"diverged between steps 6 and 9: rank 0 against rank 1 in .*0\.weight"),
    "bit-flip": (3, r"diverged between steps 6 and 9: rank 2 differs from the others in .*2\.weight"),
    "hsdp-flip": (4, r"diverged between steps 6 and 9: rank 0 against rank 2 in .*0\.weight"),
    "tp-flip": (4, r"diverged between steps 6 and 9: rank 2 differs from the others in .*0\.weight"),
    "nan": (3, r"not finite on rank 1 since step 7.*one rank diverged"),
    "batch-norm": (2, r"buffers that should be replicas diverged .*5\.running_mean"),
    "loss": (3, r"loss: rank 1 went its own way"),
}
MORE_FAULTS = {
    "restored": (3, r"diverged between steps 6 and 9: rank 1 differs from the others"),
    "compiled-restored": (3, r"diverged between steps 6 and 9: rank 1 differs from the others"),
    "fsdp2-nan": (3, r"not finite on rank 1 since step 7.*one rank diverged"),
    "fsdp1-flip": (3, r"diverged between steps 6 and 9: rank 2 differs from the others"),
    "fsdp1-hybrid-flip": (4, r"diverged between steps 6 and 9: rank 1 against rank 3"),
}


def run(kind: str, ranks: int, *options: str, steps: int = 60, **env: str) -> tuple[int, list[str]]:
    """The exit code of a job and its lines about wrong results."""
    program = MORE if kind in (*MORE_HEALTHY, *MORE_FAULTS) else PROGRAM
    command = [sys.executable, "-m", "safelaunch", *options, f"--nproc-per-node={ranks}", os.fspath(program)]
    around = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [*command, kind, str(steps)], env=around, capture_output=True, text=True, timeout=300, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode:
        print(said, file=sys.stderr)
    return done.returncode, [a or b for a, b in re.findall(LINE, said)]


def table(only: set[str]) -> bool:
    """Prints a row for each program; returns whether all were right."""
    print("| program | ranks | right | what safelaunch said |\n|---|---|---|---|")
    right = True
    for kind, ranks in (HEALTHY | MORE_HEALTHY).items():
        if not only or kind in only:
            code, lines = run(kind, ranks, "--check-every", str(EVERY))
            right &= _row(kind, ranks, not code and _is_quiet(lines), lines)
    for kind, (ranks, expected) in (FAULTS | MORE_FAULTS).items():
        if not only or kind in only:
            code, lines = run(kind, ranks, "--check-every", str(EVERY))
            right &= _row(kind, ranks, not code and any(re.search(expected, line) for line in lines), lines)
    return right


def _is_quiet(lines: list[str]) -> bool:
    return len(lines) == 1 and lines[0].startswith("nothing inconsistent")


def _row(kind: str, ranks: int, right: bool, lines: list[str]) -> bool:
    print(f"| {kind} | {ranks} | {'yes' if right else '**no**'} | {'<br>'.join(lines) or '-'} |", flush=True)
    return right


def cost(pairs: int) -> None:
    """Times one process that trains, with checks and without, in turn."""
    ratios, plain_ms = [], []
    for number in range(pairs):
        times = {every: _timed(every) for every in ((0, 100) if number % 2 else (100, 0))}
        ratios.append(times[100] / times[0] - 1)
        plain_ms.append(times[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a step of {statistics.median(plain_ms):.2f} ms of CPU time; --check-every 100 adds {middle:+.2%}")
    print(f"quartiles {low:+.2%} to {high:+.2%}, {pairs} pairs")


def _timed(every: int) -> float:
    """CPU milliseconds per step of one process. CPU time, because other programs may have the cores."""
    options = ["--check-every", str(every)] if every else []
    command = [sys.executable, "-m", "safelaunch", *options, "--nproc-per-node=1", os.fspath(PROGRAM), "cost", "600"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=True
    )
    return float(re.search(r"step_ms ([0-9.]+)", done.stdout)[1])  # type: ignore[index]  # the program prints it


def main() -> int:
    """Parses the arguments; exits with 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs, with commas between")
    parser.add_argument("--cost", action="store_true", help="measure the cost instead")
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.cost:
        cost(arguments.pairs)
        return 0
    return 0 if table(set(filter(None, arguments.only.split(",")))) else 1


if __name__ == "__main__":
    sys.exit(main())
