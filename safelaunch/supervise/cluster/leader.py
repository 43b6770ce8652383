"""What the leader makes of the nodes' beats, and who leads. Pure: beats and times in, the next page out.

Unknown is never still: a job is taken for hung only where every rank is seen by a node that is heard, and each of these
nodes has looked, at the same time as the others, and has seen nothing move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from safelaunch.supervise.cluster.election import LINE
from safelaunch.supervise.cluster.messages import MOST_ASKED, MOST_TROUBLES, Beat, LeaderPage, Phase, VoteResult

LOOKS_S = 45.0  # two looks and the patience with loader workers, besides the time between the looks
EVIDENCE_S = 25.0  # from the start of the collection until every node's evidence is in the store
DECIDE_S = 60.0  # the evidence is there, or will not come
ACKNOWLEDGE_S = 5.0  # for all nodes to acknowledge a decision; then the leader goes on without the rest


@dataclass(frozen=True, slots=True)
class LeaderInput:
    """What the leader goes by. ``heard``: the beats of the nodes that are; ``silent``: slots of the others; ``quiet``:
    of those that were not heard for ``QUIET_S``. ``last``: the last words of everybody.

    ``decided``: the leader has stored its decision about the newest incident.
    """

    responsive: Mapping[int, Beat]
    silent: tuple[int, ...] = ()
    decided: bool = False
    quiet: tuple[int, ...] = ()
    latest: Mapping[int, Beat] = field(default_factory=dict)


class Leader:
    """One term of office: from the page that was found, or the first one, to the next and the next."""

    def __init__(self, page: LeaderPage, now: float) -> None:
        self.page = page
        self._since_s = now  # of the phase, as far as this leader has seen it
        self._began: dict[int, tuple[int, int]] | None = None  # the attempt of each node as the incident began

    def next(self, given: LeaderInput, now: float) -> LeaderPage:
        """The page to write now."""
        page = replace(
            self.page,
            count=self.page.count + 1,
            nodes=len(given.responsive),
            silent=given.silent[:4096],
            covered=covers(given.responsive.values()),
            world=max((beat.world for beat in given.responsive.values()), default=0),
            quiet=given.quiet[:4096],
            stopping=tuple(slot for slot, beat in given.latest.items() if beat.doing == "stopping")[:4096],
            troubles=tuple((slot, b.trouble) for slot, b in given.latest.items() if b.trouble)[:MOST_TROUBLES],
            asked=tuple((slot, beat.asks) for slot, beat in given.responsive.items() if beat.asks is not None)[
                :MOST_ASKED
            ],
            line=tuple(sorted(slot for slot in given.responsive if slot != self.page.leader)[:LINE]),
            restarting=tuple(slot for slot, beat in given.responsive.items() if beat.restarting)[:4096],
        )
        crash = page.crash + any(beat.decided == f"crash.{page.crash + 1}" for beat in given.latest.values())
        failed = tuple(slot for slot, beat in given.latest.items() if beat.round_of("crash") == f"crash.{crash + 1}")
        page = replace(page, crash=crash, failed=failed[:4096])
        if page.phase in ("idle", "agreed"):
            page = self._open(page, given, now)
        elif page.phase == "decided":
            mine = _participants(given, page.incident).values()
            agreed = all(beat.agrees for beat in mine)
            if self._is_restarting(given) or any(beat.vote == "moving" for beat in mine):  # nobody has acted yet
                page = self._close(page, "moving", now)
            elif agreed or now - self._since_s >= ACKNOWLEDGE_S:
                page = self._enter(page, "agreed", now)
        else:
            page = self._advance(page, given, now)
        self.page = page
        return page

    def _open(self, page: LeaderPage, given: LeaderInput, now: float) -> LeaderPage:
        asking = [b for b in given.responsive.values() if b.doing == "suspecting" and b.suspects >= page.incident]
        if not asking or not page.covered:
            return page
        self._began = _attempts(given)
        page = replace(page, incident=page.incident + 1, window_s=max(beat.window_s for beat in asking))
        return self._enter(page, "looking", now)

    def _advance(self, page: LeaderPage, given: LeaderInput, now: float) -> LeaderPage:
        """Looking or collecting: whatever says that the job moves, or may, ends the incident."""
        mine = _participants(given, page.incident)
        votes = {beat.vote for beat in mine.values()}
        # The limit depends on the condition, so those of nodes that voted otherwise don't count.
        at_limit = any(beat.at_limit for beat in mine.values() if beat.vote in ("alive", ""))
        if self._is_restarting(given) or any(beat.doing == "stopping" for beat in given.responsive.values()):
            return self._close(page, "moving", now)
        if "moving" in votes:
            return self._close(page, "moving" if _moves_at_opener(mine) else "alive", now)
        if "paused" in votes:
            return self._close(page, "paused", now)
        if page.phase == "collecting":
            failed = given.decided is False and now - self._since_s >= EVIDENCE_S + DECIDE_S
            if given.decided or failed:
                return self._enter(page, "decided", now)
            return page
        if "alive" in votes and not at_limit:
            return self._close(page, "alive", now)
        waiting = len(mine) < len(_with_ranks(given)) or "" in votes
        if waiting and now - self._since_s < page.window_s + LOOKS_S:
            return page
        if waiting or not page.covered:  # each is alone then, and acts at a --max-stall of the user's
            return self._close(page, "unseen", now)
        if votes == {"stopped"}:
            return self._close(page, "stopped", now)
        return self._enter(page, "collecting", now)

    def _is_restarting(self, given: LeaderInput) -> bool:
        """Whether torchrun has started ranks anew since the incident began, or is about to."""
        if self._began is None:  # of the one who led before
            self._began = _attempts(given)
        began = self._began
        changed = any(began.get(slot, attempt) != attempt for slot, attempt in _attempts(given).items())
        return changed or any(beat.restarting for beat in given.responsive.values())

    def _close(self, page: LeaderPage, result: VoteResult, now: float) -> LeaderPage:
        return self._enter(replace(page, result=result), "idle", now)

    def _enter(self, page: LeaderPage, phase: Phase, now: float) -> LeaderPage:
        self._since_s = now
        return replace(page, phase=phase, result=page.result if phase == "idle" else "")


def covers(beats: Collection[Beat]) -> bool:
    """Whether these nodes see every rank of one job, each rank once."""
    seen = [beat for beat in beats if beat.ranks]
    ranks = list(chain.from_iterable(beat.ranks for beat in seen))
    worlds = {beat.world for beat in seen}
    return len(worlds) == 1 and len(ranks) == len(set(ranks)) == worlds.pop()


def _with_ranks(given: LeaderInput) -> dict[int, Beat]:
    """Those that have ranks: others have nothing to look at."""
    return {slot: beat for slot, beat in given.responsive.items() if beat.ranks}


def _participants(given: LeaderInput, incident: int) -> dict[int, Beat]:
    """Those that take part in the incident."""
    return {slot: beat for slot, beat in _with_ranks(given).items() if beat.incident == incident}


def _attempts(given: LeaderInput) -> dict[int, tuple[int, int]]:
    return {slot: beat.attempt for slot, beat in _with_ranks(given).items()}


def _moves_at_opener(beats: Mapping[int, Beat]) -> bool:
    return any(beat.vote == "moving" and beat.suspects >= 0 for beat in beats.values())
