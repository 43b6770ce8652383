"""Verdict cases as text: evidence in a few lines, and the decision on it.

Each file of ``tests/data/verdicts`` holds the cases of one cause. A case begins with its name in the first column::

    collectives: a call skipped long ago is the cause
      rank 0: in barrier < :70 | calls 0@50 0@60x2 0@50 0@60 0@50 barrier:0@70*
      ranks 1-2: in all_reduce < :50 | calls [0@50 0@60]x3 0@50*
      => collective-mismatch, high, proved: rank 0 at train.py:50; victims 1-2

``python -m tests.support.verdict_cases --update`` writes the lines that begin with ``=>`` from today's verdicts, and
moves each case to the file of its cause. Everything else in the files is written by hand.

Lines of a case, indented by two spaces:

- ``job: crash, stalled 4 s, 8 ranks, missing 2-3, moving``: what differs from a hang of 30 s of the listed ranks.
- ``rank N: PART | PART`` or ``ranks 0,2-4: PART | PART``. A line below it, indented by four spaces, is a further part.
- ``source train.py:``, then the lines of that file with their numbers (``40|     step()``), or ``not found``.
- ``node: {host: a, ...}``: a node of the job. ``FIELD: VALUE``: any other field of ``Evidence`` as YAML.

Parts of a rank. Its process id is 1000 + 10 * its number:

- ``in STACK [KERNEL]``: its main thread. ``thread NAME in STACK [KERNEL]``: another thread.
- ``ident 7001``, ``call {src: 1}``, ``names {key: 'a'}``, ``holds gil``: of the thread before it, in its stacks.
- ``native STACK``: C frames of the main thread. ``state {...}``, ``then {...}``: fields of all its states, or of the
  last one. ``unseen``: the process has neither states nor stacks.
- ``child PID ROLE: PART | PART``, on a separate line: a child process, with parts of the kinds above.
- ``calls CALL CALL``: its Flight Recorder, see :func:`calls_in`. ``groups 1=0-1 2=0,2``. ``called every 1 s``: times.
- ``step 60`` or ``step none``, ``page exited``, ``no page``: its progress page. ``steps every 0.1 s``: with a history.
- ``raised TYPE "MESSAGE" at SECONDS in STACK``. ``exit CODE at SECONDS``, with ``closing`` if torchrun ended it.
- ``gil held``, ``gil unknown``: the answers to the two requests that test the GIL.
- ``FIELD VALUE``: any other field of ``RankEvidence`` as YAML. A mapping changes the fields that it names.

A STACK is a chain of frames joined by ``<``, innermost first. A frame is ``FILE:LINE FUNCTION``: without a file, of the
script; without a function, ``train``. ``python/FILE`` is in the standard library, ``torch/FILE`` in site-packages. The
name of a c10d operation, or of one of :data:`STACKS`, stands for its frames. A stack that ends in a function of the
script was called from its module; ``< .`` at the end says that it was not. ``none`` is a stack without frames.

KERNEL is a key of ``evidence.KERNEL`` (``futex`` if there is none), and fields that differ: ``[pipe {inode: 1}]``.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
import yaml

from safelaunch.model import (
    Collective,
    Culprit,
    Evidence,
    FlightRecord,
    Frame,
    GilTest,
    ProcessAtFault,
    ProcessEvidence,
    Progress,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
    format_ranks,
)
from safelaunch.model.words import ranks_in
from safelaunch.verdict import diagnose as diagnosing
from tests.support import evidence as ev
from tests.support.paths import DATA

FOLDER = DATA / "verdicts"
HEADER = """\
# Cases in which the verdict is {cause}. tests/support/verdict_cases.py describes the language.
# To add a case, write its evidence into any of these files, and run `python -m tests.support.verdict_cases --update`:
# it adds the line of the decision, which you check before you commit it.
"""
R = TypeVar("R", bound=msgspec.Struct)
# Fields that the product has renamed: the name in these files, and the one that the record has now.
RENAMED: dict[str, str] = {}

# The functions of torch.distributed whose names stand for their frames in a stack.
OPERATIONS = frozenset(
    """
    _all_gather_base _reduce_scatter_base all_gather all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_to_all barrier batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather irecv
    isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_single scatter send
    """.split()  # noqa: SIM905
)
STACKS = {
    "init": ev.in_init()[:3],
    "backward": ev.in_backward(0)[:2],
    "loader": ev.in_loader(0)[:4],
    "worker": ev.WORKER_IDLE,
    "fetch": ev.in_worker(0)[1:],
}


class CaseError(Exception):
    """A case that can't be read. The message begins with its file and line."""


