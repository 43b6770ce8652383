"""Diagnoses the same evidence with two versions of safelaunch and prints where their verdicts differ.

    python -m scripts.research.compare_verdicts main .                     # a git ref or a checkout each
    python -m scripts.research.compare_verdicts v1 HEAD --count 2000 --seed 7
    python -m scripts.research.compare_verdicts main . --bundles DIR       # and every bundle below DIR (zoo --keep DIR)

The corpus comes from BEFORE: generated jobs of every layout up to 512 ranks (``synthetic``), the evidence of every
verdict in its unit tests (``unit-tests``), and the dumps that they write in the formats of torch 2.5 to 2.13
(``dumps``). A *decision* is outcome, cause, confidence, whether a proof was found and which ranks it covers, culprits
(rank, process, line), victims, the names of doubts and suggestions, and the exit code of ``safelaunch diagnose``.
Exit code: 0 if no decision differs, 1 if one does, 2 if the versions could not be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).with_name("verdict_corpus.py")
ROW = "{:<12}{:>9}{:>8}{:>10}{:>9}{:>12}"


class CompareError(Exception):
    """The two versions could not be compared."""


@dataclass(frozen=True)
class Difference:
    """One case whose verdicts differ.

    Attributes:
        level: ``decision``, ``summary`` or ``text``.
        fields: The values before and after.
    """

    corpus: str
    name: str
    level: str
    fields: dict[str, tuple[Any, Any]]


@dataclass
class Tally:
    """The counts of one corpus. ``different`` counts by level."""

    compared: int = 0
    different: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("decision", "summary", "text"), 0))

    @property
    def same(self) -> int:
        return self.compared - sum(self.different.values())


def main() -> int:
    words = _arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="verdicts-") as scratch:
            before, after = (checkout(ref, Path(scratch) / name) for ref, name in
                             ((words.before, "before"), (words.after, "after")))  # fmt: skip
            corpus = Path(scratch) / "corpus"
            make_corpus(before, corpus, words)
            results = verdicts([before, after], corpus, Path(scratch))
    except CompareError as error:
        print(f"compare_verdicts: {error}", file=sys.stderr)
        return 2
    tallies, differences = compare(*results)
    show(tallies, differences, words.show)
    if words.json is not None:
        words.json.write_text(json.dumps([vars(one) for one in differences], indent=1) + "\n")
    return 1 if any(one.level == "decision" for one in differences) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a git ref, or the path of a checkout")
    parser.add_argument("after", metavar="AFTER", help="the same")
    parser.add_argument("--count", type=int, default=400, help="generated jobs (400)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generated jobs (1)")
    parser.add_argument("--no-unit-tests", action="store_true", help="skip the evidence of the unit tests")
    parser.add_argument(
        "--bundles", type=Path, action="append", default=[], metavar="DIR", help="also compare the bundles below DIR"
    )
    parser.add_argument("--show", type=int, default=20, metavar="N", help="print N differences of each level (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all differences to FILE")
    return parser.parse_args()


# --- running both -----------------------------------------------------------------------------------------------------


def checkout(ref: str, place: Path) -> Path:
    """Returns a folder with that version: ``ref`` itself if it is a folder, else an export of the commit."""
    if Path(ref).is_dir():
        return Path(ref).resolve()
    place.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", ref], capture_output=True, check=False)
    if archive.returncode:
        raise CompareError(f"{ref} is neither a folder nor a commit of this repository")
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


def make_corpus(before: Path, corpus: Path, words: argparse.Namespace) -> None:
    corpus.mkdir()
    tests: list[str] = []
    if not words.no_unit_tests:
        tests = [str(path) for path in (before / "tests" / "unit").rglob("test_*.py") if _diagnoses(path)]
    maker = _start(before, "make", corpus, words.count, words.seed, *tests, stdout=subprocess.PIPE)
    output = maker.communicate()[0]
    if maker.returncode not in (0, 1):
        raise CompareError(f"the corpus could not be made:\n{output.decode(errors='replace')[-3000:]}")
    if maker.returncode:  # failed tests have saved their evidence, too
        print(f"tests of {before}: {output.decode(errors='replace').splitlines()[-1]}", file=sys.stderr)
    bundles = [str(path.parent.absolute()) for folder in words.bundles for path in sorted(folder.rglob("verdict.json"))]
    paths = {"dumps": [str(path) for path in sorted((corpus / "dumps").glob("*"))], "bundles": bundles}
    (corpus / "paths.json").write_text(json.dumps(paths))


def _diagnoses(test: Path) -> bool:
    # Excludes the property tests, which only add more generated jobs.
    text = test.read_text()
    return ("safelaunch.verdict" in text or "safelaunch.diagnose import" in text) and "synthetic import" not in text


def verdicts(checkouts: list[Path], corpus: Path, scratch: Path) -> list[dict[tuple[str, str, int], dict[str, Any]]]:
    """Returns (corpus, name, number) → outcome for each version. Both run at once."""
    files = [scratch / f"{number}.jsonl" for number in range(len(checkouts))]
    started = [_start(root, "diagnose", corpus, file) for root, file in zip(checkouts, files, strict=True)]
    codes = [process.wait() for process in started]
    for root, code, file in zip(checkouts, codes, files, strict=True):
        if code:
            raise CompareError(f"{root} could not diagnose the corpus (exit code {code})")
        first = json.loads(file.read_text().partition("\n")[0])
        if Path(first["root"]) != root:
            raise CompareError(f"{first['root']} was asked in place of {root}")
    return [read(file) for file in files]


def read(file: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Returns the outcomes by corpus, name and number, because one test can ask for several verdicts."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number, line in enumerate(file.read_text().splitlines()[1:]):
        outcome = json.loads(line)
        found[outcome.pop("corpus"), outcome.pop("name"), number] = outcome
    return found


def _start(root: Path, *words: object, stdout: int | None = None) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SAFELAUNCH_"))}
    # Same order of sets in both: a rule that depends on it must not look like a difference.
    env |= {"PYTHONPATH": f"{root}:{CORPUS.parent}", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(CORPUS), *map(str, words)]
    return subprocess.Popen(
        command, env=env, cwd=tempfile.gettempdir(), stdout=stdout, stderr=stdout and subprocess.STDOUT
    )


# --- comparing --------------------------------------------------------------------------------------------------------

Results = Mapping[tuple[str, str, int], Mapping[str, Any]]


def compare(before: Results, after: Results) -> tuple[dict[str, Tally], list[Difference]]:
    tallies: dict[str, Tally] = {}
    differences = []
    for key in [*before, *(key for key in after if key not in before)]:
        tally = tallies.setdefault(key[0], Tally())
        tally.compared += 1
        one = difference(key, before.get(key, {"raised": "not run"}), after.get(key, {"raised": "not run"}))
        if one is not None:
            tally.different[one.level] += 1
            differences.append(one)
    return tallies, differences


def difference(key: tuple[str, str, int], before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference | None:
    """Returns the differences at the gravest level: a different decision explains different text."""
    for level, of in (("decision", decision), ("summary", summary), ("text", text)):
        one, other = of(before), of(after)
        if one != other:
            differing = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
            fields = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
            return Difference(key[0], key[1], level, fields)
    return None


def decision(outcome: Mapping[str, Any]) -> dict[str, Any]:
    if "raised" in outcome:
        return {"raised": outcome["raised"]}
    verdict = outcome["verdict"]
    decided = {name: verdict[name] for name in ("outcome", "cause", "confidence", "victims")}
    decided["culprits"] = [_culprit(one) for one in verdict["culprits"]]
    decided["proof"] = sorted(edge["who"] for edge in verdict["proof"])
    decided |= {name: sorted(verdict[f"names of {name}"]) for name in ("doubts", "suggestions")}
    return {**decided, "exit": outcome.get("exit"), "evidence read whole": not outcome.get("lost")}


def _culprit(one: Mapping[str, Any]) -> str:
    frame = one["frame"]
    place = f"{frame['file']}:{frame['line']}" if frame else "no line"
    return f"rank {one['rank']} {one['process']} {place}"


def summary(outcome: Mapping[str, Any]) -> dict[str, Any]:
    return {"summary": outcome.get("verdict", {}).get("summary")}


def text(outcome: Mapping[str, Any]) -> dict[str, Any]:
    return dict(outcome.get("verdict", {}))


# --- showing ----------------------------------------------------------------------------------------------------------


def show(tallies: Mapping[str, Tally], differences: list[Difference], limit: int) -> None:
    print(ROW.format("corpus", "compared", "same", "decision", "summary", "other text"))
    for name, tally in tallies.items():
        print(ROW.format(name, tally.compared, tally.same, *tally.different.values()))
    for level in ("decision", "summary", "text"):
        found = [one for one in differences if one.level == level]
        for one in found[:limit]:
            print(f"\n{level}: {one.corpus} {one.name}")
            for name, (before, after) in one.fields.items():
                print(f"  {name}:\n    - {_plain(before)}\n    + {_plain(after)}")
        if len(found) > limit:
            print(f"\n{level}: {len(found) - limit} more (--show, --json)")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
