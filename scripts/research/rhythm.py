"""Compares the learned threshold with the best fixed timeout, on generated and recorded step histories.

    python -m scripts.research.rhythm [--each 25] [--json FILE]

The script replays every history as the supervisor sees it, with a floor of 5 s. The best fixed timeout is known only in
hindsight: it is the history's longest step, the shortest timeout that ends no healthy job. ``delay`` is how long a
freeze at a random step would have gone unsuspected. A suspicion only triggers a closer look: a job that computes or
writes is left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from safelaunch.supervise.watch.rhythm import quantile_s, threshold
from tests.support import histories
from tests.support.histories import BOUNDS, replay


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--each", type=int, default=25, help="histories of each kind (25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table")
    words = parser.parse_args()
    rows: dict[str, list[tuple[int, float, float, float]]] = defaultdict(list)
    for history in (*histories.histories(words.each), *histories.recorded()):
        suspected = len(replay(history).suspected)
        dice = random.Random(history.seed)
        frozen_at = dice.randint(len(history.gaps) // 4, len(history.gaps) - 1)
        known = replay(history, frozen_at).known
        delay = threshold(known, BOUNDS).seconds
        allowed = max(BOUNDS.floor_s, 3 * quantile_s(known))
        rows[history.kind].append((suspected, delay, allowed, max(BOUNDS.floor_s, *history.gaps)))
    head = f"{'kind':<40}{'n':>4}{'looked at':>11}{'delay':>9}{'/ allowed':>11}{'/ best fixed':>14}   (medians)"
    print(head)
    every = [row for found in rows.values() for row in found]
    table = [_summary(kind, found) for kind, found in [*rows.items(), ("all", every)]]
    for one in table:
        print(
            "{kind:<40}{histories:>4}{suspected:>11}{delay_s:>8.1f}s{by_allowed:>11.2f}{by_best_fixed:>14.2f}".format(
                **one
            )
        )
    if words.json is not None:
        words.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


def _summary(kind: str, found: Sequence[tuple[int, float, float, float]]) -> dict[str, str | int | float]:
    return {
        "kind": kind,
        "histories": len(found),
        "suspected": sum(row[0] for row in found),
        "delay_s": median(row[1] for row in found),
        "by_allowed": median(row[1] / row[2] for row in found),
        "by_best_fixed": median(row[1] / row[3] for row in found),
    }


if __name__ == "__main__":
    sys.exit(main())