# --- stacks -----------------------------------------------------------------------------------------------------------


_FRAME = re.compile(r"(?P<file>\S*):(?P<line>\d+)(?: (?P<function>\S+))?")


def stack_in(text: str) -> tuple[Frame, ...]:
    """Returns the frames of a STACK."""
    if text == "none":
        return ()
    frames: list[Frame] = []
    elements = text.split(" < ")
    for element in elements:
        if element in STACKS:
            frames += STACKS[element]
        elif element in OPERATIONS:
            frames += (Frame(ev.C10D, 3252, element), ev.WRAPPER)
        elif element != ".":
            frames.append(frame_in(element))
    last = frames[-1]
    if elements[-1] != "." and last.file == ev.SCRIPT and last.function != "<module>":
        frames.append(ev.MODULE)
    return tuple(frames)


def frame_in(text: str) -> Frame:
    """Returns the frame written as ``FILE:LINE FUNCTION``."""
    match = _FRAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a frame")
    return Frame(_path_in(match["file"]), int(match["line"]), match["function"] or "train")


def _path_in(file: str) -> str:
    if not file:
        return ev.SCRIPT
    if file.startswith("python/"):
        return f"{ev.STDLIB}/{file.removeprefix('python/')}"
    if file.startswith(("/", "<")):
        return file
    if "/" in file:
        return f"{ev.SITE}/{file}"
    return f"/home/me/{file}" if file.endswith(".py") else file


# --- the Flight Recorder ----------------------------------------------------------------------------------------------


_CALL = re.compile(
    r"""(?:(?P<op>[\w:]+|"[^"]+"):)?(?P<group>\w+)@(?P<place>\d+|-|\((?:[^()]|\(\))*\))(?:\#(?P<number>\d+))?"""
    r"""(?:/(?P<size>[\d,]+))?(?:~(?P<thread>\d+))?(?:x(?P<times>\d+))?(?P<pending>\*?)(?P<fields>\{[^{}]*\})?(?:\s+|$)"""
)
_ROUNDS = re.compile(r"\[(.+?)\]x(\d+)(\s+|$)")


def calls_in(text: str) -> tuple[Collective, ...]:
    """Returns a rank's calls: ``0@50x3 barrier:2@61 nccl:all_gather:0@(:41 log)#7/8,2*``, ``[0@50 barrier:0@60]x9``.

    ``[OPERATION:]GROUP@PLACE[#NUMBER][/SIZE][~THREAD][xTIMES][*][{FIELDS}]``: a completed all_reduce of four floats by
    gloo unless more is said. PLACE is a line of the script in ``train``, a STACK in brackets, or ``-`` for a record
    without stacks. ``*`` marks a pending call. Each group counts its calls from 1, or from NUMBER; ``record_id`` counts
    all calls from 1.
    """
    counts: Counter[str] = Counter()
    calls: list[Collective] = []
    while text:
        if rounds := _ROUNDS.match(text):
            text = f"{rounds[1]} " * int(rounds[2]) + text[rounds.end() :]
            continue
        match = _CALL.match(text)
        if match is None:
            raise ValueError(f"{text!r} does not begin with a call")
        text = text[match.end() :]
        group, call = match["group"], _call_in(match)
        if match["number"]:
            counts[group] = int(match["number"]) - 1
        for _ in range(int(match["times"] or 1)):
            counts[group] += 1
            numbers: dict[str, int] = {"seq": counts[group], "record_id": call.record_id or len(calls) + 1}
            if call.is_p2p and not call.p2p_seq:
                numbers["p2p_seq"] = counts[group]
            calls.append(msgspec.structs.replace(call, **numbers))
    return tuple(calls)


