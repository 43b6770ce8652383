"""What the learned threshold does to generated and recorded step histories, beside the best fixed timeout for each.

    python scripts/bench_rhythm.py [--each 25]

Every history is replayed as the supervisor sees it, with a floor of 5 s. The best fixed timeout is known only
afterwards: the shortest that would have ended nothing, the history's own longest step. ``delay`` is how long a freeze
at a random step would have gone unsuspected. A suspicion is a closer look, not an end: what computes or writes is let
be.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import histories
from test_rhythm import BOUNDS, replay

from safelaunch.watch.rhythm import quantile_s, threshold


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--each", type=int, default=25, help="histories of each kind (25)")
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
    for kind, found in [*rows.items(), ("all", every)]:
        print(
            f"{kind:<40}{len(found):>4}{sum(row[0] for row in found):>11}{median(row[1] for row in found):>8.1f}s"
            f"{median(row[1] / row[2] for row in found):>11.2f}{median(row[1] / row[3] for row in found):>14.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
