"""What is added to a finding beside the reason: frames of frameworks, the ranks' own words, earlier looks. Pure.

None of it changes a cause or makes a finding surer: it says which line to look at first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import msgspec

from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Claim,
    Culprit,
    Evidence,
    Frame,
    HandledException,
    RankEvidence,
    Verdict,
)
from safelaunch.stacks import calls, tracebacks
from safelaunch.stacks import frames as fr
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import short
from safelaunch.stacks.guards import names_at
from safelaunch.stacks.source import ReadSource, handler_of, runs_aside
from safelaunch.verdict.causes import ASIDE, DETAIL_CRASH, HANDLES, ITERABLE
from safelaunch.verdict.collectives import sides_of
from safelaunch.verdict.exits import kernel_claim, one_line
from safelaunch.verdict.findings import Annotation, Finding, by_place, capital, ranks_do, ranks_word
from safelaunch.verdict.peers import CallPlace, begins_at
from safelaunch.verdict.rank_state import CaseFacts, user_stack_of, view_of
from safelaunch.verdict.rules_live import WRONG_RESULTS

_MOST_SIDES = 3
_APART = frozenset({"collective-mismatch", "p2p-cycle", "group-order"})
_MOST_TOLD = 2  # ranks whose own words the summary has


def frames_below(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The frames of a framework that set apart ranks which are at one line of the user's, as ``trainer.fit(model)``:
    callbacks, metrics.
    """
    named = {culprit.rank for culprit in finding.culprits}
    ways: dict[int, tuple[Frame, ...]] = {}
    for rank in sorted(named | {rank for rank, one in facts.ranks.items() if one.wait is not None}):
        stack = _stack_of(facts, rank)
        if stack is not None and stack.user_frame is not None:
            below = (frame for frame in reversed(stack.called) if fr.is_of_framework(frame.file))
            ways[rank] = (stack.user_frame, *below)
    sides = dict(by_place(ways))
    lines = {side[0] for side, ranks in sides.items() if named.intersection(ranks)}
    if len(lines) != 1 or len(sides) < 2 or any(side[0] not in lines for side in sides):
        return
    shared = len(list(takewhile(lambda level: len({(f.file, f.line) for f in level}) == 1, zip(*sides, strict=False))))
    if any(len(side) == shared for side in sides):
        return
    pairs = [(_telling(side, sides, shared), ranks) for side, ranks in list(sides.items())[:_MOST_SIDES]]
    parts = [f"{ranks_do(ranks, 'is', 'are')} at {fr.place(frame)}" for frame, ranks in pairs]
    text = f"below {fr.place(lines.pop())}, {', '.join(parts)}"
    claim = Claim(text, f"ranks/{next(iter(sides.values()))[0]}/stack.txt")
    yield Annotation(f"{capital(text)}.", (claim,))


