"""What the supervisors of one job know of each other, and ask each other when one of them suspects a hang.

A suspicion becomes an incident of all nodes; each takes its two looks at the same time and votes; the leader counts.
Where nothing moves anywhere, each takes its evidence at once, and one of them judges it all: see ``rounds``. A job on
one node has a council as well: there is nobody in it to ask.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from safelaunch import __version__
from safelaunch.capture.command import helper_reports
from safelaunch.job.plan import Plan
from safelaunch.model import Lost, NodeEvidence, Rendezvous
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.exchange import PeerStatus, PeerView
from safelaunch.supervise.cluster.key import BadKeyFile, read_key
from safelaunch.supervise.cluster.messages import Action, LeaderPage, NodeCard, Vote, VoteResult
from safelaunch.supervise.cluster.rendezvous import NoRendezvous, SharedStore, hosts_of, meeting
from safelaunch.supervise.cluster.store import Address
from safelaunch.supervise.cluster.store_host import StoreHost
from safelaunch.supervise.control.protocol import NodeStatus
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.node_evidence import agent_state, digest_of, nodes_of
from safelaunch.supervise.node_notices import NodeNotices
from safelaunch.supervise.rounds import Rounds
from safelaunch.supervise.watch.progress import Watch

RoundOutcome = VoteResult | Literal["hang", "alone"]

OPEN_S = 25.0  # a suspicion waits so long for the leader, or for who follows it
SUCCEED_S = 12.0  # for another node to take over from a leader that is no longer heard
WORD_S = 3.5  # a node that was killed is quiet by then
STOP_NOTICE_S = 1.2  # the others read it where this node's agent, which ends, hosts the store
AGENT_EVERY_S = 2.0
_NOWHERE = SharedStore(Address("", 0), "", nodes=1)


class Council:
    """This node's part. Everything but ``final_status`` and ``nodes`` returns at once.

    ``rounds``: in which all nodes decide something. ``job``: where they meet.
    """

    def __init__(self, plan: Plan, context: JobContext, watch: Watch) -> None:
        self._context = context
        self._watch = watch
        self._agent_s = 0.0
        self._stop_s: float | None = None
        self._store: Lost = ""  # how it was lost while this node's own agent ran, which may host it
        self._by_torchrun = plan.by_torchrun
        self._joined = 0  # the newest incident that this node takes part in
        found = meeting(plan.command, plan.env, plan.settings.cluster_store)
        self._port: int | None = None
        self.job = f"{found.address} {found.prefix}" if isinstance(found, SharedStore) else ""
        version = plan.torch.version if plan.torch is not None else ""
        node = NodeCard("", context.host[:255], os.getpid(), __version__, version[:255])
        self.channel = Channel(node, found.why if isinstance(found, NoRendezvous) else "")
        hosts = hosts_of(plan.env)
        self._notices = NodeNotices(found if isinstance(found, SharedStore) else _NOWHERE, self.channel, hosts)
        if isinstance(found, SharedStore):
            self._meet(plan, found)
        on_stall = plan.settings.on_stall
        self._action: Action = "restart" if on_stall == "restart" else "dump" if on_stall == "dump" else "kill"
        self.rounds = Rounds(self.channel, context, lambda: self.nodes(probing=False), self._action)

    def _meet(self, plan: Plan, found: SharedStore) -> None:
        key_file = plan.settings.cluster_key_file
        try:
            key = read_key(key_file) if key_file is not None else b""
        except BadKeyFile as error:
            self.channel.view = PeerView(why=f"--cluster-key-file {key_file}: {error}")
            return
        self._port = found.address.port
        script = digest_of(Path(plan.script[0])) if plan.script else ""
        self.channel.node = replace(self.channel.node, script=script, node_rank=found.node_rank)
        self.channel.start(found, key, self._store_host(plan, found))

    def _store_host(self, plan: Plan, found: SharedStore) -> StoreHost | None:
        """Starts the store, should this be its host; None where torchrun has one, or there is no torch to start it."""
        if not found.to_start or plan.torch is None:
            return None
        log = self._context.run_dir / "store.log"
        return StoreHost(found.address, plan.torch.python, log, helper_reports.started)

    def close(self, *, at_once: bool = False) -> None:
        """Leaves the others; takes seconds, unless ``at_once``."""
        self.channel.close(at_once=at_once)

    @property
    def _seen(self) -> PeerView:
        return self.channel.view

    @property
    def _page(self) -> LeaderPage | None:
        return self.rounds.page

    @property
    def is_covered(self) -> bool:
        """Whether every rank of the job is under a supervisor that is heard."""
        page = self._page
        return page is not None and self._covers(page)

    def _covers(self, page: LeaderPage) -> bool:
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
        if not self.channel.is_started:
            return
        watch = self._watch
        ranks = watch.seen
        attempt = (watch.attempt[0], watch.attempt[1])
        self.channel.update(ranks=ranks[:4096], world=watch.world_size if ranks else 0, attempt=attempt)
        self.channel.set_step(min((p.step for p in watch.last_progress.values() if p.step is not None), default=-1))
        if stopping:
            self._stop_s = self._stop_s or now
            self.channel.update(doing="stopping")
        if now - self._agent_s >= AGENT_EVERY_S and watch.roster.agent_page is not None:
            self._agent_s = now
            self.channel.update(agent=agent_state(watch.roster.agent_page.pid))
        self._note_store()
        self.rounds.note(self._page)
        if self._by_torchrun and not watch.roster.workers and not stopping:
            self._notices.note_rendezvous(self._page, now)
        seen = self.channel.view
        covered = seen.page is not None and self._covers(seen.page)
        self._notices.changes(seen, now, covered=covered, ending=stopping or watch.has_ended)

    def has_announced_stop(self, now: float) -> bool:
        """Whether the others have had time to read that somebody stops the job here, or need none."""
        if not self._notices.met or not self._seen.is_local:
            return True
        return self._stop_s is not None and now - self._stop_s >= STOP_NOTICE_S

    def _note_store(self) -> None:
        seen, agent = self._seen, self._watch.roster.agent_page
        if seen.page is not None:
            self._store = ""
        elif seen.lost and agent is not None and agent_state(agent.pid) == "running":
            self._store = seen.lost

    def final_status(self) -> PeerStatus:
        """What the others say about the end that the ranks of this node have met; waits for it a few seconds."""
        until = time.monotonic() + WORD_S
        while True:
            seen = self._seen
            met = self._notices.met or self._notices.apart
            status = dataclasses.replace(seen.status, lost=met and seen.page is None)
            known = status.stopping or status.troubles or status.quiet or status.lost or status.restarting
            if known or not met or time.monotonic() > until:
                return status
            time.sleep(0.05)

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        """The nodes of the job as evidence; empty where it has one. ``probing`` takes seconds where one is silent."""
        if not self._seen.peers:
            return ()
        self._note_store()
        channel = self.channel
        return nodes_of(
            channel.view,
            channel.node,
            channel.beat,
            store=self._store,
            port=self._port if probing else None,
            agent_error=self._context.redactor.said(self._watch.roster.agent_error),
            missed_s=self._watch.missed_s(time.monotonic()),
        )

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Who has come to a rendezvous that not all have come to; None also where somebody stops the job elsewhere."""
        return self._notices.rendezvous if not self._seen.status.stopping else None

    def request_survey(self) -> bool:
        """Asks what every node says of itself. False: there is nobody to ask."""
        if self._seen.page is None:
            return False
        self.channel.request_survey()
        return True

    def survey(self, since_s: float) -> tuple[NodeStatus, ...] | None:
        """What every node says of itself, if that has been read after ``since_s``."""
        at_s, nodes = self._seen.survey
        return nodes if at_s > since_s else None

    # --- an incident ------------------------------------------------------------------------------------------------

    def suspect(self, window_s: float) -> bool:
        """Asks all nodes to look. False: there is nobody to ask."""
        page = self._page
        if page is None or not self._covers(page):
            return False
        self.channel.update(doing="suspecting", suspects=page.incident, window_s=min(window_s, 60.0), at_limit=False)
        return True

    def report_limit(self) -> None:
        """This node will wait no longer for something that computes."""
        self.channel.update(at_limit=True)

    @property
    def queries_nccl(self) -> bool:
        """Whether this node is to ask NCCL about the processes of all nodes: the one that leads, or that is alone."""
        return self._page is None or self._seen.leads

    @property
    def why_ranks_must_live(self) -> str:
        """Why no rank may end yet although the job hangs: a clause. Empty where it is ended next."""
        if self._action == "dump":
            return "the job continues"
        return "the nodes have yet to agree" if self._page is not None else ""

    def withdraw(self) -> None:
        """This node suspects nothing any more."""
        self.channel.update(doing="watching", at_limit=False)

    def pending_call(self) -> LeaderPage | None:
        """An incident in which all are to look, and this node does not yet."""
        page = self._page
        return page if page is not None and page.phase == "looking" and page.incident > self._joined else None

    def join_call(self) -> LeaderPage | None:
        """Takes part in the incident in which all are to look, where this node does not yet."""
        call = self.pending_call()
        if call is not None:
            self._joined = call.incident
            # This incident answers what the node has asked for meanwhile; else it would open the next one at once.
            asked = min(self._asked, call.incident - 1)
            self.channel.update(incident=call.incident, suspects=asked, vote="", agrees=False)
        return call

    def vote(self, vote: Vote) -> None:
        self.channel.update(vote=vote)

    def outcome(self, incident: int) -> RoundOutcome | None:
        """What became of it; None: nothing yet. 0: the one that this node has asked for, where that is over already."""
        seen = self._seen
        page = seen.page if seen.silent_s < SILENT_S + SUCCEED_S else None
        if page is None:
            return "alone"
        if page.incident > incident > 0:
            return "unseen"
        if incident == 0:
            asked = self._asked
            return page.result if page.phase == "idle" and page.incident > asked else None
        if page.incident < incident:
            return "alone"  # another store than the one in which it began
        return page.result if page.phase == "idle" else None if page.phase == "looking" else "hang"

    @property
    def _asked(self) -> int:
        return self.channel.beat.suspects
