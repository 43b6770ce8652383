"""Measures what the beacon costs inside the ranks: throughput, a step mark, a print, start-up.

    python -m scripts.bench overhead [--pairs 15] [--steps 2000] [--start-pairs 60] [--nodes 2] [--json FILE]

The parts that need no job (marks, prints, start-up) run in a process with a rank's environment, which the product's own
code creates. Each checks that the beacon started. The beacon is a compiled copy, as in an installed wheel.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from safelaunch.job.paths import RunPaths, create_run
from safelaunch.job.plan import injection
from scripts.bench.lib import (
    PACKAGE,
    BenchError,
    Figure,
    Pairs,
    Took,
    differences,
    environment,
    figure,
    interleave,
    of_nodes,
    program,
    progress,
    ratios,
    run,
    run_bench,
    started,
    workplace,
)

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

warm_up, steps, width = map(int, sys.argv[1:4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(width // 2, width)

def train(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

train(warm_up)
dist.barrier()
begin = time.perf_counter()
train(steps)
dist.barrier()
rate = steps / (time.perf_counter() - begin)
if dist.get_rank() == 0:
    with open("rate", "w") as file:
        file.write(str(rate))
# Skip torch's shutdown, which sometimes aborts on a busy machine, also under torchrun. The measurement is over.
os._exit(0)
"""

MARKS = """
import json, sys
from time import perf_counter_ns
import safelaunch

marks = sys.modules["_safelaunch_beacon.marks"]
optimizer = object()

def empty():
    pass

def time_of(code, count=20000, times=50):
    results = []
    scope = {"call": code[0], "optimizer": optimizer, "arguments": (), "keywords": {}}
    exec(f"def loop(count):\\n    for _ in range(count):\\n        {code[1]}", scope)
    for _ in range(times):
        begin = perf_counter_ns()
        scope["loop"](count)
        results.append((perf_counter_ns() - begin) / count / 1000)
    return results

def empty_hook(optimizer, arguments, keywords):
    pass

json.dump({
    "optimizer_stepped": time_of((marks.optimizer_stepped, "call(optimizer, arguments, keywords)")),
    "empty hook": time_of((empty_hook, "call(optimizer, arguments, keywords)")),
    "step": time_of((safelaunch.step, "call()")),
    "empty": time_of((empty, "call()")),
}, open("result", "w"))
"""

PRINTS = """
import sys
from time import perf_counter_ns

line = "step 12345 loss 0.12345 lr 1.0e-04 tokens/s 123456"
for _ in range(1000):
    print(line)
begin = perf_counter_ns()
for _ in range(20000):
    print(line)
sys.stdout.flush()
took = perf_counter_ns() - begin
with open("result", "w") as file:
    file.write(str(took / 20000 / 1000))
"""

