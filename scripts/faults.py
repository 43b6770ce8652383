"""Runs the fault matrix, one row at a time, and prints what happened to each job, its processes and its bundle.

python scripts/faults.py                          # every row
python scripts/faults.py --short                  # the rows that run with the tests
python scripts/faults.py --only "kill -9, writing"  # rows whose name contains both
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

import matrix
from row import HEAD, line, run, total

WIDTHS = (42, 13, 12, 4, 4, 7, 34, 7)


def main() -> int:
    words = _arguments()
    names = matrix.SHORT if words.short else tuple(matrix.BY_NAME)
    rows = [matrix.BY_NAME[name] for name in names if all(part.strip() in name for part in words.only.split(","))]
    if words.list:
        print("\n".join(row.name for row in rows), f"{len(rows)} rows", sep="\n")
        return 0
    print(line(HEAD, WIDTHS))
    begin, found = time.monotonic(), []
    for row in rows:
        scratch = Path(tempfile.mkdtemp(prefix="fault-"))
        try:
            outcome = run(row, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        found.append(outcome.cells())
        print(line(found[-1], WIDTHS), flush=True)
        if outcome.wrong and words.verbose:
            print(outcome.stderr, flush=True)
    print(f"{total(found)}, {time.monotonic() - begin:.0f} s")
    if words.json:
        Path(words.json).write_text(
            json.dumps([dict(zip(HEAD, cells, strict=True)) for cells in found], indent=1) + "\n"
        )
    return 0 if all(cells[-1] == "kept" or cells[-1].startswith("not run") for cells in found) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="comma-separated words that a row's name must contain"
    )
    parser.add_argument("--short", action="store_true", help="run the shorter form")
    parser.add_argument("--list", action="store_true", help="print the rows' names and exit")
    parser.add_argument("--verbose", action="store_true", help="print the output of jobs that broke a promise")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
