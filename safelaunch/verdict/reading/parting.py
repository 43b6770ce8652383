"""The conditions by which one rank has come to a line and another has not, whatever these ask for. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import short, spot
from safelaunch.verdict.reading.guards import Guard, way_to
from safelaunch.verdict.reading.source import (
    LOOPS,
    AnyLoop,
    Loop,
    ReadSource,
    attempts_of,
    calls_at,
    calls_in,
    end_of,
    handler_of,
    holds,
    ifs_with,
    loops_around,
    loops_at,
    name_called,
    names_called_at,
    names_in,
    scope_at,
)

_CACHES = frozenset({"cache", "lru_cache", "cached", "cached_property", "memoize"})
_COUNTING = frozenset({"range", "trange", "enumerate", "count"})
_UP_TO_THE_FIRST = frozenset({"any", "all"})
_ENDS = (ast.Return, ast.Break, ast.Raise)
_SETTINGS = frozenset({"args", "cfg", "config", "conf", "opt", "opts", "hparams", "params", "settings", "flags"})


@dataclass(frozen=True)
class Condition:
    """A guard, a cache, or the ``except`` of an exception. ``by_round``: it asks for the number of the round alone, so
    in one round all ranks answer alike. ``again``: by that, what failed is tried once more.
    """

    guard: Guard
    by_round: bool = False
    again: bool = False


@dataclass(frozen=True)
class Parting:
    """Two stacks of the user's frames, outermost first, from the function on in which they part. ``ways``: of each, the
    conditions on the way to its lines that are none on the other's way, the outermost first.
    """

    stacks: tuple[Sequence[Frame], ...]
    ways: tuple[list[Condition], ...]


def parting(one: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource) -> Parting | None:
    """Of two stacks, innermost first. None where they part in no function of both, nor in two calls that one line makes
    by their names, ``update(fill())``; or where a source is missing.
    """
    stacks = _parted(one, other) or _parted_on_a_line(one, other, read_source)
    if not stacks or any(not read_source(frame.file) for stack in stacks for frame in stack):
        return None
    ways = [list(_conditions_on(stack, read_source)) for stack in stacks]
    own = (
        [step for step in way if step not in others and _leads_to(step.guard, there[0], read_source)]
        for way, others, there in zip(ways, reversed(ways), reversed(stacks), strict=True)
    )
    return Parting(stacks, tuple(own))


def _leads_to(guard: Guard, there: Frame, read_source: ReadSource) -> bool:
    """Whether who goes the other way may come to the line of ``there`` by that: not by a ``continue`` of a loop that
    makes the same call for its next item, and holds no such line.
    """
    if not guard.text.endswith(": continue"):
        return True
    loops = loops_at(Frame(guard.file, guard.line, ""), read_source)
    return not loops or loops[-1].has(there)


def loop_of_both(
    one: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource
) -> tuple[Guard, Sequence[Frame]] | None:
    """The head of the loop in which both stacks, innermost first, are at one line, where what they call there is what
    the loop gives (``for part in parts: part(m)``), or they call one thing with it; and the stack below it.
    """
    same = one[::-1][: _shared(one, other)]
    alike = len(same) == len(one) == len(other)
    for depth, frame in reversed([*enumerate(same)] if alike else [*enumerate(same)][-1:]):
        here = calls_at(frame, read_source)
        used = {name for call in here for name in names_in(call if alike else call.func)}
        found = [loop for loop, given in _loops_with_names(frame, read_source) if used & given]
        if found:
            return found[-1], one[: len(one) - depth]
    return None


def _loops_with_names(frame: Frame, read_source: ReadSource) -> Iterator[tuple[Guard, set[str]]]:
    """The ``for`` loops around the line, the outermost first, each with the names of what it gives."""
    for loop in loops_around(scope_at(frame, read_source), frame.line):
        if not isinstance(loop, ast.While) and loop.lineno < frame.line:
            text = ast.unparse(loop).split("\n")[0].rstrip(":")
            yield Guard(frame.file, loop.lineno, text, taken=True), set(names_in(loop.target))


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> Loop | None:
    """The loop that ``behind`` is inside of and ``ahead`` is past, in the same function; None if there is none. Stacks
    are innermost first.

    Where they part, one function is at two lines. If one line lies in the body of a ``for`` or ``while`` and the other
    after that loop's end, the rank has left the loop. A collective under ``if rank == 0`` inside the loop has both
    lines inside.
    """
    stacks = _parted(ahead, behind)
    if not stacks:
        return None
    past, inside = stacks[0][0], stacks[1][0]
    scope, callers = scope_at(inside, read_source), ahead[len(stacks[0]) :]
    around = loops_around(scope, inside.line)
    left = [loop for loop in around if end_of(loop) < past.line and not attempts_of(loop)]
    if not left or scope is not scope_at(past, read_source):
        return None
    again = left[0] is not around[0] or any(loops_at(caller, read_source) for caller in callers)
    return _left(left[0], inside, again, (ast.Break,))


def _left(loop: AnyLoop, inside: Frame, enclosed: bool, ends: tuple[type[ast.stmt], ...]) -> Loop:
    return Loop(loop.lineno, enclosed, inside, ifs_with(ends, loop), end_of(loop))


def loop_returned_from(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> Loop | None:
    """The loop that ``behind`` is inside of, in a function that both have called and from which ``ahead`` has returned:
    it stands behind that call, and everything that leads to the call leads there as well.
    """
    inner = _parted(ahead, behind)
    if not inner:
        return None
    (past, *_), (caller, *below) = inner
    to_call, to_past = ({step.guard for step in way_to(one, read_source)} for one in (caller, past))
    loops = ((one, frame) for frame in below for one in loops_around(scope_at(frame, read_source), frame.line))
    first = next(loops, None)
    if past.line <= caller.line or not to_call <= to_past or first is None:
        return None
    again = any(loops_at(frame, read_source) for frame in behind[len(below) :])
    return _left(*first, again, (ast.Break, ast.Return))


def _shared(one: Sequence[Frame], other: Sequence[Frame]) -> int:
    """How many of their outermost frames are at the same lines."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return len(list(takewhile(lambda pair: spot(pair[0]) == spot(pair[1]), pairs)))


