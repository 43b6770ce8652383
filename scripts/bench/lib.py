"""Shared code of the benchmarks: a clean environment, interleaved pairs, process cleanup, the table of figures."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "safelaunch"
# Variables that would change the measurement or configure safelaunch: the benchmarks run as in a fresh shell.
UNWANTED = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONFAULTHANDLER")
UNWANTED_PREFIXES = ("SAFELAUNCH_", "PET_", "TORCHELASTIC_")


class BenchError(Exception):
    """The benchmark itself failed. A missed target is not a failure."""


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured several times. ``target``, e.g. ``<= 1.05``, applies to the median. Empty: no target."""

    name: str
    values: tuple[float, ...]
    unit: str = ""
    target: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        sign, limit = self.target.split()
        return median(self.values) <= float(limit) if sign == "<=" else median(self.values) >= float(limit)


def figure(name: str, values: Sequence[float], unit: str = "", target: str = "", note: str = "") -> Figure:
    """Creates a ``Figure``. Raises BenchError if nothing was measured."""
    if not values:
        raise BenchError(f"nothing was measured for: {name}")
    return Figure(name, tuple(values), unit, target, note)


def report(bench: str, figures: Sequence[Figure], save: Path | None) -> None:
    """Prints the table, and saves all values to ``save``."""
    about = _about()
    print(f"\n{bench}: {', '.join(f'{key} {value}' for key, value in about.items())}")
    rows = [("figure", "median [min..max]", "n", "target", "met", "")]
    for f in figures:
        low, mid, high = _numbers(min(f.values), median(f.values), max(f.values))
        shown = mid if len(f.values) == 1 else f"{mid} [{low}..{high}]"
        met = {None: "", True: "yes", False: "NO"}[f.met]
        rows.append((f.name, f"{shown} {f.unit}".rstrip(), str(len(f.values)), f.target, met, f.note))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join((*cells, row[5])).rstrip())
    if save is not None:
        document = {"bench": bench, "about": about, "figures": [{**asdict(f), "met": f.met} for f in figures]}
        save.write_text(json.dumps(document, indent=1) + "\n")


def _numbers(*values: float) -> list[str]:
    largest = max(abs(value) for value in values)
    digits = 3 if largest < 10 else 2 if largest < 100 else 1
    return [f"{value:.{digits}f}" for value in values]


def _about() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "cpus": str(os.cpu_count()),
        "load": "/".join(f"{value:.1f}" for value in os.getloadavg()),
    }


# --- the command line -------------------------------------------------------------------------------------------------


def run_bench(
    bench: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], list[Figure]]
) -> int:
    """Parses, measures, reports. Returns 1 if the benchmark itself failed, else 0, even if it missed targets."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measured value")
    options = parser.parse_args()
    compileall.compile_dir(PACKAGE, quiet=2)  # as in an installed wheel
    try:
        report(bench, measure(options), options.json)
    except BenchError as error:
        print(f"{bench}: {error}", file=sys.stderr)
        return 1
    return 0


def progress(text: str) -> None:
    """Prints a progress line on stderr."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- running ----------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, cleaned, with one OpenMP thread per rank, and with ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in UNWANTED and not name.startswith(UNWANTED_PREFIXES)
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def program(name: str) -> str:
    """Returns the path of ``torchrun`` or ``safelaunch`` next to this interpreter. Raises BenchError without one."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise BenchError(f"{name} is not installed next to {sys.executable}")
    return os.fspath(path)


class Took(NamedTuple):
    """The cost of a command: wall time, and CPU time of it and of all its reaped children."""

    wall_s: float
    cpu_s: float


def run(argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, *, timeout_s: float = 300.0) -> Took:
    """Runs a command, discards its output, and returns its cost. Raises BenchError unless it returns 0."""
    with tempfile.TemporaryFile() as stderr:
        begin, cpu = time.perf_counter(), _children_cpu_s()
        with started(argv, cwd, env, stderr=stderr) as process:
            if not _has_ended(process.pid, timeout_s):
                raise BenchError(f"{' '.join(argv[:4])} ... did not end within {timeout_s:g} s")
            code = process.wait()
            took = Took(time.perf_counter() - begin, _children_cpu_s() - cpu)
        if code != 0:
            stderr.seek(0)
            said = stderr.read()[-2000:].decode("utf-8", "replace")
            raise BenchError(f"{' '.join(argv[:4])} ... ended with {code}:\n{said}")
    return took


def _has_ended(pid: int, timeout_s: float) -> bool:
    # ``Popen.wait(timeout)`` polls, which rounds 18 ms up to 31.5.
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def started(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command during the block, and ends it and everything that it started afterwards."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment() if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM and, some seconds later, SIGKILL to a process and its descendants."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    for left in alive:  # psutil compares start times, so a reused pid is left alone
        left.kill()


@contextmanager
def workplace(**files: str) -> Iterator[Path]:
    """Creates a temporary directory with ``files`` (name without ``.py`` → source), and removes it afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        for stem, source in files.items():
            (Path(name) / f"{stem}.py").write_text(source)
        yield Path(name)


