"""Lists and runs the qualifications: what CI has no time for, at night and before a release.

python -m scripts.qa                     # lists them
python -m scripts.qa zoo --ranks 4       # one of them, with its options
python -m scripts.qa nightly zoo soak    # several, and a table at the end
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q")


@dataclass(frozen=True)
class Qualification:
    """One program. ``minutes`` is its approximate duration on 2 cores."""

    about: str
    minutes: int
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)


def script(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"scripts.qa.{name}", *words)


QUALIFICATIONS = {
    "nightly": Qualification(
        "the tests that CI leaves out",
        40,
        (*PYTEST, "-n", "3", "--dist", "loadgroup", "--whole", "-m", "nightly", "tests"),
    ),
    "generated": Qualification(
        "verdicts on generated jobs, 1,000 of each kind",
        60,
        (*PYTEST, "-n", "2", "tests/unit/test_verdict_synthetic.py"),
        {"SAFELAUNCH_EXAMPLES": "1000"},
    ),
    "zoo": Qualification("each class of hang, with each rank as the culprit", 20, script("zoo")),
    "zoo-default": Qualification(
        "each class with nothing configured", 60, script("zoo", "--default", "--culprit", "1")
    ),
    "zoo-nodes": Qualification("each class on two nodes", 30, script("zoo", "--nodes", "2")),
    "first-word": Qualification("how soon the right rank is on the screen", 30, script("zoo", "--first-word")),
    "attach": Qualification("the zoo under plain torchrun", 30, script("zoo", "--attach", "--culprit", "1")),
    "alive": Qualification("200 healthy programs that wait, compute or are stopped", 60, script("alive")),
    "slow": Qualification(
        "jobs with a slow rank, which must be named, and healthy jobs of an uneven pace", 120, script("slow")
    ),
    "soak": Qualification("healthy and hung jobs of every rhythm", 30, script("soak")),
    "soak-nodes": Qualification("the same on two nodes", 45, script("soak", "--nodes", "2")),
    "faults": Qualification("the fault matrix", 45, script("faults")),
    "faults-nodes": Qualification("the fault matrix for nodes", 60, script("faults", "--nodes", "--jobs", "3")),
    "attacks": Qualification("attacks by dumps, bundles, secrets, other users, kills", 60, script("attacks")),
    "crowd": Qualification("50 runs compete for 8 GPUs", 2, (sys.executable, "-m", "tests.qa.crowd", "--jobs", "50")),
    "slurm": Qualification("sweeps on a private Slurm", 8, script("slurm")),
    "consistency": Qualification("wrong results, planted and absent", 8, script("consistency")),
    "reproductions": Qualification("what `safelaunch reproduce` writes", 30, script("reproductions")),
    "log-verdicts": Qualification("verdicts from logs alone, compared with a watched job's", 5, script("log_verdicts")),
    "frameworks": Qualification("Lightning, Accelerate, DeepSpeed, Trainer", 7, ("bash", "scripts/qa/frameworks.sh")),
    "gpu-check": Qualification("a node with a GPU: readings, leases, a blocked job, cost", 7, script("gpu_check")),
    "compat": Qualification("a smoke set under five versions of torch", 75, script("compat")),
}


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "list"):
        print(__doc__)
        for name, each in QUALIFICATIONS.items():
            print(f"{name:<14} {each.about} ({each.minutes} min)")
        return 0
    if words[0] not in QUALIFICATIONS:
        print(f"there is no {words[0]}; known: {', '.join(QUALIFICATIONS)}", file=sys.stderr)
        return 2
    if len(words) > 1 and all(word in QUALIFICATIONS for word in words):
        return run_all(words)
    return run(words[0], words[1:])


def run(name: str, options: list[str]) -> int:
    each = QUALIFICATIONS[name]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **each.environ}
    return subprocess.run([*each.command, *options], cwd=ROOT, env=environ, check=False).returncode


def run_all(names: list[str]) -> int:
    rows = []
    for name in names:
        print(f"\n== {name}: {QUALIFICATIONS[name].about}", flush=True)
        begin = time.monotonic()
        code = run(name, [])
        rows.append((name, code, time.monotonic() - begin))
    print("\n| | exit code | minutes |\n|---|---|---|")
    for name, code, seconds in rows:
        print(f"| {name} | {code} | {seconds / 60:.0f} |")
    return max(code != 0 for _, code, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
