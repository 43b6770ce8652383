"""What the supervisors of one job do together about a stall. Where they cannot meet, every question here says so.

A suspicion becomes an incident of all nodes; each takes its two looks at the same time and votes; the leader counts.
Where nothing moves anywhere, each takes its evidence at once, and one of them judges it all. See ``cluster.council``.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from safelaunch import __version__
from safelaunch.bundle.publishing import name_of
from safelaunch.capture.command import helper_reports
from safelaunch.cluster.channel import Channel, Neighbour, Seen, Word
from safelaunch.cluster.council import SILENT_S
from safelaunch.cluster.evidence import aged, condensed, expanded, merged, received
from safelaunch.cluster.hosting import StoreHost
from safelaunch.cluster.keyfile import BadKeyFile, read_key
from safelaunch.cluster.messages import LONGEST_TEXT, BadMessage, Decision, Node, Page, Result, Vote
from safelaunch.cluster.where import Alone, Meeting, meeting
from safelaunch.launch.plan import Plan
from safelaunch.model import BundlePlace, Evidence, Lost, NodeEvidence, RankEvidence, Verdict, format_ranks
from safelaunch.redaction.evidence import without_secrets
from safelaunch.settings.config import Settings
from safelaunch.supervise.incident import Circumstances, Common, judged
from safelaunch.supervise.peers import agent_state, digest_of, nodes_of
from safelaunch.supervise.small_files import apart, small_files
from safelaunch.supervise.watch import Watch
from safelaunch.system.console import say

Action = Literal["kill", "restart", "dump"]
Outcome = Result | Literal["hang", "alone"]

OPEN_S = 25.0  # a suspicion waits so long for the leader, or for who follows it
SUCCEED_S = 12.0  # for another node to take over from a leader that is no longer heard
SETTLE_S = 75.0  # from a node's evidence to the leader's decision
AGREE_S = 5.0
WORD_S = 3.5  # a node that was killed is quiet by then
DUMP_S = 30.0  # for the evidence of the other nodes
DUMP_EVERY_S = 5.0  # between two that others ask for
CRASH_S = 4.0  # torchrun's agents, in one of which the nodes talk, are held for 6 s, the look at the ranks included
HEAR_S = 2.5  # for the evidence of the others whose ranks fail
EFFECTS_S = 2.8  # nobody's own failure is known by then
RENDEZVOUS_S = 30.0
GOODBYE_S = 1.2  # the others read it where this node's agent, which ends, hosts the store
HOSTS_S = 1.0  # the others read the verdict where this node's agent hosts the store
FEW = 16  # nodes whose Flight Recorders travel as they are
CROWD = 64  # nodes; of more, not every one reads what all others know
AGENT_EVERY_S = 2.0
LOST_S = 3.0  # the connection is gone: the job may just be ending


@dataclass(frozen=True, slots=True)
class Settled:
    """What has come of an incident. ``common`` None: the others no longer answer, and this node has only its own half.

    ``action``: what is done about the job, on every node. ``step``: the lowest that a rank of any node has marked.
    """

    action: Action
    common: Common | None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What has come of a crash. ``verdict`` None: the nodes have not agreed on any; ``word``: what they said.

    ``others``: their evidence, where it was read here. ``name``: of the bundle that this node writes.
    """

    word: Word
    verdict: Verdict | None = None
    name: str = ""
    others: tuple[Evidence, ...] = ()


