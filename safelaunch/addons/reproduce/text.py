"""A program as the text of a script that needs torch alone.

Names of files, groups and operations come from dumps, which may be anybody's: they stand in comments only, in ASCII and
on one line. All else is written from numbers and from words of this module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from math import prod
from shlex import quote

from msgspec import structs

from safelaunch.addons.reproduce import fold
from safelaunch.addons.reproduce.fold import FoldNode, done
from safelaunch.addons.reproduce.program import (
    BARE,
    TRANSFERS,
    TYPES,
    WORLD,
    Program,
    RankProgram,
    ScriptCall,
    ScriptEnd,
)
from safelaunch.model import Evidence, FlightRecord, Frame, RankEvidence
from safelaunch.stacks.frames import basename, is_pseudo, short
from safelaunch.system.redaction.redact import redact_text
from safelaunch.verdict.diagnose import diagnose

# --- Groups that play the same part on different ranks, as the tensor-parallel groups of a job do, under one name -----


Families = dict[str, list[tuple[int, ...]]]


def in_families(program: Program) -> tuple[Program, Families]:
    """The program with the names of families for those of groups, and each family's groups."""
    # Rank → group → its place among the groups of this rank, in the order in which it first calls in them.
    firsts = {rank: dict.fromkeys(call.group for call in one.calls) for rank, one in program.ranks.items()}
    turn = {rank: {name: place for place, name in enumerate(names)} for rank, names in firsts.items()}
    parts: dict[object, list[str]] = {}
    for name, ranks in program.groups.items():
        part = (len(ranks), tuple({turn[rank].get(name, -1) for rank in ranks}))
        parts.setdefault(name if name in program.makers else part, []).append(name)
    families: Families = {}
    name_of: dict[str, str] = {WORLD: WORLD}
    for names in parts.values():
        alike: list[str] = []  # families
        for group in names:
            members = program.groups[group]
            apart = (one for one in alike if set(members).isdisjoint(chain(*families[one])))
            family = next(apart, f"group_{len(families) + 1}")
            if family not in families:
                alike.append(family)
            families.setdefault(family, []).append(members)
            name_of[group] = family
    programs = {rank: _renamed(one, name_of) for rank, one in program.ranks.items()}
    makers = {name_of[name]: ranks for name, ranks in program.makers.items()}
    return replace(program, ranks=programs, makers=makers), {name: sorted(groups) for name, groups in families.items()}


def _renamed(program: RankProgram, name_of: Mapping[str, str]) -> RankProgram:
    return replace(program, calls=tuple(_call(call, name_of) for call in program.calls))


def _call(call: ScriptCall, name_of: Mapping[str, str]) -> ScriptCall:
    parts = tuple(_call(part, name_of) for part in call.parts)
    return replace(call, group=name_of[call.group], parts=parts)


# --- What the records of the script will tell -------------------------------------------------------------------------


ScriptComment = tuple[str, list[int]]  # cause and culprits


def places_matter(program: Program, nodes: Sequence[FoldNode]) -> bool:
    """Whether the lines of ``nodes`` lead to another verdict than one line for equal calls would."""
    steps = {rank: list(done(nodes, rank)) for rank in program.ranks}
    lines, items = ({r: [k(s) for s in made] for r, made in steps.items()} for k in (id, lambda step: step.item))
    return _told(program, lines) != _told(program, items)


def records_tell(program: Program) -> ScriptComment:
    """By the records alone that the script leaves, if it makes equal calls from one line."""
    named, _ = in_families(program)
    return _told(named, {rank: one.calls for rank, one in named.ranks.items()})