def _parted(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    """Both stacks, outermost first, from the function on in which they part; empty where it is no function of both."""
    stacks = _below(one, other)
    return stacks if stacks and spot(stacks[0][0])[:2] == spot(stacks[1][0])[:2] else ()


def _parted_on_a_line(
    one: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource
) -> tuple[Sequence[Frame], ...]:
    """Both stacks, outermost first, below a line that calls the functions of both by their names; else empty."""
    stacks, at = _below(one, other), _shared(one, other)
    called = names_called_at(one[-at], read_source) if stacks and at else set()
    return stacks if called and called >= {short(stack[0].function) for stack in stacks} else ()


def _below(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    """Both, outermost first, without what they share; empty where nothing is left of one."""
    at = _shared(one, other)
    return (one[::-1][at:], other[::-1][at:]) if at < min(len(one), len(other)) else ()


def _conditions_on(stack: Sequence[Frame], read_source: ReadSource) -> Iterator[Condition]:
    """Of a stack, outermost first. What counts rounds does so in a function that it is passed to as well."""
    counters = frozenset[str]()
    for frame, into in zip_longest(stack, stack[1:]):
        scope = scope_at(frame, read_source)
        counters |= frozenset(_counters(scope))
        yield from _conditions(frame, into, scope, counters, read_source)
        counters = frozenset(_passed(frame, into, counters, read_source) if into is not None else ())


def _passed(frame: Frame, into: Frame, names: frozenset[str], read_source: ReadSource) -> Iterator[str]:
    """The parameters of the function that the line calls which get one of these names."""
    function = scope_at(into, read_source)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    parameters = [one.arg for one in function.args.args]
    for call in calls_at(frame, read_source):
        if name_called(call.func) == function.name:
            own = parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters
            pairs = [*zip(own, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
            yield from (name for name, value in pairs if name is not None and ast.unparse(value) in names)


def _conditions(
    frame: Frame, into: Frame | None, scope: ast.AST, counters: frozenset[str], read_source: ReadSource
) -> Iterator[Condition]:
    for decorator in getattr(scope, "decorator_list", []):
        if _CACHES.intersection(names_in(decorator)):
            yield Condition(Guard(frame.file, decorator.lineno, f"@{ast.unparse(decorator)}", taken=False))
    for step in way_to(frame, read_source):
        if not step.loop and step.guard.test is not None:
            yield Condition(step.guard, counters.issuperset(_asked(step.guard.test)))
    if (handler := handler_of(frame, read_source)) is not None:
        yield Condition(Guard(frame.file, handler.lineno, _caught(handler), taken=True))
    for handler in _of_further_attempts(scope, frame.line):
        words = f"{_caught(handler)}, then another attempt"
        yield Condition(Guard(frame.file, handler.lineno, words, taken=False), again=True)
    item = short(into.function) if into is not None else ""
    for call in calls_at(frame, read_source) if item else ():
        if name_called(call.func) in _UP_TO_THE_FIRST and item in {*_generated_by(call.args)}:
            yield Condition(Guard(frame.file, call.lineno, ast.unparse(call), taken=True))


def _caught(handler: ast.ExceptHandler) -> str:
    return f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"


def _generated_by(given: Sequence[ast.expr]) -> Iterator[str]:
    """The names of what runs as items are asked of these arguments."""
    for one in given:
        if isinstance(one, ast.GeneratorExp):
            yield from ("<genexpr>", *(name_called(call.func) for call in calls_in(one.elt)))
        elif isinstance(one, ast.Call):
            yield name_called(one.func)


def _of_further_attempts(scope: ast.AST, line: int) -> Iterator[ast.ExceptHandler]:
    """Of each ``try`` around the line that ends its loop when it succeeds: what catches its failures and goes on."""
    for one in (one for loop in loops_around(scope, line) for one in attempts_of(loop)):
        if holds(one.body, line):
            yield from (each for each in one.handlers if not isinstance(each.body[-1], _ENDS))


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
    loops = (node for node in ast.walk(scope) if isinstance(node, LOOPS))
    for loop in loops:
        if not isinstance(loop, ast.While) and _COUNTING.intersection(names_in(loop.iter)):
            yield ast.unparse(loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target)
        each_round = [] if any(isinstance(node, ast.Continue) for node in ast.walk(loop)) else loop.body
        added = (one for one in each_round if isinstance(one, ast.AugAssign) and isinstance(one.value, ast.Constant))
        yield from (ast.unparse(one.target) for one in added)
