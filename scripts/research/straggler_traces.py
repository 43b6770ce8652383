"""Asks the watch for slow ranks about the three traces of ByteDance's straggler study.

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python -m scripts.research.straggler_traces StragglerAnalysis/data [--save]

``AR`` has one slow worker, ``ST`` a long last stage, ``SE`` sequences of different lengths (and a long last stage, the
smaller problem). Each line is about windows that end with each of the trace's steps: what the arrivals say, and what
samples of the ranks would say. Needs pyarrow.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safelaunch.addons.record.shares import RankTime
from safelaunch.addons.record.slowness import split
from safelaunch.addons.slow.arrivals import find_straggler
from safelaunch.model import format_ranks
from tests.support.straggler_traces import DATA, KEPT_STEPS, StragglerTrace, original

WINDOWS = ((60.0, 1), (60.0, 4), (60.0, 8), (180.0, 1))
SAMPLES = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="with the traces")
    parser.add_argument("--save", action="store_true", help="write the reduced traces that the tests read")
    words = parser.parse_args()
    for name, kept in KEPT_STEPS.items():
        trace = original(words.directory, name)
        if words.save:
            trace.save(DATA / f"{name}.json.gz", kept)
        for seconds, steps in WINDOWS:
            ranges = list(_ranges(trace, seconds, steps))
            arrivals = Counter(_late(trace, *window) for window in ranges)
            samples = Counter(_waits_least(trace, *window) for window in ranges)
            print(f"{name}  {seconds:.0f} s and {steps} steps: arrivals {_words(arrivals)}; samples {_words(samples)}")
    return 0


def _ranges(trace: StragglerTrace, seconds: float, steps: int) -> Iterator[tuple[int, int]]:
    for last in range(steps, len(trace.steps) + 1):
        for first in range(last - steps, -1, -1):
            if sum(step.length_ms for step in trace.steps[first:last]) >= 1000 * seconds:
                yield first, last
                break


def _late(trace: StragglerTrace, first: int, last: int) -> str:
    straggler = find_straggler(trace.arrivals(first, last))
    return format_ranks(straggler.ranks) if straggler is not None else "none"


def _waits_least(trace: StragglerTrace, first: int, last: int) -> str:
    waits = trace.waits(first, last)
    groups = split([RankTime(rank, SAMPLES, {}, {}, {}, share, 0.0) for rank, share in waits.items()])
    return format_ranks(time.rank for time in groups[0]) if groups is not None else "none"


def _words(found: Counter[str]) -> str:
    return ", ".join(f"{ranks} ({count})" for ranks, count in found.most_common()) or "-"


if __name__ == "__main__":
    raise SystemExit(main())