class Together:
    """This node's part. Everything but ``settle``, ``all_agree``, ``crash`` and ``nodes`` returns at once."""

    def __init__(self, plan: Plan, about: Circumstances, watch: Watch) -> None:
        self._about = about
        self._watch = watch
        self._action: Action = _action(plan.settings.on_stall)
        self._was_together = self._is_apart = False  # ``_is_apart``: a person was told so
        self._lost_s: float | None = None
        self._silent: frozenset[int] = frozenset()
        self._compared: tuple[Node, ...] = ()
        self._said: set[str] = set()
        self._said_host, self._address = False, ""
        self._dumps: set[int] = set()  # that this node has asked for, or taken part in
        self._next_dump_s = 0.0
        self._crashes: int | None = None  # that had their verdict as the ranks were started
        self._begin_s: float | None = None
        self._come = 0  # nodes of a rendezvous, as far as a person was told
        self._agent_s = 0.0
        self._stop_s: float | None = None
        self._store: Lost = ""  # how it was lost while this node's own agent ran, which may host it
        self._by_torchrun = plan.by_torchrun
        self._joined = 0  # the newest incident that this node takes part in
        found = meeting(plan.command, plan.env, plan.settings.cluster_store)
        self._why = found.why if isinstance(found, Alone) else ""
        self._channel: Channel | None = None
        if isinstance(found, Meeting):
            key = self._key(plan.settings)
            if key is None:
                return
            version = plan.torch.version if plan.torch is not None else ""
            script = digest_of(Path(plan.script[0])) if plan.script else ""
            node = Node("", about.host[:255], os.getpid(), __version__, version[:255], script)
            node = replace(node, node_rank=found.node_rank)
            self._needed = found.nodes
            self._port = found.address.port
            self._channel = Channel(found, node, key, self._store_host(plan, found))
            self._channel.start()
            self._address = str(found.address)

    def _store_host(self, plan: Plan, found: Meeting) -> StoreHost | None:
        """Starts the store, should this be its host; None where torchrun has one, or there is no torch to start it."""
        if not found.to_start or plan.torch is None:
            return None
        log = self._about.run_dir / "store.log"
        return StoreHost(found.address, plan.torch.python, log, helper_reports.started)

    def _key(self, settings: Settings) -> bytes | None:
        """Empty where none was given; None, and why, where the one that was given cannot be had any more."""
        if settings.cluster_key_file is None:
            return b""
        try:
            return read_key(settings.cluster_key_file)
        except BadKeyFile as error:
            self._why = f"--cluster-key-file {settings.cluster_key_file}: {error}"
            return None

    def close(self, *, at_once: bool = False) -> None:
        """Leaves the others; takes seconds, unless ``at_once``."""
        if self._channel is not None:
            self._channel.close(at_once=at_once)

    @property
    def _seen(self) -> Seen:
        return self._channel.seen if self._channel is not None else Seen(why=self._why)

    @property
    def _page(self) -> Page | None:
        """What the leader says, if it is heard."""
        seen = self._seen
        return seen.page if seen.silent_s < SILENT_S else None

    @property
    def is_covered(self) -> bool:
        """Whether every rank of the job is under a supervisor that is heard."""
        page = self._page
        return page is not None and self._covers(page)

    def _covers(self, page: Page) -> bool:
        """Whether it counts every rank of the job as this node knows it: it may be of before this node came."""
        return page.covered and page.world == self._watch.world_size

    @property
    def why_alone(self) -> str:
        """Why the nodes are not watched together, as far as is known: a clause."""
        seen = self._seen
        if seen.page is None:
            return seen.why
        if seen.silent_s >= SILENT_S:
            return f"nothing has been heard of the node that leads for {seen.silent_s:.0f} s"
        return "not every rank of the job has a safelaunch that is heard"

    @property
    def others(self) -> str:
        """The other nodes, in words."""
        page, hosts = self._page, [node.host for node in self._seen.nodes]
        number = page.nodes - 1 if page is not None else len(hosts)
        more = f" and {number - len(hosts)} more" if number > len(hosts) else ""
        word = "node" if number == 1 else "nodes"
        return f"{number} other {word} ({', '.join(hosts)}{more})" if hosts else f"{number} other {word}"

    def tick(self, now: float, *, stopping: bool = False) -> None:
        """Tells the others what this node sees now, and a person what becomes of the others."""
        if self._channel is None:
            return
        watch = self._watch
        ranks = watch.seen
        attempt = (watch.attempt[0], watch.attempt[1])
        self._channel.tell(ranks=ranks[:4096], world=watch.world_size if ranks else 0, attempt=attempt)
        self._channel.note(min((p.step for p in watch.last_progress.values() if p.step is not None), default=-1))
        if stopping:
            self._stop_s = self._stop_s or now
            self._channel.tell(doing="stopping")
        if now - self._agent_s >= AGENT_EVERY_S and watch.roster.agent_page is not None:
            self._agent_s = now
            self._channel.tell(agent=agent_state(watch.roster.agent_page.pid))
        self._note_store()
        if self._crashes is None and (page := self._page) is not None:
            self._crashes = page.crash
        if self._by_torchrun and not watch.roster.workers and not stopping:
            self._say_who_has_come(now)
        self._say_changes(now, stopping=stopping)

    def _say_who_has_come(self, now: float) -> None:
        """Of a rendezvous that does not complete; once, and again where more nodes have come."""
        self._begin_s = self._begin_s if self._begin_s is not None else now
        assert self._channel is not None
        nodes = (self._channel.node, *self._seen.nodes)
        number = self._page.nodes if self._page is not None else 1
        if now - self._begin_s < RENDEZVOUS_S or not self._come < number < self._needed:
            return
        self._come = number
        self._begin_s = now - RENDEZVOUS_S + LOST_S  # those that come next come together
        text = f"torchrun has started no rank yet: {number} of {self._needed} nodes have come to the rendezvous"
        text += f" ({', '.join(node.host for node in nodes)}{', ...' * (number > len(nodes))})"
        ranks = {node.node_rank for node in nodes}
        if None not in ranks and number == len(nodes) and (missing := set(range(self._needed)) - ranks):
            numbers = format_ranks({rank for rank in missing if rank is not None})
            text += f"; node rank {numbers} has not" if len(missing) == 1 else f"; node ranks {numbers} have not"
        if self._page is None:
            text += f"; the store where nodes meet does not answer ({self._seen.why})"
        say(text)

    def is_heard_stopping(self, now: float) -> bool:
        """Whether the others have had time to read that somebody stops the job here, or need none."""
        if not self._was_together or not self._seen.is_local:
            return True
        return self._stop_s is not None and now - self._stop_s >= GOODBYE_S

    def _note_store(self) -> None:
        seen, agent = self._seen, self._watch.roster.agent_page
        if seen.page is not None:
            self._store = ""
        elif seen.lost and agent is not None and agent_state(agent.pid) == "running":
            self._store = seen.lost

    def _compare(self, nodes: tuple[Node, ...]) -> None:
        """Nodes that run something else than this one: NCCL and pickles of two versions rarely agree."""
        assert self._channel is not None
        mine = self._channel.node
        for other in nodes if nodes != self._compared else ():
            for what in ("torch", "safelaunch", "script"):
                here, there = getattr(mine, what), getattr(other, what)
                text = f"{what} differs between nodes: {here} here, {there} on {other.host}"
                text = f"the script on {other.host} is not the one here" if what == "script" else text
                if here != there and here and there and text not in self._said:
                    self._said.add(text)
                    say(text)
        self._compared = nodes

    def _say_changes(self, now: float, *, stopping: bool) -> None:
        seen = self._seen
        self._compare(seen.nodes)
        if self._channel is not None and self._channel.hosts and not self._said_host:
            self._said_host = True
            say(f"started a store for the supervisors of this job: it listens at {self._address} until the job ends")
        if seen.page is not None:
            self._lost_s = None
            self._was_together = self._was_together or self._covers(seen.page)
            silent = frozenset(seen.page.silent)
            if self._is_apart and self._covers(seen.page):
                self._is_apart = False
                say("the other nodes are heard again: one verdict for all")
            if self._was_together and silent - self._silent and not stopping:
                self._is_apart = True
                say(
                    f"a node has not been heard for {SILENT_S:.0f} s: its safelaunch has stopped, or the node is gone. "
                    "Until it is heard again, each node judges for itself"
                )
            self._silent = silent
        elif self._was_together:
            self._lost_s = self._lost_s or now
            if now - self._lost_s > LOST_S and not stopping:
                self._was_together, self._is_apart = False, True
                say(f"lost touch with the other nodes ({seen.why}): until they are back, this one judges for itself")

    def trouble(self, text: str) -> None:
        """Tells the others what has failed here on its own account; the first failure counts."""
        if self._channel is not None and not self._channel.beat.trouble:
            self._channel.tell(trouble=text[:LONGEST_TEXT])

    @property
    def has_trouble(self) -> bool:
        return self._channel is not None and bool(self._channel.beat.trouble)

    def no_trouble(self) -> None:
        """The ranks have been started anew."""
        self._crashes = None
        if self._channel is not None:
            self._channel.tell(trouble="", crash=0, failed=-1)

    def last_words(self) -> Word:
        """What the others say about the end that the ranks of this node have met; waits for it a few seconds."""
        until = time.monotonic() + WORD_S
        while True:
            seen = self._seen
            met = self._was_together or self._is_apart
            word = dataclasses.replace(seen.word, lost=met and seen.page is None)
            known = word.stopping or word.troubles or word.quiet or word.lost
            if known or not met or time.monotonic() > until:
                return word
            time.sleep(0.05)

    # --- what a person asks for -------------------------------------------------------------------------------------

    def look_around(self) -> bool:
        """Asks what every node says of itself. False: there is nobody to ask."""
        if self._channel is None or self._seen.page is None:
            return False
        self._channel.look_around()
        return True

    def around(self, since_s: float) -> tuple[Neighbour, ...] | None:
        """What every node says of itself, if that has been read after ``since_s``."""
        at_s, nodes = self._seen.around
        return nodes if at_s > since_s else None

    def ask_dump(self) -> bool:
        """Asks all nodes for their evidence, now. False: there is nobody to ask."""
        page = self._page
        if self._channel is None or page is None or page.nodes < 2:
            return False
        self._channel.ask_dump(True)
        return True

    def dumped(self, own: Evidence) -> tuple[Evidence, tuple[RankEvidence, ...]]:
        """The evidence of all nodes as one, and what of it is other nodes'; waits for it ``DUMP_S`` at most."""
        assert self._channel is not None
        until = time.monotonic() + DUMP_S
        while (seen := self._seen).page is not None and time.monotonic() < until:
            if seen.answers is not None and seen.answers.complete:
                break
            time.sleep(0.05)
        handed_in = seen.answers.evidence if seen.answers is not None else {}
        everything, others, _ = _whole(own, handed_in, self._about.host)
        return everything, others

    def dump_is_over(self) -> None:
        """No other node need answer any longer."""
        if self._channel is not None:
            if self._seen.answers is not None:
                self._dumps.add(self._seen.answers.number)
            self._channel.ask_dump(False)

    def dump_wanted(self, now: float) -> int | None:
        """The number of a dump that another node asks for, and this one has not taken part in."""
        page = self._page
        answers = self._seen.answers
        known = self._dumps | ({answers.number} if answers is not None else set())
        wanted = next((number for number in page.dumps if number not in known), None) if page is not None else None
        if wanted is None or now < self._next_dump_s:
            return None
        self._dumps.add(wanted)
        self._next_dump_s = now + DUMP_EVERY_S
        return wanted

    def hand_in_dump(self, number: int, evidence: Evidence) -> None:
        if self._channel is not None:
            self._channel.hand_in_dump(number, condensed(without_secrets(evidence, self._about.redactor)))

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        """The nodes of the job as evidence; empty where it has one. ``probing`` takes seconds where one is silent."""
        if self._channel is None or not self._channel.seen.peers:
            return ()
        channel = self._channel
        return nodes_of(
            channel.seen, channel.node, channel.beat, store=self._store, port=self._port if probing else None
        )

    # --- a crash ----------------------------------------------------------------------------------------------------

    def crash(self, half: Evidence) -> Told:
        """What all nodes make of a failure that ranks of this one are part of. Takes ``CRASH_S``, and a little more.

        Whose ranks failed on their own account judges the evidence of all; where nobody's did, the leader. The first
        verdict that is stored is everybody's.
        """
        channel, number = self._channel, self._crashes
        if channel is None or number is None:
            return Told(Word())
        half = aged(without_secrets(replace(half, nodes=self.nodes(probing=False)), self._about.redactor), time.time())
        channel.fail(number + 1, condensed(half))
        begin_s, name, judged_it = time.monotonic(), "", False
        others: tuple[Evidence, ...] = ()
        while (past_s := time.monotonic() - begin_s) < CRASH_S:
            seen = channel.seen
            if seen.crash is not None and seen.crash[0] == number + 1:
                break
            if seen.word.stopping or seen.page is None:
                self._note_store()
                return Told(seen.word)
            if not judged_it and self._may_judge(seen, seen.page, past_s):
                channel.gather()
                if self._has_heard(seen, seen.page, past_s):
                    others, judged_it = _halves(seen), True
                    name = self._judge_crash(half, others)
            time.sleep(0.02)
        seen = channel.seen
        if seen.crash is None or seen.crash[0] != number + 1:
            return Told(seen.word)
        if self.has_trouble and not seen.crash[1].verdict.culprits:
            return Told(seen.word)  # they have not heard of what failed here
        if seen.is_local:
            time.sleep(HOSTS_S)
        return self._told(seen.crash[1], seen.word, name, others)

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

    def _judge_crash(self, half: Evidence, others: tuple[Evidence, ...]) -> str:
        assert self._channel is not None
        own = replace(half, nodes=self.nodes(probing=False))
        everything = replace(merged(own, others), outcome="crash")
        verdict = judged(everything, self._about)
        name = name_of(self._about.run_name, time.time(), verdict.outcome)
        path = "" if everything.missing_ranks else os.fspath(self._about.bundle_dir / name)
        self._channel.decide_crash(Decision(verdict, "dump", self._about.host[:255], path[:4096]))
        return name

    def _told(self, decision: Decision, word: Word, name: str, others: tuple[Evidence, ...]) -> Told:
        ours = bool(name) and decision.path in ("", os.fspath(self._about.bundle_dir / name)[:4096])
        verdict = decision.verdict
        if decision.path:
            verdict = replace(verdict, bundle=BundlePlace(decision.host, decision.path, ours))
        if not ours:
            name = name_of(f"{self._about.run_name}-{self._about.host}", time.time(), verdict.outcome)
        return Told(word, verdict, name, others if ours else ())

    # --- an incident ------------------------------------------------------------------------------------------------

    def suspect(self, window_s: float) -> bool:
        """Asks all nodes to look. False: there is nobody to ask."""
        page = self._page
        if self._channel is None or page is None or not self._covers(page):
            return False
        self._channel.tell(doing="suspecting", suspects=page.incident, window_s=min(window_s, 60.0), at_limit=False)
        return True

    def at_limit(self) -> None:
        """This node will wait no longer for something that computes."""
        if self._channel is not None:
            self._channel.tell(at_limit=True)

    def let_go(self) -> None:
        """This node suspects nothing any more."""
        if self._channel is not None:
            self._channel.tell(doing="watching", at_limit=False)

    def calls(self) -> Page | None:
        """An incident in which all are to look, and this node does not yet."""
        page = self._page
        return page if page is not None and page.phase == "looking" and page.incident > self._joined else None

    def join(self, incident: int) -> None:
        self._joined = incident
        if self._channel is not None:
            # This incident answers what the node has asked for meanwhile; else it would open the next one at once.
            asked = min(self._asked, incident - 1)
            self._channel.tell(incident=incident, suspects=asked, vote="", chunks=-1, agrees=False)

    def vote(self, vote: Vote) -> None:
        if self._channel is not None:
            self._channel.tell(vote=vote)

    def outcome(self, incident: int) -> Outcome | None:
        """What became of it; None: nothing yet. 0: the one that this node has asked for, where that is over already."""
        seen = self._seen
        page = seen.page if seen.silent_s < SILENT_S + SUCCEED_S else None
        if page is None:
            return "alone"
        if page.incident > incident > 0:
            return "elsewhere"
        if incident == 0:
            asked = self._asked
            return page.result if page.phase == "idle" and page.incident > asked else None
        if page.incident < incident:
            return "alone"  # another store than the one in which it began
        return page.result if page.phase == "idle" else None if page.phase == "looking" else "hang"

    @property
    def _asked(self) -> int:
        return self._channel.beat.suspects if self._channel is not None else 0

    # --- what is done about it; in a thread of its own --------------------------------------------------------------

    def settle(self, incident: int, evidence: Evidence, root: Path | None = None) -> Settled | None:
        """Hands this node's evidence in, judges all of it where this node leads, and waits for the decision.

        ``root``: this node's bundle, of which small files travel. None: the job moves after all. Takes ``SETTLE_S`` at
        most.
        """
        assert self._channel is not None
        page = self._channel.seen.page
        files = small_files(root, records=page is not None and page.nodes <= FEW) if root is not None else {}
        self._channel.hand_in(incident, condensed(without_secrets(evidence, self._about.redactor), files))
        whole: Common | None = None
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            seen = self._channel.seen
            if seen.page is None or seen.page.incident > incident:
                break
            if seen.decision is not None and seen.decision[0] == incident:
                return self._agreed(seen.decision[1], evidence, whole)
            if seen.page.incident == incident and seen.page.phase == "idle":
                return None
            if seen.leads and seen.complete and whole is None:
                whole = self._judge(evidence, seen)
                self._channel.decide(incident, self._decision(whole))
            time.sleep(0.05)
        return Settled(self._action, None)

    def _judge(self, evidence: Evidence, seen: Seen) -> Common:
        """Everything that any node has seen, and the verdict over it."""
        everything, foreign, files = _whole(replace(evidence, outcome="hang"), seen.evidence, self._about.host)
        verdict = judged(everything, self._about)
        name = name_of(self._about.run_name, time.time(), verdict.outcome)
        return Common(verdict, everything, name, foreign, files)

    def _decision(self, common: Common) -> Decision:
        steps = [rank.progress.step for rank in common.evidence.ranks if rank.progress and rank.progress.step]
        path = os.fspath(self._about.bundle_dir / common.name)
        lowest = min(steps, default=None)
        return Decision(common.verdict, self._action, self._about.host[:255], path[:4096], lowest)

    def _agreed(self, decision: Decision, evidence: Evidence, whole: Common | None) -> Settled:
        assert self._channel is not None
        self._channel.tell(agrees=True, doing="watching", at_limit=False)
        is_whole = whole is not None and decision.verdict == whole.verdict
        verdict = replace(decision.verdict, bundle=BundlePlace(decision.host, decision.path, is_whole))
        if whole is not None and is_whole:
            return Settled(decision.action, dataclasses.replace(whole, verdict=verdict), decision.step)
        name = name_of(f"{self._about.run_name}-{self._about.host}", time.time(), verdict.outcome)
        half = Common(verdict, replace(evidence, outcome=verdict.outcome), name)
        return Settled(decision.action, half, decision.step)

    def all_agree(self) -> None:
        """Where the store is on this host: waits until all others know the decision, for they learn it there."""
        until = time.monotonic() + AGREE_S
        while time.monotonic() < until:
            seen = self._seen
            if seen.page is None or not seen.is_local or seen.page.phase not in ("collecting", "decided"):
                return
            time.sleep(0.05)


