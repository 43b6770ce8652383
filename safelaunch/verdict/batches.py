"""Ranks that had fewer batches than others: how many steps each made, which loop it left, what gave it the batches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from msgspec import structs

from safelaunch.model import Claim, Frame
from safelaunch.verdict import causes
from safelaunch.verdict.collectives import sides_of
from safelaunch.verdict.findings import Annotation, Finding, ranks_word
from safelaunch.verdict.rank_state import Facts, user_stack_of
from safelaunch.verdict.reading import source as src
from safelaunch.verdict.reading.guards import names_at
from safelaunch.verdict.reading.source import ReadSource

_CAUSE = "uneven-batches"


def counts(facts: Facts, finding: Finding) -> Iterator[Annotation]:
    """The steps of each rank, and advice for a dataset that no sampler divides."""
    if finding.cause != _CAUSE or not finding.culprits:
        return
    steps = {rank: one.step for rank, one in facts.ranks.items() if one.step is not None}
    sides = sorted(sides_of(steps).items())
    words = ", ".join(f"{count} on {ranks_word(ranks)}" for count, ranks in sides[:4])
    words += f", and other counts on {len(sides) - 4} more ranks" if len(sides) > 4 else ""
    loops = [one.left for one in finding.culprits if isinstance(one.left, Frame)]
    iterable = any(_is_iterable(loop, facts.read_source) for loop in loops)
    yield Annotation(
        f"Steps made: {words}." if len(sides) > 1 else "",
        (Claim(f"steps made: {words}", f"ranks/{min(steps)}/progress.json"),) if steps else (),
        advice=frozenset({causes.ITERABLE}) if iterable else frozenset(),
    )


def with_loops_left(facts: Facts, finding: Finding) -> Finding:
    """The same, with the loop that each rank has left which is out of the script: the outermost of its peers'."""
    if finding.cause != _CAUSE:
        return finding
    named = {one.rank for one in finding.culprits}
    gone = {rank for rank in named if facts.ranks[rank].condition is not None}
    stacks = (user_stack_of(facts.ranks[rank].evidence) for rank in facts.waiting if rank not in named)
    loop = next((loop for stack in stacks if (loop := _outermost_loop(stack, facts.read_source)) is not None), None)
    if loop is None or not gone:
        return finding
    culprits = (structs.replace(one, left=loop) if one.rank in gone else one for one in finding.culprits)
    return replace(finding, culprits=tuple(culprits))


def _outermost_loop(stack: Iterable[Frame], read_source: ReadSource) -> Frame | None:
    frames = [frame for frame in stack if src.loops_at(frame, read_source)]
    if not frames:
        return None
    loop = src.loops_at(frames[-1], read_source)[0]
    return Frame(frames[-1].file, loop.line, frames[-1].function)


_ITERABLE = frozenset({"IterableDataset", "WebDataset", "StreamingDataset", "MosaicStreamingDataset"})
_MOST_STEPS = 6  # of names that stand for names


def _is_iterable(loop: Frame, read_source: ReadSource) -> bool:
    """Whether the loop's items come from an iterable dataset or a generator, as far as its file shows."""
    tree = src.tree_in(loop.file, read_source)
    inside = Frame(loop.file, loop.line, loop.function)
    heads = [one for one in src.loops_around(src.scope_at(inside, read_source), loop.line) if one.lineno == loop.line]
    if not heads or isinstance(heads[-1], ast.While):
        return False
    names = _behind(heads[-1].iter, names_at(inside, read_source))
    if any("Sampler" in name for name in names):
        return False
    defined = {one.name: one for one in ast.walk(tree) if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
    found = [defined[name] for name in names if name in defined]
    bases = {
        name for one in found if isinstance(one, ast.ClassDef) for base in one.bases for name in src.names_in(base)
    }
    generators = (one for one in found if isinstance(one, ast.FunctionDef))
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for one in generators for node in ast.walk(one))
    return bool(_ITERABLE & (names | bases)) or yields or "streaming" in names


def _behind(value: ast.expr, known: Mapping[str, ast.expr], steps: int = _MOST_STEPS) -> set[str]:
    """The names in an expression, in what these stand for, and of its arguments."""
    names = {*src.names_in(value)}
    names |= {word.arg for one in src.calls_in(value) for word in one.keywords if word.arg is not None}
    values = [known[name] for name in names if name in known] if steps else []
    return names.union(*(_behind(one, known, steps - 1) for one in values))