def _told(program: Program, places: Mapping[int, Sequence[Hashable]]) -> ScriptComment:
    numbers: dict[object, int] = {}
    ranks = []
    for rank, one in program.ranks.items():
        entries = [
            structs.replace(
                entry, frames=(Frame("/repro.py", numbers.setdefault(place, len(numbers) + 1), "<module>"),)
            )
            for place, left in zip(places[rank], one.entries, strict=False)
            for entry in left
            if not entry.is_p2p
        ]
        entries = [structs.replace(entry, record_id=at) for at, entry in enumerate(entries)]
        groups = {entry.group: program.groups.get(entry.group, tuple(program.ranks)) for entry in entries}
        ranks.append(
            RankEvidence(rank=rank, host="", pid=rank + 1, flight_record=FlightRecord("", tuple(entries), groups))
        )
    found = diagnose(Evidence("hang", program.world_size, tuple(ranks)))
    return found.cause, [culprit.rank for culprit in found.culprits]


_WIDTH = 118
_INDENT = "    "
_FOREVER = "time.sleep(86_400)"
# Whoever reads this line in the output knows that the script does not do what was recorded.
_CAME_BACK = 'raise SystemExit(f"not as recorded: rank {rank} came back from its last call")'
# How a rank stands that waits for nobody, where a line of the standard library stands so as well.
_STANDS = {
    "blocking-io": ("os.read(os.pipe()[0], 1)",),
    "lock-deadlock": ("lock = threading.Lock()", "lock.acquire()", "lock.acquire()"),
    "busy-loop": ("while True:", f"{_INDENT}pass"),
    "rank-stopped": ("os.kill(os.getpid(), signal.SIGSTOP)",),
    "stuck-in-user-code": (_FOREVER,),
    "missing-from-collective": (_FOREVER,),
    "": (_FOREVER,),
}
_MODULES = ("os", "signal", "sys", "threading", "time")


Item = ScriptCall | ScriptEnd


@dataclass(frozen=True)
class Script:
    text: str
    command: str
    notes: tuple[str, ...]


def script(program: Program, recorded: Sequence[str], name: str) -> Script:
    """The whole script. ``recorded``: what was recorded, a paragraph each; ``name``: how the script is called."""
    named, families = in_families(program)
    items = {rank: _items(one) for rank, one in named.ranks.items()}
    dtypes = {dtype for rank in program.ranks.values() for call in _flat(rank) for dtype in call.dtypes}
    writer = _Writer(named, families)
    body = [*_before(named), *writer.groups()]
    nodes = fold.merged(items)
    listed = places_matter(named, nodes)
    body += writer.list_of_calls(nodes) if listed else writer.nodes(nodes, "")
    body.append(_CAME_BACK)
    strange = (f"gloo has no {dtype[:40]}: float32 stands for it." for dtype in sorted(dtypes - {*TYPES, ""}))
    notes = [*program.notes, *_not_the_same(program), *strange]
    command = f"safelaunch --startup-timeout=10 --nproc-per-node={program.world_size} {plain(quote(name))}"
    lines = [*_head(recorded, command, notes), "", *_imports(body), "", *body]
    return Script("\n".join(lines) + "\n", command, tuple(notes))


# --- the parts --------------------------------------------------------------------------------------------------------


def _head(recorded: Sequence[str], command: str, notes: Sequence[str]) -> Iterator[str]:
    yield "# A minimal reproduction, written by safelaunch reproduce from recorded calls. It needs torch, and no GPU:"
    yield "#"
    yield f"#     {command}"
    yield "#"
    for text in recorded:
        yield from _comment(text)
    if notes:
        yield "#"
        yield "# Not as recorded:"
    for note in notes:
        yield from _comment(f"- {note}", "  ")


def _comment(text: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        plain(text), _WIDTH, initial_indent="# ", subsequent_indent=f"# {hanging}", break_on_hyphens=False
    ) or ["#"]


def plain(text: str) -> str:
    """The text without secrets, in printable ASCII, on one line: nothing in it can end a comment."""
    flat = " ".join(redact_text(text).split())
    return "".join(c if " " <= c <= "~" else "?" for c in flat)


NO_SENDS = (
    "The calls are made, but gloo records no send and no receive: a verdict on this script may give the cause another"
    " name, or name more or fewer ranks."
)


def _not_the_same(program: Program) -> Iterator[str]:
    for rank, one in program.ranks.items():
        if one.end.kind == "stands" and one.end.cause not in _STANDS:
            yield f"Rank {rank} {one.end.words} ({one.end.cause}): here it is asleep."
    if any(entry.is_p2p for rank in program.ranks.values() for left in rank.entries for entry in left):
        yield NO_SENDS


