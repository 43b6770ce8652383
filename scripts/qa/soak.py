"""Runs healthy jobs of every rhythm (none must be ended) and frozen ones (none must be missed), and prints a table.

python -m scripts.qa soak                        # everything, three jobs at a time: half an hour on 2 cores python -m
scripts.qa soak --only healthy --at-once 2 python -m scripts.qa soak --name "slow disk"     # cases whose name contains
this python -m scripts.qa soak --nodes 2              # each job on two nodes, in network namespaces (root)
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.qa import soak, soak_nodes
from tests.support import netns
from tests.support.jobs import Result

Case = soak.Healthy | soak.Frozen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=("healthy", "frozen"), help="run only this half")
    parser.add_argument("--name", default="", help="run only cases whose name contains this")
    parser.add_argument("--at-once", type=int, default=3, help="concurrent jobs (3)")
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes of each job (1), of 2 or 3 of which one is in trouble"
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="run the Kth of N parts of these cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table")
    words = parser.parse_args()
    if words.nodes > 1 and (reason := netns.cannot()):
        parser.error(reason)
    cases: list[Case] = []
    cases += soak.HEALTHY if words.only != "frozen" else ()
    cases += soak.FROZEN if words.only != "healthy" else ()
    if words.nodes > 1:  # the cases of everyday.py share files and ports of one machine
        cases = [case for case in cases if isinstance(case, soak.Frozen) or case.script == soak.SCRIPT]
    part, parts = map(int, words.part.split("/"))
    numbers = [number for number, case in enumerate(cases) if words.name in case.name][part - 1 :: parts]
    cases = [cases[number] for number in numbers]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the network goes, too
    print(f"{'job':<42}{'seconds':>8}  {'threshold':<34}outcome", flush=True)
    with ThreadPoolExecutor(words.at_once) as pool:
        rows = list(pool.map(partial(_run, nodes=words.nodes), cases, numbers))
    healthy = [row for case, row in zip(cases, rows, strict=True) if isinstance(case, soak.Healthy)]
    frozen = [row for case, row in zip(cases, rows, strict=True) if isinstance(case, soak.Frozen)]
    print(f"\nhealthy: {len(healthy)} jobs, {sum(bool(row['wrong']) for row in healthy)} ended or disturbed")
    print(f"frozen:  {len(frozen)} jobs, {sum(bool(row['wrong']) for row in frozen)} missed or misjudged")
    if words.json is not None:
        words.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


def _run(case: Case, number: int, *, nodes: int) -> dict[str, object]:
    trouble = soak_nodes.trouble_of(number) if nodes > 1 else ""
    name = f"{case.name} ({trouble})" if trouble else case.name
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    begin, threshold, outcome = time.monotonic(), "", "unharmed"
    try:
        wrong, results = _wrong(case, scratch, nodes, trouble)
        for result in (one for one in results[:1] if one.bundles):
            watch = result.bundle.json("manifest.json")["watch"]
            threshold, outcome = f"{watch['threshold_s']:g} s: {watch['why']}"[:33], result.verdict["cause"]
    except AssertionError as error:
        wrong = [str(error).splitlines()[0][:160]]
    seconds = time.monotonic() - begin
    shown = "; ".join(wrong) if wrong else outcome
    print(f"{name:<42}{seconds:>8.1f}  {threshold:<34}{'WRONG: ' if wrong else ''}{shown}", flush=True)
    if wrong:
        print(f"  kept: {scratch}", flush=True)
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    kind = "healthy" if isinstance(case, soak.Healthy) else "frozen"
    row = {"name": name, "kind": kind, "seconds": round(seconds, 1), "threshold": threshold}
    return {**row, "outcome": outcome, "wrong": wrong}


def _wrong(case: Case, scratch: Path, nodes: int, trouble: soak_nodes.Trouble) -> tuple[list[str], list[Result]]:
    """Returns what went wrong, and the results of a frozen job, one for each node."""
    if nodes > 1:
        return soak_nodes.run(case, scratch, nodes, trouble)
    if isinstance(case, soak.Healthy):
        return soak.run_healthy(case, scratch), []
    wrong, result = soak.run_frozen(case, scratch)
    return wrong, [result]


if __name__ == "__main__":
    sys.exit(main())
