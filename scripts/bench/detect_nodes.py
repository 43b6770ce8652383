"""Measures a hang of jobs of several nodes, of 2 gloo ranks each: the suspicion, the merged bundle, the end of all.

    python -m scripts.bench detect_nodes [--nodes 2,4,8] [--runs 3] [--stall-timeout 3] [--json FILE]

The nodes are supervisors and torchrun agents on this machine. The last rank records the time and sleeps forever. The
timeline in each node's ``manifest.json`` has the time of its suspicion. All times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.detect import EXIT_HUNG, HANG
from scripts.bench.lib import (
    BenchError,
    Figure,
    environment,
    figure,
    of_nodes,
    program,
    progress,
    run_bench,
    started,
    wait_for,
    workplace,
)

PER_NODE = 2
WAIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Run:
    """One hang, in seconds of CLOCK_MONOTONIC.

    Attributes:
        suspected_s: Time of the first node's suspicion.
        named: All verdicts name the sleeping rank and no other.
        whole: One node's bundle holds every rank.
    """

    stopped_s: float
    suspected_s: float
    published_s: float
    ended_s: tuple[float, ...]
    named: bool
    whole: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4,8", help="how many nodes, comma-separated (2,4,8)")
    parser.add_argument("--runs", type=int, default=3, help="hangs to measure of each (3)")
    parser.add_argument("--stall-timeout", type=float, default=3.0, help="the threshold in seconds (3)")
    return run_bench("bench_detect_nodes", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    found = []
    for nodes in map(int, options.nodes.split(",")):
        runs = [hang(nodes, options.stall_timeout) for _ in range(options.runs)]
        late = [run.suspected_s - run.stopped_s - options.stall_timeout for run in runs]
        merged = [run.published_s - run.suspected_s for run in runs]
        apart = [max(run.ended_s) - min(run.ended_s) for run in runs]
        right = sum(run.named and run.whole for run in runs)
        found += [
            figure(f"{nodes} nodes: from the stop to the suspicion, less the threshold", late, "s", "<= 1.5"),
            figure("  from the suspicion to the merged bundle", merged, "s", "<= 8" if nodes == 2 else ""),
            figure("  from the end of the first supervisor to the end of the last", apart, "s", "<= 15"),
            figure("  one whole bundle, the sleeping rank alone named by all", [right / len(runs)], "", ">= 1"),
        ]
    return found


def hang(nodes: int, threshold_s: float) -> Run:
    """Runs the job once until its supervisors end it. Raises BenchError if it ends any other way."""
    progress(f"a job of {nodes} nodes will hang")
    with workplace(hang=HANG) as here, ExitStack() as stack:
        own = [program("safelaunch"), f"--stall-timeout={threshold_s}", "--startup-timeout=120"]
        own += of_nodes(nodes, PER_NODE)
        script = ["hang.py", str(nodes * PER_NODE - 1)]
        env = environment(GLOO_SOCKET_IFNAME="lo")
        stderr = [stack.enter_context((here / f"stderr-{number}").open("wb")) for number in range(nodes)]
        jobs = [
            stack.enter_context(started([*own, f"--bundle-dir=bundles/{n}", *script], here, env, stderr=stderr[n]))
            for n in range(nodes)
        ]
        try:
            return _follow(jobs, here, nodes * PER_NODE)
        except BenchError as error:
            said = (here / "stderr-0").read_text(errors="replace")[-3000:]
            raise BenchError(f"{error}\n{said}") from None


def _follow(jobs: list[subprocess.Popen[bytes]], here: Path, ranks: int) -> Run:
    wait_for((here / "stopped").exists, jobs[0], "a rank sleeps", timeout_s=WAIT_S)
    wait_for(lambda: _whole(here, ranks) is not None, None, "the merged bundle is there", timeout_s=WAIT_S)
    published_s, ended = time.monotonic(), dict[int, float]()
    while len(ended) < len(jobs):
        ended |= {n: time.monotonic() for n, job in enumerate(jobs) if n not in ended and job.poll() is not None}
        if time.monotonic() > published_s + WAIT_S:
            raise BenchError("not all supervisors have ended")
        time.sleep(0.02)
    codes = [job.returncode for job in jobs]
    if codes != [EXIT_HUNG] * len(jobs):
        raise BenchError(f"safelaunch ended with {codes}, not {EXIT_HUNG} on each node")
    bundles = _bundles(here)
    stages = [json.loads((bundle / "manifest.json").read_text())["timeline"] for bundle in bundles]
    verdicts = [json.loads((bundle / "verdict.json").read_text()) for bundle in bundles]
    return Run(
        stopped_s=float((here / "stopped").read_text()),
        suspected_s=min(one["monotonic_s"] for moments in stages for one in moments if one["stage"] == "suspected"),
        published_s=published_s,
        ended_s=tuple(ended.values()),
        named=all([one["rank"] for one in verdict["culprits"]] == [ranks - 1] for verdict in verdicts),
        whole=len(bundles) == len(jobs) and _whole(here, ranks) is not None,
    )


def _bundles(here: Path) -> list[Path]:
    return [path.parent for path in (here / "bundles").glob("*/[!.]*-hang/manifest.json")]


def _whole(here: Path, ranks: int) -> Path | None:
    return next((one for one in _bundles(here) if len([*(one / "ranks").glob("*/stack.json")]) == ranks), None)


if __name__ == "__main__":
    sys.exit(main())