def _imports(body: Sequence[str]) -> list[str]:
    code = "\n".join(body)
    standard = [f"import {name}" for name in _MODULES if f"{name}." in code]
    return [*standard, *([""] if standard else []), "import torch", "import torch.distributed as dist"]


def _before(program: Program) -> Iterator[str]:
    """What comes before the groups: ranks that do not join, and the default group."""
    late = {rank: one for rank, one in program.ranks.items() if one.before}
    if late:
        yield 'rank = int(os.environ["RANK"])'
        for rank, one in late.items():
            yield f"if rank == {rank}:"
            yield from (f"{_INDENT}{line}" for line in _standing(one.end))
        yield 'dist.init_process_group("gloo")'
        return
    yield 'dist.init_process_group("gloo")'
    yield "rank = dist.get_rank()"


# --- what ranks have in common ----------------------------------------------------------------------------------------


def _flat(program: RankProgram) -> Iterator[ScriptCall]:
    for call in program.calls:
        yield from call.parts or (call,)


def _items(program: RankProgram) -> list[Item]:
    ends = () if program.end.kind == "waits" else (program.end,)
    return [] if program.before else [*program.calls, *ends]


# --- lines ------------------------------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, program: Program, families: Families) -> None:
        self._program, self._families = program, families
        self._names: Mapping[Item, str] = {}  # of the functions that make the calls, where there are any

    def groups(self) -> Iterator[str]:
        for name, groups in self._families.items():
            makers = self._program.makers.get(name)
            if makers is not None:
                yield from _wrapped(f"if {self._condition(makers)}:")
            if len(groups) == 1:
                line = f"{name} = dist.new_group({_ranks(groups[0])})"
                yield from _wrapped(line if makers is None else _INDENT + line)
            else:
                yield from _wrapped(f"{name}, _ = dist.new_subgroups_by_enumeration({_lists(groups)})")
        if any(not call.waited_for for rank in self._program.ranks.values() for call in rank.calls):
            yield "works = []"
        yield ""

    def nodes(self, nodes: Sequence[fold.FoldNode], indent: str) -> Iterator[str]:
        for is_plain, same in groupby(nodes, key=lambda node: isinstance(node, fold.RankStep)):
            if is_plain:
                yield from self._plain([node.item for node in same if isinstance(node, fold.RankStep)], indent)
                continue
            for node in same:
                if isinstance(node, fold.RepeatedItems):
                    yield f"{indent}for _ in range({node.times}):"
                    yield from self.nodes(node.body, indent + _INDENT)
                elif isinstance(node, fold.RankBranch):
                    yield from self._branch(node, indent)

    def _plain(self, items: Sequence[Item], indent: str) -> Iterator[str]:
        if self._names:
            yield from _wrapped(f"{indent}calls += [{', '.join(self._names[item] for item in items)}]", indent)
            return
        for item in items:
            yield from (indent + line for line in self._item(item))

    def _item(self, item: Item) -> list[str]:
        return _ending(item) if isinstance(item, ScriptEnd) else self._call(item)

    def list_of_calls(self, nodes: Sequence[fold.FoldNode]) -> Iterator[str]:
        """Each distinct call as a function; a list of these for each rank; and one line that makes them.

        So equal calls are made from one place, whoever makes them.
        """
        distinct = dict.fromkeys(step.item for rank in self._program.ranks for step in fold.done(nodes, rank))
        names: dict[Item, str] = {item: f"call_{number}" for number, item in enumerate(distinct, 1)}
        for item, name in names.items():
            yield from ("", f"def {name}():")
            yield from (_INDENT + line for line in self._item(item))
            yield ""
        yield from ("", "calls = []")
        self._names = names
        yield from self.nodes(nodes, "")
        yield "for call in calls:"
        yield f"{_INDENT}call()"

    def _condition(self, ranks: frozenset[int]) -> str:
        return condition(ranks, self._program.world_size)

    def _branch(self, branch: fold.RankBranch, indent: str) -> Iterator[str]:
        word = "if"
        for ranks, body in branch.sides:
            yield from _wrapped(f"{indent}{word} {self._condition(ranks)}:", indent)
            yield from self.nodes(body, indent + _INDENT)
            word = "elif"
        if branch.rest:
            yield f"{indent}else:"
            yield from self.nodes(branch.rest, indent + _INDENT)

    def _call(self, call: ScriptCall) -> list[str]:
        if call.op == "batch":
            return self._batch(call)
        text = self._text(call)
        if not call.waited_for:
            text = f"works.append({text})"
        return _with_comment([text], _site(call.site))

    def _text(self, call: ScriptCall) -> str:
        name = {"send": "isend", "recv": "irecv"}.get(call.op, call.op) if not call.waited_for else call.op
        words = [*self._tensors(call), *self._ends(call)]
        words += [f"group={call.group}"] if call.group != WORLD else []
        words += ["async_op=True"] if not call.waited_for and call.op not in TRANSFERS else []
        if call.op == "all_reduce" and len(call.sizes) > 1:
            name = "all_reduce_coalesced"
        elif call.op == "all_to_all":
            name = "all_to_all_single"
        return f"dist.{name}({', '.join(words)})"

    def _ends(self, call: ScriptCall) -> Iterator[str]:
        prefix = "group_" if call.group != WORLD else ""
        if call.root is not None:
            yield f"{prefix}{'dst' if call.op in ('reduce', 'gather') else 'src'}={self._root(call)}"
        if call.peer is not None:
            yield f"{'' if call.named else 'group_'}{'dst' if call.op == 'send' else 'src'}={_peer(call)}"
        if call.tag:
            yield f"tag={call.tag}"

    def _root(self, call: ScriptCall) -> str:
        text = str(call.root)
        for root in dict.fromkeys(root for _, root in call.other_roots):
            ranks = frozenset(rank for rank, its in call.other_roots if its == root)
            text = f"{root} if {self._condition(ranks)} else {text}"
        return text

    def _tensors(self, call: ScriptCall) -> Iterator[str]:
        count = self._count(call.group)
        given = [self._zeros(size, call) for size in call.sizes]
        if call.op in BARE:
            return
        if call.op == "all_reduce" and len(given) > 1:
            yield f"[{', '.join(given)}]"
        elif call.op == "all_gather":
            yield from (f"[{given[0]} for _ in range({count})]", given[0])
        elif call.op == "all_gather_into_tensor":
            yield from (self._zeros((count * sum(map(prod, call.sizes)),), call), given[0])
        elif call.op == "reduce_scatter_tensor":
            part = -(-sum(map(prod, call.sizes)) // count)
            yield from (self._zeros((part,), call), self._zeros((part * count,), call))
        elif call.op in ("gather", "scatter"):
            several = f"[{given[0]} for _ in range({count})]"
            me = "rank" if call.group == WORLD else f"dist.get_rank({call.group})"
            root = f"({self._root(call)})" if call.other_roots else str(call.root)
            yield from (given[0], f"{several} if {me} == {root} else None")
        elif call.op == "all_to_all":
            yield from (given[0], given[0])
        else:
            yield given[0]

    def _zeros(self, size: tuple[int, ...], call: ScriptCall) -> str:
        shape = ", ".join(map(str, size)) if size else "()"
        dtype = TYPES.get(call.dtypes[0], "float32") if call.dtypes else "float32"
        return f"torch.zeros({shape}{f', dtype=torch.{dtype}' if dtype != 'float32' else ''})"

    def _batch(self, call: ScriptCall) -> list[str]:
        ops = []
        for part in call.parts:
            where = f"{_peer(part)}, {part.group}" if part.group != WORLD else f"{part.peer}"
            tag = f", tag={part.tag}" if part.tag else ""
            kind = "dist.isend" if part.op == "send" else "dist.irecv"
            ops.append(f"{_INDENT}dist.P2POp({kind}, {self._zeros(part.sizes[0], part)}, {where}{tag}),")
        site = _site(call.site)
        if not call.waited_for:
            return [*_with_comment(["works += dist.batch_isend_irecv(["], site), *ops, "])"]
        begin = _with_comment(["for work in dist.batch_isend_irecv(["], site)
        return [*begin, *ops, "]):", f"{_INDENT}work.wait()"]

    def _count(self, group: str) -> int:
        return len(self._families[group][0]) if group in self._families else self._program.world_size


def _peer(call: ScriptCall) -> str:
    """A rank of the world: a stack then tells whom the call waits for, where gloo records nothing of it."""
    return f"dist.get_global_rank({call.group}, {call.peer})" if call.group != WORLD else str(call.peer)


def _ending(end: ScriptEnd) -> list[str]:
    if end.kind == "waits for work":
        return _with_comment([f"works[-{end.work + 1}].wait()"], _site(end.site))
    lines = {
        "leaves": ["threading.Thread(target=time.sleep, args=(86_400,)).start()", "sys.exit()"],
        "raises": ['raise RuntimeError("as recorded")'],
        "exits": [f"os._exit({end.code})"],
        "is killed": [f"os.kill(os.getpid(), {end.code})"],
    }.get(end.kind)
    if lines is None:
        return _standing(end)
    return [*_said(end), *lines]


def _standing(end: ScriptEnd) -> list[str]:
    return [*_said(end), *_STANDS.get(end.cause, (_FOREVER,))]


def _said(end: ScriptEnd) -> list[str]:
    where = _site(end.site)
    words = end.words if where and where.split(" ")[0] in end.words else f"{end.words} {where}".strip()
    return _comment(f"{end.cause}: {words}" if end.cause else words)


def _site(frame: Frame | None) -> str:
    """``train.py:61 (train)``."""
    if frame is None or is_pseudo(frame.file):
        return ""
    function = short(frame.function)
    return f"{basename(frame.file)[-60:]}:{frame.line}" + (
        f" ({function[:60]})" if function and function != "<module>" else ""
    )


def _with_comment(lines: Sequence[str], words: str) -> list[str]:
    text = plain(words)
    if not text:
        return [*lines]
    beside = f"{lines[0]}  # {text}"
    return [beside, *lines[1:]] if len(beside) <= _WIDTH else [f"# {text}", *lines]


def _wrapped(line: str, indent: str = "") -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent + 2 * _INDENT, break_long_words=False)