# Times each call that the beacon makes while torch is imported, and at exit.
TORCH = """
import json
from time import perf_counter

from _safelaunch_beacon import imports, server

took = {"import hook": 0.0, "server start": 0.0, "server stop": 0.0}

def timed(name, function):
    def call(*arguments):
        begin = perf_counter()
        try:
            return function(*arguments)
        finally:
            took[name] += 1000 * (perf_counter() - begin)
    return call

def stop(real=server.stop):
    timed("server stop", real)()
    with open("result", "w") as file:
        json.dump(took, file)

imports._Finder.find_spec = timed("import hook", imports._Finder.find_spec)
server.start = timed("server start", server.start)
server.stop = stop
import torch
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of training and printing runs (15)")
    parser.add_argument("--steps", type=int, default=2000, help="measured training steps per run (2000)")
    parser.add_argument("--start-pairs", type=int, default=60, help="pairs of runs of an empty script (60)")
    parser.add_argument("--torch-pairs", type=int, default=30, help="pairs of runs of a script that imports torch (30)")
    parser.add_argument(
        "--nodes", choices=("1", "2", "all"), default="all", help="1, 2: the throughput of a job of so many nodes alone"
    )
    return run_bench("bench_overhead", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    figures = throughput(options.pairs, options.steps) if options.nodes != "2" else []
    if options.nodes != "1":
        figures += throughput_of_nodes(options.pairs, options.steps)
    if options.nodes != "all":
        return figures
    with rank(marks=MARKS, prints=PRINTS, nothing="pass\n", torch_only="import torch\n", torch_timed=TORCH) as one:
        figures += mark_cost(one)
        figures += print_cost(one, options.pairs)
        nothing = start_cost(one, "nothing.py", options.start_pairs, "a script that imports nothing", "<= 15")
        figures += nothing + torch_cost(one, options.pairs, median(nothing[0].values))
        figures += start_cost(one, "torch_only.py", options.torch_pairs, "a script that imports torch")
    return figures


# --- a whole job ------------------------------------------------------------------------------------------------------


def throughput(pairs: int, steps: int) -> list[Figure]:
    """Compares the steps per second of 2 DDP ranks, as rank 0 measures them."""
    with workplace(train=TRAIN) as here:

        def train(name: str) -> float:
            (here / "rate").unlink(missing_ok=True)
            run([program(name), "--nproc-per-node=2", "train.py", "200", str(steps), "32"], here)
            return float((here / "rate").read_text())

        train("safelaunch"), train("torchrun")
        ab, aa = interleave(pairs, lambda: train("safelaunch"), lambda: train("torchrun"), "DDP")
    return [
        *ratios("DDP steps/s, 2 gloo ranks: safelaunch / torchrun", ab, aa, ">= 0.99"),
        figure("  torchrun alone", [b for _, b in ab], "steps/s"),
    ]


def throughput_of_nodes(pairs: int, steps: int) -> list[Figure]:
    """Measures the same for 2 nodes of one rank, whose supervisors communicate through the agents' store.

    Each node has its own core, and its steps compute: on shared cores, torchrun differs from itself by half.
    """
    cores = sorted(os.sched_getaffinity(0))
    with workplace(train=TRAIN) as here:

        def train(name: str) -> float:
            (here / "rate").unlink(missing_ok=True)
            own = [program(name), *of_nodes(2, 1)]
            words, env = [*own, "train.py", "20", str(steps // 10), "512"], environment(GLOO_SOCKET_IFNAME="lo")
            with started(["taskset", "-c", str(cores[-1]), *words], here, env) as other:
                run(["taskset", "-c", str(cores[0]), *words], here, env)
                other.wait(60)
            return float((here / "rate").read_text())

        train("safelaunch"), train("torchrun")
        ab, aa = interleave(pairs, lambda: train("safelaunch"), lambda: train("torchrun"), "DDP, 2 nodes")
    return [
        *ratios("DDP steps/s, 2 nodes of a gloo rank: safelaunch / torchrun", ab, aa, ">= 0.99"),
        figure("  torchrun alone", [b for _, b in ab], "steps/s"),
    ]


# --- one rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """The environment of rank 0 of a job that this script would supervise, with the beacon and without."""

    here: Path
    pages: Path
    plain: dict[str, str]
    injected: dict[str, str]

    def start(self, beacon: bool, *words: str) -> Took:
        """Runs a Python script and returns its cost. Raises BenchError if the beacon's start contradicts ``beacon``."""
        before = len(list(self.pages.iterdir()))
        (self.here / "result").unlink(missing_ok=True)
        took = run([sys.executable, *words], self.here, self.injected if beacon else self.plain)
        if (len(list(self.pages.iterdir())) > before) != beacon:
            raise BenchError(f"the beacon {'did not start' if beacon else 'started unexpectedly'} in {words[-1]}")
        return took

    def result(self) -> str:
        return (self.here / "result").read_text()