def _call_in(match: re.Match[str]) -> Collective:
    operation, place = (match["op"] or "all_reduce").strip('"'), match["place"]
    call = ev.entry(operation, 0, done=not match["pending"], group=match["group"])
    fields: dict[str, Any] = {"thread": int(match["thread"] or 0)}
    if match["size"]:
        fields["input_sizes"] = (tuple(int(number) for number in match["size"].split(",")),)
    if place != "-":
        function = operation.rpartition(":")[2].partition(" ")[0]
        below = stack_in(place[1:-1] if place[0] == "(" else f":{place}")
        fields["frames"] = (Frame(ev.C10D, 3245, function), Frame(ev.LOGGER, 83, "wrapper"), *below)
    return changed(msgspec.structs.replace(call, **fields), yaml_in(match["fields"] or "{}"))


# --- records ----------------------------------------------------------------------------------------------------------


def nccl_process_in(text: str) -> dict[str, Any]:
    """Returns a process of an answer of NCCL, written as ``HOST PID RANK GPU`` and perhaps its state."""
    host, pid, rank, gpu, *state = text.split()
    fields = {"host": host, "pid": int(pid), "rank": int(rank), "gpu": int(gpu)}
    return {**fields, "state": state[0]} if state else fields


def gpu_reading_in(text: str) -> dict[str, Any]:
    """Returns a reading of a GPU, written as ``UTILISATION/MEMORY POWER``, or its error."""
    match = re.fullmatch(r"(?P<gpu>\d+)/(?P<memory>\d+) (?P<power>\d+)", text)
    if match is None:
        return {"error": text}
    fields = ("utilisation_percent", "memory_utilisation_percent", "power_w")
    return dict(zip(fields, map(int, match.groups()), strict=True))


# Fields whose values have a short form, and how to read it.
_SHORT: dict[str, Callable[[Any], Any]] = {
    "frames": stack_in,
    "frame": frame_in,
    "raised": frame_in,
    "caught": frame_in,
    "threads": lambda stacks: [stack_in(stack) for stack in stacks],
    "ends": lambda pids: [{"pid": pid, "name": "python"} for pid in pids],
    "processes": lambda texts: [nccl_process_in(text) for text in texts],
    "looks": lambda texts: [gpu_reading_in(text) for text in texts],
    "usual": gpu_reading_in,
}


def yaml_in(text: str) -> Any:
    return yaml.load(text, yaml.CSafeLoader)


