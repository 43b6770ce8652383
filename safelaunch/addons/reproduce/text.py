"""Writes a program as a script that needs only torch.

Names of files, groups and operations come from dumps, which are untrusted. The script contains them only in comments,
in ASCII and on one line. Everything else in it consists of numbers and of words from this module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from shlex import quote

from safelaunch.addons.reproduce import fold
from safelaunch.addons.reproduce.families import Families, with_group_families
from safelaunch.addons.reproduce.gloo import BARE, TYPES
from safelaunch.addons.reproduce.program import TRANSFERS, WORLD, Program, RankProgram, ScriptCall, ScriptEnd
from safelaunch.addons.reproduce.rank_expressions import _lists, _ranks, condition
from safelaunch.addons.reproduce.script_verdict import places_matter
from safelaunch.model import Frame
from safelaunch.stacks.frames import basename, is_pseudo, short
from safelaunch.system.redaction.redact import redact_text

_WIDTH = 118
_INDENT = "    "
_FOREVER = "time.sleep(86_400)"
# If this line appears in the output, the script doesn't behave as recorded.
_CAME_BACK = 'raise SystemExit(f"not as recorded: rank {rank} came back from its last call")'
# Code that stalls a rank without peers, if the standard library can stall in the same way.
_STALLS = {
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
    """Writes the complete script. ``recorded`` describes the recording, one paragraph per item."""
    named, families = with_group_families(program)
    items = {rank: _items(rank_program) for rank, rank_program in named.ranks.items()}
    dtypes = {dtype for rank in program.ranks.values() for call in _flat(rank) for dtype in call.dtypes}
    writer = _Writer(named, families)
    body = [*_initialization(named), *writer.groups()]
    nodes = fold.merged(items)
    listed = places_matter(named, nodes)
    body += writer.list_of_calls(nodes) if listed else writer.nodes(nodes, "")
    body.append(_CAME_BACK)
    strange = (
        f"gloo doesn't support {dtype[:40]}: the script uses float32 instead."
        for dtype in sorted(dtypes - {*TYPES, ""})
    )
    notes = [*program.notes, *_difference_notes(program), *strange]
    command = f"safelaunch --startup-timeout=10 --nproc-per-node={program.world_size} {plain(quote(name))}"
    lines = [*_head(recorded, command, notes), "", *_imports(body), "", *body]
    return Script("\n".join(lines) + "\n", command, tuple(notes))


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
    """Returns the text without secrets, in printable ASCII and on one line, so that nothing in it can end a comment."""
    flat = " ".join(redact_text(text).split())
    return "".join(c if " " <= c <= "~" else "?" for c in flat)


NO_SENDS = (
    "gloo doesn't record the sends and receives that the script makes: a verdict on it might give the cause another"
    " name, or name more or fewer ranks."
)


def _difference_notes(program: Program) -> Iterator[str]:
    for rank, rank_program in program.ranks.items():
        if rank_program.end.kind == "stalls" and rank_program.end.cause not in _STALLS:
            yield f"Rank {rank} {rank_program.end.words} ({rank_program.end.cause}): here it sleeps."
    if any(entry.is_p2p for rank in program.ranks.values() for left in rank.entries for entry in left):
        yield NO_SENDS


def _imports(body: Sequence[str]) -> list[str]:
    code = "\n".join(body)
    standard = [f"import {name}" for name in _MODULES if f"{name}." in code]
    return [*standard, *([""] if standard else []), "import torch", "import torch.distributed as dist"]


def _initialization(program: Program) -> Iterator[str]:
    """Yields the lines before the process groups: which ranks don't join, and the default group."""
    late = {rank: rank_program for rank, rank_program in program.ranks.items() if rank_program.before}
    if late:
        yield 'rank = int(os.environ["RANK"])'
        for rank, rank_program in late.items():
            yield f"if rank == {rank}:"
            yield from (f"{_INDENT}{line}" for line in _stall_lines(rank_program.end))
        yield 'dist.init_process_group("gloo")'
        return
    yield 'dist.init_process_group("gloo")'
    yield "rank = dist.get_rank()"


def _flat(program: RankProgram) -> Iterator[ScriptCall]:
    for call in program.calls:
        yield from call.parts or (call,)


def _items(program: RankProgram) -> list[Item]:
    ends = () if program.end.kind == "waits" else (program.end,)
    return [] if program.before else [*program.calls, *ends]


class _Writer:
    def __init__(self, program: Program, families: Families) -> None:
        self._program, self._families = program, families
        self._names: Mapping[Item, str] = {}  # of the functions that make the calls, if any

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
        """Yields a function for each distinct call, a list of calls for each rank, and one line that makes all calls.

        All ranks therefore make equal calls from the same line.
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
        tensors = [self._zeros(size, call) for size in call.sizes]
        if call.op in BARE:
            return
        if call.op == "all_reduce" and len(tensors) > 1:
            yield f"[{', '.join(tensors)}]"
        elif call.op == "all_gather":
            yield from (f"[{tensors[0]} for _ in range({count})]", tensors[0])
        elif call.op == "all_gather_into_tensor":
            yield from (self._zeros((count * sum(map(prod, call.sizes)),), call), tensors[0])
        elif call.op == "reduce_scatter_tensor":
            part = -(-sum(map(prod, call.sizes)) // count)
            yield from (self._zeros((part,), call), self._zeros((part * count,), call))
        elif call.op in ("gather", "scatter"):
            several = f"[{tensors[0]} for _ in range({count})]"
            me = "rank" if call.group == WORLD else f"dist.get_rank({call.group})"
            root = f"({self._root(call)})" if call.other_roots else str(call.root)
            yield from (tensors[0], f"{several} if {me} == {root} else None")
        elif call.op == "all_to_all":
            yield from (tensors[0], tensors[0])
        else:
            yield tensors[0]

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
        return _stall_lines(end)
    return [*_cause_comment(end), *lines]


def _stall_lines(end: ScriptEnd) -> list[str]:
    return [*_cause_comment(end), *_STALLS.get(end.cause, (_FOREVER,))]


def _cause_comment(end: ScriptEnd) -> list[str]:
    where = _site(end.site)
    words = end.words if where and where.split(" ")[0] in end.words else f"{end.words} {where}".strip()
    return _comment(f"{end.cause}: {words}" if end.cause else words)


def _site(frame: Frame | None) -> str:
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
