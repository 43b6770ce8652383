"""The catalogue of the verdict's sentences: one example for each template, taken from the verdict cases.

``python -m tests.support.verdict_wording --update`` writes it again. After a change of wording its diff shows every
sentence that reads differently, and no decision is part of it. The number of cases with a sentence changes only if an
explanation comes to other cases than before.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from safelaunch.model import Verdict
from tests.support import verdict_cases
from tests.support.paths import DATA

FILE = DATA / "verdict_wording.txt"
HEADER = """\
# One example for each sentence of the verdict, below the case that it comes from. Before it stands the number of cases
# with that sentence; if it introduces several clauses, the number for each of them. After a change of wording, or for a
# new case, run `python -m tests.support.verdict_wording --update`: a change of wording changes no number.
"""

_SENTENCE = re.compile(r"(?<=[.`'])\s+(?=[A-Z`])")
_CLAUSE = re.compile(r"; |, (?:while|but|and|which|perhaps|called) | while |: | and | in a separate thread")
_OPERATIONS = "|".join(sorted(verdict_cases.OPERATIONS, key=len, reverse=True))
# What differs from case to case within one template, and what stands for it.
_VARIABLE = (
    (re.compile(r"`[^`]*`|\"[^\"]*\""), "CODE"),
    (re.compile(r"'[^']*'"), "NAME"),
    (re.compile(r"\S+\.(?:py|cc|so|txt)(?::\d+)?(?: \([^)]*\))?"), "PLACE"),
    (re.compile(r"PLACE(?: < PLACE)+"), "PLACE"),
    (re.compile(rf"\b_?(?:{_OPERATIONS})\b(?: of \w+\[[^]]*\])?(?: #\d+)?"), "CALL"),
    (re.compile(r"(?i)\b(?:each of )?ranks? \d[\d,-]*"), "RANKS"),
    (re.compile(r" \([^()]*\)|, its peers (?:do|did) not"), ""),
    (re.compile(r"\bwaited\b"), "waits"),
    (re.compile(r"\b\w*Error: .*|signal SIG\w+|SIG\w+"), "NAME"),
    (re.compile(r"\d[\d.,]*"), "N"),
    (re.compile(r"\b(?:is|are)\b|\b(?:has|have)\b|\b(?:was|were)\b|\b(?:does|do)\b|\b(?:its|their)\b"), "BE"),
    (re.compile(r"s\b"), ""),
)
_SHORTEST_TEMPLATE = 8


def sentences(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yields each sentence of a verdict, after the part that it belongs to."""
    texts = {
        "summary": [verdict.summary],
        "reasons": [*(one.reason for one in verdict.culprits), *(one.reason for one in verdict.nodes_at_fault)],
        "evidence": [one.claim for one in verdict.evidence],
        "proof": [one.why for one in verdict.proof],
        "ruled out": verdict.ruled_out,
        "missing": verdict.missing,
        "doubts": verdict.doubts,
        "suggestions": verdict.suggestions,
        "next": [verdict.next.why] if verdict.next else [],
        "blamed before": verdict.blamed_before or (),
    }
    for part, paragraphs in texts.items():
        for paragraph in paragraphs:
            yield from ((part, sentence) for sentence in _SENTENCE.split(paragraph))


def templates_of(sentence: str) -> list[str]:
    """Returns the clauses of a sentence, without what differs from case to case."""
    for pattern, name in _VARIABLE:
        sentence = pattern.sub(name, sentence)
    clauses = (clause.strip(" .").lower() for clause in _CLAUSE.split(sentence))
    return [clause for clause in clauses if len(clause) >= _SHORTEST_TEMPLATE]


def catalogue(verdicts: Iterable[tuple[str, Verdict]]) -> str:
    """Returns the text of the catalogue: by part, the sentences in which a template occurs for the first time."""
    counts: Counter[str] = Counter()
    parts: dict[str, list[tuple[str, str, list[str]]]] = {}
    for name, verdict in verdicts:
        templates_of_case: set[str] = set()
        for part, sentence in sentences(verdict):
            templates = templates_of(sentence)
            first = [one for one in templates if one not in counts and one not in templates_of_case]
            if first:
                parts.setdefault(part, []).append((name, sentence, first))
            templates_of_case.update(templates)
        counts.update(templates_of_case)
    return "\n\n".join((HEADER.rstrip(), *(_part(part, parts[part], counts) for part in parts))) + "\n"


def _part(title: str, entries: Iterable[tuple[str, str, list[str]]], counts: Mapping[str, int]) -> str:
    lines = [f"=== {title} ==="]
    for name, group in itertools.groupby(entries, key=operator.itemgetter(0)):
        lines.append(name)
        for _, sentence, templates in group:
            cases = "+".join(str(counts[one]) for one in dict.fromkeys(templates))
            lines.append(f"  {cases:>3}  {sentence}")
    return "\n".join(lines)


def todays_verdicts() -> Iterator[tuple[str, Verdict]]:
    return ((case.name, case.read().verdict) for case in verdict_cases.all_cases())


def todays_catalogue() -> str:
    return catalogue(todays_verdicts())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.verdict_wording", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the catalogue; without it, print it")
    parser.add_argument(
        "--cases", action="store_true", help="print all sentences of each case, to compare two versions"
    )
    words = parser.parse_args()
    if words.cases:
        for name, verdict in todays_verdicts():
            print(name, *(f"  {part}: {sentence}" for part, sentence in sentences(verdict)), sep="\n")
    elif words.update:
        FILE.write_text(todays_catalogue())
    else:
        print(todays_catalogue(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
