"""Runs what `safelaunch reproduce` writes for each class of hang, and prints whether it leads to the same verdict.

python -m scripts.qa reproductions                        # the zoo's classes and generated dumps
python -m scripts.qa reproductions --only barrier,skip    # some of them
python -m scripts.qa reproductions --json FILE --for 200  # for 200 s; again: the cases that FILE doesn't have
python -m scripts.qa reproductions --wish ranks,shrink    # as the options of reproduce
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safelaunch.addons.reproduce import Extent, ScriptOptions
from scripts.qa.commits import product_commit
from tests.qa import reproducing, zoo
from tests.qa.reproducing import Case, Replay

SEEDS = 3


def main() -> int:
    words = _arguments()
    commit = product_commit(
        "tests/qa/reproducing.py", "tests/qa/zoo.py", "tests/support/synthetic.py", "tests/qa/programs"
    )
    cases = _cases(words)
    known = {} if words.again else _known(words.json, commit)
    print(f"{'case':<34}{'ranks':>5}{'lines':>6}  {'recorded':<36}{'replayed':<36}")
    begin, ran = time.monotonic(), 0
    found, todo = {**known}, [case for case in cases if ", ".join(case) not in known]
    with ThreadPoolExecutor(words.jobs) as pool:
        futures = [pool.submit(_one, case, words, begin) for case in todo]
        for case, future in zip(todo, futures, strict=True):
            row = future.result()
            if row is None:
                continue
            ran += 1
            found[", ".join(case)] = {**asdict(row), "case": ", ".join(case), "commit": commit}
            _show(row)
            if words.json:
                _write(words.json, list(found.values()))
    rows = [found[name] for name in (", ".join(case) for case in cases) if name in found]
    same, said = (sum(not row["why_not"] and bool(row["in_part"]) is part for row in rows) for part in (False, True))
    print(
        f"{same} of {len(rows)} lead to the same verdict, {said} hang or abort at the same calls and say what gloo"
        f" cannot show; {ran} run now, {len(cases) - len(rows)} left, {time.monotonic() - begin:.0f} s, commit {commit}"
    )
    return 0 if same + said == len(cases) else 1


def _show(row: Replay) -> None:
    shown = [f"{cause} {list(ranks)}" for cause, ranks in (row.recorded, row.found)]
    verdict = row.why_not or (f"said: {row.in_part}" if row.in_part else "same")
    print(f"{row.name:<34}{row.ranks:>5}{row.lines:>6}  {shown[0]:<36}{shown[1]:<36}{verdict}", flush=True)


def _known(file: Path | None, commit: str) -> dict[str, dict[str, Any]]:
    # A replay that differed is run again, and so is every case of a commit with changes.
    if file is None or not file.exists() or commit.endswith("+changes"):
        return {}
    rows = json.loads(file.read_text())
    return {row["case"]: row for row in rows if row["commit"] == commit and not row["why_not"]}


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(rows, indent=1) + "\n")
    beside.replace(file)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="classes of the zoo, kinds of generated faults")
    parser.add_argument("--variant", default="", metavar="WORD", help="generated jobs of variants with this word")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only this part of the cases")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"generated jobs of each kind and variant [{SEEDS}]")
    parser.add_argument("--wish", default="", metavar="WORDS", help="ranks, shrink, all, or a number of last calls")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent jobs [2]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows in FILE, and run only those not there")
    parser.add_argument("--again", action="store_true", help="also run what FILE has")
    parser.add_argument("--for", type=float, default=0, dest="for_s", metavar="SECONDS", help="start no case later")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep scripts, output and bundles below DIR")
    return parser.parse_args()


def _cases(words: argparse.Namespace) -> list[Case]:
    only = set(filter(None, words.only.split(",")))
    found: list[Case] = [(name,) for name in reproducing.CLASSES if not zoo.BY_NAME[name].unavailable()]
    for variant in reversed(reproducing.VARIANTS):
        kinds = (*reproducing.KINDS, *(reproducing.THREADED if variant == "no stacks" else ()))
        found += [(kind, variant, str(seed)) for seed in range(words.seeds) for kind in kinds]
    found = [case for case in found if len(case) == 1 or reproducing.on_paper(case) is not None]
    found = [case for case in found if words.variant in ", ".join(case[1:])]
    found = [case for case in found if not only or case[0] in only]
    part, _, of = words.part.partition("/")
    return found[int(part) - 1 :: int(of)]


def _one(case: Case, words: argparse.Namespace, begin: float) -> Replay | None:
    """None: there is no time left for it."""
    if words.for_s and time.monotonic() - begin > words.for_s:
        return None
    name = ", ".join(case)
    scratch = Path(tempfile.mkdtemp(prefix="reproductions-"))
    source, replayed = scratch / "source", scratch / "replayed"
    source.mkdir()
    replayed.mkdir()
    try:
        if len(case) == 1:
            evidence = reproducing.of_zoo(case[0], 1, source)
        else:
            name = f"{name} {'x'.join(map(str, reproducing.layout_of(case)))}"
            evidence = reproducing.of_dumps(case, source)
        return reproducing.replay(name, evidence, replayed, _wish(words.wish))
    except AssertionError as error:  # a job did not end, or its bundle is not there
        return Replay(name, ("-", ()), ("-", ()), 0, 0, str(error).splitlines()[0])
    finally:
        if words.keep:
            shutil.copytree(scratch, words.keep / name.replace(", ", "-").replace(" ", "-"), dirs_exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


def _wish(words: str) -> ScriptOptions:
    asked = set(filter(None, words.split(",")))
    last = next((int(word) for word in asked if word.isdecimal()), None)
    return ScriptOptions(Extent("all" in asked, last), fewest="ranks" in asked, shrink="shrink" in asked)


if __name__ == "__main__":
    sys.exit(main())
