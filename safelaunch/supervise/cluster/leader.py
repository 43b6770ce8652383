"""Computes the leader's next page from the nodes' beats. Has no side effects.

A job counts as hung only if every rank is on a responding node, and all these nodes looked at the same time and voted
that nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from safelaunch.supervise.cluster.election import LINE
from safelaunch.supervise.cluster.messages import MOST_ASKED, MOST_TROUBLES, Beat, LeaderPage, Phase, VoteResult

LOOKS_S = 45.0  # for two looks and slow DataLoader workers, without the pause between the looks
EVIDENCE_S = 25.0  # for the evidence of all nodes to reach the store
DECIDE_S = 60.0  # for the verdict, after EVIDENCE_S
ACKNOWLEDGE_S = 5.0  # for all nodes to acknowledge a decision


@dataclass(frozen=True, slots=True)
class LeaderInput:
    responsive: Mapping[int, Beat]  # by slot
    silent: tuple[int, ...] = ()
    decided: bool = False  # the decision about the newest incident is stored
    quiet: tuple[int, ...] = ()
    latest: Mapping[int, Beat] = field(default_factory=dict)


class Leader:
    """One node's term as the leader."""

    def __init__(self, page: LeaderPage, now: float) -> None:
        self.page = page
        self._since_s = now
        self._began: dict[int, tuple[int, int]] | None = None  # each node's attempt when the incident began

    def next(self, inputs: LeaderInput, now: float) -> LeaderPage:
        page = replace(
            self.page,
            count=self.page.count + 1,
            nodes=len(inputs.responsive),
            silent=inputs.silent[:4096],
            covered=covers(inputs.responsive.values()),
            world=max((beat.world for beat in inputs.responsive.values()), default=0),
            quiet=inputs.quiet[:4096],
            stopping=tuple(slot for slot, beat in inputs.latest.items() if beat.doing == "stopping")[:4096],
            troubles=tuple((slot, b.trouble) for slot, b in inputs.latest.items() if b.trouble)[:MOST_TROUBLES],
            asked=tuple((slot, beat.asks) for slot, beat in inputs.responsive.items() if beat.asks is not None)[
                :MOST_ASKED
            ],
            line=tuple(sorted(slot for slot in inputs.responsive if slot != self.page.leader)[:LINE]),
            restarting=tuple(slot for slot, beat in inputs.responsive.items() if beat.restarting)[:4096],
        )
        crash = page.crash + any(beat.decided == f"crash.{page.crash + 1}" for beat in inputs.latest.values())
        failed = tuple(slot for slot, beat in inputs.latest.items() if beat.round_of("crash") == f"crash.{crash + 1}")
        page = replace(page, crash=crash, failed=failed[:4096])
        if page.phase in ("idle", "agreed"):
            page = self._open(page, inputs, now)
        elif page.phase == "decided":
            participants = _participants(inputs, page.incident).values()
            agreed = all(beat.agrees for beat in participants)
            if self._is_restarting(inputs) or any(beat.vote == "moving" for beat in participants):
                page = self._close(page, "moving", now)
            elif agreed or now - self._since_s >= ACKNOWLEDGE_S:
                page = self._enter(page, "agreed", now)
        else:
            page = self._advance(page, inputs, now)
        self.page = page
        return page

    def _open(self, page: LeaderPage, inputs: LeaderInput, now: float) -> LeaderPage:
        asking = [b for b in inputs.responsive.values() if b.doing == "suspecting" and b.suspects >= page.incident]
        if not asking or not page.covered:
            return page
        self._began = _attempts(inputs)
        page = replace(page, incident=page.incident + 1, window_s=max(beat.window_s for beat in asking))
        return self._enter(page, "looking", now)

    def _advance(self, page: LeaderPage, inputs: LeaderInput, now: float) -> LeaderPage:
        """Advances an incident that is in phase ``looking`` or ``collecting``.

        Any sign that the job might move ends the incident.
        """
        participants = _participants(inputs, page.incident)
        votes = {beat.vote for beat in participants.values()}
        # Each condition has its own limit: ignore nodes with another vote.
        at_limit = any(beat.at_limit for beat in participants.values() if beat.vote in ("alive", ""))
        if self._is_restarting(inputs) or any(beat.doing == "stopping" for beat in inputs.responsive.values()):
            return self._close(page, "moving", now)
        if "moving" in votes:
            return self._close(page, "moving" if _moves_at_opener(participants) else "alive", now)
        if "paused" in votes:
            return self._close(page, "paused", now)
        if page.phase == "collecting":
            failed = inputs.decided is False and now - self._since_s >= EVIDENCE_S + DECIDE_S
            if inputs.decided or failed:
                return self._enter(page, "decided", now)
            return page
        if "alive" in votes and not at_limit:
            return self._close(page, "alive", now)
        waiting = len(participants) < len(_with_ranks(inputs)) or "" in votes
        if waiting and now - self._since_s < page.window_s + LOOKS_S:
            return page
        if waiting or not page.covered:  # each node decides alone
            return self._close(page, "unseen", now)
        if votes == {"stopped"}:
            return self._close(page, "stopped", now)
        return self._enter(page, "collecting", now)

    def _is_restarting(self, inputs: LeaderInput) -> bool:
        if self._began is None:  # the incident began under another leader
            self._began = _attempts(inputs)
        began = self._began
        changed = any(began.get(slot, attempt) != attempt for slot, attempt in _attempts(inputs).items())
        return changed or any(beat.restarting for beat in inputs.responsive.values())

    def _close(self, page: LeaderPage, result: VoteResult, now: float) -> LeaderPage:
        return self._enter(replace(page, result=result), "idle", now)

    def _enter(self, page: LeaderPage, phase: Phase, now: float) -> LeaderPage:
        self._since_s = now
        return replace(page, phase=phase, result=page.result if phase == "idle" else "")


def covers(beats: Collection[Beat]) -> bool:
    """Returns whether these nodes see every rank of the same job exactly once."""
    with_ranks = [beat for beat in beats if beat.ranks]
    ranks = list(chain.from_iterable(beat.ranks for beat in with_ranks))
    worlds = {beat.world for beat in with_ranks}
    return len(worlds) == 1 and len(ranks) == len(set(ranks)) == worlds.pop()


def _with_ranks(inputs: LeaderInput) -> dict[int, Beat]:
    return {slot: beat for slot, beat in inputs.responsive.items() if beat.ranks}


def _participants(inputs: LeaderInput, incident: int) -> dict[int, Beat]:
    return {slot: beat for slot, beat in _with_ranks(inputs).items() if beat.incident == incident}


def _attempts(inputs: LeaderInput) -> dict[int, tuple[int, int]]:
    return {slot: beat.attempt for slot, beat in _with_ranks(inputs).items()}


def _moves_at_opener(beats: Mapping[int, Beat]) -> bool:
    return any(beat.vote == "moving" and beat.suspects >= 0 for beat in beats.values())