def plain(value: Any) -> Any:
    """Converts short forms to plain data, and old names of fields to those that records have now."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {RENAMED.get(key, key): plain(_written_out(key, item)) for key, item in value.items()}


def _written_out(key: Any, value: Any) -> Any:
    first = value[0] if isinstance(value, list) and value else value
    is_short = key in _SHORT and isinstance(first, (str, int))
    return msgspec.to_builtins(_SHORT[key](value)) if is_short else value


def changed(record: R, fields: Mapping[str, Any]) -> R:
    """Returns the record with these fields, each as YAML gives it. A mapping changes a record field by field."""
    values = {}
    for key, value in plain(fields).items():
        name, kind = _field_of(type(record), key)
        before = getattr(record, name)
        if isinstance(value, dict) and isinstance(before, msgspec.Struct):
            values[name] = changed(before, value)
        else:
            values[name] = msgspec.convert(value, kind)
            _check_names(value, values[name])
    return msgspec.structs.replace(record, **values) if values else record


def _check_names(value: Any, record: Any) -> None:
    """Raises ValueError for a key that has become no field, as msgspec ignores it."""
    if isinstance(record, msgspec.Struct):
        for key, item in value.items():
            _check_names(item, getattr(record, _field_of(type(record), key)[0]))
    elif isinstance(record, (tuple, list)):
        for item, one in zip(value, record, strict=True):
            _check_names(item, one)


def _field_of(record: type, key: str) -> tuple[str, Any]:
    fields = _fields_of(record)
    if key not in fields:
        raise ValueError(f"{record.__name__} has no field {key!r}")
    return fields[key]


@functools.cache
def _fields_of(record: type) -> dict[str, tuple[str, Any]]:
    types = get_type_hints(record)
    return {one.encode_name: (one.name, types[one.name]) for one in msgspec.structs.fields(record)}


# --- processes and ranks ----------------------------------------------------------------------------------------------


@dataclass
class ThreadParts:
    """One thread. ``kernel`` is a key of ``evidence.KERNEL``."""

    name: str = "MainThread"
    frames: tuple[Frame, ...] = ()
    kernel: str = "futex"
    state: dict[str, Any] = field(default_factory=dict)  # fields that its states change
    stack: dict[str, Any] = field(default_factory=dict)  # and its stacks

    def state_at(self, now_s: float) -> dict[str, Any]:
        """Returns the changed fields, with ``ends_in_s`` as an end that moves with the time."""
        fields = dict(self.state)
        if "ends_in_s" in fields:
            fields["ends_s"] = now_s + fields.pop("ends_in_s")
        return fields


_THREAD = re.compile(r"(?:thread (?P<name>.+?) )?in (?P<stack>.+?)(?: \[(?P<kernel>[\w-]*)(?: (?P<fields>\{.*\}))?\])?")


class ProcessParts:
    """Collects the parts of one process."""

    def __init__(self, pid: int, role: str) -> None:
        self.pid, self.role = pid, role
        self.threads = [ThreadParts()]
        self.native: tuple[Frame, ...] = ()
        self.state: dict[str, Any] = {}
        self.last_state: dict[str, Any] = {}

    def take(self, part: str) -> bool:
        """Returns False if the part doesn't describe a process."""
        word, _, rest = part.partition(" ")
        if word in ("in", "thread"):
            self._take_thread(part)
        elif word == "native":
            self.native = stack_in(f"{rest} < .")
        elif word == "state":
            self.state = yaml_in(rest)
        elif word == "then":
            self.last_state = yaml_in(rest)
        elif part == "holds gil":
            self.threads[-1].stack["owns_gil"] = True
        elif word == "names":
            self.threads[-1].stack[word] = [*yaml_in(rest).items()]
        elif word in ("call", "ident"):
            self.threads[-1].stack[word] = yaml_in(rest)
        else:
            return False
        return True

    def _take_thread(self, part: str) -> None:
        match = _THREAD.fullmatch(part)
        if match is None or match["kernel"] not in (None, *ev.KERNEL):
            raise ValueError(f"{part!r} is not a thread")
        kernel = "futex" if match["kernel"] is None else match["kernel"]
        thread = ThreadParts("MainThread", stack_in(match["stack"]), kernel, yaml_in(match["fields"] or "{}"))
        if match["name"] is None:
            self.threads = [thread]
        else:
            thread.name = match["name"]
            self.threads.append(thread)

    def evidence(self) -> ProcessEvidence:
        main, *others = self.threads
        threads = [(one.name, one.frames, one.kernel) for one in others]
        process = ev.process(self.pid, main.frames, main.kernel, role=self.role, threads=threads, native=self.native)
        states = []
        for state in process.states:
            pairs = zip(state.threads, self.threads, strict=True)
            seen = tuple(changed(thread, parts.state_at(state.at_s)) for thread, parts in pairs)
            states.append(changed(msgspec.structs.replace(state, threads=seen), self.state))
        states[-1] = changed(states[-1], self.last_state)
        stacks = []
        for stack in process.stacks:
            shown = tuple(
                changed(thread, parts.stack) for thread, parts in zip(stack.threads, self.threads, strict=True)
            )
            stacks.append(msgspec.structs.replace(stack, threads=shown))
        return msgspec.structs.replace(process, states=tuple(states), stacks=tuple(stacks))


_CHILD = re.compile(r"(\d+) ([^:]+): (.+)")
_EXIT = re.compile(r"(-?\d+) at (-?[\d.]+)( closing)?")
_RAISED = re.compile(r'(\S+) ("(?:[^"\\]|\\.)*") at (-?[\d.]+)(?: in (.+))?')
_GIL_TESTS = {"held": GilTest(ping=True, python=False), "unknown": GilTest()}


