"""``scripts/faults.py --jobs``: rows beside each other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Rows that meet: ``first`` ends only once ``second`` has begun, and ``third`` begins once one of them has ended.
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import faults
from row import Outcome

place = Path(sys.argv[2])

def row(name, until=""):
    def run(scratch):
        (place / f"{name}.began").touch()
        (place / f"{name}.scratch").write_text(str(scratch))
        while until and not (place / until).exists():
            time.sleep(0.01)
        return Outcome(faults._Named(name, "training", "a node"))
    return run

def fails(scratch):
    raise ValueError("no such row")

runs = {"first": row("first", "second.began"), "second": row("second", "third.began"), "third": row("third", "never")}
found = faults._outcomes(runs, 2)
print(sorted(name for name, _ in (next(found), next(found))))
while not (place / "third.began").exists():
    time.sleep(0.01)
found.close()
print([name for name in runs if Path((place / f"{name}.scratch").read_text()).exists()])
try:
    list(faults._outcomes({"fails": fails}, 1))
except RuntimeError as error:
    print(error)
"""


def test_rows_run_beside_each_other_and_clean_up_after_themselves(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(ROOT / "scripts"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        "['first', 'second']",
        "[]",
        "no outcome of the row 'fails': its traceback stands above",
    ]
    assert "ValueError: no such row" in done.stderr
