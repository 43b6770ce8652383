"""What the supervisors of one job do together about a stall. Where they cannot meet, every question here says so.

A suspicion becomes an incident of all nodes; each takes its two looks at the same time and votes; the leader counts.
Where nothing moves anywhere, each takes its evidence at once, and one of them judges it all. See ``cluster.council``.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from safelaunch import __version__
from safelaunch.bundle.staging import name_of
from safelaunch.capture.command import helper_reports
from safelaunch.capture.redaction import without_secrets
from safelaunch.job.plan import Plan
from safelaunch.model import BundlePlace, Evidence, Lost, NodeEvidence, Rendezvous
from safelaunch.supervise.answer import proves
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.council import SILENT_S
from safelaunch.supervise.cluster.evidence import condensed
from safelaunch.supervise.cluster.hosting import StoreHost
from safelaunch.supervise.cluster.keyfile import BadKeyFile, read_key
from safelaunch.supervise.cluster.messages import Decision, Node, Page, Result, Vote, node_count, share_of
from safelaunch.supervise.cluster.seen import Neighbour, Seen, Word
from safelaunch.supervise.cluster.where import Alone, Meeting, hosts_of, meeting
from safelaunch.supervise.incident import Circumstances, Common, judged
from safelaunch.supervise.joint_checks import JointChecks
from safelaunch.supervise.joint_crash import JointCrash
from safelaunch.supervise.joint_dump import JointDump, whole_of
from safelaunch.supervise.node_notices import NodeNotices
from safelaunch.supervise.peers import agent_state, digest_of, nodes_of
from safelaunch.supervise.small_files import small_files
from safelaunch.supervise.watch.job import Watch

Action = Literal["kill", "restart", "dump"]
Outcome = Result | Literal["hang", "alone"]

OPEN_S = 25.0  # a suspicion waits so long for the leader, or for who follows it
SUCCEED_S = 12.0  # for another node to take over from a leader that is no longer heard
SETTLE_S = 75.0  # from a node's evidence to the leader's decision
AGREE_S = 5.0
WORD_S = 3.5  # a node that was killed is quiet by then
GOODBYE_S = 1.2  # the others read it where this node's agent, which ends, hosts the store
FEW = 16  # nodes whose Flight Recorders travel as they are
AGENT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Settled:
    """What has come of an incident. ``common`` None: the others no longer answer, and this node has only its own half.

    ``action``: what is done about the job, on every node. ``step``: the lowest that a rank of any node has marked.
    ``outcome``: ``suspect`` if the job continues because nothing proves that it hangs.
    """

    action: Action
    common: Common | None
    step: int | None = None
    outcome: Literal["hang", "suspect"] = "hang"


class Together:
    """This node's part. Everything but ``settle``, ``all_agree`` and ``nodes`` returns at once.

    ``crash``, ``dump``, ``checks``: its part in what the nodes do together about these. ``job``: where they meet.
    """

    def __init__(self, plan: Plan, about: Circumstances, watch: Watch) -> None:
        self._about = about
        self._watch = watch
        self._action: Action = _action(plan.settings.on_stall)
        self._agent_s = 0.0
        self._stop_s: float | None = None
        self._store: Lost = ""  # how it was lost while this node's own agent ran, which may host it
        self._by_torchrun = plan.by_torchrun
        self._joined = 0  # the newest incident that this node takes part in
        found = meeting(plan.command, plan.env, plan.settings.cluster_store)
        self._notices: NodeNotices | None = None
        self._port: int | None = None
        self.job = f"{found.address} {found.prefix}" if isinstance(found, Meeting) else ""
        version = plan.torch.version if plan.torch is not None else ""
        node = Node("", about.host[:255], os.getpid(), __version__, version[:255])
        self._channel = Channel(node, found.why if isinstance(found, Alone) else "")
        if isinstance(found, Meeting):
            self._meet(plan, found)
        self.crash = JointCrash(self._channel, about, lambda: self.nodes(probing=False))
        self.dump = JointDump(self._channel, about, lambda: self._page)
        self.checks = JointChecks(self._channel, lambda: self._page)

    def _meet(self, plan: Plan, found: Meeting) -> None:
        key_file = plan.settings.cluster_key_file
        try:
            key = read_key(key_file) if key_file is not None else b""
        except BadKeyFile as error:
            self._channel.seen = Seen(why=f"--cluster-key-file {key_file}: {error}")
            return
        self._port = found.address.port
        script = digest_of(Path(plan.script[0])) if plan.script else ""
        self._channel.node = replace(self._channel.node, script=script, node_rank=found.node_rank)
        self._channel.start(found, key, self._store_host(plan, found))
        self._notices = NodeNotices(found, self._channel, hosts_of(plan.env))

    def _store_host(self, plan: Plan, found: Meeting) -> StoreHost | None:
        """Starts the store, should this be its host; None where torchrun has one, or there is no torch to start it."""
        if not found.to_start or plan.torch is None:
            return None
        log = self._about.run_dir / "store.log"
        return StoreHost(found.address, plan.torch.python, log, helper_reports.started)

    def close(self, *, at_once: bool = False) -> None:
        """Leaves the others; takes seconds, unless ``at_once``."""
        self._channel.close(at_once=at_once)

    @property
    def _seen(self) -> Seen:
        return self._channel.seen

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
            return f"no message from the leader for {seen.silent_s:.0f} s"
        return "not every rank's supervisor can be reached"

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
        if self._notices is None:
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
        self.crash.note(self._page)
        if self._by_torchrun and not watch.roster.workers and not stopping:
            self._notices.who_has_come(self._page, now)
        seen = self._channel.seen
        covered = seen.page is not None and self._covers(seen.page)
        self._notices.changes(seen, now, covered=covered, ending=stopping or watch.has_ended)

    def is_heard_stopping(self, now: float) -> bool:
        """Whether the others have had time to read that somebody stops the job here, or need none."""
        if self._notices is None or not self._notices.met or not self._seen.is_local:
            return True
        return self._stop_s is not None and now - self._stop_s >= GOODBYE_S

    def _note_store(self) -> None:
        seen, agent = self._seen, self._watch.roster.agent_page
        if seen.page is not None:
            self._store = ""
        elif seen.lost and agent is not None and agent_state(agent.pid) == "running":
            self._store = seen.lost

    def last_words(self) -> Word:
        """What the others say about the end that the ranks of this node have met; waits for it a few seconds."""
        until = time.monotonic() + WORD_S
        while True:
            seen = self._seen
            met = self._notices is not None and (self._notices.met or self._notices.apart)
            word = dataclasses.replace(seen.word, lost=met and seen.page is None)
            known = word.stopping or word.troubles or word.quiet or word.lost or word.anew
            if known or not met or time.monotonic() > until:
                return word
            time.sleep(0.05)

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        """The nodes of the job as evidence; empty where it has one. ``probing`` takes seconds where one is silent."""
        if not self._seen.peers:
            return ()
        self._note_store()
        channel = self._channel
        return nodes_of(
            channel.seen,
            channel.node,
            channel.beat,
            store=self._store,
            port=self._port if probing else None,
            agent_error=self._about.redactor.said(self._watch.roster.agent_error),
            missed_s=self._watch.missed_s(time.monotonic()),
        )

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Who has come to a rendezvous that not all have come to; None also where somebody stops the job elsewhere."""
        return self._notices.rendezvous if self._notices is not None and not self._seen.word.stopping else None

    def look_around(self) -> bool:
        """Asks what every node says of itself. False: there is nobody to ask."""
        if self._seen.page is None:
            return False
        self._channel.look_around()
        return True

    def around(self, since_s: float) -> tuple[Neighbour, ...] | None:
        """What every node says of itself, if that has been read after ``since_s``."""
        at_s, nodes = self._seen.around
        return nodes if at_s > since_s else None

    # --- an incident ------------------------------------------------------------------------------------------------

    def suspect(self, window_s: float) -> bool:
        """Asks all nodes to look. False: there is nobody to ask."""
        page = self._page
        if page is None or not self._covers(page):
            return False
        self._channel.tell(doing="suspecting", suspects=page.incident, window_s=min(window_s, 60.0), at_limit=False)
        return True

    def at_limit(self) -> None:
        """This node will wait no longer for something that computes."""
        self._channel.tell(at_limit=True)

    @property
    def asks_nccl(self) -> bool:
        """Whether this node is to ask NCCL about the processes of all nodes: the one that leads, or that is alone."""
        return self._page is None or self._seen.leads

    @property
    def spares_the_ranks(self) -> str:
        """Why no rank may end yet although the job hangs: a clause. Empty where it is ended next."""
        if self._action == "dump":
            return "the job continues"
        return "the nodes have yet to agree" if self._page is not None else ""

    def let_go(self) -> None:
        """This node suspects nothing any more."""
        self._channel.tell(doing="watching", at_limit=False)

    def calls(self) -> Page | None:
        """An incident in which all are to look, and this node does not yet."""
        page = self._page
        return page if page is not None and page.phase == "looking" and page.incident > self._joined else None

    def join(self, incident: int) -> None:
        self._joined = incident
        # This incident answers what the node has asked for meanwhile; else it would open the next one at once.
        asked = min(self._asked, incident - 1)
        self._channel.tell(incident=incident, suspects=asked, vote="", chunks=-1, agrees=False)

    def vote(self, vote: Vote) -> None:
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
        return self._channel.beat.suspects

    # --- what is done about it; in a thread of its own --------------------------------------------------------------

    def settle(self, incident: int, evidence: Evidence, root: Path | None = None) -> Settled | None:
        """Hands this node's evidence in, judges all of it where this node leads, and waits for the decision.

        ``root``: this node's bundle, of which small files travel. None: the job moves after all. Takes ``SETTLE_S`` at
        most.
        """
        page = self._channel.seen.page
        nodes = node_count(page)
        files = small_files(root, records=page is not None and nodes <= FEW) if root is not None else {}
        own = without_secrets(evidence, self._about.redactor)
        self._channel.hand_in(incident, condensed(own, files, share_of(nodes)))
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
        return Settled(self._action, None) if evidence.ends else Settled("dump", None, outcome="suspect")

    def _judge(self, evidence: Evidence, seen: Seen) -> Common:
        """Everything that any node has seen, and the verdict over it."""
        everything, foreign, files = whole_of(evidence, seen.evidence, self._about.host)
        everything = with_answer(everything)
        verdict = judged(everything, self._about)
        name = name_of(self._about.run_name, time.time(), verdict.outcome)
        return Common(verdict, everything, name, foreign, files)

    def _decision(self, common: Common) -> Decision:
        steps = [rank.progress.step for rank in common.evidence.ranks if rank.progress and rank.progress.step]
        path = os.fspath(self._about.bundle_dir / common.name)
        lowest = min(steps, default=None)
        action: Action = self._action if common.verdict.outcome == "hang" else "dump"
        return Decision(common.verdict, action, self._about.host[:255], path[:4096], lowest)

    def _agreed(self, decision: Decision, evidence: Evidence, whole: Common | None) -> Settled:
        self._channel.tell(agrees=True, doing="watching", at_limit=False)
        outcome: Literal["hang", "suspect"] = "suspect" if decision.verdict.outcome == "suspect" else "hang"
        is_whole = whole is not None and decision.verdict == whole.verdict
        verdict = replace(decision.verdict, bundle=BundlePlace(decision.host, decision.path, is_whole))
        if whole is not None and is_whole:
            return Settled(decision.action, dataclasses.replace(whole, verdict=verdict), decision.step, outcome)
        name = name_of(f"{self._about.run_name}-{self._about.host}", time.time(), verdict.outcome)
        half = Common(verdict, replace(evidence, outcome=verdict.outcome), name)
        return Settled(decision.action, half, decision.step, outcome)

    def all_agree(self, incident: int) -> bool:
        """Waits until all others know the decision; nobody acts before. False: torchrun has begun another round.

        What one node does ends ranks on others, which torchrun may start anew; so only what comes before is a reason to
        go on, and those who host the store, or its ranks, do not take it from under the others.
        """
        until = time.monotonic() + AGREE_S + WORD_S
        while time.monotonic() < until:
            page = self._seen.page
            if page is None or page.incident != incident or page.phase in ("idle", "agreed"):
                return page is None or page.incident != incident or page.phase == "agreed"
            time.sleep(0.05)
        return True


def with_answer(evidence: Evidence) -> Evidence:
    """The evidence of all nodes, with the answer of them all: proved dead, or as the node says that knows the least.

    Without a proof the job ends only if a node says so whose answer is the one of all.
    """
    if evidence.answer in (None, "unknown") and proves(evidence):
        return replace(evidence, answer="dead", outcome="hang")
    return replace(evidence, outcome="hang" if evidence.ends else "suspect")


def _action(on_stall: str) -> Action:
    return "restart" if on_stall == "restart" else "dump" if on_stall == "dump" else "kill"
