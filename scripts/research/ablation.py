"""Leaves out each rule and each explanation in turn, and prints the decisions that change without it.

    python -m scripts.research.ablation                              # generated jobs and the evidence of the unit tests
    python -m scripts.research.ablation --bundles DIR --show group_order,mismatch

Of generated jobs the ranks at fault are known: ``better`` and ``worse`` are those whose verdict is better or worse with
it than without. A verdict is the better, the more exactly it names them and the surer it is; one that names others, the
less sure. Of the unit tests and of bundles only that the decision differs is known. One that owns no decision can go.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from safelaunch.bundle.reading import locate
from safelaunch.model import Evidence, Verdict
from safelaunch.verdict.findings import Annotation, Finding
from scripts.research import verdict_corpus
from scripts.research.calibration import outcome_of

DIAGNOSE: Any = importlib.import_module("safelaunch.verdict.diagnose")
ROOT = Path(__file__).resolve().parents[2]
ROW = "{:<34}{:>7}{:>9}{:>8}{:>8}{:>8}{:>12}{:>9}"


class Case(NamedTuple):
    """One case. ``diagnose`` applies the current rules. ``faulty`` is None if unknown."""

    corpus: str
    name: str
    diagnose: Callable[[], Verdict]
    faulty: frozenset[int] | None = None


@dataclass
class Owned:
    """The effect of one recognizer. ``changed`` maps a corpus to the cases decided differently without it."""

    asked: int = 0
    better: int = 0
    worse: int = 0
    changed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=700, help="generated jobs (700)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-unit-tests", action="store_true")
    parser.add_argument("--bundles", type=Path, action="append", default=[], metavar="DIR", help="zoo.py --keep DIR")
    parser.add_argument("--show", metavar="NAMES", default="", help="comma-separated; print the cases that they decide")
    words = parser.parse_args()
    owned: dict[str, Owned] = {name: Owned() for name in (*_rules(), *_explanations())}
    total: Counter[str] = Counter()
    for case in cases(words):
        total[case.corpus] += 1
        weigh(case, owned)
    print("cases:", ", ".join(f"{count} {corpus}" for corpus, count in total.items()))
    print(ROW.format("", "asked", "changed", "jobs", "better", "worse", "unit-tests", "bundles"))
    for name, one in owned.items():
        by = {corpus: len(one.changed[corpus]) for corpus in ("jobs", "unit-tests", "bundles")}
        print(ROW.format(name, one.asked, sum(by.values()), by["jobs"], one.better, one.worse, *list(by.values())[1:]))
    for name in filter(None, words.show.split(",")):
        print(f"\n{name}", *(case for names in owned[name].changed.values() for case in names), sep="\n  ")
    return 0


# --- the cases --------------------------------------------------------------------------------------------------------


def cases(words: argparse.Namespace) -> Iterator[Case]:
    for name, faulty, evidence in verdict_corpus.synthetic_jobs(words.count, words.seed):
        yield Case("jobs", name, lambda evidence=evidence: DIAGNOSE.diagnose(evidence), faulty)  # type: ignore[misc]
    if not words.no_unit_tests:
        with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
            yield from _of_unit_tests(Path(folder))
    for folder in words.bundles:
        for path in sorted(folder.rglob("verdict.json")):
            yield Case("bundles", path.parent.name, lambda path=path: _of_bundle(path.parent))  # type: ignore[misc]


def _of_bundle(folder: Path) -> Verdict:
    # The bundle's own verdict is by the rules of its time.
    found = locate.read(folder)
    return DIAGNOSE.diagnose(found.evidence, read_source=found.read_source)  # type: ignore[no-any-return]


def _of_unit_tests(folder: Path) -> Iterator[Case]:
    """The evidence of every verdict in the unit tests."""
    tests = [str(path) for path in sorted(verdict_corpus.UNIT.rglob("test_*.py")) if _diagnoses(path)]
    script = [sys.executable, verdict_corpus.__file__, "make", str(folder), "0", "1", *tests]
    subprocess.run(script, check=False, stdout=subprocess.DEVNULL)
    for path in sorted((folder / "unit-tests").glob("*.msgpack")):
        case = msgspec.msgpack.decode(path.read_bytes(), type=verdict_corpus.Case)
        evidence = verdict_corpus.with_tuples(msgspec.convert(case.evidence, Evidence, strict=True))
        read = case.sources.get if case.sources else None
        yield Case("unit-tests", case.name, lambda e=evidence, r=read: DIAGNOSE.diagnose(e, r))  # type: ignore[misc]


def _diagnoses(test: Path) -> bool:
    text = test.read_text()
    return "safelaunch.verdict" in text and "synthetic import" not in text


# --- leaving out ------------------------------------------------------------------------------------------------------


def weigh(case: Case, owned: dict[str, Owned]) -> None:
    """Diagnoses the case once with everything, then without each recogniser that had a part in it."""
    took_part: list[str] = []
    with _noting(took_part):
        before = case.diagnose()
    for name in owned.keys() & set(took_part):
        one = owned[name]
        one.asked += 1
        with _without(name):
            after = case.diagnose()
        if _decision(after) == _decision(before):
            continue
        one.changed[case.corpus].append(f"{case.name}: {_plain(before)} -> {_plain(after)}")
        if case.faulty is not None:
            with_it, without = worth(before, case.faulty), worth(after, case.faulty)
            one.better += with_it > without
            one.worse += with_it < without


def worth(verdict: Verdict, faulty: frozenset[int]) -> int:
    named, outcome = {one.rank for one in verdict.culprits}, outcome_of(verdict, faulty)
    sure = ("low", "medium", "high").index(verdict.confidence) + 1
    if outcome == "nobody":
        return 0 if faulty else sure
    return -sure if outcome == "wrong" else sure * (2 if named == faulty else 1)


def _rules() -> list[str]:
    return [rule.name for rule in DIAGNOSE.RULES[:-1]]  # the last concludes in any case


def _explanations() -> list[str]:
    return [explanation.name for explanations in DIAGNOSE.EXPLANATIONS for explanation in explanations]


@contextmanager
def _with(rules: tuple[Any, ...], explanations: tuple[Any, ...]) -> Iterator[None]:
    kept = DIAGNOSE.RULES, DIAGNOSE.EXPLANATIONS
    DIAGNOSE.RULES, DIAGNOSE.EXPLANATIONS = rules, explanations
    try:
        yield
    finally:
        DIAGNOSE.RULES, DIAGNOSE.EXPLANATIONS = kept


def _without(name: str) -> Any:
    return _with(
        tuple(rule for rule in DIAGNOSE.RULES if rule.name != name),
        tuple(tuple(one for one in those if one.name != name) for those in DIAGNOSE.EXPLANATIONS),
    )


def _noting(took_part: list[str]) -> Any:
    """Notes the rule that concludes and each explanation that has something to say."""

    def noting_rule(rule: Any) -> Any:
        def decide(case: Any) -> Any:
            ruling = rule.decide(case)
            if isinstance(ruling, Finding):
                took_part.append(rule.name)
            return ruling

        return replace(rule, decide=decide)

    def noting_explanation(explanation: Any) -> Any:
        def explain(case: Any, finding: Finding) -> list[Annotation]:
            notes = [one for one in explanation.explain(case, finding) if one != Annotation()]
            if notes:
                took_part.append(explanation.name)
            return notes

        return replace(explanation, explain=explain)

    explanations = tuple(tuple(map(noting_explanation, those)) for those in DIAGNOSE.EXPLANATIONS)
    return _with(tuple(map(noting_rule, DIAGNOSE.RULES)), explanations)


def _decision(verdict: Verdict) -> Any:
    proved = bool(verdict.proof)
    named = (verdict.outcome, verdict.cause, verdict.confidence, proved, verdict.culprits, verdict.victims)
    return (*named, frozenset(verdict.doubts), frozenset(verdict.suggestions))


def _plain(verdict: Verdict) -> str:
    ranks = ",".join(str(one.rank) for one in verdict.culprits) or "nobody"
    return f"{verdict.cause}, {verdict.confidence}, {ranks}"


if __name__ == "__main__":
    sys.exit(main())