class RankParts:
    """Collects the parts of one rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.main = ProcessParts(1000 + 10 * number, "main")
        self.is_seen = self.has_page = True
        self.children: list[ProcessEvidence] = []
        self.calls: tuple[Collective, ...] | None = None
        self.called_every_s = self.steps_every_s = 0.0
        self.groups: dict[str, tuple[int, ...]] = {}
        self.step: int | None = 60
        self.page = "torch"
        self.fields: dict[str, Any] = {}
        self.yaml_fields: list[dict[str, Any]] = []

    def take(self, part: str) -> None:
        word, _, rest = part.partition(" ")
        if self.main.take(part):
            return
        if part == "unseen":
            self.is_seen = False
        elif part == "no page":
            self.has_page = False
        elif word in _READERS:
            _READERS[word](self, rest)
        elif word == "gil" and rest in _GIL_TESTS:
            self.fields["gil"] = _GIL_TESTS[rest]
        elif rest:
            self.yaml_fields.append({word: yaml_in(rest)})
        else:
            raise ValueError(f"{part!r} is not a part of a rank")

    def take_child(self, text: str) -> None:
        match = _matched(_CHILD, text, "child process")
        child = ProcessParts(int(match[1]), match[2])
        for part in match[3].split(" | "):
            if not child.take(part):
                raise ValueError(f"{part!r} is not a part of a process")
        self.children.append(child.evidence())

    def take_calls(self, text: str) -> None:
        self.calls = calls_in(text)

    def take_groups(self, text: str) -> None:
        self.groups = {name: ranks_in(ranks) for name, _, ranks in (word.partition("=") for word in text.split())}

    def take_step(self, text: str) -> None:
        self.step = None if text == "none" else int(text)

    def take_page(self, text: str) -> None:
        self.page = text

    def take_interval_of_steps(self, text: str) -> None:
        self.steps_every_s = _seconds(text)

    def take_interval_of_calls(self, text: str) -> None:
        self.called_every_s = _seconds(text)

    def take_exception(self, text: str) -> None:
        match = _matched(_RAISED, text, "exception")
        message, frames = msgspec.json.decode(match[2], type=str), stack_in(match[4] or "none")
        self.fields["exception"] = RankException(match[1], message, float(match[3]), frames)

    def take_exit(self, text: str) -> None:
        match = _matched(_EXIT, text, "exit")
        self.fields["exit"] = RankExit(int(match[1]), float(match[2]), before_close=not match[3])

    def evidence(self) -> RankEvidence:
        rank = ev.rank(self.number, seen=False, flight=self._record(), children=self.children)
        main = self.main.evidence() if self.is_seen else None
        rank = msgspec.structs.replace(rank, main=main, progress=self._progress(), **self.fields)
        for fields in self.yaml_fields:
            rank = changed(rank, fields)
        return rank

    def _record(self) -> FlightRecord | None:
        if self.calls is None:
            return None
        calls = self.calls
        if self.called_every_s:
            times = [round(number * self.called_every_s * 1e9) for number in range(1, len(calls) + 1)]
            pairs = zip(calls, times, strict=True)
            calls = tuple(msgspec.structs.replace(call, created_ns=time) for call, time in pairs)
        return ev.record(*calls, groups=self.groups)

    def _progress(self) -> Progress | None:
        if not self.has_page:
            return None
        page = ev.progress(self.number, self.step, self.page)
        if not self.steps_every_s:
            return page
        history = tuple((round(n * self.steps_every_s * 1e9), n) for n in range(1, (self.step or 0) + 1))
        return msgspec.structs.replace(page, first_step_ns=history[0][0], last_step_ns=history[-1][0], history=history)


_READERS: dict[str, Callable[[RankParts, str], None]] = {
    "child": RankParts.take_child,
    "calls": RankParts.take_calls,
    "called": RankParts.take_interval_of_calls,
    "groups": RankParts.take_groups,
    "step": RankParts.take_step,
    "steps": RankParts.take_interval_of_steps,
    "page": RankParts.take_page,
    "raised": RankParts.take_exception,
    "exit": RankParts.take_exit,
}


def _matched(pattern: re.Pattern[str], text: str, what: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not describe an {what}".replace("an child", "a child"))
    return match


def _seconds(text: str) -> float:
    return float(text.removeprefix("every ").removesuffix(" s"))


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The evidence of one case, and the source files that are found, or not, when its verdict asks for them."""

    evidence: Evidence
    sources: Mapping[str, str | None]  # by path

    @property
    def verdict(self) -> Verdict:
        # Scripts replace the function in its module.
        return diagnosing.diagnose(self.evidence, self.sources.get if self.sources else None)


