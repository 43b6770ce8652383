"""Measures what `--check-every` adds to a small training on one CPU core, in alternate blocks of steps.

    python -m scripts.bench checks [--runs 5] [--rounds 100] [--json FILE]

One process trains three copies of a model alternately, ten steps of each at a time. One copy is checked; the others
have no hook of the checks, neither at their optimizer nor at a gradient. Each round of blocks therefore shows the cost
of the hooks in every step, and of a check, including slower steps after it. The two unchecked copies show the precision
of the measurement. The cost at `--check-every 100` is the hooks' cost and a hundredth of a check's. The table also has
the time spent inside the checks' functions, and the cost of the supervisor's comparison on another core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from scripts.bench.lib import BenchError, Figure, environment, figure, program, progress, run, run_bench, workplace

EVERY = 100
AIM = "<= 0.5"

TRAIN = """
import json, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROUNDS, BLOCK = int(sys.argv[1]), 10
checks = next(one for name, one in sys.modules.items() if name.endswith("consistency.probe"))
optim = sys.modules["torch.optim.optimizer"]
hooks = optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks
ours = [{key: hook for key, hook in one.items() if hook.__module__ == checks.__name__} for one in hooks]
assert all(map(len, ours)), "the checks have no hooks"
inside = 0.0
timing = False


def timed(function):
    def wrapper(*arguments):
        global inside
        if not timing:
            return function(*arguments)
        began = time.perf_counter()
        function(*arguments)
        inside += time.perf_counter() - began
    return wrapper


sentinel = checks._sentinel
checks._sentinel = lambda *arguments: timed(sentinel(*arguments))
ours = [{key: timed(hook) for key, hook in one.items()} for one in ours]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = torch.randn(64, 256)


def copy():
    layers = (nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8))
    model = DDP(nn.Sequential(*layers, nn.Linear(256, 1)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def block(which, steps=BLOCK):
    model, optimizer = which
    for one, its in zip(hooks, ours):
        one.update(its) if which is checked else [one.pop(key, None) for key in its]
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - cpu, time.perf_counter() - wall


plain, other, checked = copy(), copy(), copy()
for which in (plain, other):
    block(which, 25)
block(checked, 25)  # --check-every 20: the next block has no check, and the one behind it has one in its middle
rounds = []
for number in range(ROUNDS):
    order = (plain, checked, other, checked) if number % 2 else (other, checked, plain, checked)
    found = [block(which) for which in order]
    rounds.append(found if number % 2 else [found[2], found[1], found[0], found[3]])
timing, calls = True, [[], []]
for step in range(25 + 2 * BLOCK * ROUNDS + 1, 25 + 2 * BLOCK * ROUNDS + 401):
    inside = 0.0
    block(checked, 1)
    calls[step % 20 == 0].append(inside)
print(json.dumps({"rounds": rounds, "hooks": calls[0], "check": calls[1]}), file=open(sys.argv[2], "w"))
dist.destroy_process_group()
"""

PACED = """
import os, sys, time
import torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
supervisor = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]


def cpu_s():
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{supervisor}/task").glob("*/schedstat")) / 1e9


model = DDP(nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)), nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(64, 256)
for step in range(1100):
    if step == 100:
        began, own, at = cpu_s(), time.process_time(), time.perf_counter()
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    took = time.perf_counter() - at
    Path(sys.argv[1]).write_text(f"{cpu_s() - began} {took} {time.process_time() - own}")
dist.destroy_process_group()
"""


def measure(options: argparse.Namespace) -> list[Figure]:
    """The cost in per cent of a step's time."""
    found = []
    with workplace(train=TRAIN, paced=PACED) as place:
        for number in range(options.runs):
            progress(f"blocks: run {number + 1} of {options.runs}")
            found.append(_blocks(place, options.rounds))
        compared = []
        for number in range(options.pairs):
            progress(f"the supervisor: pair {number + 1} of {options.pairs}")
            compared.append(_supervisor(place, EVERY) - _supervisor(place, 0))
    return [
        figure(f"CPU time that --check-every {EVERY} adds to a step", [one["cpu"] for one in found], "%", AIM),
        figure("  two copies without checks against each other (A/A)", [one["cpu A/A"] for one in found], "%"),
        figure("  wall time", [one["wall"] for one in found], "%"),
        figure("  wall time, A/A", [one["wall A/A"] for one in found], "%"),
        figure("  by the time inside the checks' functions", [one["inside"] for one in found], "%"),
        figure("    of their hooks in every step", [one["hooks us"] for one in found], "us"),
        figure("    of a check", [one["inside check us"] for one in found], "us"),
        figure("  by the difference, in every step", [one["step us"] for one in found], "us"),
        figure("  by the difference, in a check", [one["check us"] for one in found], "us"),
        figure("  a step without checks", [one["plain us"] / 1e3 for one in found], "ms"),
        *([figure("  the supervisor's, per rank of two, on another core", compared, "%")] if compared else []),
    ]


def _blocks(place: Path, rounds: int) -> dict[str, float]:
    """One process. Every figure is the median of its rounds', which share what else the machine does."""
    out = place / "blocks.json"
    run([program("safelaunch"), "--check-every", "20", "--nproc-per-node=1", "train.py", str(rounds), str(out)], place)
    document = json.loads(out.read_text())
    found = {}
    for at, clock in enumerate(("cpu", "wall")):
        blocks = [[1e6 * block[at] / 10 for block in one] for one in document["rounds"]]
        plain = median((a + b) / 2 for a, _, b, _ in blocks)
        hooks = median(hooked - (a + b) / 2 for a, hooked, b, _ in blocks)
        check = 10 * median(with_one - hooked for _, hooked, _, with_one in blocks)
        found[clock] = 100 * (hooks + check / EVERY) / plain
        found[f"{clock} A/A"] = 100 * median(b - a for a, _, b, _ in blocks) / plain
        if clock == "cpu":
            found |= {"step us": hooks, "check us": check, "plain us": plain}
            inside = 1e6 * (median(document["hooks"]) + median(document["check"]) / EVERY)
            found |= {"hooks us": 1e6 * median(document["hooks"]), "inside check us": 1e6 * median(document["check"])}
            found["inside"] = 100 * inside / plain
    return found


def _supervisor(place: Path, every: int) -> float:
    """The supervisor's CPU time for each rank, in per cent of a rank's."""
    out = place / "paced.txt"
    options = ["--check-every", str(every)] if every else []
    run([program("safelaunch"), *options, "--nproc-per-node=2", "paced.py", str(out)], place, environment())
    used, _, rank = map(float, out.read_text().split())
    if not rank:
        raise BenchError("the rank used no CPU time")
    return 100 * used / 2 / rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="processes that train [5]")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of four blocks of ten steps in each [100]")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for the supervisor's cost [3]")
    return run_bench("bench_checks", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
