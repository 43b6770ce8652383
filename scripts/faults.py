"""Runs the fault matrix, one row at a time, and prints what happened to each job, its processes and its bundle.

python scripts/faults.py                          # every row
python scripts/faults.py --short                  # the rows that run with the tests
python scripts/faults.py --only "kill -9, writing"  # rows whose name contains both
python scripts/faults.py --nodes --record FILE    # the matrix for nodes, in network namespaces (root); again: the rest
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

import matrix
import node_matrix
import node_row
import row as single
from row import HEAD, Outcome, line, total

WIDTHS = (42, 13, 13, 8, 4, 7, 34, 7)


def main() -> int:
    words = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever a row has begun is cleaned up
    rows = _rows(words)
    if words.list:
        print("\n".join(rows), f"{len(rows)} rows", sep="\n")
        return 0
    print(line(HEAD, WIDTHS))
    begin = time.monotonic()
    record = Path(words.record) if words.record else None
    kept = {tuple(cells[:3]): tuple(cells) for cells in _recorded(record)}
    found = []
    for name, run in rows.items():
        known = kept.get(tuple(name.rsplit(", ", 2)))
        outcome = None if known is not None and known[-1] == "kept" else _ran(run)
        cells = outcome.cells() if outcome is not None else known
        assert cells is not None
        found.append(cells)
        print(line(cells, WIDTHS), flush=True)
        if outcome is not None and record is not None:
            with record.open("a") as file:
                file.write(json.dumps(cells) + "\n")
        if outcome is not None and (words.output or (outcome.wrong and words.verbose)):
            print(outcome.stderr, flush=True)
    print(f"{total(found)}, {time.monotonic() - begin:.0f} s")
    if words.json:
        Path(words.json).write_text(
            json.dumps([dict(zip(HEAD, cells, strict=True)) for cells in found], indent=1) + "\n"
        )
    return 0 if all(cells[-1] == "kept" or cells[-1].startswith("not run") for cells in found) else 1


def _rows(words: argparse.Namespace) -> dict[str, Callable[[Path], Outcome]]:
    """The rows that are asked for, by name."""
    runs: dict[str, Callable[[Path], Outcome]]
    if words.nodes:
        runs = {name: partial(node_row.run, row) for name, row in node_matrix.BY_NAME.items()}
    else:
        runs = {name: partial(single.run, row) for name, row in matrix.BY_NAME.items()}
    short = node_matrix.SHORT if words.nodes else matrix.SHORT
    asked = [part.strip() for part in words.only.split(",")]
    return {
        name: run
        for name, run in runs.items()
        if all(part in name for part in asked) and (not words.short or name in short)
    }


def _ran(run: Callable[[Path], Outcome]) -> Outcome:
    scratch = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        return run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _recorded(record: Path | None) -> list[list[str]]:
    if record is None or not record.exists():
        return []
    return [json.loads(text) for text in record.read_text().splitlines()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="comma-separated words that a row's name must contain"
    )
    parser.add_argument("--nodes", action="store_true", help="the matrix for several nodes instead")
    parser.add_argument("--record", metavar="FILE", help="keep the rows in FILE, and run only those not kept there")
    parser.add_argument("--short", action="store_true", help="run the shorter form")
    parser.add_argument("--list", action="store_true", help="print the rows' names and exit")
    parser.add_argument("--verbose", action="store_true", help="print the output of jobs that broke a promise")
    parser.add_argument("--output", action="store_true", help="print the output of all jobs")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
