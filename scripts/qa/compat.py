"""Runs a smoke set under several versions of torch, each in its own virtual environment, and prints a table.

    python -m scripts.qa compat                            # 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0
    python -m scripts.qa compat --torch 2.7.1 --keep DIR   # one version; keep its environment in DIR

Each environment installs the wheel, as a user would, and runs a copy of the tests that contains no other safelaunch.
Older builds of torch take gigabytes, too much for CI. Builds without CUDA work as well: pip follows ``PIP_INDEX_URL``
and ``PIP_EXTRA_INDEX_URL``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.6.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0")

# The tests cover what differs between versions: torchrun's options, elastic's internals that the agent's beacon wraps,
# the worker server, the Flight Recorder, the names of c10d's frames, the store. One test of each kind, or all of a
# quick file.
SMOKE = (
    "tests/unit/test_job_argv.py",
    "tests/unit/test_job_torchrun.py",
    "tests/unit/test_supervise_cluster_store.py",
    "tests/unit/test_supervise_cluster_store_host.py",
    "tests/e2e/test_differential.py",
    "tests/e2e/test_beacon.py",
    "tests/e2e/test_healthy_exit.py",
    "tests/e2e/test_crashes.py::test_an_exception_on_one_rank",
    "tests/e2e/test_crashes.py::test_a_clean_early_exit_names_who_left_early",
    "tests/e2e/test_hangs.py",
    "tests/e2e/test_relay.py",
    "tests/e2e/test_restart.py",
    "tests/e2e/test_cluster.py::test_a_hang_has_one_verdict_on_all_nodes",
)
HANGS = (
    "asleep", "read-fifo", "busy-python", "stops-itself", "gil", "all-gather", "barrier", "init-asleep",
    "loader-asleep", "loader-lock", "lock-order", "group-order", "recv-recv", "uneven-barrier", "symmetric",
)  # fmt: skip
# Finds out what a rank of this torch offers: whether the recorder lists gloo collectives, and whether C++ threads or
# only Python can read it. Both of the recorder's variables are set, as in the preset hang-debug. It is off by default
# in 2.6 and 2.9.
PROBE = """
import json, os, pickle, socket, sys, tempfile
os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def ask(path, handler):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(f"POST /handler/{handler} HTTP/1.1\\r\\nContent-Length: 0\\r\\n"
                           "Connection: close\\r\\n\\r\\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\\r\\n\\r\\n")
    return body if head.split()[1] == b"200" else b"{}"

scratch = tempfile.mkdtemp(dir="/tmp")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
server = hasattr(c10d, "_WorkerServer") and c10d._WorkerServer(scratch + "/s")
if server and json.loads(ask(scratch + "/s", "fr_trace_json")).get("entries"):
    gloo = "yes"
else:
    dump = getattr(c10d, "_dump_fr_trace", None)
    gloo = "only to Python" if dump and pickle.loads(dump()).get("entries") else "no"
print(json.dumps({
    "python": sys.version.split()[0], "torch": torch.__version__, "gloo": gloo,
    "server": ("own handlers" if hasattr(c10d, "_register_handler") else "yes") if server else "no",
}), flush=True)
__import__("shutil").rmtree(scratch)
os._exit(0)
"""
# Above the tests and their own conftest.py: makes sure that they import the installed safelaunch.
CONFTEST = """
import sys
from pathlib import Path
import pytest, safelaunch

if not Path(safelaunch.__file__).is_relative_to(Path(sys.prefix, "lib")):
    pytest.exit(f"this is not the installed safelaunch: {safelaunch.__file__}", 3)
