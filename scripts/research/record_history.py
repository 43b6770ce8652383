"""Records when the slowest rank of a real job took its steps, for tests/data/histories.

python -m scripts.research.record_history NAME -- --nproc-per-node=2 train.py ...   # the arguments of safelaunch
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from tests.support.jobs import Job

RECORDED = Path(__file__).parents[2] / "tests" / "data" / "histories"
LOOK_EVERY_S = 0.002
SHOWN_DIGITS = 4


def main() -> int:
    if "--" not in sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    name, _, *words = sys.argv[1:]
    with Job(words, Path(tempfile.mkdtemp(prefix="record-"))) as job:
        times = list(_steps(job))
        code = job.process.wait()
    if code or len(times) < 2:
        print(f"exit code {code}, {len(times)} steps\n{job.stderr[-2000:]}", file=sys.stderr)
        return 1
    gaps = [round(after - before, SHOWN_DIGITS) for before, after in pairwise(times)]
    path = RECORDED / f"{name}.json"
    path.write_text(json.dumps({"command": [Path(word).name for word in words], "gaps": gaps}) + "\n")
    print(f"{path.name}: {len(gaps)} steps of {min(gaps):.3f} to {max(gaps):.3f} s")
    return 0


def _steps(job: Job):  # type: ignore[no-untyped-def]
    """Returns the time of each step of the slowest rank. Spreads several steps in one poll evenly."""
    roster = Roster(RunPaths(job.runtime / "safelaunch" / f"r{job.process.pid}"))
    step, at_s = 0, 0.0
    while job.process.poll() is None:
        roster.refresh()
        pages = [page.read() for page in roster.pages().values()]
        if pages and all(page.step for page in pages):
            slowest = min(pages, key=lambda page: page.step or 0)
            made, now_s = slowest.step or 0, slowest.last_step_ns / 1e9
            for number in range(step + 1, made + 1):
                yield now_s if not at_s else at_s + (now_s - at_s) * (number - step) / (made - step)
            step, at_s = max(step, made), now_s if made > step else at_s
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
