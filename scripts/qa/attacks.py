"""Runs every known attack on safelaunch and prints how many got through. None may.

python -m scripts.qa attacks                            # everything: 10,000 fuzzed dumps, 200 kills, ... (an hour)
python -m scripts.qa attacks --area dumps --count 500   # one area, fewer random attacks
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.qa.attacks.attack import AREAS, Attack, attacks

COUNTS = {"dumps": 10_000, "kills": 200}
ROW = "{:<10}  {:>6}  {:>6}  {:>7}  {:>7}"


@dataclass
class Tally:
    """The results of one area. ``fallen`` has a line for each attack that succeeded."""

    tried: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    fallen: list[str] = field(default_factory=list)


def main() -> int:
    words = _arguments()
    tallies = {}
    print(ROW.format("area", "tried", "fallen", "not run", "seconds"))
    for area in words.area or AREAS:
        begin = time.monotonic()
        tally = tallies[area] = Tally()
        for attack in attacks(area, words.count or COUNTS.get(area, 100), words.seed):
            _try(attack, tally)
        skipped = sum(tally.skipped.values())
        print(ROW.format(area, tally.tried, len(tally.fallen), skipped, f"{time.monotonic() - begin:.0f}"), flush=True)
    for area, tally in tallies.items():
        for reason, count in tally.skipped.items():
            print(f"{area}: {count} not run: {reason}")
        for line in tally.fallen:
            print(f"{area}: {line}")
    tried = sum(tally.tried for tally in tallies.values())
    fallen = sum(len(tally.fallen) for tally in tallies.values())
    print(f"{tried} tried, {fallen} fallen (seed {words.seed})")
    if words.json is not None:
        found = {"seed": words.seed, "areas": {area: asdict(tally) for area, tally in tallies.items()}}
        words.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if fallen or not tried else 0


def _try(attack: Attack, tally: Tally) -> None:
    if reason := attack.needs():
        tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
        return
    scratch = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        wrong = attack.run(scratch)
    except Exception as error:  # noqa: BLE001 - an unforeseen error counts as fallen, and the next attack runs
        wrong = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tally.tried += 1
    if wrong:
        tally.fallen.append(f"{attack.name}: {wrong}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="run only this area (repeatable)")
    parser.add_argument("--count", type=int, help="random attacks per area (default: 100, dumps 10,000, kills 200)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeat the attacks of this seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
