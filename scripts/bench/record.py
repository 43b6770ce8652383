"""Measures what `safelaunch record` costs the run that it samples: its steps with and without recording.

    python -m scripts.bench record [--blocks 8] [--window 10] [--ranks 2,1] [--json FILE]

One job trains all the time. A block is four windows of it: sampled, alone, alone, sampled, so that a drift of the
machine affects both sides. The two windows alone, against each other, show the precision of the measurement. With one
rank, a core is free for py-spy; with as many ranks as cores, py-spy takes all its time from the job.

Steps are counted in the ranks' progress pages, exact to a step's time stamp. Steps per second need a quiet machine. CPU
time doesn't: a step's share of the ranks' own, and the time of py-spy and the supervisor. A job whose ranks wait for
each other in each step, and that leaves no core free, can lose as many of its steps as py-spy and the supervisor use of
one core, if they never interrupt two ranks at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import msgspec
import psutil

from safelaunch.addons.record.recording import Recording, Sampling
from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from safelaunch.supervise.control.discover import find, our_roots
from safelaunch.supervise.control.protocol import ControlRequest, ServiceAnswer, ask
from scripts.bench.lib import (
    BenchError,
    Figure,
    environment,
    figure,
    program,
    progress,
    run,
    run_bench,
    started,
    wait_for,
    workplace,
)

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(1024, 512)
while True:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
START_S = 180.0
ANSWER_S = 60.0
AIM = "<= 2"
TICK = os.sysconf("SC_CLK_TCK")


class Window(NamedTuple):
    """One window.

    Attributes:
        rate: Steps per second.
        step_cpu_s: CPU time of the ranks per step.
        cpu: CPU of py-spy and the supervisor, percent of all cores.
        others: CPU of everything else, percent of all cores.
    """

    rate: float
    step_cpu_s: float
    cpu: float
    others: float


class Job:
    """A live run: its pages, its control socket, its processes."""

    def __init__(self, supervisor: subprocess.Popen[bytes], ranks: int) -> None:
        self._supervisor = supervisor
        wait_for(lambda: self._found() is not None, supervisor, "the run directory", timeout_s=START_S)
        directory = self._found()
        assert directory is not None
        self.run = RunPaths(directory)
        self._roster = Roster(self.run)
        wait_for(lambda: self._warm(ranks), supervisor, "the first steps", timeout_s=START_S)
        pages = self._roster.pages()
        self._page = pages[0]
        self._pids = [page.pid for page in pages.values()]

    def _found(self) -> Path | None:
        mine = f"{self._supervisor.pid}"
        return next((one.directory for one in find(our_roots()) if one.id.removeprefix("r") == mine), None)

    def _warm(self, ranks: int) -> bool:
        self._roster.refresh()
        steps = [page.read().step or 0 for page in self._roster.pages().values()]
        return len(steps) == ranks and min(steps) >= 100

    def _steps(self) -> tuple[int, float]:
        # Two equal reads in a row are consistent.
        while True:
            first, second = self._page.read(), self._page.read()
            if (first.step, first.last_step_ns) == (second.step, second.last_step_ns):
                return first.step or 0, first.last_step_ns / 1e9

    def _read(self) -> tuple[float, float, float]:
        # CPU seconds of the supervisor and its ended helpers (not torchrun), of the ranks, and of the machine.
        return sum(_times(self._supervisor.pid)), sum(sum(_times(pid)[:2]) for pid in self._pids), _busy_s()

    def window(self, seconds: float, *, sampled: bool) -> Window:
        """Measures the job for this time, with or without a recording."""
        (before, begin_s), used, at_s = self._steps(), self._read(), time.monotonic()
        if sampled:
            self._record(seconds)
        else:
            time.sleep(seconds)
        cores_s = (time.monotonic() - at_s) * (os.cpu_count() or 1) / 100
        (after, end_s), now = self._steps(), self._read()
        if after <= before:
            raise BenchError("the job made no steps")
        ours, ranks, all_of_it = (b - a for a, b in zip(used, now, strict=True))
        return Window(
            rate=(after - before) / (end_s - begin_s),
            step_cpu_s=ranks / (after - before),
            cpu=ours / cores_s,
            others=max(0.0, all_of_it - ours - ranks) / cores_s,
        )

    def _record(self, seconds: float) -> None:
        request = ControlRequest("record", ask=msgspec.Raw(msgspec.json.encode(Sampling(seconds))))
        answer = msgspec.json.decode(
            ask(self.run.control, request, deadline_s=seconds + ANSWER_S), type=ServiceAnswer[Recording], strict=False
        )
        if answer.part is None:
            raise BenchError(f"no samples: {answer.problem}")


def _times(pid: int) -> list[float]:
    # User and system time of a process, then of its ended children.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(one) / TICK for one in fields[11:15]]


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


# --- blocks -----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Two sampled windows against two windows alone, and the latter against each other.

    Attributes:
        lost: Percent of the steps.
        dearer: Percent of CPU that a step takes more.
        taken: CPU that py-spy and the supervisor use more, percent of one core.
    """

    lost: float
    dearer: float
    taken: float
    itself_lost: float
    itself_dearer: float


