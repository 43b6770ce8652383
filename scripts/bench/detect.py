"""Measures how long safelaunch takes to detect a hang of 8 gloo ranks and to publish its bundle.

    python -m scripts.bench detect [--runs 5] [--stall-timeout 3] [--json FILE]
    python -m scripts.bench detect --auto           # learned thresholds, with floors of 5 s and 60 s

One rank, a different one in each run, records the time and sleeps forever. The bundle's ``manifest.json`` gives the
times of suspicion, sampling and confirmation. This script polls for the published bundle. All times are
CLOCK_MONOTONIC, which the ranks, the supervisor and this script share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.lib import BenchError, Figure, figure, program, progress, run_bench, started, wait_for, workplace

HANG = """
import os, sys, time
import torch
import torch.distributed as dist
import safelaunch

sleeper, rank = int(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones(16)
for step in range(1_000_000):
    dist.all_reduce(tensor)
    time.sleep(0.05)
    safelaunch.step()
    if step == 100 and rank == sleeper:
        with open("partial", "w") as file:
            file.write(str(time.monotonic()))
        os.rename("partial", "stopped")
        time.sleep(1_000_000)
"""
RANKS = 8
EXIT_HUNG = 124


@dataclass(frozen=True, slots=True)
class Run:
    """One hang. Times are seconds of CLOCK_MONOTONIC.

    Attributes:
        named: The verdict names the sleeping rank and no other.
        whole: Number of ranks with all their files in the bundle.
        word_s: Time from the stop to the first printed early look; None without one.
        word_named: That early look names the sleeping rank alone.
    """

    stopped_s: float
    stages: dict[str, float]
    published_s: float
    ended_s: float
    named: bool
    whole: int
    word_s: float | None
    word_named: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="hangs to measure (5)")
    parser.add_argument("--stall-timeout", type=float, default=3.0, help="the threshold in seconds (3)")
    parser.add_argument("--auto", action="store_true", help="learned thresholds, steps of 50 ms")
    return run_bench("bench_detect", parser, measure)


def measure_auto(runs: int) -> list[Figure]:
    """Measures with learned thresholds, for two floors: from the stop to the suspicion and to the bundle."""
    found = []
    for floor_s, suspected_s, published_s in ((5.0, 10, 20), (60.0, 90, 90)):
        options = () if floor_s == 60.0 else ("--stall-floor", str(floor_s))
        hangs = [hang(number * 3 % RANKS, options) for number in range(runs)]
        floor = f"floor {floor_s:g} s"
        late = [run.stages["suspected"] - run.stopped_s for run in hangs]
        there = [run.published_s - run.stopped_s for run in hangs]
        named = sum(run.named for run in hangs)
        found += [
            figure(f"auto, {floor}: from the stop to the suspicion", late, "s", f"<= {suspected_s}"),
            figure(f"auto, {floor}: from the stop to the bundle", there, "s", f"<= {published_s}"),
            figure("  verdicts that name the sleeping rank alone", [named / runs], note=f"{named} of {runs}"),
        ]
        words = [run.word_s for run in hangs if run.word_s is not None]
        right = sum(run.word_named for run in hangs)
        if words:  # with a floor as low as a first look, the suspicion comes before it
            found += [
                figure(f"auto, {floor}: from the stop to the first word", words, "s", "<= 15"),
                figure("  first words about the sleeping rank alone", [right / runs], note=f"{right} of {runs}"),
            ]
    return found


def measure(options: argparse.Namespace) -> list[Figure]:
    if options.auto:
        return measure_auto(options.runs)
    threshold = options.stall_timeout
    words = ("--stall-timeout", str(threshold))
    runs = [hang(number * 3 % RANKS, words) for number in range(options.runs)]

    def stage(name: str) -> Callable[[Run], float]:
        return lambda run: run.stages[name]

    def between(name: str, begin: Callable[[Run], float], end: Callable[[Run], float], target: str = "") -> Figure:
        return figure(name, [end(run) - begin(run) for run in runs], "s", target)

    late = [run.stages["suspected"] - run.stopped_s - threshold for run in runs]
    named = sum(run.named for run in runs)
    return [
        figure("from the stop to the suspicion, less the threshold", late, "s", "<= 0.5", f"threshold {threshold:g} s"),
        between(
            f"from the suspicion to the published bundle, {RANKS} ranks",
            stage("suspected"),
            lambda run: run.published_s,
            "<= 6",
        ),
        between("  to the end of the first look", stage("suspected"), stage("first look")),
        between("  to the end of the second look", stage("first look"), stage("second look")),
        between("  to the conclusion", stage("second look"), stage("confirmed")),
        between("  to the last evidence", stage("confirmed"), stage("evidence complete")),
        between("  to the verdict", stage("evidence complete"), stage("verdict")),
        between("  to the bundle in its place", stage("verdict"), lambda run: run.published_s),
        between("from the bundle to the end of safelaunch", lambda run: run.published_s, lambda run: run.ended_s),
        figure("ranks with every file in the bundle", [run.whole for run in runs], "", f">= {RANKS}"),
        figure("verdicts that name the sleeping rank alone", [named / len(runs)], note=f"{named} of {len(runs)}"),
    ]


def hang(sleeper: int, words: Sequence[str]) -> Run:
    """Runs the job once until the watchdog ends it. Raises BenchError if the run ends any other way."""
    with workplace(hang=HANG) as here, tempfile.TemporaryFile() as stderr:
        argv = [program("safelaunch"), *words, "--startup-timeout", "120"]
        argv += ["--bundle-dir", "bundles", f"--nproc-per-node={RANKS}", "hang.py", str(sleeper)]
        progress(f"rank {sleeper} will sleep")
        try:
            with started(argv, here, stderr=stderr) as process:
                return _follow(process, here, sleeper)
        except BenchError as error:
            stderr.seek(0)
            raise BenchError(f"{error}\n{stderr.read()[-3000:].decode('utf-8', 'replace')}") from None


def _follow(process: subprocess.Popen[bytes], here: Path, sleeper: int) -> Run:
    wait_for((here / "stopped").exists, process, "a rank sleeps", timeout_s=180)
    wait_for(lambda: _bundle(here) is not None, process, "the bundle is there", timeout_s=120)
    published_s = time.monotonic()
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        raise BenchError("safelaunch did not end after its bundle was written") from None
    ended_s = time.monotonic()
    bundle = _bundle(here)
    if code != EXIT_HUNG or bundle is None:
        raise BenchError(f"safelaunch ended with {code}, not {EXIT_HUNG}")
    verdict = json.loads((bundle / "verdict.json").read_text())
    manifest = json.loads((bundle / "manifest.json").read_text())
    word = _first_word(bundle)
    incomplete = {path.split("/")[1] for path in manifest["missing"] if path.startswith("ranks/")}
    seen = sum((bundle / "ranks" / str(rank) / "stack.json").exists() for rank in range(RANKS))
    return Run(
        stopped_s=float((here / "stopped").read_text()),
        stages={moment["stage"]: moment["monotonic_s"] for moment in manifest["timeline"]},
        published_s=published_s,
        ended_s=ended_s,
        named=[culprit["rank"] for culprit in verdict["culprits"]] == [sleeper],
        whole=seen - len(incomplete),
        word_s=word["quiet_s"] if word is not None else None,
        word_named=word is not None and [place["rank"] for place in word.get("places", ())] == [sleeper],
    )


def _first_word(bundle: Path) -> dict[str, Any] | None:
    file = bundle / "early.json"
    looks = json.loads(file.read_text()) if file.exists() else []
    return next((look for look in looks if look.get("said")), None)


def _bundle(here: Path) -> Path | None:
    found = [path.parent for path in (here / "bundles").glob("[!.]*-hang/manifest.json")]
    return found[0] if found else None


if __name__ == "__main__":
    sys.exit(main())
