"""What to do about a finding: the advice of its cause that fits the case, and one command to paste.

What sets cases of one cause apart are signs, and each sign is a fact about the evidence (:data:`SIGNS`) or was noted by
the rule that found it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from safelaunch.model import Frame, Launched, NextStep, RankEvidence, RankException
from safelaunch.model.entries import Entries
from safelaunch.verdict.causes import Advice, Sign, advice_for
from safelaunch.verdict.collectives import op_name
from safelaunch.verdict.doubts import confidence_of
from safelaunch.verdict.exits import aborted_in, failure_of_rank, has_lost_a_peer, is_timeout
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.rank_state import Facts, view_of
from safelaunch.verdict.reading import calls
from safelaunch.verdict.reading import frames as fr

# The same call on other ranks is part of training.
_TRAINING: frozenset[calls.Purpose] = frozenset(
    {"gradients", "ddp-forward", "fsdp-forward", "fsdp-backward", "sync-batchnorm"}
)
_UNUSED = re.compile("expected to have finished reduction in the prior iteration", re.IGNORECASE)
_GPU_MEMORY = re.compile("(?:cuda|hip) out of memory", re.IGNORECASE)
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|cannot allocate memory|std::bad_alloc", re.IGNORECASE
)
_GPU_ASSERT = re.compile("device-side assert|illegal memory access|cudaErrorAssert", re.IGNORECASE)


@dataclass(frozen=True)
class Scene:
    """A finding with its evidence."""

    facts: Facts
    finding: Finding

    @cached_property
    def named(self) -> frozenset[int]:
        return frozenset(one.rank for one in self.finding.culprits)

    @cached_property
    def transfers(self) -> list[str]:
        """The sends and receives that ranks at fault wait in."""
        waits = (self.facts.ranks[rank].wait for rank in sorted(self.named))
        return [wait.op for wait in waits if wait is not None and wait.kind == "p2p"]

    @cached_property
    def purposes(self) -> dict[int, calls.Purpose]:
        """rank → what torch makes the call for that it waits in, or was aborted in."""
        aborted = {rank: stack for rank in self.named if (stack := aborted_in(self.facts.ranks[rank].evidence))}
        waiting = {rank: self._purpose(rank) for rank, one in self.facts.ranks.items() if one.wait is not None}
        return {**waiting, **{rank: calls.purpose(stack) for rank, stack in aborted.items()}}

    def _purpose(self, rank: int) -> calls.Purpose:
        one, alignment = self.facts.ranks[rank], self.facts.alignment
        view = view_of(one.evidence)
        raised = one.evidence.exception
        stack = fr.stack_of(one.evidence, raised.frames) if raised is not None else view.stack if view else None
        found = calls.purpose(stack) if stack is not None else ""
        wait = one.wait
        if found or wait is None or wait.group is None or wait.seq is None:
            return found
        entry = alignment.entry(rank, wait.group, wait.seq)
        return calls.purpose(alignment.stack(rank, entry)) if entry is not None else ""

    def alone_in(self, purpose: calls.Purpose) -> bool:
        """Ranks at fault are in such a call, while all others train, or where a condition on the rank sent them."""
        there = {rank for rank, found in self.purposes.items() if found == purpose}
        if not there or not there <= self.named:
            return False
        rest = {found for rank, found in self.purposes.items() if rank not in there}
        return rest <= _TRAINING or any(there == set(one.ranks) for one in self.finding.partings)

    @cached_property
    def out_of_step(self) -> bool:
        """Ranks at fault wait at lines from which their peers have made the same call: no pass that they make alone."""
        if self.finding.partings:
            return False
        waits = [wait for rank in self.named if (wait := self.facts.ranks[rank].wait) is not None]
        return bool(waits) and all(wait.frame is not None and self._is_common(wait.op, wait.frame) for wait in waits)

    def _is_common(self, op: str, frame: Frame) -> bool:
        alignment = self.facts.alignment
        peers = (rank for rank in alignment.records if rank not in self.named)
        return any(
            op_name(kind) == op and _is_at(alignment.stack(rank, kind).user_frame, frame)
            for rank in peers
            for kind in Entries.of(alignment.records[rank].entries).used().values()
        )

    @cached_property
    def kinds(self) -> list[str]:
        """The operations on all records, with their backends."""
        records = self.facts.alignment.records.values()
        return list(dict.fromkeys(kind.op for record in records for kind in Entries.of(record.entries).used().values()))

    @property
    def raised(self) -> list[RankException]:
        """The exceptions of ranks at fault."""
        raised = (self.facts.ranks[rank].evidence.exception for rank in self.named)
        return [one for one in raised if one is not None]

    @property
    def messages(self) -> list[str]:
        return [one.message for one in self.raised]

    @property
    def failures(self) -> set[Sign]:
        """What the errors of ranks at fault mean; where none is named, those of all ranks."""
        ranks = (self.facts.ranks[rank].evidence for rank in self.named or self.facts.ranks)
        return {told.kind for one in ranks if (told := failure_of_rank(one)) is not None}

    @property
    def lost(self) -> bool:
        return any(has_lost_a_peer(one.evidence) for one in self.facts.ranks.values())

    @property
    def whole(self) -> bool:
        """All ranks were seen, at one time."""
        return not (self.facts.unseen or self.facts.evidence.rendezvous or self.facts.evidence.stopped)

    @property
    def waits(self) -> bool:
        return any(one.wait is not None for one in self.facts.ranks.values())

    @property
    def somewhere(self) -> bool:
        """Some rank's place is known."""
        return any(one.condition is not None and one.condition.frame for one in self.facts.ranks.values())


