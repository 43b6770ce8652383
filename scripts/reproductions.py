"""Runs what `safelaunch reproduce` writes for each class of hang, and prints whether it leads to the same verdict.

python scripts/reproductions.py                        # the zoo's classes and generated dumps
python scripts/reproductions.py --only barrier,skip    # some of them
python scripts/reproductions.py --part 2/5             # the second fifth
python scripts/reproductions.py --wish ranks,shrink --json reproductions.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import reproducing
import verdict_corpus
import zoo
from reproducing import Replay

from safelaunch.reproduce import Wish


def main() -> int:
    words = _arguments()
    cases = _cases(words)
    print(f"{'case':<34}{'ranks':>5}{'lines':>6}  {'recorded':<36}{'replayed':<36}")
    begin, rows = time.monotonic(), []
    with ThreadPoolExecutor(words.jobs) as pool:
        for row in pool.map(lambda case: _one(case, words), cases):
            if row is None:
                continue
            rows.append(row)
            shown = [f"{cause} {list(ranks)}" for cause, ranks in (row.recorded, row.found)]
            verdict = row.why_not or (f"in part, {row.in_part}" if row.in_part else "same")
            print(f"{row.name:<34}{row.ranks:>5}{row.lines:>6}  {shown[0]:<36}{shown[1]:<36}{verdict}", flush=True)
    same, in_part = (sum(not row.why_not and bool(row.in_part) is part for row in rows) for part in (False, True))
    print(f"{same} of {len(rows)} lead to the same verdict, {in_part} in part, {time.monotonic() - begin:.0f} s")
    if words.json:
        words.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if same + in_part == len(rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="classes of the zoo, kinds of generated faults")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only this part of the cases")
    parser.add_argument("--seeds", type=int, default=1, help="generated jobs of each kind and variant [1]")
    parser.add_argument("--wish", default="", metavar="WORDS", help="ranks, shrink: as the options of reproduce")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent jobs [2]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep scripts, output and bundles below DIR")
    return parser.parse_args()


def _cases(words: argparse.Namespace) -> list[tuple[str, ...]]:
    only = set(filter(None, words.only.split(",")))
    found: list[tuple[str, ...]] = [(name,) for name in reproducing.CLASSES if not zoo.BY_NAME[name].unavailable()]
    kinds = (*verdict_corpus.KINDS, "retry", "members")
    for seed in range(words.seeds):
        found += [(kind, variant, str(seed)) for kind in kinds for variant in reproducing.VARIANTS]
    found = [case for case in found if not only or case[0] in only]
    part, _, of = words.part.partition("/")
    return found[int(part) - 1 :: int(of)]


def _one(case: tuple[str, ...], words: argparse.Namespace) -> Replay | None:
    name = ", ".join(case)
    scratch = Path(tempfile.mkdtemp(prefix="reproductions-"))
    wish = Wish(fewest="ranks" in words.wish, shrink="shrink" in words.wish)
    source, replayed = scratch / "source", scratch / "replayed"
    source.mkdir()
    replayed.mkdir()
    try:
        if len(case) == 1:
            told = reproducing.of_zoo(case[0], 1, source)
        else:
            number = reproducing.VARIANTS.index(case[1]) + 3 * int(case[2])
            layout = reproducing.LAYOUTS[(number + sum(map(ord, case[0]))) % len(reproducing.LAYOUTS)]
            if "sends" in case[1]:
                layout = (1, 2, 2)
            name = f"{name} {'x'.join(map(str, layout))}"
            told = reproducing.of_paper(case[0], layout, case[1], int(case[2]), source)
        return reproducing.replay(name, told[0], replayed, wish) if told is not None else None
    except AssertionError as error:  # a job did not end, or its bundle is not there
        return Replay(name, ("-", ()), ("-", ()), 0, 0, str(error).splitlines()[0])
    finally:
        if words.keep:
            shutil.copytree(scratch, words.keep / name.replace(", ", "-").replace(" ", "-"), dirs_exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