@dataclass(frozen=True)
class CaseText:
    """A case as it is written."""

    path: Path
    line: int  # number of the line with its name
    lines: tuple[str, ...]  # from its name to its last line that is not blank

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} {self.name}"

    @property
    def name(self) -> str:
        return self.lines[0]

    @property
    def decision(self) -> str:
        """Returns the line of the decision without its arrow, or an empty text if there is none yet."""
        return next((line[len(_ARROW) :] for line in self.lines if line.startswith(_ARROW)), "")

    def decided(self, decision: str) -> CaseText:
        """Returns the same case with that decision."""
        lines = [line for line in self.lines if not line.startswith(_ARROW)]
        return CaseText(self.path, self.line, (*lines, f"{_ARROW}{decision}"))

    def read(self) -> Case:
        """Raises CaseError."""
        reader = _CaseReader()
        for number, item, below in self._items():
            try:
                reader.take(item, below)
            except (ValueError, yaml.YAMLError, msgspec.ValidationError) as error:
                raise CaseError(f"{self.path.name}:{number}: {error}") from error
        return reader.case()

    def _items(self) -> Iterator[tuple[int, str, list[str]]]:
        """Yields each line that is indented by two spaces: its number, its text, and the lines indented below it."""
        item: tuple[int, str, list[str]] | None = None
        for number, line in enumerate(self.lines[1:], start=self.line + 1):
            if line.startswith(_ARROW) or not line.strip():
                continue
            if line.startswith("    ") and item is not None:
                item[2].append(line[4:])
                continue
            if item is not None:
                yield item
            item = number, line.strip(), []
        if item is not None:
            yield item


_ARROW = "  => "
_RANKS = re.compile(r"ranks? ([\d,-]+):(?: (.*))?")
_SOURCE = re.compile(r"source (\S+):( not found)?")


