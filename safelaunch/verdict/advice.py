"""Advice for a verdict: the pieces of its cause that fit the case, and one command to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from safelaunch.model import Launched, NextStep, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.stacks import calls, failures
from safelaunch.stacks import frames as fr
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import confidence_of
from safelaunch.verdict.exceptions import failure_of_rank, has_lost_a_peer, is_timeout
from safelaunch.verdict.exits import aborted_in
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import Advice

# If ranks at fault are alone in one of these, the others' calls still belong to training.
_TRAINING: frozenset[calls.Purpose] = frozenset(
    {"gradients", "ddp-forward", "fsdp-forward", "fsdp-backward", "sync-batchnorm"}
)


@dataclass(frozen=True)
class Scene:
    """A finding and its evidence, as advice sees them."""

    facts: CaseFacts
    finding: Finding

    @property
    def launched(self) -> Launched:
        return self.facts.evidence.launched or Launched()

    @cached_property
    def attached(self) -> frozenset[Advice]:
        """Advice that the rule or the conditions of the ranks at fault attached."""
        return self.finding.all_advice.union(*(condition.advice for condition in self._own if condition is not None))

    @cached_property
    def named(self) -> frozenset[int]:
        return frozenset(culprit.rank for culprit in self.finding.culprits)

    @cached_property
    def _own(self) -> list[Condition | None]:
        return [self.facts.ranks[rank].condition for rank in self.named]

    @property
    def surely_named(self) -> bool:
        """True if a rank is named and evidence shows what it did."""
        return bool(self.named) and not any(
            condition is None or confidence_of(condition.doubts) == "low" for condition in self._own
        )

    @property
    def exits_early(self) -> bool:
        return any(condition is not None and condition.exits_early for condition in self._own)

    @property
    def holds_a_lock(self) -> bool:
        """True if a rank at fault waits while its thread holds a lock that another of its threads waits for."""
        waits = (self.facts.ranks[rank].wait for rank in self.named)
        return any(wait is not None and wait.holds_lock for wait in waits)

    @cached_property
    def transfers(self) -> list[str]:
        """Sends and receives that ranks at fault wait in."""
        waits = (self.facts.ranks[rank].wait for rank in sorted(self.named))
        return [wait.op for wait in waits if wait is not None and wait.kind == "p2p"]

    @cached_property
    def purposes(self) -> dict[int, calls.Purpose]:
        """rank → why torch makes the call that the rank waits in, or was aborted in."""
        aborted = {rank: stack for rank in self.named if (stack := aborted_in(self.facts.ranks[rank].evidence))}
        waiting = {rank: self._purpose(rank) for rank, state in self.facts.ranks.items() if state.wait is not None}
        return {**waiting, **{rank: calls.purpose(stack) for rank, stack in aborted.items()}}

    def _purpose(self, rank: int) -> calls.Purpose:
        state, alignment = self.facts.ranks[rank], self.facts.alignment
        view = state.view
        raised = state.evidence.exception
        stack = fr.stack_of(state.evidence, raised.frames) if raised is not None else view.stack if view else None
        purpose = calls.purpose(stack) if stack is not None else ""
        wait = state.wait
        if purpose or wait is None or wait.group is None or wait.seq is None:
            return purpose
        entry = alignment.entry(rank, wait.group, wait.seq)
        return calls.purpose(alignment.stack(rank, entry)) if entry is not None else ""

    def alone_in(self, purpose: calls.Purpose) -> bool:
        """Returns whether only ranks at fault make such a call: others train, or a condition on the rank differs."""
        alone = {rank for rank, own_purpose in self.purposes.items() if own_purpose == purpose}
        if not alone or not alone <= self.named:
            return False
        rest = {own_purpose for rank, own_purpose in self.purposes.items() if rank not in alone}
        return rest <= _TRAINING or any(alone == set(branch.ranks) for branch in self.finding.branches)

    def raised_like(self, pattern: re.Pattern[str]) -> bool:
        """Returns whether an exception of a rank at fault, type included, matches."""
        raised = (self.facts.ranks[rank].evidence.exception for rank in self.named)
        return any(error is not None and pattern.search(f"{error.type}: {error.message}") for error in raised)

    @cached_property
    def failures(self) -> set[failures.FailureKind]:
        """Kinds of the errors of ranks at fault, or of all ranks if no rank is named."""
        ranks = (self.facts.ranks[rank].evidence for rank in self.named or self.facts.ranks)
        return {failure.kind for rank in ranks if (failure := failure_of_rank(rank)) is not None}

    @property
    def lost(self) -> bool:
        return any(has_lost_a_peer(rank.evidence) for rank in self.facts.ranks.values())

    @property
    def timed_out(self) -> bool:
        raised = (rank.exception for rank in self.facts.evidence.ranks)
        return any(error is not None and is_timeout(error) for error in raised)

    @property
    def _whole(self) -> bool:
        evidence = self.facts.evidence
        return not (self.facts.unseen or evidence.rendezvous or evidence.stopped or evidence.world_guessed)

    @property
    def of_some_stacks(self) -> bool:
        """True if the evidence is saved stacks, for an unknown number of ranks, and no process is at fault."""
        return self.facts.evidence.world_guessed and self.facts.evidence.printed is None and not self.named

    @property
    def _waits(self) -> set[str]:
        return {rank.wait.kind for rank in self.facts.ranks.values() if rank.wait is not None}

    @property
    def all_arrived(self) -> bool:
        return self._whole and bool(self._waits) and not self.lost

    @property
    def all_in_init(self) -> bool:
        return self._waits == {"init"}

    @property
    def all_in_own_code(self) -> bool:
        """True if no rank waits for a peer, and at least one rank's place is known."""
        somewhere = any(rank.condition is not None and rank.condition.frame for rank in self.facts.ranks.values())
        return self._whole and somewhere and not self._waits

    @property
    def all_alike(self) -> bool:
        return len(self.named) > 1 and self.named == self.facts.world

    @property
    def over_gloo(self) -> bool:
        kinds = (Entries.of(record.entries).used().values() for record in self.facts.alignment.records.values())
        return any(kind.by_gloo for used in kinds for kind in used)

    @property
    def without_stack(self) -> bool:
        ranks = self.facts.ranks.values()
        living = [rank.evidence for rank in ranks if rank.evidence.exit is None and not _has_ended(rank.evidence)]
        return not ranks or any(rank.main is None or not rank.main.stacks for rank in living)


