"""The conditions by which one rank has come to a line and another has not, whatever these ask for; the loops that one
has left; the ways in which code leaves out what stands below, and what it prints as it does. Pure.

``print("loss is nan, skipping batch"); continue`` tells why a rank did not come to what stands below in the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename, short, spot
from safelaunch.stacks.guards import Guard, asks_for_the_rank, names_at, way_to
from safelaunch.stacks.source import ReadSource

_CACHES = frozenset({"cache", "lru_cache", "cached", "cached_property", "memoize"})
_COUNTING = frozenset({"range", "trange", "enumerate", "count"})
_UP_TO_THE_FIRST = frozenset({"any", "all"})
_ENDS = (ast.Return, ast.Break, ast.Raise)
_SETTINGS = frozenset({"args", "cfg", "config", "conf", "opt", "opts", "hparams", "params", "settings", "flags"})


@dataclass(frozen=True)
class Parting:
    """Two stacks of the user's frames, outermost first, from the function on in which they part. ``ways``: of each, the
    conditions on the way to its lines that are none on the other's way, the outermost first.
    """

    stacks: tuple[Sequence[Frame], ...]
    ways: tuple[list[Guard], ...]


def parting(one: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource) -> Parting | None:
    """Of two stacks, innermost first. None where they part in no function of both, nor in two calls that one line makes
    by their names, ``update(fill())``; or where a source is missing.
    """
    stacks = _parted(one, other) or _parted_on_a_line(one, other, read_source)
    if not stacks or any(not read_source(frame.file) for stack in stacks for frame in stack):
        return None
    callers = one[len(stacks[0]) :][::-1]
    ways = [list(_conditions_on(stack, callers, read_source)) for stack in stacks]
    own = (
        [one for one in way if one not in others and _leads_to(one, there[0], read_source)]
        for way, others, there in zip(ways, reversed(ways), reversed(stacks), strict=True)
    )
    return Parting(stacks, tuple(own))


def _leads_to(guard: Guard, there: Frame, read_source: ReadSource) -> bool:
    """Whether who goes the other way may come to the line of ``there`` by that: not by a ``continue`` of a loop that
    makes the same call for its next item, and holds no such line.
    """
    if not guard.text.endswith(": continue"):
        return True
    loops = src.loops_at(Frame(guard.file, guard.line, ""), read_source)
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
        here = src.calls_at(frame, read_source)
        used = {name for call in here for name in src.names_in(call if alike else call.func)}
        found = [loop for loop, given in _loops_with_names(frame, read_source) if used & given]
        if found:
            return found[-1], one[: len(one) - depth]
    return None


def _loops_with_names(frame: Frame, read_source: ReadSource) -> Iterator[tuple[Guard, set[str]]]:
    """The ``for`` loops around the line, the outermost first, each with the names of what it gives."""
    for loop in src.loops_around(src.scope_at(frame, read_source), frame.line):
        if not isinstance(loop, ast.While) and loop.lineno < frame.line:
            text = f"for {src.text_of(loop.target)} in {src.text_of(loop.iter)}"
            yield Guard(frame.file, loop.lineno, text, taken=True), set(src.names_in(loop.target))


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> src.SourceLoop | None:
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
    scope, callers = src.scope_at(inside, read_source), ahead[len(stacks[0]) :]
    around = src.loops_around(scope, inside.line)
    left = [loop for loop in around if src.end_of(loop) < past.line and not src.attempts_of(loop)]
    if not left or scope is not src.scope_at(past, read_source):
        return None
    again = left[0] is not around[0] or any(src.loops_at(caller, read_source) for caller in callers)
    return _left(left[0], inside, again, (ast.Break,), read_source)


def _left(
    loop: src.AnyLoop, inside: Frame, enclosed: bool, ends: tuple[type[ast.stmt], ...], read_source: ReadSource
) -> src.SourceLoop:
    """``ends``: the statements by which it is left early, under a condition that may differ between ranks."""
    names = names_at(inside, read_source)
    counters = {*_counters(src.scope_at(inside, read_source))}
    ifs = src.ifs_with(
        ends, loop, lambda test: asks_for_the_rank(test, names) or not counters.issuperset(_asked(test, names))
    )
    return src.SourceLoop(loop.lineno, enclosed, inside, ifs, src.end_of(loop))


def loop_returned_from(
    ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource
) -> src.SourceLoop | None:
    """The loop that ``behind`` is inside of, in a function that both have called and from which ``ahead`` has returned:
    it stands behind that call, and everything that leads to the call leads there as well.
    """
    inner = _parted(ahead, behind)
    if not inner:
        return None
    (past, *_), (caller, *below) = inner
    to_call, to_past = ({*way_to(one, read_source)} for one in (caller, past))
    loops = ((one, frame) for frame in below for one in src.loops_around(src.scope_at(frame, read_source), frame.line))
    first = next(loops, None)
    if past.line <= caller.line or not to_call <= to_past or first is None:
        return None
    again = any(src.loops_at(frame, read_source) for frame in behind[len(below) :])
    return _left(*first, again, (ast.Break, ast.Return), read_source)


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
    called = src.names_called_at(one[-at], read_source) if stacks and at else set()
    return stacks if called and called >= {short(stack[0].function) for stack in stacks} else ()


def _below(one: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    """Both, outermost first, without what they share; empty where nothing is left of one."""
    at = _shared(one, other)
    return (one[::-1][at:], other[::-1][at:]) if at < min(len(one), len(other)) else ()


def _conditions_on(stack: Sequence[Frame], callers: Sequence[Frame], read_source: ReadSource) -> Iterator[Guard]:
    """Of a stack below its ``callers``, outermost first. What counts rounds does so in a function that it is passed to
    as well.
    """
    counters, whole = frozenset[str](), [*callers, *stack]
    for depth, (frame, into) in enumerate(zip_longest(whole, whole[1:])):
        scope = src.scope_at(frame, read_source)
        counters |= frozenset(_counters(scope))
        if depth >= len(callers):
            yield from _conditions(frame, into, scope, counters, read_source)
        counters = frozenset(_passed(frame, into, counters, read_source) if into is not None else ())


def _passed(frame: Frame, into: Frame, names: frozenset[str], read_source: ReadSource) -> Iterator[str]:
    """The parameters of the function that the line calls which get one of these names, or the same on all ranks."""
    function = src.scope_at(into, read_source)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    parameters = [arg.arg for arg in function.args.args]
    defaults = {
        **dict(zip(parameters[::-1], function.args.defaults[::-1], strict=False)),
        **{
            one.arg: value
            for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if value
        },
    }
    known = names_at(frame, read_source)
    for call in src.calls_at(frame, read_source):
        if src.name_called(call.func) == function.name:
            own = parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters
            pairs = [*zip(own, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
            given = {**defaults, **{name: value for name, value in pairs if name is not None}}
            yield from (n for n, value in given.items() if ast.unparse(value) in names or _is_alike(value, known))


def _conditions(
    frame: Frame, into: Frame | None, scope: ast.AST, counters: frozenset[str], read_source: ReadSource
) -> Iterator[Guard]:
    for decorator in getattr(scope, "decorator_list", []):
        if _CACHES.intersection(src.names_in(decorator)):
            yield Guard(frame.file, decorator.lineno, f"@{src.text_of(decorator)}", taken=False)
    for step in way_to(frame, read_source):
        if not step.loop and step.test is not None:
            by_round = not step.asks_for_rank and counters.issuperset(_asked(step.test, step.names))
            yield replace(step, by_round=by_round)
    if (handler := src.handler_of(frame, read_source)) is not None:
        yield Guard(frame.file, handler.lineno, _caught(handler), taken=True)
    for handler in _of_further_attempts(scope, frame.line):
        words = f"{_caught(handler)}, then another attempt"
        yield Guard(frame.file, handler.lineno, words, taken=False, again=True)
    item = short(into.function) if into is not None else ""
    for call in src.calls_at(frame, read_source) if item else ():
        if src.name_called(call.func) in _UP_TO_THE_FIRST and item in {*_generated_by(call.args)}:
            yield Guard(frame.file, call.lineno, src.text_of(call), taken=True)


def _caught(handler: ast.ExceptHandler) -> str:
    return f"except {src.text_of(handler.type)}" if handler.type is not None else "except"


def _generated_by(given: Sequence[ast.expr]) -> Iterator[str]:
    """The names of what runs as items are asked of these arguments."""
    for one in given:
        if isinstance(one, ast.GeneratorExp):
            yield from ("<genexpr>", *(src.name_called(call.func) for call in src.calls_in(one.elt)))
        elif isinstance(one, ast.Call):
            yield src.name_called(one.func)


def _of_further_attempts(scope: ast.AST, line: int) -> Iterator[ast.ExceptHandler]:
    """Of each ``try`` around the line that ends its loop when it succeeds: what catches its failures and goes on."""
    for one in (one for loop in src.loops_around(scope, line) for one in src.attempts_of(loop)):
        if src.holds(one.body, line):
            yield from (handler for handler in one.handlers if not isinstance(handler.body[-1], _ENDS))


_MOST_STEPS = 6  # of names that stand for names
_CASTS = frozenset({"int", "float", "bool", "str", "min", "max", "round", "abs"})


def _is_alike(value: ast.expr, names: Mapping[str, ast.expr], steps: int = _MOST_STEPS) -> bool:
    """Whether all ranks compute the same from it: constants, settings, and names that stand for such."""
    if not steps or asks_for_the_rank(value, names):
        return False
    calls = [*src.calls_in(value)]
    if any(not isinstance(call.func, ast.Name) or call.func.id not in _CASTS for call in calls):
        return False
    known = {"", *_CASTS} if calls else {""}
    for name in _asked_itself(value):
        plain = names.get(name)
        if name not in known and (plain is None or not _is_alike(plain, names, steps - 1)):
            return False
    return True


def _asked(test: ast.expr, names: Mapping[str, ast.expr]) -> Iterator[str]:
    """What a condition asks for, as written, but for what is the same on all ranks."""
    alike = {name for name, value in names.items() if _is_alike(value, names)}
    yield from ("()" for _ in src.calls_in(test))
    yield from (name for name in _asked_itself(test) if name not in alike)


def _asked_itself(test: ast.expr) -> Iterator[str]:
    """The names in an expression, but for settings and constants."""
    nodes = list(ast.walk(test))
    owners = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in owners:
            *where, name = ast.unparse(node).split(".")
            if not name.isupper() and not _SETTINGS.intersection(where):
                yield ".".join((*where, name))


def _counters(scope: ast.AST) -> Iterator[str]:
    """What counts rounds in this function: ``step`` of ``for step in range(n)``, and of ``step += 1`` in each round."""
    loops = (node for node in ast.walk(scope) if isinstance(node, src.LOOPS))
    for loop in loops:
        if not isinstance(loop, ast.While) and _COUNTING.intersection(src.names_in(loop.iter)):
            yield ast.unparse(loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target)
        each_round = [] if any(isinstance(node, ast.Continue) for node in ast.walk(loop)) else loop.body
        added = (one for one in each_round if isinstance(one, ast.AugAssign) and isinstance(one.value, ast.Constant))
        yield from (ast.unparse(one.target) for one in added)


# --- where code goes on elsewhere, and what it prints as it does ------------------------------------------------------

_FIELD = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*[a-zA-Z]|\{[^{}]*\}")
_LEAST = 6  # letters of a text that tells one statement from others


@dataclass(frozen=True)
class Left:
    """A statement at ``frame`` behind which the code goes on elsewhere; it prints a text with these ``parts``, if any.

    ``goes``: how (``continue``, ``return``). ``after``: the ``except`` or ``if`` around it. ``skips``: the lines that
    it leaves out.
    """

    frame: Frame
    parts: tuple[str, ...]
    goes: str
    after: str
    skips: tuple[range, ...]

    @property
    def words(self) -> str:
        """``if bad(batch): continue``; ``except OSError``, behind whose ``try`` the code goes on."""
        return f"{self.after}: {self.goes}" if self.goes == "continue" else self.after

    @property
    def swallows(self) -> bool:
        return self.after.startswith("except")

    def has_printed(self, line: str) -> bool:
        at = 0
        for part in self.parts:
            at = line.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return bool(self.parts)

    def is_in(self, text: str) -> bool:
        """Whether a line of ``text`` is one that it printed."""
        return all(part in text for part in self.parts) and any(map(self.has_printed, text.splitlines()))

    def leaves_out(self, frame: Frame) -> bool:
        return frame.file == self.frame.file and any(frame.line in lines for lines in self.skips)


def left_by(frames: Iterable[Frame], read_source: ReadSource) -> Iterator[Left]:
    """Those in the functions of ``frames``."""
    seen = set()
    for frame in frames:
        scope = src.scope_at(frame, read_source)
        if isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) and scope not in seen:
            seen.add(scope)
            yield from _in_block(scope.body, _Around(frame, getattr(scope, "end_lineno", None) or 1 << 30))


def ways_around(frames: Sequence[Frame], begin: int, read_source: ReadSource) -> list[str]:
    """How a round of the loop that begins at ``begin`` may end, or compute its gradients alone, without the call that
    ``frames`` led to (innermost first; the last of them is in that loop); in words. Ways out of the loop are none.
    """
    scope = src.scope_at(frames[-1], read_source)
    loops = src.loops_around(scope, frames[-1].line)
    body = next((range(loop.lineno, src.end_of(loop) + 1) for loop in loops if loop.lineno == begin), ())
    lefts = [
        left
        for left in left_by(frames, read_source)
        if any(map(left.leaves_out, frames)) and (left.frame.function != frames[-1].function or left.frame.line in body)
    ]
    last = {left.skips: left for left in lefts if left.goes in ("continue", "behind the `try`")}
    found = [f"`{one.words}` at {basename(one.frame.file)}:{one.frame.line}" for one in last.values()]
    calls = (call for call in src.calls_in(scope) if call.lineno in body and isinstance(call.func, ast.Attribute))
    unsynced = (call.lineno for call in calls if src.name_called(call.func) == "no_sync")
    return found + [f"`no_sync()` at line {line}" for line in sorted(unsynced)[:1]]


@dataclass(frozen=True)
class _Around:
    """What a block stands in. ``end``: of the function. ``trial``: of a handler, the lines that it has left."""

    frame: Frame
    end: int
    loop: ast.stmt | None = None
    trial: range | None = None
    after: str = ""


def _in_block(block: Sequence[ast.stmt], around: _Around) -> Iterator[Left]:
    for statement in block:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_loop = isinstance(statement, src.LOOPS)
        inside = replace(around, loop=statement, trial=None, after="") if is_loop else around
        for name in ("body", "orelse", "finalbody"):
            nested = getattr(statement, name, None) or []
            if isinstance(statement, ast.If) and not around.trial:
                head = f"if {src.text_of(statement.test)}"
                inside = replace(around, after=head if name == "body" else f"else of {head}")
            yield from _in_block(nested, inside)
        for handler in getattr(statement, "handlers", ()):
            yield from _in_block(handler.body, _handling(statement, handler, around))
    goes = _way_out(block[-1], around) if block else ""
    for statement in block if goes else ():
        parts = _prints(statement)
        if parts or statement is block[-1]:
            frame = Frame(around.frame.file, statement.lineno, around.frame.function)
            yield Left(frame, parts, goes, around.after, tuple(_skipped(block[-1], around)))


def _handling(statement: ast.stmt, handler: ast.ExceptHandler, around: _Around) -> _Around:
    body: Sequence[ast.stmt] = getattr(statement, "body", [])
    return replace(around, trial=range(body[0].lineno, src.end_of(body[-1]) + 1), after=_caught(handler))


def _way_out(last: ast.stmt, around: _Around) -> str:
    """How the code goes on behind a block, where that is elsewhere."""
    if isinstance(last, (ast.Continue, ast.Break, ast.Return)):
        return type(last).__name__.lower() if around.after else ""
    return "behind the `try`" if around.trial is not None and not isinstance(last, ast.Raise) else ""


def _skipped(last: ast.stmt, around: _Around) -> Iterator[range]:
    if around.trial is not None:
        yield around.trial
    if isinstance(last, (ast.Continue, ast.Break)) and around.loop is not None:
        begin = last if isinstance(last, ast.Continue) else around.loop
        yield range(begin.lineno, src.end_of(around.loop) + 1)
    elif isinstance(last, ast.Return):
        yield range(around.loop.lineno if around.loop is not None else last.lineno, around.end + 1)


# --- what a statement prints ------------------------------------------------------------------------------------------


def _prints(statement: ast.stmt) -> tuple[str, ...]:
    """The literal parts of the text that a call has: loggers and wrappers of ``print`` have any name."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    parts = tuple(part for arg in call.args for part in _literals(arg)) if isinstance(call, ast.Call) else ()
    return parts if sum(map(str.isalpha, "".join(parts))) >= _LEAST else ()


def _literals(node: ast.expr) -> list[str]:
    """The parts of a text that are the same each time, without those of which nobody knows what becomes of them."""
    if isinstance(node, ast.Constant):
        found = _FIELD.split(node.value) if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        found = [str(one.value) for one in node.values if isinstance(one, ast.Constant)]
    elif isinstance(node, ast.BinOp):  # "..." % value, "..." + value
        found = _literals(node.left) + (_literals(node.right) if isinstance(node.op, ast.Add) else [])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        found = _literals(node.func.value)
    else:
        found = []
    return [line for part in found for line in part.split("\n")[:1] if line.strip()]