# --- ranks ------------------------------------------------------------------------------------------------------------


def condition(ranks: frozenset[int], world: int) -> str:
    """Whether ``rank`` is one of these, of all ranks of the world."""
    others = frozenset(range(world)) - ranks
    if len(others) == 1 and len(ranks) > 2:
        return f"rank != {min(others)}"
    ordered = sorted(ranks)
    first, last = ordered[0], ordered[-1]
    if len(ordered) == 1:
        return f"rank == {first}"
    if len(ordered) == last - first + 1 and len(ordered) > 2:
        return (
            f"rank <= {last}"
            if first == 0
            else f"rank >= {first}"
            if last == world - 1
            else f"{first} <= rank <= {last}"
        )
    return f"rank in {_range(ordered) or '(' + ', '.join(map(str, ordered)) + ')'}"


def _range(ordered: Sequence[int]) -> str:
    """``range(0, 8, 2)`` where the numbers are evenly spaced and more than a few; else empty."""
    if len(ordered) < 4:
        return ""
    step = ordered[1] - ordered[0]
    if any(after - before != step for before, after in pairwise(ordered)):
        return ""
    end = ordered[-1] + step
    return f"range({ordered[0]}, {end}{f', {step}' if step > 1 else ''})"


def _ranks(ranks: Sequence[int]) -> str:
    spaced = _range(ranks)
    return f"list({spaced})" if spaced else f"[{', '.join(map(str, ranks))}]"


def _lists(groups: Sequence[tuple[int, ...]]) -> str:
    return f"[{', '.join(map(_ranks, groups))}]"