class _CaseReader:
    """Collects the lines of one case."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankEvidence] = {}
        self.sources: dict[str, str | None] = {}
        self.nodes: list[Any] = []
        self.fields: dict[str, Any] = {}
        self.job: dict[str, Any] = {"outcome": "hang", "stall_s": 30.0}

    def take(self, item: str, below: Sequence[str]) -> None:
        if match := _RANKS.fullmatch(item):
            for number in ranks_in(match[1]):
                rank = RankParts(number)
                for part in (*(match[2].split(" | ") if match[2] else ()), *below):
                    rank.take(part)
                self.ranks[number] = rank.evidence()
        elif match := _SOURCE.fullmatch(item):
            self.sources[_path_in(match[1])] = None if match[2] else _source_in(below)
        elif item.startswith("job: "):
            self.job |= _job_in(item.removeprefix("job: "))
        else:
            name, _, value = item.partition(":")
            content = yaml_in(" ".join([value, *(line.strip() for line in below)]))
            if name == "node":
                self.nodes.append(content)
            else:
                self.fields[name] = content

    def case(self) -> Case:
        ranks = tuple(self.ranks[number] for number in sorted(self.ranks))
        size = len(ranks) + len(self.job.get("missing_ranks", ()))
        evidence = Evidence(**{"world_size": size, "ranks": ranks, **self.job})
        nodes = {"nodes": self.nodes} if self.nodes else {}
        return Case(changed(evidence, {**nodes, **self.fields}), self.sources)


def _source_in(numbered: Iterable[str]) -> str:
    lines: dict[int, str] = {}  # those that are left out are empty
    for text in numbered:
        number, _, line = text.partition("|")
        lines[int(number)] = line.removeprefix(" ")
    return "".join(f"{lines.get(number, '')}\n" for number in range(1, max(lines, default=0) + 1))


def _job_in(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for words in text.split(", "):
        first, _, rest = words.partition(" ")
        if words in ("hang", "suspect", "crash", "dump"):
            fields["outcome"] = words
        elif words == "moving":
            fields["moving"] = True
        elif first == "stalled":
            fields["stall_s"] = float(rest.removesuffix(" s"))
        elif first == "missing":
            fields["missing_ranks"] = ranks_in(rest.replace("+", ","))
        elif rest == "ranks":
            fields["world_size"] = int(first)
        else:
            raise ValueError(f"{words!r} does not describe a job")
    return fields


def decision_of(verdict: Verdict) -> str:
    """Returns cause, confidence, proof, culprits, nodes at fault and victims in one line, without any prose."""
    proved = ", proved" if verdict.proof else ""
    culprits: dict[str, list[int]] = {}
    for culprit in verdict.culprits:
        culprits.setdefault(_place_of(culprit), []).append(culprit.rank)
    named = [f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}{place}" for place, ranks in culprits.items()]
    named += [f"{process.label}{_place_of(process)}" for process in verdict.processes_at_fault]
    named += [f"node {node.host}" for node in verdict.nodes_at_fault]
    victims = f"; victims {verdict.victims}" if verdict.victims else ""
    return f"{verdict.cause}, {verdict.confidence}{proved}: {'; '.join(named) or 'no culprit'}{victims}"


def _place_of(culprit: Culprit | ProcessAtFault) -> str:
    process = "" if culprit.process == "main" else f", {culprit.process},"
    return f"{process} at {Path(culprit.frame.file).name}:{culprit.frame.line}" if culprit.frame else process


# --- files ------------------------------------------------------------------------------------------------------------


def cases_in(path: Path) -> Iterator[CaseText]:
    """Yields the cases of a file. Raises CaseError for a line that belongs to none."""
    begin, lines = 0, list[str]()
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if line.startswith("#"):
            continue
        if line[:1].strip():
            if begin:
                yield _case_text(path, begin, lines)
            begin, lines = number, []
        elif line.strip() and not begin:
            raise CaseError(f"{path.name}:{number}: this line is above the first case")
        lines.append(line)
    if begin:
        yield _case_text(path, begin, lines)


def _case_text(path: Path, line: int, lines: Sequence[str]) -> CaseText:
    return CaseText(path, line, tuple("\n".join(lines).rstrip().split("\n")))


def all_cases(folder: Path = FOLDER) -> list[CaseText]:
    return [case for path in sorted(folder.glob("*.txt")) for case in cases_in(path)]


def update(folder: Path = FOLDER) -> int:
    """Writes today's decision on each case into the file of its cause, and returns how many decisions changed."""
    files: dict[str, list[CaseText]] = {}
    count = 0
    for case in all_cases(folder):
        decision = decision_of(case.read().verdict)
        count += decision != case.decision
        files.setdefault(decision.partition(",")[0], []).append(case.decided(decision))
    for path in folder.glob("*.txt"):
        if path.stem not in files:
            path.unlink()
    for cause, cases in files.items():
        text = "\n\n".join("\n".join(case.lines) for case in sorted(cases, key=lambda case: case.path.stem != cause))
        (folder / f"{cause}.txt").write_text(f"{HEADER.format(cause=cause)}\n{text}\n")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.verdict_cases", description="Cases of verdicts.")
    parser.add_argument("--update", action="store_true", help="write today's decisions")
    parser.add_argument("name", nargs="?", default="", help="print the verdicts on the cases with this in their name")
    words = parser.parse_args()
    if words.update:
        print(f"{update()} decisions changed")
        return 0
    for case in all_cases():
        if words.name and words.name in case.name:
            print(f"{case}\n{msgspec.json.format(msgspec.json.encode(case.read().verdict)).decode()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
