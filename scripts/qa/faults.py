"""Runs the fault matrix, and prints what happened to each job, its processes and its bundle.

python -m scripts.qa faults                          # every row
python -m scripts.qa faults --short                  # the rows that run with the tests
python -m scripts.qa faults --only "kill -9, writing"  # rows whose name contains both
python -m scripts.qa faults --nodes --record FILE  # the matrix for nodes, in network namespaces (root); again: the rest
python -m scripts.qa faults --nodes --jobs 3         # three rows at a time: they mostly wait
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.qa.faults import matrix, node_matrix, node_row
from tests.qa.faults import row as single
from tests.qa.faults.row import HEAD, Outcome, line, total

Run = Callable[[Path], Outcome]

WIDTHS = (42, 13, 13, 8, 4, 7, 34, 7)


def main() -> int:
    words = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # rows that run are ended
    rows = _rows(words)
    if words.list:
        print("\n".join(rows), f"{len(rows)} rows", sep="\n")
        return 0
    print(line(HEAD, WIDTHS), flush=True)
    begin = time.monotonic()
    record = Path(words.record) if words.record else None
    found = {name: cells for name, cells in _recorded(record).items() if name in rows and cells[-1] == "kept"}
    for cells in found.values():
        print(line(cells, WIDTHS), flush=True)
    for name, outcome in _outcomes({name: run for name, run in rows.items() if name not in found}, words.jobs):
        found[name] = cells = outcome.cells()
        print(line(cells, WIDTHS), flush=True)
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps(cells) + "\n")
        if words.output or (outcome.wrong and words.verbose):
            print(outcome.stderr, flush=True)
    table = [found[name] for name in rows]
    print(f"{total(table)}, {time.monotonic() - begin:.0f} s")
    if words.json:
        Path(words.json).write_text(
            json.dumps([dict(zip(HEAD, cells, strict=True)) for cells in table], indent=1) + "\n"
        )
    return 0 if all(cells[-1] == "kept" or cells[-1].startswith("not run") for cells in table) else 1


def _rows(words: argparse.Namespace) -> dict[str, Run]:
    """The rows that are asked for, by name."""
    runs: dict[str, Run]
    if words.nodes:
        runs = {name: partial(node_row.run, row) for name, row in node_matrix.BY_NAME.items()}
    else:
        runs = {name: partial(single.run, row) for name, row in matrix.BY_NAME.items()}
    in_ci = node_matrix.IN_CI if words.nodes else matrix.IN_CI
    asked = [part.strip() for part in words.only.split(",")]
    return {
        name: run
        for name, run in runs.items()
        if all(part in name for part in asked) and (not words.short or name in in_ci)
    }


def _outcomes(runs: Mapping[str, Run], jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Runs ``jobs`` rows at a time, each in a separate process, and yields them as they end."""
    waiting = list(runs.items())
    running: dict[Connection, _Process] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, run = waiting.pop(0)
                process = _Process(name, run)
                running[process.result] = process
            for result in wait(list(running)):
                process = running.pop(result)  # type: ignore[call-overload]
                yield process.name, process.outcome()
    finally:
        for process in running.values():
            process.end()


class _Process:
    """A process that runs one row. It sends the outcome through ``result``."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.result, sender = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(target=_send_outcome, args=(run, sender))
        self._process.start()
        sender.close()

    def outcome(self) -> Outcome:
        """Waits for the end of the process. Raises RuntimeError if it ended without an outcome."""
        try:
            outcome: Outcome = self.result.recv()
        except EOFError:
            raise RuntimeError(f"no outcome of the row {self.name!r}: its traceback stands above") from None
        finally:
            self._process.join()
        return outcome

    def end(self) -> None:
        """Ends the row; its job is cleaned up."""
        self._process.terminate()
        self._process.join()


def _send_outcome(run: Run, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the rows
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever the row has begun is cleaned up
    scratch = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        outcome = run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # A row's functions can't travel.
    sender.send(replace(outcome, row=_Named(outcome.row.fault, outcome.row.moment, outcome.row.where)))


@dataclass(frozen=True)
class _Named:
    fault: str
    moment: str
    where: str

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.moment}, {self.where}"


def _recorded(record: Path | None) -> dict[str, tuple[str, ...]]:
    if record is None or not record.exists():
        return {}
    lines = [tuple(json.loads(text)) for text in record.read_text().splitlines()]
    return {", ".join(cells[:3]): cells for cells in lines}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="comma-separated words that a row's name must contain"
    )
    parser.add_argument("--nodes", action="store_true", help="the matrix for several nodes instead")
    parser.add_argument("--record", metavar="FILE", help="keep the rows in FILE, and run only those not kept there")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N rows at a time")
    parser.add_argument("--short", action="store_true", help="run the shorter form")
    parser.add_argument("--list", action="store_true", help="print the rows' names and exit")
    parser.add_argument("--verbose", action="store_true", help="print the output of jobs that broke a promise")
    parser.add_argument("--output", action="store_true", help="print the output of all jobs")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
