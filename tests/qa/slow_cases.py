"""The jobs of the test bed for slow ranks: those with a planted slow rank, and healthy ones of an uneven pace."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.paths import PROGRAMS

FOLDER = PROGRAMS / "slow"
MARK = "# SLOW: "


@dataclass(frozen=True)
class Case:
    """A job. Healthy ones have no share.

    Attributes:
        how: What the program does. Planted lines have the comment ``# SLOW: <how>``; without them, no line is at fault.
        extra: Seconds that the planted rank loses in each step (``stops``: while it is stopped).
        share: Share by which the plant lengthens a step, approximately.
        reasons: Reasons that are right; "" stands for none.
        also: Other ranks that are right.
        outside: What slows the rank down from outside, a name in ``slow_outside.ACTORS``.
        limit: Its strength: a share of a CPU, a number of disk accesses per second, or Mbit/s.
        slow_links: Node → (seconds of delay, share of lost frames), from the start.
        alone: It takes a whole CPU, so it runs when no other job does.
    """

    name: str
    program: str
    ranks: int = 4
    rank: int = 1
    how: str = ""
    extra: float = 0.0
    share: float = 0.0
    words: tuple[str, ...] = ()
    from_start: bool = False
    reasons: tuple[str, ...] = ("",)
    also: tuple[int, ...] = ()
    nodes: int = 1
    exec: bool = False
    outside: str = ""
    limit: float = 0.0
    slow_links: tuple[tuple[int, float, float], ...] = ()
    alone: bool = False

    @property
    def planted(self) -> bool:
        return self.share > 0

    @property
    def script(self) -> Path:
        return FOLDER / f"{self.program}.py"

    @cached_property
    def lines(self) -> dict[int, str]:
        """Planted lines, each with its function; empty if no line is at fault."""
        return planted_lines(self.script, self.how) if self.how and self.planted else {}

    @property
    def right_ranks(self) -> frozenset[int]:
        return frozenset({self.rank, *self.also})


def planted_lines(script: Path, how: str) -> dict[int, str]:
    text = script.read_text()
    marks = {n: line.partition(MARK)[2].split(", ") for n, line in enumerate(text.splitlines(), 1) if MARK in line}
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {number: _function_at(functions, number) for number, names in marks.items() if how in names}


def _function_at(functions: list[ast.FunctionDef], line: int) -> str:
    around = [each for each in functions if each.lineno <= line <= (each.end_lineno or 0)]
    return max(around, key=lambda each: each.lineno).name if around else "<module>"


QUEUE, QUOTA, STOPPED, DISK, MEMORY = ("cpu-queue",), ("cpu-quota",), ("stopped",), ("disk",), ("memory",)
NETWORK, GARBAGE = ("network",), ("garbage-collection",)
UNPINNED = ("--pin=none", "--work=0.03", "--pause=0.14")

_PLANTED = (
    # datasets, models, optimizers and callbacks under DDP
    Case("vision-augment-25", "vision", 4, 2, "augment", 0.035, 0.25),
    Case("vision-augment-15", "vision", 4, 1, "augment", 0.025, 0.15),
    Case("vision-augment-50-start", "vision", 3, 0, "augment", 0.07, 0.50, from_start=True),
    Case("vision-forward-25", "vision", 2, 1, "forward", 0.035, 0.25),
    Case("vision-forward-100-start", "vision", 4, 3, "forward", 0.14, 1.0, from_start=True),
    Case("vision-hook-25", "vision", 4, 0, "hook", 0.035, 0.25),
    Case("vision-average-25", "vision", 3, 2, "average", 0.035, 0.25),
    Case("vision-average-100-start", "vision", 2, 0, "average", 0.14, 1.0, from_start=True),
    Case("workers-decode-50", "workers", 2, 1, "decode", 0.1, 0.50),
    Case("workers-decode-25-start", "workers", 3, 0, "decode", 0.05, 0.25, from_start=True),
    Case("workers-two-decode-50", "workers", 2, 0, "decode", 0.1, 0.50, ("--workers=2",)),
    Case("lm-collate-25", "lm", 8, 5, "collate", 0.045, 0.25),
    Case("lm-backward-50", "lm", 4, 1, "backward", 0.075, 0.50),
    Case("lm-backward-25-start", "lm", 3, 0, "backward", 0.038, 0.25, from_start=True),
    Case("lm-clip-25", "lm", 3, 2, "clip", 0.038, 0.25),
    Case("lm-item-25-start", "lm", 2, 1, "item", 0.028, 0.25, from_start=True),
    Case("lm-tokenize-15", "lm", 4, 3, "tokenize", 0.015, 0.15, ("--accumulate=2", "--pace=0.06")),
    Case("callbacks-histograms-50", "callbacks", 4, 3, "histograms", 0.08, 0.50),
    Case("callbacks-progress-15", "callbacks", 3, 1, "progress", 0.026, 0.15),
    Case("callbacks-progress-50-exec", "callbacks", 3, 2, "progress", 0.08, 0.50, from_start=True, exec=True),
    # other ways to divide the work
    Case("fsdp-forward-50", "sharded", 4, 2, "forward", 0.09, 0.50),
    Case("fsdp-optimizer-25", "sharded", 2, 1, "optimizer", 0.045, 0.25),
    Case("fsdp-collate-100-start", "sharded", 3, 0, "collate", 0.17, 1.0, from_start=True),
    Case("pipe-forward-50", "pipe", 3, 1, "forward", 0.08, 0.50),
    Case("pipe-forward-100-start", "pipe", 4, 3, "forward", 0.17, 1.0, ("--gpipe",), from_start=True),
    Case("pipe-uneven", "pipe", 3, 1, "uneven", share=0.60, from_start=True),
    Case("stages-compute-50", "stages", 4, 2, "compute", 0.1, 0.50),
    Case("stages-uneven", "stages", 3, 0, "uneven", share=0.50, from_start=True),
    Case("grid-shard-25", "grid", 4, 3, "shard", 0.04, 0.25),
    Case("grid-read-50-start", "grid", 8, 4, "read", 0.09, 0.50, from_start=True),
    Case("solver-boundary-25", "solver", 4, 1, "boundary", 0.045, 0.25),
    Case("solver-boundary-100-start", "solver", 8, 6, "boundary", 0.16, 1.0, from_start=True),
    Case("solver-boundary-50-exec", "solver", 3, 2, "boundary", 0.08, 0.50, ("--reduce-only",), exec=True),
    Case("nodes-augment-25", "vision", 4, 3, "augment", 0.035, 0.25, nodes=2),
    Case("nodes-forward-100-start", "sharded", 4, 1, "forward", 0.17, 1.0, from_start=True, nodes=2),
    Case("nodes-compute-25", "wide", 4, 2, "compute", 0.045, 0.25, nodes=2),
    # with a reason that isn't in the script
    Case("collector-release-50", "replay", 3, 1, "release", share=0.50, reasons=GARBAGE),
    Case("collector-manual-25-start", "replay", 2, 0, "manual", share=0.25, reasons=GARBAGE, from_start=True),
    Case("gil-50", "background", 2, 1, "gil", 0.025, 0.50, reasons=("", "gil")),
    Case("gil-25-start", "background", 3, 2, "gil", 0.018, 0.25, reasons=("", "gil"), from_start=True),
    Case("log-pipe-50", "background", 3, 0, "pipe", 0.1, 0.50, reasons=("", *DISK)),
    Case("page-faults-50", "tokens", 3, 2, "faults", 0.09, 0.50, reasons=MEMORY),
    Case("page-faults-25-start", "tokens", 4, 0, "faults", 0.05, 0.25, reasons=MEMORY, from_start=True),
    Case("swap-50", "tokens", 2, 1, "swap", share=0.50, reasons=MEMORY, outside="swap"),
    Case("disk-read-50", "shards", 3, 1, "read", share=0.50, reasons=DISK, outside="disk", limit=20),
    Case("disk-sync-50", "shards", 2, 0, "fsync", share=0.50, reasons=DISK, outside="disk", limit=15),
    Case(
        "disk-read-100-start",
        "shards",
        4,
        2,
        "read",
        share=1.0,
        words=("--blocks=3",),
        reasons=DISK,
        outside="disk",
        limit=10,
        from_start=True,
    ),
    Case("stops-50", "pinned", 3, 1, "stops", 0.3, 0.50, UNPINNED, reasons=STOPPED, outside="stops"),
    Case(
        "stops-100-start",
        "pinned",
        2,
        0,
        "stops",
        0.55,
        1.0,
        UNPINNED,
        reasons=STOPPED,
        outside="stops",
        from_start=True,
    ),
    Case("quota-50", "pinned", 3, 2, share=0.50, words=UNPINNED, reasons=QUOTA, outside="quota", limit=0.13),
    Case(
        "quota-100-start",
        "pinned",
        2,
        1,
        share=1.0,
        words=UNPINNED,
        reasons=QUOTA,
        outside="quota",
        limit=0.1,
        from_start=True,
    ),
    Case("link-50", "wide", 3, 1, share=0.50, reasons=NETWORK, nodes=3, outside="link", limit=160),
    Case(
        "link-delay-start",
        "wide",
        3,
        2,
        share=0.70,
        words=("--width=256",),
        reasons=NETWORK,
        nodes=3,
        slow_links=((2, 0.01, 0.0),),
        from_start=True,
    ),
    Case("hog-50", "pinned", 2, 1, share=0.5, outside="hog", reasons=QUEUE, alone=True),
    Case(
        "hog-50-start",
        "pinned",
        2,
        0,
        share=0.5,
        outside="hog",
        reasons=QUEUE,
        alone=True,
        from_start=True,
    ),
    Case("threads-50", "pinned", 2, 0, "threads", share=0.5, reasons=QUEUE, alone=True),
    Case("evaluator-50-start", "pinned", 2, 1, "evaluator", share=0.5, reasons=QUEUE, from_start=True, alone=True),
)

_HEALTHY = (
    Case("even-vision", "vision", 3),
    Case("evaluations", "vision", 3, words=("--evaluate=all",)),
    Case("evaluations-rank-0", "vision", 3, words=("--evaluate=first", "--every=300")),
    Case("rare-slow-items", "workers", 2, how="rare"),
    Case("growing-sequences", "lm", 3, how="growing"),
    Case("doubled-batch", "lm", 3, how="double"),
    Case("slow-drift", "lm", 2, how="drift"),
    Case("accumulation", "lm", 2, words=("--accumulate=4", "--pace=0.03")),
    Case("even-fsdp", "sharded", 3),
    Case("even-pipe", "pipe", 3),
    Case("even-stages", "stages", 4),
    Case("even-grid", "grid", 4),
    Case("even-solver", "solver", 4),
    Case("even-solver-exec", "solver", 3, words=("--reduce-only",), exec=True),
    Case("even-nodes", "wide", 4, nodes=2),
    Case("checkpoints-rank-0", "callbacks", 3, words=("--save-every=200",)),
    Case("log-rank-0", "callbacks", 3, how="log"),
    Case("pauses", "callbacks", 2, how="pauses"),
    Case("phases", "callbacks", 2, how="phases"),
    Case("sawtooth-collector", "replay", 2, how="sawtooth"),
    Case("experts", "experts", 4, how="uniform"),
    Case("experts-heavy-tail", "experts", 4, how="heavy-tail"),
    Case("alternating", "experts", 3, how="alternating"),
    Case("uneven-last-batches", "experts", 3, how="last-batch"),
    Case("compile-warm-up", "compiled", 3),
    Case(
        "short-neighbour",
        "pinned",
        2,
        words=("--work=0.04", "--slow-rank=1", "--onset=inf"),
        outside="neighbour",
        alone=True,
    ),
    Case("bursts-on-all", "pinned", 2, words=("--work=0.04", "--pin=none"), outside="bursts", alone=True),
)

CASES = {case.name: case for case in (*_PLANTED, *_HEALTHY)}
