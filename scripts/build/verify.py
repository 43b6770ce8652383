"""Runs the long checks in order, records their results in figures.json, and prints one table.

python -m scripts.build.verify                     # checks without a record of this commit (about six hours in all)
python -m scripts.build.verify --only zoo,soak     # only these
python -m scripts.build.verify --list              # the records with their commits; runs nothing

Interrupt it at any time: the next run restarts the interrupted check and continues. It also repeats failed checks.
``scripts/build/figures.py`` puts the tables into README and docs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.build import checks
from scripts.build.checks import CHECKS, FIGURES, ROOT, Check, CheckError, Found, Record

LOGS = ROOT / "build" / "verify"
ROW = "{:<12}{:<20}{:<12}{:>8}  {}"
INTERRUPTED = 130


def main() -> int:
    words = _arguments()
    try:
        names = chosen(words.only)
        if words.list:
            show(names, CHECKS, words.results)
            return 0
        done = verify(names, CHECKS, words.results, again=words.again)
        show(names, CHECKS, words.results)
    except CheckError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the next run goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0 if done else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"comma-separated, of {', '.join(CHECKS)}")
    parser.add_argument("--list", action="store_true", help="show the records and exit")
    parser.add_argument("--again", action="store_true", help="also run checks that have a record of this commit")
    parser.add_argument("--results", type=Path, default=FIGURES, metavar="FILE", help="the record (figures.json)")
    return parser.parse_args()


def chosen(only: str) -> list[str]:
    names = [name.strip() for name in only.split(",")] if only else list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise CheckError(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return names


def verify(
    names: Sequence[str],
    known: Mapping[str, Check],
    results: Path,
    *,
    again: bool = False,
    root: Path = ROOT,
    logs: Path = LOGS,
) -> bool:
    """Runs the checks that have no good record of the current commit. Returns whether all have passed."""
    for name in names:
        commit = checks.commit_of(known[name], root)
        if again or not is_current(checks.load(results).get(name), commit):
            record = run(name, known[name], commit, root, logs, anew=again)
            checks.save(results, {**checks.load(results), name: record})  # loads again: two may run at once
    return all(checks.load(results)[name].passed for name in names)


def is_current(record: Record | None, commit: str) -> bool:
    """Whether the record is good and of the current commit. A record of uncommitted changes never counts."""
    return record is not None and record.passed and record.commit == commit and not commit.endswith("+changes")


def run(name: str, check: Check, commit: str, root: Path, logs: Path, *, anew: bool = False) -> Record:
    """Runs one check and returns its record. Raises only if interrupted. ``anew``: a check that resumes does not."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    print(f"{time.strftime('%H:%M:%S')} {name}: about {check.minutes} min; log: {log}", file=sys.stderr, flush=True)
    files, code, begin = [], 0, time.monotonic()
    with log.open("wb") as output:
        for number, command in enumerate(check.commands):
            files.append(logs / f"{name}.{number}.out")
            if anew or not check.resumes:
                files[-1].unlink(missing_ok=True)
            words = [str(files[-1]) if word == "{out}" else word for word in command]
            code = (
                code
                or subprocess.run(
                    words, cwd=root, env={**os.environ, **check.env}, stdout=output, stderr=output, check=False
                ).returncode
            )
    seconds = round(time.monotonic() - begin, 1)
    try:
        found = check.read(files)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        print(f"{name}: no results ({type(error).__name__}: {error}); see {log}", file=sys.stderr)
        code, found = code or 1, Found("no results", (), ())
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Record(commit, today, checks.machine(), seconds, code, found.result, found.head, found.rows)


def show(names: Sequence[str], known: Mapping[str, Check], results: Path, root: Path = ROOT) -> None:
    records = checks.load(results)
    print(ROW.format("check", "commit", "date", "minutes", "result"))
    for name in names:
        record, commit = records.get(name), checks.commit_of(known[name], root)
        if record is None:
            print(ROW.format(name, "-", "-", f"~{known[name].minutes}", "not run"))
            continue
        result = record.result if record.passed else f"FAILED ({record.exit}): {record.result}"
        result += "" if record.commit == commit else f"; older than {commit}"
        print(ROW.format(name, record.commit, record.date, f"{record.seconds / 60:.1f}", result))


if __name__ == "__main__":
    sys.exit(main())