def _is_at(one: Frame | None, other: Frame) -> bool:
    """On one line: a recorded frame has the name of a function without that of its class."""
    return one is not None and (one.file, one.line) == (other.file, other.line)


def _says(pattern: re.Pattern[str]) -> Callable[[Scene], bool]:
    return lambda scene: any(pattern.search(message) for message in scene.messages)


def _without_stack(scene: Scene) -> bool:
    """Of a rank that was there to be looked at."""
    ranks = scene.facts.ranks.values()
    living = [one.evidence for one in ranks if one.evidence.exit is None and not _has_ended(one.evidence)]
    return not ranks or any(one.main is None or not one.main.stacks for one in living)


def _has_ended(rank: RankEvidence) -> bool:
    states = rank.main.states if rank.main is not None else ()
    return (bool(states) and states[-1].state in "ZX") or (
        rank.progress is not None and rank.progress.state == "exited"
    )


SIGNS: Mapping[Sign, Callable[[Scene], bool]] = {
    "transfer": lambda scene: bool(scene.transfers),
    "may-send": lambda scene: any(op != "recv" for op in scene.transfers),
    "receives": lambda scene: bool(scene.transfers) and set(scene.transfers) == {"recv"},
    "send-and-receive": lambda scene: all(any(word in op for op in scene.transfers) for word in ("send", "recv")),
    "somebody-named": lambda scene: bool(scene.named),
    "nobody-named": lambda scene: not scene.named,
    "ranks-unseen": lambda scene: bool(scene.facts.unseen),
    "nodes-absent": lambda scene: not scene.facts.unseen and scene.facts.evidence.rendezvous is not None,
    "all-arrived": lambda scene: scene.whole and scene.waits and not scene.lost,
    "all-in-init": lambda scene: {one.wait.kind for one in scene.facts.ranks.values() if one.wait} == {"init"},
    "group-timeout": lambda scene: any(
        one.exception is not None and is_timeout(one.exception) for one in scene.facts.evidence.ranks
    ),
    "all-in-own-code": lambda scene: scene.whole and scene.somewhere and not scene.waits,
    "lost-connection": lambda scene: scene.lost and not scene.facts.evidence.stopped,
    "seen-apart": lambda scene: bool(scene.facts.evidence.stopped),
    "ddp": lambda scene: any(one in ("gradients", "ddp-forward") for one in scene.purposes.values()),
    "ddp-forward": lambda scene: scene.alone_in("ddp-forward") and not scene.out_of_step,
    "out-of-step": lambda scene: scene.alone_in("ddp-forward") and scene.out_of_step,
    "fsdp-forward": lambda scene: scene.alone_in("fsdp-forward"),
    "sync-batchnorm": lambda scene: scene.alone_in("sync-batchnorm"),
    "state-dict": lambda scene: scene.alone_in("state-dict"),
    "unused-parameters": _says(_UNUSED),
    "gpu-memory": _says(_GPU_MEMORY),
    "gpu-assert": _says(_GPU_ASSERT),
    "out-of-memory": lambda scene: any(
        one.type == "MemoryError" or _HOST_MEMORY.search(one.message) for one in scene.raised
    ),
    "one-rank": lambda scene: len(scene.facts.world) == 1,
    "all-alike": lambda scene: len(scene.named) > 1 and scene.named == scene.facts.world,
    "not-all-alike": lambda scene: (
        len(scene.facts.world) > 1 and (len(scene.named) == 1 or scene.named != scene.facts.world)
    ),
    "foreign-dumps": lambda scene: scene.facts.evidence.launched is None and _without_stack(scene),
    "no-stacks": lambda scene: scene.facts.evidence.launched is not None and _without_stack(scene),
    "build-lock": lambda scene: any(
        one.condition is not None and "build-lock" in one.condition.signs for one in scene.facts.ranks.values()
    ),
    "gloo": lambda scene: any(op.startswith("gloo:") for op in scene.kinds),
    "unsure": lambda scene: confidence_of(scene.finding.doubts) != "high",
}