def block(windows: list[Window]) -> Block:
    first, alone, again, last = windows
    return Block(
        lost=100 * (1 - (first.rate + last.rate) / (alone.rate + again.rate)),
        dearer=100 * ((first.step_cpu_s + last.step_cpu_s) / (alone.step_cpu_s + again.step_cpu_s) - 1),
        taken=(first.cpu + last.cpu - alone.cpu - again.cpu) / 2 * (os.cpu_count() or 1),
        itself_lost=100 * (1 - again.rate / alone.rate),
        itself_dearer=100 * (again.step_cpu_s / alone.step_cpu_s - 1),
    )


def uncertain(values: list[float]) -> str:
    """The mean with two standard errors."""
    error = 2 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return f"mean {mean(values):+.2f} ± {error:.2f}"


def of_ranks(ranks: int, options: argparse.Namespace) -> list[Figure]:
    """Measures the loss of a job with this many ranks, and of the same job against itself."""
    blocks: list[Block] = []
    windows: list[Window] = []
    name = f"bench-record-{os.getpid()}-{ranks}"  # another benchmark might run on this machine
    with workplace(train=TRAIN) as place:
        words = [program("safelaunch"), "--run-name", name, f"--nproc-per-node={ranks}", "train.py"]
        with started(words, place, environment()) as supervisor:
            job = Job(supervisor, ranks)
            for number in range(options.blocks):
                four = [job.window(options.window, sampled=one) for one in (True, False, False, True)]
                windows += four
                blocks.append(block(four))
                progress(f"{ranks} ranks, block {number + 1} of {options.blocks}: {_shown(blocks[-1])}")
    return figures_of(f"{ranks} of {os.cpu_count() or 1} cores busy", blocks, windows)


def _shown(one: Block) -> str:
    return ", ".join(f"{name} {value:+.2f} %" for name, value in one._asdict().items())


def figures_of(what: str, blocks: list[Block], windows: list[Window]) -> list[Figure]:
    lost, dearer, taken, lost_alone, dearer_alone = (list(values) for values in zip(*blocks, strict=True))
    noise = f"; other programs used {median(one.others for one in windows):.0f} % of the machine"
    sampled, alone = [*windows[::4], *windows[3::4]], [*windows[1::4], *windows[2::4]]
    idle = f"alone {median(one.cpu for one in alone):.2f}"
    return [
        figure(f"steps per second lost while sampled, {what}", lost, "%", AIM, uncertain(lost) + noise),
        figure("  the same job against itself (A/A)", lost_alone, "%", note=uncertain(lost_alone)),
        figure(f"CPU time that a step takes more, {what}", dearer, "%", AIM, uncertain(dearer)),
        figure("  the same job against itself (A/A)", dearer_alone, "%", note=uncertain(dearer_alone)),
        figure(f"CPU of py-spy and the supervisor, of all cores, {what}", [one.cpu for one in sampled], "%", AIM, idle),
        figure(f"CPU that sampling takes, of one core, {what}: what a job can lose at most", taken, "%", AIM),
    ]


# --- does py-spy stop the process? ------------------------------------------------------------------------------------

SPIN = """
import time
print("ready", flush=True)
while True:
    sum(range(100))
"""
STOPS = re.compile(r"ptrace\((PTRACE_(?:ATTACH|SEIZE|INTERRUPT))")
READS = re.compile(r"process_vm_readv\(")
SECONDS, RATE_HZ = 4, 20


def of_a_sample() -> list[Figure]:
    """How often a recording's own py-spy stops the process that it samples, if strace is there to tell."""
    from safelaunch.addons.record import sampling
    from safelaunch.capture import stacks

    strace = shutil.which("strace")
    if strace is None:
        progress("strace is not installed: whether py-spy stops a process is not measured")
        return []
    with workplace(spin=SPIN) as place, started([sys.executable, "spin.py"], place) as process:
        time.sleep(1.0)
        spy = stacks.find_py_spy(None)
        stops = reads = 0
        for name in sampling.PASSES:
            argv = sampling.argv(spy, process.pid, name, place / "out", SECONDS, RATE_HZ)
            run([strace, "-f", "-o", "trace", "-e", "trace=ptrace,process_vm_readv", *argv], place, environment())
            trace = (place / "trace").read_text(errors="replace")
            stops += len(STOPS.findall(trace))
            reads += len(READS.findall(trace))
    if not reads:
        raise BenchError("strace saw nothing of py-spy")
    samples = SECONDS * RATE_HZ * len(sampling.PASSES)
    return [figure("times that py-spy stops a process", [float(stops)], "", "<= 0", f"of {samples} samples")]


def measure(options: argparse.Namespace) -> list[Figure]:
    figures = of_a_sample()
    for ranks in options.ranks.split(","):
        figures += of_ranks(int(ranks), options)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="blocks of four windows")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window, and so of a recording")
    parser.add_argument("--ranks", default=f"{os.cpu_count() or 1},1", help="the jobs: how many ranks each")
    return run_bench("bench_record", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
