"""Runs the hang zoo, every class with every rank as the culprit, and prints the verdicts.

python scripts/zoo.py                       # the whole matrix
python scripts/zoo.py --only asleep,gil     # some classes
python scripts/zoo.py --ranks 4 --json zoo.json
python scripts/zoo.py --first-word          # with nothing configured: how soon is the right rank on the screen?
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

import zoo


def main() -> int:
    words = _arguments()
    names = words.only.split(",") if words.only else list(zoo.BY_NAME)
    unknown = [name for name in names if name not in zoo.BY_NAME]
    if unknown:
        print(f"no such class: {', '.join(unknown)}; there are {', '.join(zoo.BY_NAME)}", file=sys.stderr)
        return 2
    cases = []
    absent: list[dict[str, object]] = []
    for name in names:
        specimen = zoo.BY_NAME[name]
        if specimen.unavailable():
            print(f"{name:<18} not run: {specimen.unavailable()}")
            absent.append({"class": name, "not run": specimen.unavailable()})
            continue
        world = words.ranks or specimen.ranks
        culprits = range(world) if words.culprit is None else [words.culprit]
        cases += [(specimen, culprit, world) for culprit in culprits]
    if words.first_word:
        return _first_words(cases, words.jobs, Path(words.json) if words.json else None)
    print(f"{'class':<18}{'culprit':<9}{'seconds':>7}  {'cause':<24}{'confidence':<11}verdict")
    begin = time.monotonic()
    with ThreadPoolExecutor(words.jobs) as pool:
        rows = []
        for row in pool.map(lambda case: _one(*case, Path(words.keep) if words.keep else None), cases):
            rows.append(row)
            print(
                f"{row['class']:<18}{row['culprit']}/{row['ranks']:<7}{row['seconds']:>7.1f}  {row['cause']:<24}"
                f"{row['confidence']:<11}{'; '.join(row['wrong']) or 'right'}",
                flush=True,
            )
    right = sum(not row["wrong"] for row in rows)
    print(f"{right} of {len(rows)} right, {time.monotonic() - begin:.0f} s")
    if words.json:
        Path(words.json).write_text(json.dumps([*rows, *absent], indent=1) + "\n")
    return 0 if right == len(rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CLASSES", help="comma-separated; all by default")
    parser.add_argument("--ranks", type=int, help="ranks of each job; by default what the class needs")
    parser.add_argument("--culprit", type=int, help="only this culprit; by default each rank in turn")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent jobs [2]")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--first-word", action="store_true", help="measure the time to the first word instead")
    parser.add_argument("--keep", metavar="DIR", help="keep bundles and output below DIR")
    return parser.parse_args()


SOON_S = 15.0  # from the last progress to the right line on the screen


def _first_words(cases: list[tuple[zoo.Specimen, int, int]], jobs: int, file: Path | None) -> int:
    print(f"{'class':<18}{'culprit':<9}{'seconds':>7}  first word")
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda case: _first_word(*case), cases):
            rows.append(row)
            wrong = f"WRONG: {'; '.join(row['wrong'])}: " if row["wrong"] else ""
            print(
                f"{row['class']:<18}{row['culprit']}/{row['ranks']:<7}{row['seconds']:>7.1f}  {wrong}{row['words']}",
                flush=True,
            )
    soon = sum(not row["wrong"] and row["seconds"] <= SOON_S for row in rows)
    print(f"{soon} of {len(rows)} within {SOON_S:g} s and right")
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if soon >= 0.95 * len(rows) else 1


def _first_word(specimen: zoo.Specimen, culprit: int, world: int) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    with zoo.start(specimen, culprit, scratch, ranks=world, configured=False) as job:
        word = zoo.first_word(job)
    shutil.rmtree(scratch, ignore_errors=True)
    wrong = zoo.judge_word(specimen, culprit, word, ranks=world)
    row = {"class": specimen.name, "culprit": culprit, "ranks": world, "wrong": wrong}
    return {**row, "seconds": word.quiet_s if word else 0.0, "words": word.words if word else ""}


def _one(specimen: zoo.Specimen, culprit: int, world: int, keep: Path | None) -> dict[str, object]:
    name = f"{specimen.name}-{culprit}of{world}"
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    if keep is not None:
        scratch.rmdir()
        scratch = (keep / name).absolute()
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    row: dict[str, object] = {"class": specimen.name, "culprit": culprit, "ranks": world}
    try:
        with zoo.start(specimen, culprit, scratch, ranks=world) as job:
            result = job.wait()
        verdict = result.verdict if len(result.bundles) == 1 else {}
        wrong = zoo.judge(specimen, culprit, result, ranks=world)
        seconds = result.seconds
    except AssertionError as error:  # the job did not end; the message contains its output
        verdict, wrong, seconds = {}, [str(error).splitlines()[0]], job.seconds
    row |= {"seconds": round(seconds, 1), "cause": verdict.get("cause", "-")}
    row |= {"confidence": verdict.get("confidence", "-"), "summary": verdict.get("summary", ""), "wrong": wrong}
    if keep is None:
        shutil.rmtree(scratch, ignore_errors=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
