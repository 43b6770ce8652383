"""Runs healthy jobs of every rhythm (none may be ended) and frozen ones (none may be missed), and prints a table.

python scripts/soak.py                        # everything, three jobs at a time: half an hour on 2 cores
python scripts/soak.py --only healthy --at-once 2
python scripts/soak.py --name "slow disk"     # cases whose name contains this
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

import soak


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=("healthy", "frozen"), help="run only this half")
    parser.add_argument("--name", default="", help="run only cases whose name contains this")
    parser.add_argument("--at-once", type=int, default=3, help="concurrent jobs (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table")
    words = parser.parse_args()
    cases: list[soak.Healthy | soak.Frozen] = []
    cases += soak.HEALTHY if words.only != "frozen" else ()
    cases += soak.FROZEN if words.only != "healthy" else ()
    cases = [case for case in cases if words.name in case.name]
    print(f"{'job':<42}{'seconds':>8}  {'threshold':<34}outcome", flush=True)
    with ThreadPoolExecutor(words.at_once) as pool:
        rows = list(pool.map(_run, cases))
    healthy = [row for case, row in zip(cases, rows, strict=True) if isinstance(case, soak.Healthy)]
    frozen = [row for case, row in zip(cases, rows, strict=True) if isinstance(case, soak.Frozen)]
    print(f"\nhealthy: {len(healthy)} jobs, {sum(bool(row['wrong']) for row in healthy)} ended or disturbed")
    print(f"frozen:  {len(frozen)} jobs, {sum(bool(row['wrong']) for row in frozen)} missed or misjudged")
    if words.json is not None:
        words.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


def _run(case: soak.Healthy | soak.Frozen) -> dict[str, object]:
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    begin, threshold, outcome = time.monotonic(), "", "unharmed"
    try:
        if isinstance(case, soak.Healthy):
            wrong = soak.run_healthy(case, scratch)
        else:
            wrong, result = soak.run_frozen(case, scratch)
            if result.bundles:
                watch = result.bundle.json("manifest.json")["watch"]
                threshold, outcome = f"{watch['threshold_s']:g} s: {watch['why']}"[:33], result.verdict["cause"]
    except AssertionError as error:
        wrong = [str(error).splitlines()[0][:160]]
    seconds = time.monotonic() - begin
    shown = "; ".join(wrong) if wrong else outcome
    print(f"{case.name:<42}{seconds:>8.1f}  {threshold:<34}{'WRONG: ' if wrong else ''}{shown}", flush=True)
    if wrong:
        print(f"  kept: {scratch}", flush=True)
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    kind = "healthy" if isinstance(case, soak.Healthy) else "frozen"
    row = {"name": case.name, "kind": kind, "seconds": round(seconds, 1), "threshold": threshold}
    return {**row, "outcome": outcome, "wrong": wrong}


if __name__ == "__main__":
    sys.exit(main())