def advise(facts: Facts, finding: Finding) -> tuple[tuple[str, ...], NextStep | None]:
    """What to do, the surest first; and what to type next, where it is known how the job was started."""
    scene = Scene(facts, finding)
    signs: set[Sign] = {sign for sign, holds in SIGNS.items() if holds(scene)} | scene.failures
    for rank in scene.named:
        condition = facts.ranks[rank].condition
        signs |= condition.signs if condition is not None else set()
    launched = facts.evidence.launched or Launched()
    given = tuple(advice_for(finding.cause, signs | (finding.signs or {"no-sign"}), launched.presets, launched.torch))
    step = _next_step(launched, given) if facts.evidence.outcome != "dump" else None
    return tuple(one.shown for one in given), step


def _next_step(launched: Launched, given: Sequence[Advice]) -> NextStep | None:
    more = next((one for one in given if one.preset), None)
    command = again(launched, more.preset if more is not None else "")
    return NextStep(more.text if more is not None else "Once that is fixed", command) if command else None


def again(launched: Launched, preset: str = "", options: Sequence[str] = ()) -> str:
    """The user's own command, with one preset and ``options`` more; empty where it is not known, or holds what was a
    secret."""
    typed = launched.typed
    if not typed or any("[redacted" in word or not word.isprintable() for word in typed):
        return ""
    begin = 1 if typed[0] == "exec" else 0
    at = _behind_presets(typed, launched.presets[-1:])
    added = [*(() if at else launched.presets), preset] if preset else []
    presets = [word for name in added for word in ("--preset", name)]
    at = at or begin
    return shlex.join(["safelaunch", *typed[:at], *presets, *options, *typed[at:]])


def _behind_presets(typed: Sequence[str], last: Sequence[str]) -> int:
    """Where in ``typed`` the last preset's name ends, as later ones win; 0 where it is not from there."""
    for name in last:
        for number, word in enumerate(typed):
            if word == f"--preset={name}" or (word == name and number and typed[number - 1] == "--preset"):
                return number + 1
    return 0