def _has_ended(rank: RankEvidence) -> bool:
    states = rank.main.states if rank.main is not None else ()
    return (bool(states) and states[-1].state in "ZX") or (
        rank.progress is not None and rank.progress.state == "exited"
    )


def advise(facts: CaseFacts, finding: Finding) -> tuple[tuple[str, ...], NextStep | None]:
    """Returns the advice that fits, in order, and the next command, if the user's command line is known."""
    scene = Scene(facts, finding)
    pieces = [piece for piece in CAUSES[finding.cause].advice if piece.fits(scene)]
    step = _next_step(scene.launched, pieces) if facts.evidence.outcome != "dump" else None
    return tuple(piece.shown for piece in pieces), step


def _next_step(launched: Launched, pieces: Sequence[Advice]) -> NextStep | None:
    more = next((piece for piece in pieces if piece.preset), None)
    command, why = again(launched, more.preset if more is not None else ""), "Once that is fixed"
    any_node = _NUMBER_OF_NODE.sub(r"\1N", command)
    why = more.text if more is not None else why
    if any_node != command:  # the verdict is the same on all nodes, the command isn't
        why += " (on each node, with its own number as N)"
    return NextStep(why, any_node) if command else None


_NUMBER_OF_NODE = re.compile(r"(?<!\S)(--(?:node|machine)[-_]r\w*[= ])\d+(?!\S)")


def again(launched: Launched, preset: str = "", options: Sequence[str] = ()) -> str:
    """Returns the user's command with one more preset and more options.

    Empty if the command is unknown or contained a secret.
    """
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
    for name in last:
        for number, word in enumerate(typed):
            if word == f"--preset={name}" or (word == name and number and typed[number - 1] == "--preset"):
                return number + 1
    return 0
