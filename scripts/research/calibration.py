"""How often verdicts of each confidence are right: over generated jobs, and over the hang zoo.

python -m scripts.research.calibration --count 1000                  # generated jobs, one fault each
python -m scripts.research.calibration --zoo zoo.json --json out     # and the results of scripts.qa zoo --json zoo.json

``right``: a rank at fault is named, alone or among others. ``exact``: those, and no other rank. ``nobody``: no rank is
named. If ranks draw for themselves (``random``) or threads race, no rank is at fault, and any named rank is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from safelaunch.model import Verdict
from safelaunch.verdict.diagnose import diagnose
from scripts.research.verdict_corpus import synthetic_jobs

LEVELS = ("high", "medium", "low")
OUTCOMES = ("right", "nobody", "wrong")
COLUMNS = ("exact", *OUTCOMES)
ROW = "{:<14}{:<10}{:>8}{:>8}{:>8}{:>8}{:>8}{:>9}"

Counts = Counter[tuple[str, str]]  # (confidence, outcome)
Classes = dict[str, Counts]


def main() -> int:
    words = _arguments()
    classes = generated(words.count, words.seed, words.show)
    tables = {"generated": sum(classes.values(), start=Counter())}
    if words.zoo:
        tables["zoo"] = of_zoo(words.zoo)
    if words.classes:
        tables |= classes
    print(ROW.format("", "confidence", *COLUMNS, "all", "right"))
    for name, counts in tables.items():
        for level in LEVELS:
            print(_row(name, level, counts))
    if words.json:
        rows = [
            {"source": name, "confidence": level, **{name: counts[level, name] for name in COLUMNS}}
            for name, counts in tables.items()
            for level in LEVELS
        ]
        words.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="generated jobs (500)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--classes", action="store_true", help="also a table for each kind of fault")
    parser.add_argument("--show", choices=LEVELS, help="print the jobs with wrong verdicts of this confidence")
    parser.add_argument("--zoo", type=Path, metavar="FILE", help="results of scripts/qa/zoo.py --json FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    return parser.parse_args()


def _row(name: str, level: str, counts: Counts) -> str:
    numbers = [counts[level, outcome] for outcome in OUTCOMES]
    named = numbers[0] + numbers[2]
    share = f"{numbers[0] / named:.1%}" if named else "-"
    return ROW.format(name, level, counts[level, "exact"], *numbers, sum(numbers), share)


def generated(count: int, seed: int, show: str | None = None) -> Classes:
    """Each kind of fault equally often, in jobs of up to 512 ranks, with and without stacks and short ring buffers."""
    classes: Classes = {}
    for name, faulty, evidence in synthetic_jobs(count, seed):
        verdict = diagnose(evidence)
        outcome = outcome_of(verdict, faulty)
        counts = classes.setdefault(name.partition(",")[0], Counter())
        counts[verdict.confidence, outcome] += 1
        counts[verdict.confidence, "exact"] += outcome == "right" and {c.rank for c in verdict.culprits} == faulty
        if outcome == "wrong" and verdict.confidence == show:
            print(f"{name}, at fault {sorted(faulty)}: {verdict.cause}: {verdict.summary[:300]}")
    return classes


def outcome_of(verdict: Verdict, faulty: frozenset[int]) -> str:
    named = {culprit.rank for culprit in verdict.culprits}
    return "nobody" if not named else "right" if named & faulty else "wrong"


def of_zoo(path: Path) -> Counts:
    """A specimen whose verdict is not right in every way counts as wrong; one that is right is exact."""
    counts: Counts = Counter()
    for row in json.loads(path.read_text()):
        if not row.get("not run"):
            counts[row["confidence"], "wrong" if row["wrong"] else "right"] += 1
            counts[row["confidence"], "exact"] += not row["wrong"]
    return counts


if __name__ == "__main__":
    sys.exit(main())
