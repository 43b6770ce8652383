"""A crash of a whole job: the nodes whose ranks fail exchange what they have seen, and agree on one verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from safelaunch.bundle.staging import name_of
from safelaunch.capture.redaction import without_secrets
from safelaunch.model import BundlePlace, Evidence, NodeEvidence, Verdict
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.evidence import Shared, aged, condensed, expanded, merged
from safelaunch.supervise.cluster.messages import LONGEST_TEXT, BadMessage, Decision, Page
from safelaunch.supervise.cluster.seen import Seen, Word
from safelaunch.supervise.incident import Circumstances, judged

CRASH_S = 4.0  # torchrun's agents, in one of which the nodes talk, are held for 6 s, the look at the ranks included
HEAR_S = 2.5  # for the evidence of the others whose ranks fail
EFFECTS_S = 2.8  # nobody's own failure is known by then
HOSTS_S = 1.0  # the others read the verdict where this node's agent hosts the store
CROWD = 64  # nodes; of more, not every one reads what all others know


@dataclass(frozen=True, slots=True)
class Told:
    """What has come of a crash. ``verdict`` None: the nodes have not agreed on any; ``word``: what they said.

    ``others``: their evidence, where it was read here. ``name``: of the bundle that this node writes.
    """

    word: Word
    verdict: Verdict | None = None
    name: str = ""
    others: tuple[Evidence, ...] = ()


class JointCrash:
    """This node's part. ``nodes``: what it knows of all of them. Everything but ``settle`` returns at once."""

    def __init__(self, channel: Channel, about: Circumstances, nodes: Callable[[], tuple[NodeEvidence, ...]]) -> None:
        self._channel = channel
        self._about = about
        self._nodes = nodes
        self._past: int | None = None  # crashes that had their verdict as the ranks were started

    def note(self, page: Page | None) -> None:
        """What the leader says, on each tick."""
        if self._past is None and page is not None:
            self._past = page.crash

    def trouble(self, text: str) -> None:
        """Tells the others what has failed here on its own account; the first failure counts."""
        if not self._channel.beat.trouble:
            self._channel.tell(trouble=text[:LONGEST_TEXT])

    @property
    def has_trouble(self) -> bool:
        return bool(self._channel.beat.trouble)

    def anew(self) -> None:
        """The ranks have been started anew."""
        self._past = None
        self._channel.tell(trouble="", crash=0, failed=-1, anew=False)

    def another_round(self) -> str:
        """torchrun has ended the ranks here, none of which had failed: it is about to start others. Returns why."""
        self._channel.tell(anew=True)
        troubles = self._channel.seen.word.troubles
        return f"on another node, {troubles[0]}" if troubles else "nodes have joined or left"

    def settle(self, half: Evidence) -> Told:
        """What all nodes make of a failure that ranks of this one are part of. Takes ``CRASH_S``, and a little more.

        Whose ranks failed on their own account judges the evidence of all; where nobody's did, the leader. The first
        verdict that is stored is everybody's.
        """
        channel, number = self._channel, self._past
        if number is None:
            return Told(Word())
        half = aged(without_secrets(replace(half, nodes=self._nodes()), self._about.redactor), time.time())
        channel.fail(number + 1, condensed(half))
        begin_s, name, complete, judged_it = time.monotonic(), "", False, False
        others: tuple[Evidence, ...] = ()
        while (past_s := time.monotonic() - begin_s) < CRASH_S:
            seen = channel.seen
            if seen.crash is not None and seen.crash[0] == number + 1:
                break
            excused = seen.word.anew and not seen.word.troubles and not self.has_trouble
            if seen.word.stopping or excused or seen.page is None:
                return Told(seen.word)
            if not judged_it and self._may_judge(seen, seen.page, past_s):
                channel.gather()
                if self._has_heard(seen, seen.page, past_s):
                    others, judged_it = _halves(seen), True
                    name, complete = self._judge_crash(half, others)
            time.sleep(0.02)
        seen = channel.seen
        if seen.crash is None or seen.crash[0] != number + 1:
            return Told(seen.word)
        if self.has_trouble and not seen.crash[1].verdict.culprits:
            return Told(seen.word)  # they have not heard of what failed here
        if seen.is_local:
            time.sleep(HOSTS_S)
        return self._told(seen.crash[1], seen.word, name, others, complete=complete)

    def _may_judge(self, seen: Seen, page: Page, past_s: float) -> bool:
        """Of those with a failure of their own the first in the order of the nodes, later the leader, last anybody."""
        failing = [slot for slot, _ in page.troubles if slot in page.failed]
        if failing and past_s < EFFECTS_S:
            return seen.slot == failing[0]
        crowd = page.nodes > CROWD and seen.slot != page.leader
        return past_s >= HEAR_S and not crowd

    def _has_heard(self, seen: Seen, page: Page, past_s: float) -> bool:
        """Whether the evidence is complete, or need not be waited for any longer."""
        if self.has_trouble or any(slot in page.failed for slot, _ in page.troubles):
            complete = len(page.failed) >= page.nodes and len(seen.halves) >= len(page.failed) - 1
            return past_s >= (HEAR_S if self.has_trouble else EFFECTS_S) or complete
        silent = any(peer.silent_s for peer in seen.peers)
        return past_s >= (EFFECTS_S if silent and seen.slot == page.leader else CRASH_S - 0.4)

    def _judge_crash(self, half: Evidence, others: tuple[Evidence, ...]) -> tuple[str, bool]:
        """Returns the name of this node's bundle, and whether it will hold every rank."""
        own = replace(half, nodes=self._nodes())
        everything = replace(merged(own, others), outcome="crash")
        verdict = judged(everything, self._about)
        name = name_of(self._about.run_name, time.time(), verdict.outcome)
        path = os.fspath(self._about.bundle_dir / name)
        self._channel.decide_crash(Decision(verdict, "dump", self._about.host[:255], path[:4096]))
        return name, not everything.missing_ranks

    def _told(self, decision: Decision, word: Word, name: str, others: tuple[Evidence, ...], *, complete: bool) -> Told:
        ours = bool(name) and decision.path == os.fspath(self._about.bundle_dir / name)[:4096]
        place = BundlePlace(decision.host, decision.path, ours and complete)
        verdict = replace(decision.verdict, bundle=place)
        if not ours:
            name = name_of(f"{self._about.run_name}-{self._about.host}", time.time(), verdict.outcome)
        return Told(word, verdict, name, others if ours else ())


def _halves(seen: Seen) -> tuple[Evidence, ...]:
    found, shared = [], Shared()
    for _, chunks in sorted(seen.halves.items()):
        with suppress(BadMessage):
            found.append(expanded(chunks, shared))
    return tuple(found)