def frames_above(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """From where ranks came to one line of the user's, as that of a helper, if some came from elsewhere than others."""
    if finding.cause not in _APART or not finding.culprits:
        return
    stacks = {rank: stack for rank, one in facts.ranks.items() if (stack := user_stack_of(one.evidence))}
    for line in dict.fromkeys(
        fr.spot(stacks[culprit.rank][0]) for culprit in finding.culprits if culprit.rank in stacks
    ):
        there = {rank: stack for rank, stack in stacks.items() if fr.spot(stack[0]) == line}
        helper, *levels = zip(*there.values(), strict=False)
        parted = next((level for level in levels if len({*map(fr.spot, level)}) > 1), ())
        ways = by_place({rank: fr.place(frame) for rank, frame in zip(there, parted, strict=False)})
        if not all(way in finding.summary for way, _ in ways):
            parts = [f"{ranks_do(ranks, 'comes', 'come')} from {way}" for way, ranks in ways[:_MOST_SIDES]]
            yield Annotation(f"To {fr.place(helper[0])}, {' and '.join(parts)}.")


def _telling(side: tuple[Frame, ...], sides: Iterable[tuple[Frame, ...]], shared: int) -> Frame:
    """The outermost frame behind the last common one that is in a file of its own (a callback's), or the innermost."""
    others = {frame.file for other in sides if other is not side for frame in other[shared:]}
    return next((frame for frame in side[shared:] if frame.file not in others), side[-1])


def _stack_of(facts: CaseFacts, rank: int) -> fr.Stack | None:
    """Of the call that it waits in, as recorded; else of its main thread."""
    one = facts.ranks[rank]
    if one.wait is not None and one.wait.group is not None and one.wait.seq is not None:
        entry = facts.alignment.entry(rank, one.wait.group, one.wait.seq)
        if entry is not None and entry.frames:
            return facts.alignment.stack(rank, entry)
    view = view_of(one.evidence)
    return view.stack if view is not None else None


# --- what the ranks at fault say themselves ---------------------------------------------------------------------------


def own_words(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """What its culprits say themselves of the reason, where they have not failed by it."""
    told = [words for culprit in finding.culprits if (words := _words_of(facts, culprit.rank)) is not None]
    for number, one in enumerate(told):
        yield replace(one, sentence=one.sentence if number < _MOST_TOLD else "")


def says_why(facts: CaseFacts, rank: int) -> bool:
    """Whether the rank says itself why it is where it is."""
    return _words_of(facts, rank) is not None


def is_aside(facts: CaseFacts, rank: int) -> bool:
    """Whether the rank is where it is beside the course of its program: as it handles an exception or a signal."""
    handles = _handles(facts, facts.ranks[rank].evidence)
    return is_interrupted(facts, rank) or (handles is not None and bool(handles.advice))


def is_interrupted(facts: CaseFacts, rank: int) -> bool:
    return _interrupted(facts, facts.ranks[rank].evidence) is not None


def _words_of(facts: CaseFacts, number: int) -> Annotation | None:
    rank = facts.ranks[number].evidence
    if rank.exception is not None or rank.exit is not None:
        return None
    return _handles(facts, rank) or _interrupted(facts, rank) or _lost_a_thread(facts, rank)


def _interrupted(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """By what Python calls of its own accord: each rank at another moment, or one alone."""
    for frame in user_stack_of(rank):
        if what := runs_aside(frame, facts.read_source):
            words = f"in {what}, {short(frame.function)}"
            claim = Claim(f"rank {rank.rank} is {words}", f"ranks/{rank.rank}/stack.txt")
            return Annotation(f"Rank {rank.rank} does so {words}.", (claim,), advice=frozenset({ASIDE}))
    return None


def _handles(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """Its main thread is in a ``finally``, or an ``except``: what it waits for there, it would not else."""
    view = view_of(rank)
    ident = view.thread.ident if view is not None and view.thread is not None else 0
    for one in rank.gil.handling:
        if ident and one.thread == ident:
            words = _words(rank, one)
            text = f"Rank {rank.rank} does so while it handles {words}."
            claim = Claim(f"rank {rank.rank}: handles {words}", f"ranks/{rank.rank}/rank.json")
            is_end = one.type.startswith("Stop") and one.type.endswith("Iteration")  # of a loop, as by design
            usual = is_end or _always_does(facts, rank)
            return Annotation(text, (claim,), advice=frozenset() if usual else frozenset({HANDLES}))
    return None


def _always_does(facts: CaseFacts, rank: RankEvidence) -> bool:
    """Its call in the body of an ``except`` is one that it has made there before: a way that it takes by design."""
    wait = facts.ranks[rank.rank].wait
    if wait is None or wait.group is None or wait.seq is None:
        return False
    before = facts.histories.in_group(wait.group).times_called(rank.rank, wait.seq) > 1
    return before and any(handler_of(frame, facts.read_source) for frame in user_stack_of(rank))


def _words(rank: RankEvidence, one: HandledException) -> str:
    message = f": {one_line(one.message)}" if one.message else ""
    return f"{one.type}{message}, raised{fr.at(fr.stack_of(rank, one.frames).user_frame)}"


def _lost_a_thread(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """It waits for its own threads, and its output ends with the exception of one; or all its peers have one more."""
    condition = facts.ranks[rank.rank].condition
    if condition is None or condition.lock is None:
        return None
    found = next(tracebacks.of_threads(rank.log_tail), None)
    if found is None:
        return _lacks_a_thread(facts, rank)
    where = fr.at(fr.stack_of(rank, found.frames).user_frame)
    words = f"thread {found.thread!r} has ended by {one_line(found.message)}{where}"
    return Annotation(f"Its {words}.", (Claim(f"rank {rank.rank}: its {words}", f"ranks/{rank.rank}/log_tail.txt"),))


def _lacks_a_thread(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """One that all its peers have: where an exception is swallowed, nothing else is left of it."""
    mine = _threads_of(rank)
    if mine is None:
        return None
    peers = (_threads_of(one.evidence) for number, one in facts.ranks.items() if number != rank.rank)
    missing: dict[CallPlace | None, Frame] = {}
    for theirs in (threads for threads in peers if threads is not None):
        missing = {place: at for place, at in (missing or theirs).items() if place in theirs and place not in mine}
        if not missing:
            return None
    if not missing:
        return None
    words = f"has no thread in {fr.place(next(iter(missing.values())))}, as all its peers have"
    claim = Claim(f"rank {rank.rank} {words}", f"ranks/{rank.rank}/stack.txt")
    return Annotation(f"Rank {rank.rank} {words}: it has ended, or was never started.", (claim,))


def _threads_of(rank: RankEvidence) -> dict[CallPlace | None, Frame] | None:
    """Where its other threads begin, and are now; None where they were not seen."""
    view = view_of(rank)
    if view is None or view.sample is None:
        return None
    return {begins_at(one.stack): one.stack.user_frames[-1] for one in view.beside()}


# --- what was seen before ---------------------------------------------------------------------------------------------


def debug_detail(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The variable under which torch 2.13 and later crash where a DDP model is built."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    launched = facts.evidence.launched
    if finding.cause != "rank-killed" or launched is None or launched.distributed_debug != "DETAIL":
        return
    fatal = [fr.stack_of(rank, rank.fatal.frames) for rank in ranks if rank.fatal is not None]
    if fatal and all(calls.purpose(stack) == "ddp-constructor" for stack in fatal):
        text = f"`TORCH_DISTRIBUTED_DEBUG=DETAIL` is set, under which torch {launched.torch or '2.13 and later'}"
        claim = Claim("TORCH_DISTRIBUTED_DEBUG=DETAIL is in the job's environment", "launch.json")
        yield Annotation(f"{text} crashes when a DDP model is created.", (claim,), advice=frozenset({DETAIL_CRASH}))


def wrong_results_before(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Whatever has happened to the job, it had computed wrong results before."""
    if finding.cause not in WRONG_RESULTS:
        yield Annotation(context=tuple(Claim(one.words, WRONG_RESULTS_FILE) for one in facts.evidence.wrong_results))


# --- hardware ---------------------------------------------------------------------------------------------------------


def driver_errors(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """What the driver has reported of the GPUs of ranks that failed: CUDA's own words come later and say less."""
    for rank in (facts.ranks[culprit.rank].evidence for culprit in finding.culprits if finding.cause != "gpu-lost"):
        yield Annotation(context=tuple(kernel_claim(rank, line, f"rank {rank.rank}: ") for line in rank.gpu_errors))


# What the CUDA driver and NVML say only of a device or its links.
_OF_A_BAD_GPU = re.compile(
    r"uncorrectable|hardware stack error|hardware error|gpu is lost|fallen off the bus", re.IGNORECASE
)
_MOST_TEXT = 200


def with_gpus(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Names the GPUs of the culprits where the GPU itself may be what is broken."""
    ranks = {rank.rank: rank for rank in evidence.ranks}
    named = tuple(_with_gpu(verdict.cause, culprit, ranks.get(culprit.rank), evidence) for culprit in verdict.culprits)
    return msgspec.structs.replace(verdict, culprits=named)


def with_repeats(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Adds how many of the last bundles have blamed the same hardware."""
    found = tuple(_lines(verdict, evidence.earlier or ()))
    return msgspec.structs.replace(verdict, blamed_before=found) if found else verdict


def _lines(verdict: Verdict, earlier: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    gpus = [culprit.gpu for culprit in verdict.culprits if culprit.gpu]
    for name in dict.fromkeys((*gpus, *(node.host for node in verdict.nodes_at_fault))):
        times = sum(name in names for names in earlier)
        if times and verdict.outcome in ("hang", "crash"):
            last = f"the last {len(earlier)} bundles" if len(earlier) > 1 else "the last bundle"
            yield f"{name} was named in {f'{times} of ' if len(earlier) > 1 else ''}{last} here"


def _with_gpu(cause: str, culprit: Culprit, rank: RankEvidence | None, evidence: Evidence) -> Culprit:
    if rank is None or not _may_be_its_gpu(cause, rank):
        return culprit
    uuid = _uuid(rank, evidence)
    return msgspec.structs.replace(culprit, gpu=uuid[:_MOST_TEXT]) if uuid else culprit


def _may_be_its_gpu(cause: str, rank: RankEvidence) -> bool:
    said = rank.exception.message if cause == "rank-exception" and rank.exception is not None else ""
    return cause in ("gpu-kernel", "gpu-lost") or _OF_A_BAD_GPU.search(said) is not None


def _uuid(rank: RankEvidence, evidence: Evidence) -> str:
    """By its CUDA_VISIBLE_DEVICES, else the only GPU on which it has memory: CUDA and NVML count in different ways."""
    if rank.gpu.startswith(("GPU-", "MIG-")):
        return rank.gpu
    used = {
        one.uuid for one in evidence.gpus if one.host == rank.host and any(p.pid == rank.pid for p in one.processes)
    }
    return used.pop() if len(used) == 1 else ""


# --- fewer batches on some ranks --------------------------------------------------------------------------------------

_UNEVEN = "uneven-batches"


def steps_made(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The steps of each rank, and advice for a dataset that no sampler divides."""
    if finding.cause != _UNEVEN or not finding.culprits:
        return
    steps = {rank: one.step for rank, one in facts.ranks.items() if one.step is not None}
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
    """The same, with the loop that each rank has left which is out of the script: the outermost of its peers'."""
    if finding.cause != _UNEVEN:
        return finding
    named = {culprit.rank for culprit in finding.culprits}
    gone = {rank for rank in named if facts.ranks[rank].condition is not None}
    stacks = (user_stack_of(facts.ranks[rank].evidence) for rank in facts.waiting if rank not in named)
    loop = next((loop for stack in stacks if (loop := _outermost_loop(stack, facts.read_source)) is not None), None)
    if loop is None or not gone:
        return finding
    culprits = (
        msgspec.structs.replace(culprit, left=loop) if culprit.rank in gone else culprit for culprit in finding.culprits
    )
    return replace(finding, culprits=tuple(culprits))


def _outermost_loop(stack: Iterable[Frame], read_source: ReadSource) -> Frame | None:
    frames = [frame for frame in stack if src.loops_at(frame, read_source)]
    if not frames:
        return None
    loop = src.loops_at(frames[-1], read_source)[0]
    return Frame(frames[-1].file, loop.line, frames[-1].function)


_STREAMS = frozenset({"IterableDataset", "WebDataset", "StreamingDataset", "MosaicStreamingDataset"})
_MOST_NAMES = 6  # of names that stand for names


def _is_iterable(loop: Frame, read_source: ReadSource) -> bool:
    """Whether the loop's items come from an iterable dataset or a generator, as far as its file shows."""
    tree = src.tree_in(loop.file, read_source)
    inside = Frame(loop.file, loop.line, loop.function)
    heads = [one for one in src.loops_around(src.scope_at(inside, read_source), loop.line) if one.lineno == loop.line]
    within = (one for head in heads[-1:] for one in ast.walk(head))  # of epochs, it holds the loop over batches
    given = [one.iter for one in within if isinstance(one, (ast.For, ast.AsyncFor))]
    known = names_at(inside, read_source)
    names = set[str]().union(*(_behind(one, known) for one in given))
    if any("Sampler" in name for name in names):
        return False
    defined = {one.name: one for one in ast.walk(tree) if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
    found = [defined[name] for name in names if name in defined]
    bases = {
        name for one in found if isinstance(one, ast.ClassDef) for base in one.bases for name in src.names_in(base)
    }
    generators = (one for one in found if isinstance(one, ast.FunctionDef))
    yields = any(
        isinstance(node, (ast.Yield, ast.YieldFrom)) for generator in generators for node in ast.walk(generator)
    )
    return bool(_STREAMS & (names | bases)) or yields or "streaming" in names


def _behind(value: ast.expr, known: Mapping[str, ast.expr], steps: int = _MOST_NAMES) -> set[str]:
    """The names in an expression, in what these stand for, and of its arguments."""
    names = {*src.names_in(value)}
    names |= {word.arg for one in src.calls_in(value) for word in one.keywords if word.arg is not None}
    values = [known[name] for name in names if name in known] if steps else []
    return names.union(*(_behind(one, known, steps - 1) for one in values))