def of_nodes(nodes: int, ranks: int) -> list[str]:
    """Returns torchrun's options for a job of several nodes on this machine, the same for all of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    return [f"--nnodes={nodes}", "--rdzv-backend=c10d", endpoint, f"--nproc-per-node={ranks}"]


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes] | None, what: str, *, timeout_s: float
) -> None:
    """Polls until ``condition``. Raises BenchError if ``process`` ends first or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            raise BenchError(f"the job ended with {process.returncode} before: {what}")
        if time.monotonic() > deadline:
            raise BenchError(f"waited {timeout_s:g} s for: {what}")
        time.sleep(0.01)


# --- pairs ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Pairs = list[tuple[T, T]]
"""Two consecutive runs: the tested program and the baseline. In A/A pairs, both are the baseline."""


def interleave(
    count: int, tested: Callable[[], T], baseline: Callable[[], T], what: str = ""
) -> tuple[Pairs[T], Pairs[T]]:
    """Runs ``count`` pairs of tested and baseline, alternating with as many pairs of baseline and baseline.

    The order within a pair alternates, so a drift of the machine affects both sides equally.
    """
    ab: Pairs[T] = []
    aa: Pairs[T] = []
    for number in range(count):
        if what:
            progress(f"{what}: pair {number + 1} of {count}")
        swapped = number % 2 == 1
        ab.append(_pair(tested, baseline, swapped))
        aa.append(_pair(baseline, baseline, swapped))
    return ab, aa


def _pair(tested: Callable[[], T], baseline: Callable[[], T], swapped: bool) -> tuple[T, T]:
    if swapped:
        second = baseline()
        return tested(), second
    first = tested()
    return first, baseline()


def ratios(name: str, ab: Pairs[float], aa: Pairs[float], target: str = "") -> list[Figure]:
    """Figures of tested / baseline, and of the baseline against itself."""
    with_ours, alone = [a / b for a, b in ab], [a / b for a, b in aa]
    return [
        figure(name, with_ours, "", target, f"middle half {_middle(with_ours)}"),
        figure("  the baseline against itself (A/A)", alone, note=f"middle half {_middle(alone)}"),
    ]


def differences(name: str, ab: Pairs[float], aa: Pairs[float], unit: str, target: str = "") -> list[Figure]:
    """Figures of tested - baseline, and of the baseline against itself."""
    with_ours, alone = [a - b for a, b in ab], [a - b for a, b in aa]
    return [
        figure(name, with_ours, unit, target, f"middle half {_middle(with_ours)}"),
        figure("  the baseline against itself (A/A)", alone, unit, note=f"middle half {_middle(alone)}"),
    ]


def _middle(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, high = _numbers(ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4])
    return f"{low}..{high}"
