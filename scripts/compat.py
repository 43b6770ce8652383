"""Runs a smoke set under several versions of torch, each in a virtual environment of its own, and prints a table.

    python scripts/compat.py                            # 2.6.0, 2.9.1 and 2.13.0
    python scripts/compat.py --torch 2.7.1 --keep DIR   # one version; environments stay in DIR for the next time

What is installed is the wheel, as a user would have it. The builds of older versions take gigabytes: not for CI. Where
pip finds a build without CUDA, that does as well: ``PIP_INDEX_URL`` and ``PIP_EXTRA_INDEX_URL`` count as ever.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.6.0", "2.9.1", "2.13.0")

# What differs between versions: torchrun's options, elastic's internals that the agent's beacon wraps, the worker
# server and the Flight Recorder, the names of c10d's frames. One test of each kind, or all of a quick file.
SMOKE = (
    "tests/unit/test_argv.py",
    "tests/unit/test_torchrun_options.py",
    "tests/integration/test_differential.py",
    "tests/integration/test_beacon.py",
    "tests/integration/test_healthy_exit.py",
    "tests/integration/test_crashes.py::test_an_exception_on_one_rank",
    "tests/integration/test_crashes.py::test_a_clean_early_exit_names_who_left_early",
    "tests/integration/test_hangs.py",
    "tests/integration/test_restart.py",
)
HANGS = "asleep or mismatch or init or worker or lock or gil or p2p"
PROBE = """
import json, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
print(json.dumps({"torch": torch.__version__, "worker server": hasattr(c10d, "_WorkerServer"),
                  "fr json": hasattr(c10d, "_dump_fr_trace_json"), "fr": hasattr(c10d, "_dump_fr_trace")}))
"""


@dataclass
class Outcome:
    """One version: what torch can, and how the smoke set went. ``problem``: why it could not be run."""

    version: str
    features: dict[str, object] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""
    failures: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"one version ({', '.join(VERSIONS)})")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the environments here, and leave them")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that makes the environments")
    parser.add_argument("--hangs", default=HANGS, help="which hangs, as pytest's -k (the whole zoo: '')")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the outcomes")
    words = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        wheel = build_wheel(words.python, Path(scratch))
        for version in words.torch or VERSIONS:
            outcomes.append(check(version, wheel, words.keep or Path(scratch), words.python, words.hangs))
            print(row(outcomes[-1]), flush=True)
    print("\n".join(table(outcomes)))
    if words.json is not None:
        words.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if all(o.passed and not o.failed and not o.problem for o in outcomes) else 1


def build_wheel(python: str, scratch: Path) -> Path:
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(scratch), str(ROOT)])
    return next(scratch.glob("safelaunch-*.whl"))


def check(version: str, wheel: Path, place: Path, python: str, hangs: str) -> Outcome:
    """Makes the environment where it is not there yet, and runs the smoke set in it."""
    outcome = Outcome(version)
    begin = time.monotonic()
    home = place / f"torch-{version}"
    inside = home / "bin" / "python"
    try:
        if not inside.exists():
            run([python, "-m", "venv", str(home)])
        if (
            run([str(inside), "-c", "import torch; print(torch.__version__)"], may_fail=True).split("+")[0].strip()
            != version
        ):
            run([str(inside), "-m", "pip", "install", "-q", f"torch=={version}"])
        run([str(inside), "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", str(wheel)])
        run([str(inside), "-m", "pip", "install", "-q", f"{wheel}[test]"])
        outcome.features = json.loads(run([str(inside), "-c", PROBE]))
        smoke(inside, hangs, outcome)
    except RuntimeError as error:
        outcome.problem = str(error)
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def smoke(python: Path, hangs: str, outcome: Outcome) -> None:
    """pytest over the smoke set, from a directory in which the checkout's own package is not importable."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    for files, only in (
        ([name for name in SMOKE if "test_hangs" not in name], ""),
        (["tests/integration/test_hangs.py"], hangs),
    ):
        command = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
        command += ["-k", only] if only else []
        done = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
        outcome.passed += counts.get("passed", 0)
        outcome.failed += counts.get("failed", 0) + counts.get("error", 0)
        outcome.skipped += counts.get("skipped", 0)
        outcome.failures += re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if not counts:
            raise RuntimeError(f"pytest ran nothing: {(done.stdout + done.stderr)[-800:]}")


def run(command: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command[:5])} ...: {done.stderr.strip()[-600:]}")
    return done.stdout


def row(outcome: Outcome) -> str:
    can = [name for name, there in outcome.features.items() if there is True]
    result = outcome.problem or f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    return f"{outcome.version:<9}{', '.join(can) or '-':<32}{result} ({outcome.seconds:.0f} s)"


def table(outcomes: list[Outcome]) -> list[str]:
    lines = ["", f"{'torch':<9}{'has':<32}smoke set", *map(row, outcomes)]
    return [*lines, *(f"  {outcome.version}: {name}" for outcome in outcomes for name in outcome.failures)]


if __name__ == "__main__":
    sys.exit(main())
