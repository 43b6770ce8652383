"""Runs jobs that end, and prints the verdict from the log alone next to the verdict of the watched job.

python -m scripts.qa log-verdicts                 # all python -m scripts.qa log-verdicts --only raises   # some of them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.reading import locate
from safelaunch.model import Verdict
from safelaunch.verdict.diagnose import diagnose

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).parents[2] / "tests" / "qa" / "programs" / "ending.py"
OWN = (
    "raises",
    "chain",
    "assertion",
    "shapes",
    "file",
    "memory",
    "exits",
    "leaves",
    "killed",
    "segv",
    "aborts",
    "worker",
)
HANGS = ("asleep", "thread", "logged", "other-call", "other-size", "skips")
TREE = "tree"  # torchrun writes a file for each rank


@dataclass(frozen=True)
class Case:
    how: str
    culprit: int
    launcher: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        more = " ".join((*(word for word in self.launcher if word != "3"), *(name for name, _ in self.env)))
        return f"{self.how} on {'all' if self.culprit < 0 else self.culprit}{f' {more}' if more else ''}"


def cases() -> Iterator[Case]:
    for number, how in enumerate((*OWN, *HANGS)):
        yield Case(how, number % 3)
    for how in ("raises", "file"):
        yield Case(how, -1)
    for how in ("raises", "killed", "asleep"):
        yield Case(how, 2, ("--tee", "3"))
        yield Case(how, 1, ("--redirects", "3"))
    yield Case("other-call", 1, env=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),))
    yield Case("healthy", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of these ways to end, after commas")
    only = parser.parse_args().only.split(",")
    rows = [row(case) for case in cases() if only == [""] or case.how in only]
    same, wrong = (sum(one[at] for one in rows) for at in (0, 1))
    print(f"{same} of {len(rows)} logs name the same ranks as the bundle; {wrong} are wrong and sure of it")
    return 0


def row(case: Case) -> tuple[bool, bool]:
    with tempfile.TemporaryDirectory() as folder:
        log, bundle = _from_log(case, Path(folder)), _from_bundle(case, Path(folder))
    mine, theirs = (sorted({one.rank for one in each.culprits}) if each is not None else [] for each in (log, bundle))
    told = [f"{one.cause} {one.confidence}" if one is not None else "nothing wrong seen" for one in (log, bundle)]
    print(f"{case.name:<44} {told[0]:<36} {mine!s:<10} | {told[1]:<36} {theirs!s:<10}", flush=True)
    return mine == theirs, mine != theirs and log is not None and log.confidence == "high"


def _from_log(case: Case, folder: Path) -> Verdict | None:
    launcher = [*case.launcher, *(("--log-dir", str(folder / TREE)) if "--redirects" in case.launcher else ())]
    with (folder / "job.log").open("wb") as log:
        _run([BIN / "torchrun", "--standalone", "--nproc-per-node=3", *launcher], case, log.fileno())
    path = folder / TREE if "--redirects" in case.launcher else folder / "job.log"
    found = locate.read(path)
    return diagnose(found.evidence) if found.evidence.ranks else None


def _from_bundle(case: Case, folder: Path) -> Verdict | None:
    own = ["--bundle-dir", folder / "bundles", "--stall-timeout=4"]
    _run([BIN / "safelaunch", *own, "--nproc-per-node=3"], case, subprocess.DEVNULL)
    latest = folder / "bundles" / "latest"
    return diagnose(locate.read(latest.resolve()).evidence) if latest.exists() else None


def _run(command: list[object], case: Case, output: int) -> None:
    words = [*map(str, command), str(PROGRAM), case.how, str(case.culprit)]
    subprocess.run(words, env={**os.environ, **dict(case.env)}, stdout=output, stderr=subprocess.STDOUT, check=False)


if __name__ == "__main__":
    sys.exit(main())
