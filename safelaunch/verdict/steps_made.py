"""Steps of each rank, and the loop that a rank has left, if some ranks had fewer batches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import msgspec

from safelaunch.model import (
    Claim,
    Frame,
)
from safelaunch.stacks import source as src
from safelaunch.stacks.guards import loops_at
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import ITERABLE


def steps_made(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields the steps of each rank, and advice for a dataset that no sampler divides."""
    steps = {rank: state.step for rank, state in facts.ranks.items() if state.step is not None}
    sides = sorted(sides_of(steps).items())
    words = ", ".join(f"{count} on {ranks_word(ranks)}" for count, ranks in sides[:4])
    words += f", and other counts on {len(sides) - 4} more ranks" if len(sides) > 4 else ""
    loops = [culprit.left for culprit in finding.culprits if isinstance(culprit.left, Frame)]
    iterable = any(_is_iterable(loop, facts.read_source) for loop in loops)
    yield Annotation(
        f"Steps made: {words}." if len(sides) > 1 else "",
        (Claim(f"steps made: {words}", f"ranks/{min(steps)}/progress.json"),) if steps else (),
        advice=frozenset({ITERABLE}) if iterable else frozenset(),
    )


def with_loops_left(facts: CaseFacts, finding: Finding) -> Finding:
    """Adds the loop that ranks outside the script have left: the outermost loop of their peers."""
    if finding.cause != "uneven-batches":
        return finding
    named = {culprit.rank for culprit in finding.culprits}
    gone = {rank for rank in named if facts.ranks[rank].condition is not None}
    stacks = (facts.ranks[rank].user_stack for rank in facts.waiting if rank not in named)
    loop = next((loop for stack in stacks if (loop := _outermost_loop(stack, facts.read_source)) is not None), None)
    if loop is None or not gone:
        return finding
    culprits = (
        msgspec.structs.replace(culprit, left=loop) if culprit.rank in gone else culprit for culprit in finding.culprits
    )
    return replace(finding, culprits=tuple(culprits))


def _outermost_loop(stack: Iterable[Frame], read_source: ReadSource) -> Frame | None:
    loops = [loops[0] for frame in stack if (loops := loops_at(frame, read_source))]
    return Frame(loops[-1].file, loops[-1].line, loops[-1].inside.function) if loops else None


_STREAMS = frozenset({"IterableDataset", "WebDataset", "StreamingDataset", "MosaicStreamingDataset"})
_MOST_NAMES = 6  # names followed through assignments


def _is_iterable(loop: Frame, read_source: ReadSource) -> bool:
    """Returns whether the loop's items come from an iterable dataset or a generator, if its file shows that."""
    here = src.context(loop, read_source)
    heads = (head for head in here.loops if head.lineno == loop.line)
    within = (node for head in heads for node in ast.walk(head))  # a loop over epochs contains the one over batches
    iterables = [node.iter for node in within if isinstance(node, (ast.For, ast.AsyncFor))]
    names = set[str]().union(*(_names_in(iterable, here.names) for iterable in iterables))
    if any("Sampler" in name for name in names):
        return False
    defined = {node.name: node for node in ast.walk(here.tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    definitions = [defined[name] for name in names if name in defined]
    names |= {name for each in definitions for base in getattr(each, "bases", ()) for name in src.names_in(base)}
    generators = (node for each in definitions if isinstance(each, ast.FunctionDef) for node in ast.walk(each))
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in generators)
    return bool(_STREAMS & names) or yields or "streaming" in names


def _names_in(value: ast.expr, values_of_names: Mapping[str, ast.expr], steps: int = _MOST_NAMES) -> set[str]:
    names = {*src.names_in(value)}
    names |= {word.arg for call in src.calls_in(value) for word in call.keywords if word.arg is not None}
    values = [values_of_names[name] for name in names if name in values_of_names] if steps else []
    return names.union(*(_names_in(value_of_name, values_of_names, steps - 1) for value_of_name in values))
