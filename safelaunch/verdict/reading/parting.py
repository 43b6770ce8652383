"""The conditions by which one rank has come to a line and another has not, whatever these ask for. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import spot
from safelaunch.verdict.reading.guards import Guard, way_to
from safelaunch.verdict.reading.source import Loop, ReadSource, handler_of, loops_at, names_in, scope_of, tree_of

_CACHES = frozenset({"cache", "lru_cache", "cached", "cached_property", "memoize"})
_COUNTING = frozenset({"range", "trange", "enumerate", "count"})
_SETTINGS = frozenset({"args", "cfg", "config", "conf", "opt", "opts", "hparams", "params", "settings", "flags"})


@dataclass(frozen=True)
class Condition:
    """A guard, a cache, or the ``except`` of an exception. ``by_round``: it asks for the number of the round alone, so
    in one round all ranks answer alike.
    """

    guard: Guard
    by_round: bool = False


@dataclass(frozen=True)
class Parting:
    """Two stacks of the user's frames, outermost first, from the function on in which they part. ``ways``: of each, the
    conditions on the way to its lines that are none on the other's way, the outermost first.
    """

    stacks: tuple[Sequence[Frame], ...]
    ways: tuple[list[Condition], ...]


def parting(one: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource) -> Parting | None:
    """Of two stacks, innermost first. None where they part in no function of both, or where a source is missing."""
    stacks = _parted(one, other)
    if not stacks or any(not read_source(frame.file) for stack in stacks for frame in stack):
        return None
    ways = [[step for frame in stack for step in _conditions(frame, read_source)] for stack in stacks]
    own = ([step for step in way if step not in others] for way, others in zip(ways, reversed(ways), strict=True))
    return Parting(stacks, tuple(own))


def loop_returned_from(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> Loop | None:
    """The loop that ``behind`` is inside of, in a function that both have called and from which ``ahead`` has returned:
    it stands behind that call, and everything that leads to the call leads there as well.
    """
    inner = _parted(ahead, behind)
    if not inner:
        return None
    (past, *_), (caller, *below) = inner
    to_call, to_past = ({step.guard for step in way_to(one, read_source)} for one in (caller, past))
    loops = [loop for frame in below for loop in loops_at(frame, read_source)]
    if past.line <= caller.line or not to_call <= to_past or not loops:
        return None
    outside = behind[len(below) :]
    return replace(loops[0], enclosed=any(loops_at(frame, read_source) for frame in outside))


def _parted(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    """Both stacks, outermost first, from the function on in which they part; empty where it is no function of both."""
    stacks = [stack[::-1] for stack in (one, other)]
    at = next((n for n, (a, b) in enumerate(zip(*stacks, strict=False)) if spot(a) != spot(b)), None)
    if at is None or spot(stacks[0][at])[:2] != spot(stacks[1][at])[:2]:
        return ()
    return tuple(stack[at:] for stack in stacks)


def _conditions(frame: Frame, read_source: ReadSource) -> Iterator[Condition]:
    tree = tree_of(read_source(frame.file) or "")
    scope = scope_of(tree, frame.line) if tree is not None else ast.Module([], [])
    counters = set(_counters(scope))
    for decorator in getattr(scope, "decorator_list", []):
        if _CACHES.intersection(names_in(decorator)):
            yield Condition(Guard(frame.file, decorator.lineno, f"@{ast.unparse(decorator)}", taken=False))
    for step in way_to(frame, read_source):
        if not step.loop and step.guard.test is not None:
            yield Condition(step.guard, counters.issuperset(_asked(step.guard.test)))
    handler = handler_of(frame, read_source)
    if handler is not None:
        what = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
        yield Condition(Guard(frame.file, handler.lineno, what, taken=True))


def _asked(test: ast.expr) -> Iterator[str]:
    """What a condition asks for, as written, but for settings and constants: these are the same on all ranks."""
    nodes = list(ast.walk(test))
    yield from ("()" for node in nodes if isinstance(node, ast.Call))
    owners = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in owners:
            *where, name = ast.unparse(node).split(".")
            if not name.isupper() and not _SETTINGS.intersection(where):
                yield ".".join((*where, name))


def _counters(scope: ast.AST) -> Iterator[str]:
    """What counts rounds in this function: ``step`` of ``for step in range(n)``, and of ``step += 1`` in each round."""
    loops = (node for node in ast.walk(scope) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)))
    for loop in loops:
        if not isinstance(loop, ast.While) and _COUNTING.intersection(names_in(loop.iter)):
            yield ast.unparse(loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target)
        each_round = [] if any(isinstance(node, ast.Continue) for node in ast.walk(loop)) else loop.body
        added = (one for one in each_round if isinstance(one, ast.AugAssign) and isinstance(one.value, ast.Constant))
        yield from (ast.unparse(one.target) for one in added)