@contextmanager
def rank(**scripts: str) -> Iterator[Rank]:
    """Creates the environment of a rank whose agent and supervisor is this process. Compiles a copy of the beacon."""
    with workplace(**scripts) as here:
        shutil.copytree(PACKAGE / "beacon", here / "beacon", ignore=shutil.ignore_patterns("__pycache__"))
        if not compileall.compile_dir(here / "beacon", quiet=2):
            raise BenchError("the beacon could not be compiled")
        paths: RunPaths = create_run(here / "runs", os.getpid(), os.getuid())
        plain = environment(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            TORCHELASTIC_RESTART_COUNT="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )
        injected = {**plain, **injection(plain, paths.root, os.getpid()), "SAFELAUNCH_AGENT_PID": str(os.getpid())}
        installed, copied = os.fspath(PACKAGE / "beacon"), os.fspath(here / "beacon")
        injected["PYTHONPATH"] = injected["PYTHONPATH"].replace(installed, copied)
        yield Rank(here, paths.pages, plain, injected)


def mark_cost(one: Rank) -> list[Figure]:
    """Measures a mark, including the call, and a call of an empty function for comparison."""
    progress("step marks")
    one.start(True, "marks.py")
    times: dict[str, list[float]] = json.loads(one.result())
    return [
        figure(
            "a step mark (optimizer hook)", times["optimizer_stepped"], "µs", "<= 0.5", "with the call and the loop"
        ),
        figure("  an empty hook in the same loop", times["empty hook"], "µs"),
        figure("a step mark (safelaunch.step())", times["step"], "µs", "<= 0.5", "with the call and the loop"),
        figure("  an empty function in the same loop", times["empty"], "µs"),
    ]


def print_cost(one: Rank, pairs: int) -> list[Figure]:
    """Measures what the output ring adds to a print of 52 bytes to the null device."""
    figures = []
    for name, words in (("buffered", ("prints.py",)), ("-u", ("-u", "prints.py"))):

        def prints(beacon: bool, words: Sequence[str] = words) -> float:
            one.start(beacon, *words)
            return float(one.result())

        with_ring, without = partial(prints, True), partial(prints, False)
        ab, aa = interleave(pairs, with_ring, without, f"print {name}")
        figures += differences(f"the output ring's cost of a print, {name}", ab, aa, "µs")
        figures.append(figure("  the print itself", [b for _, b in ab], "µs"))
    return figures


def torch_cost(one: Rank, runs: int, nothing_ms: float) -> list[Figure]:
    """Measures start-up with torch by timing the beacon's own calls: torch's import varies by more than they take."""
    timed: list[dict[str, float]] = []
    for number in range(runs):
        progress(f"start torch_timed.py: {number + 1} of {runs}")
        one.start(True, "torch_timed.py")
        timed.append(json.loads(one.result()))
    added = [nothing_ms + sum(times.values()) for times in timed]
    return [
        figure("start-up and exit with torch, the beacon's calls timed", added, "ms", "<= 15", "with the row above"),
        *(figure(f"  of that, {name}", [times[name] for times in timed], "ms") for name in timed[0]),
    ]


def start_cost(one: Rank, script: str, pairs: int, name: str, target: str = "") -> list[Figure]:
    """Measures what the beacon adds to a process from start to end."""

    def start(beacon: bool) -> Took:
        return one.start(beacon, script)

    start(True), start(False)
    ab, aa = interleave(pairs, lambda: start(True), lambda: start(False), f"start {script}")

    def ms(took: Pairs[Took], what: str) -> Pairs[float]:
        return [(1000 * getattr(a, what), 1000 * getattr(b, what)) for a, b in took]

    added = f"start-up added by the beacon, {name}"
    return [
        *differences(added, ms(ab, "wall_s"), ms(aa, "wall_s"), "ms", target),
        *differences("  the same in CPU time", ms(ab, "cpu_s"), ms(aa, "cpu_s"), "ms"),
        figure("  without the beacon", [b for _, b in ms(ab, "wall_s")], "ms"),
    ]


if __name__ == "__main__":
    sys.exit(main())