def _whole(
    own: Evidence, handed_in: Mapping[int, list[bytes]], host: str
) -> tuple[Evidence, tuple[RankEvidence, ...], dict[str, bytes]]:
    """The evidence of all nodes as one, the ranks in it that are not of this one, and the others' files."""
    others: list[Evidence] = []
    notes: list[str] = []
    files: dict[str, bytes] = {}
    for slot, chunks in sorted(handed_in.items()):
        try:
            other, its = received(chunks)
            hosts = {host, *(rank.host for one in others for rank in one.ranks)}
            others.append(other)
            files |= {apart(name, slot, hosts): content for name, content in its.items()}
        except BadMessage as error:
            notes.append(f"the evidence of a node could not be read (slot {slot}: {error})")
    everything = merged(own, others)
    mine = {rank.rank for rank in own.ranks}
    foreign = tuple(rank for rank in everything.ranks if rank.rank not in mine)
    return replace(everything, notes=(*everything.notes, *notes)), foreign, files


def _halves(seen: Seen) -> tuple[Evidence, ...]:
    found = []
    for _, chunks in sorted(seen.halves.items()):
        with suppress(BadMessage):
            found.append(expanded(chunks))
    return tuple(found)


def _action(on_stall: str) -> Action:
    return "restart" if on_stall == "restart" else "dump" if on_stall == "dump" else "kill"