"""


@dataclass
class Outcome:
    """One version: what torch offers, and the result of the smoke set. ``problem`` is the reason if it couldn't run."""

    version: str
    features: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""
    failures: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"one version ({', '.join(VERSIONS)})")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="create the environments in this directory and keep them"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter that creates the environments")
    parser.add_argument("--all-hangs", action="store_true", help="run the whole zoo of hangs, not a selection")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="concurrent test files (%(default)s)")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="run only matching tests, like pytest's -k")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the outcomes")
    words = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        place = (words.keep or Path(scratch)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        wheel = build_wheel(words.python, Path(scratch))
        tests = copy_tests(Path(scratch) / "apart")
        for version in words.torch or VERSIONS:
            outcome = Outcome(version)
            begin = time.monotonic()
            try:
                python = prepare(version, wheel, place, words.python)
                outcome.features = json.loads(run([str(python), "-c", PROBE]).splitlines()[-1])
                smoke(python, tests, words, outcome, place / f"torch-{version}.txt")
            except RuntimeError as error:
                outcome.problem = str(error)
            outcome.seconds = round(time.monotonic() - begin, 1)
            outcomes.append(outcome)
            print("\n".join([row(outcome), *(f"    {name}" for name in outcome.failures)]), flush=True)
    print("\n".join(table(outcomes)))
    if words.json is not None:
        words.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if all(o.passed and not o.failed and not o.problem for o in outcomes) else 1


def build_wheel(python: str, scratch: Path) -> Path:
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(scratch), str(ROOT)])
    return next(scratch.glob("safelaunch-*.whl"))


def copy_tests(apart: Path) -> Path:
    """Copies the tests and their settings to a directory without the package: they can't import the checkout's."""
    for name in ("tests", "scripts"):
        shutil.copytree(ROOT / name, apart / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", apart)
    (apart / "conftest.py").write_text(CONFTEST)
    return apart


def prepare(version: str, wheel: Path, place: Path, python: str) -> Path:
    """Returns the interpreter of this version's environment. Creates it if missing, and installs the new wheel."""
    home = place / f"torch-{version}"
    inside = home / "bin" / "python"
    if not inside.exists():
        run([python, "-m", "venv", str(home)])
    there = run([str(inside), "-c", "import torch; print(torch.__version__)"], may_fail=True)
    if there.split("+")[0].strip() != version:
        run([str(inside), "-m", "pip", "install", "-q", f"torch=={version}"])
    run([str(inside), "-m", "pip", "install", "-q", f"{wheel}[test]"])
    run([str(inside), "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", str(wheel)])
    return inside


def smoke(python: Path, tests: Path, words: argparse.Namespace, outcome: Outcome, log: Path) -> None:
    """Runs pytest on the smoke set and saves its output to ``log``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "loadfile"]
    command += ["-n", str(words.workers)]
    hangs = "" if words.all_hangs else "not test_hangs.py or " + " or ".join(f"[{name}-" for name in HANGS)
    chosen = " and ".join(f"({part})" for part in (hangs, words.only) if part)
    command += ["-k", chosen] if chosen else []
    with log.open("w") as file:
        subprocess.run([*command, *SMOKE], cwd=tests, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    said = log.read_text(errors="replace")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said[-400:])}
    if not counts:
        raise RuntimeError(f"pytest ran nothing: {said[-800:]}")
    outcome.passed = counts.get("passed", 0)
    outcome.failed = counts.get("failed", 0) + counts.get("error", 0)
    outcome.skipped = counts.get("skipped", 0)
    outcome.failures = re.findall(r"^((?:FAILED|ERROR) tests/.*)", said, re.MULTILINE)


def run(command: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command[:5])} ...: {done.stderr.strip()[-600:]}")
    return done.stdout


def row(outcome: Outcome) -> str:
    seen = [outcome.features.get(name, "?") for name in ("python", "server", "gloo")]
    result = outcome.problem or f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    return f"| {outcome.features.get('torch', outcome.version)} | {' | '.join(seen)} | {result} |"


def table(outcomes: list[Outcome]) -> list[str]:
    head = [
        "",
        "| torch | Python | worker server | Flight Recorder of gloo | smoke set |",
        "|---|---|---|---|---|",
    ]
    return [*head, *map(row, outcomes)]


if __name__ == "__main__":
    sys.exit(main())
