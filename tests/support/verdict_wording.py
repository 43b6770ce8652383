"""The catalogue of the verdict's sentences: one example for each template, taken from the verdict cases.

``python -m tests.support.verdict_wording --update`` writes it again. After a change of wording its diff shows every
sentence that reads differently, and no decision is part of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from safelaunch.model import Verdict
from tests.support import verdict_cases
from tests.support.paths import DATA

FILE = DATA / "verdict_wording.txt"
HEADER = """\
# One example for each sentence of the verdict, below the case that it comes from. After a change of wording, run
# `python -m tests.support.verdict_wording --update`, and read the diff.
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
    """Returns the text of the catalogue: the sentences in which a template occurs for the first time, by part."""
    seen: set[str] = set()
    parts: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    for name, verdict in verdicts:
        for part, sentence in sentences(verdict):
            templates = templates_of(sentence)
            if seen.issuperset(templates):
                continue
            seen.update(templates)
            lines = parts.setdefault(part, [])
            lines += [name] if last.get(part) != name else []
            lines.append(f"  {sentence}")
            last[part] = name
    texts = ("\n".join([f"=== {part} ===", *lines]) for part, lines in parts.items())
    return "\n\n".join((HEADER.rstrip(), *texts)) + "\n"


def todays_catalogue(folder: Path = verdict_cases.FOLDER) -> str:
    return catalogue((case.name, case.read().verdict) for case in verdict_cases.all_cases(folder))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.verdict_wording", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the catalogue; without it, print it")
    text = todays_catalogue()
    if parser.parse_args().update:
        FILE.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
