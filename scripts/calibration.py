"""How often verdicts of each confidence are right: over generated jobs, and over the hang zoo.

python scripts/calibration.py --count 1000                  # generated jobs, one fault each
python scripts/calibration.py --zoo zoo.json --json out     # with the results of scripts/zoo.py --json zoo.json

``right``: the rank at fault is named, alone or within the circle that it is part of. ``nobody``: no rank is named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from verdict_corpus import synthetic_jobs

from safelaunch.diagnose import diagnose
from safelaunch.model import Verdict

LEVELS = ("high", "medium", "low")
OUTCOMES = ("right", "nobody", "wrong")
ROW = "{:<12}{:<10}{:>8}{:>8}{:>8}{:>8}{:>9}"

Counts = Counter[tuple[str, str]]  # (confidence, outcome)


def main() -> int:
    words = _arguments()
    tables = {"generated": generated(words.count, words.seed)}
    if words.zoo:
        tables["zoo"] = of_zoo(words.zoo)
    print(ROW.format("", "confidence", *OUTCOMES, "all", "right"))
    for name, counts in tables.items():
        for level in LEVELS:
            print(_row(name, level, counts))
    if words.json:
        rows = [
            {"source": name, "confidence": level, **{outcome: counts[level, outcome] for outcome in OUTCOMES}}
            for name, counts in tables.items()
            for level in LEVELS
        ]
        words.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="generated jobs (500)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--zoo", type=Path, metavar="FILE", help="results of scripts/zoo.py --json FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    return parser.parse_args()


def _row(name: str, level: str, counts: Counts) -> str:
    numbers = [counts[level, outcome] for outcome in OUTCOMES]
    named = numbers[0] + numbers[2]
    share = f"{numbers[0] / named:.1%}" if named else "-"
    return ROW.format(name, level, *numbers, sum(numbers), share)


def generated(count: int, seed: int) -> Counts:
    """Each kind of fault equally often, in jobs of up to 512 ranks, with and without stacks and short ring buffers."""
    counts: Counts = Counter()
    for _, rank, evidence in synthetic_jobs(count, seed):
        verdict = diagnose(evidence)
        counts[verdict.confidence, outcome_of(verdict, rank)] += 1
    return counts


def outcome_of(verdict: Verdict, rank: int) -> str:
    named = [culprit.rank for culprit in verdict.culprits]
    return "nobody" if not named else "right" if rank in named else "wrong"


def of_zoo(path: Path) -> Counts:
    """A specimen whose verdict is not right in every way counts as wrong."""
    counts: Counts = Counter()
    for row in json.loads(path.read_text()):
        if not row.get("not run"):
            counts[row["confidence"], "wrong" if row["wrong"] else "right"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
