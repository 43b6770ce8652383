"""Joint action of a job's supervisors once one of them suspects a hang.

When a node suspects a hang, an incident begins: all nodes take two looks at the same time and vote, and the leader
counts the votes. If nothing moves, each node collects its evidence, and one node judges all of it (see ``rounds``). A
job on one node has no peers.
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

OPEN_S = 25.0  # for the leader or its successor to open an incident
SUCCEED_S = 12.0  # for another node to succeed a silent leader
LAST_STATUS_S = 3.5  # for other nodes' status; by then, a killed node counts as quiet
STOP_NOTICE_S = 1.2  # for other nodes to notice a stop, if this node's agent hosts the store
AGENT_EVERY_S = 2.0
_NOWHERE = SharedStore(Address("", 0), "", nodes=1)


class Council:
    """This node's part in joint actions. Only ``close``, ``final_status`` and ``nodes`` block."""

    def __init__(self, plan: Plan, context: JobContext, watch: Watch) -> None:
        self._context = context
        self._watch = watch
        self._agent_s = 0.0
        self._stop_s: float | None = None
        self._store: Lost = ""  # how the store was lost while this node's agent, which might host it, still ran
        self._by_torchrun = plan.by_torchrun
        self._joined = 0  # newest incident with this node
        rendezvous = meeting(plan.command, plan.env, plan.settings.cluster_store)
        self._port: int | None = None
        self.job = f"{rendezvous.address} {rendezvous.prefix}" if isinstance(rendezvous, SharedStore) else ""
        version = plan.torch.version if plan.torch is not None else ""
        node = NodeCard("", context.host[:255], os.getpid(), __version__, version[:255])
        self.channel = Channel(node, rendezvous.why if isinstance(rendezvous, NoRendezvous) else "")
        hosts = hosts_of(plan.env)
        self._notices = NodeNotices(
            rendezvous if isinstance(rendezvous, SharedStore) else _NOWHERE, self.channel, hosts
        )
        if isinstance(rendezvous, SharedStore):
            self._join(plan, rendezvous)
        on_stall = plan.settings.on_stall
        self._action: Action = "restart" if on_stall == "restart" else "dump" if on_stall == "dump" else "kill"
        self.rounds = Rounds(self.channel, context, lambda: self.nodes(probing=False), self._action)

    def _join(self, plan: Plan, store: SharedStore) -> None:
        key_file = plan.settings.cluster_key_file
        try:
            key = read_key(key_file) if key_file is not None else b""
        except BadKeyFile as error:
            self.channel.view = PeerView(why=f"--cluster-key-file {key_file}: {error}")
            return
        self._port = store.address.port
        script = digest_of(Path(plan.script[0])) if plan.script else ""
        self.channel.node = replace(self.channel.node, script=script, node_rank=store.node_rank)
        self.channel.start(store, key, self._store_host(plan, store))

    def _store_host(self, plan: Plan, store: SharedStore) -> StoreHost | None:
        # torchrun has a store, or there is no torch to start one
        if not store.to_start or plan.torch is None:
            return None
        log = self._context.run_dir / "store.log"
        return StoreHost(store.address, plan.torch.python, log, helper_reports.started)

    def close(self, *, at_once: bool = False) -> None:
        self.channel.close(at_once=at_once)

    @property
    def _seen(self) -> PeerView:
        return self.channel.view

    @property
    def _page(self) -> LeaderPage | None:
        return self.rounds.page

    @property
    def is_covered(self) -> bool:
        """True if every rank has a supervisor that responds."""
        page = self._page
        return page is not None and self._covers(page)

    def _covers(self, page: LeaderPage) -> bool:
        # The page might date from before this node joined, and count fewer ranks.
        return page.covered and page.world == self._watch.world_size

    @property
    def why_alone(self) -> str:
        view = self._seen
        if view.page is None:
            return view.why
        if view.silent_s >= SILENT_S:
            return f"no message from the leader for {view.silent_s:.0f} s"
        return "not every rank's supervisor can be reached"

    @property
    def others(self) -> str:
        page, hosts = self._page, [node.host for node in self._seen.nodes]
        number = page.nodes - 1 if page is not None else len(hosts)
        more = f" and {number - len(hosts)} more" if number > len(hosts) else ""
        word = "node" if number == 1 else "nodes"
        return f"{number} other {word} ({', '.join(hosts)}{more})" if hosts else f"{number} other {word}"

    def tick(self, now: float, *, stopping: bool = False) -> None:
        if not self.channel.is_started:
            return
        watch = self._watch
        ranks = watch.own_ranks
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
        view = self.channel.view
        covered = view.page is not None and self._covers(view.page)
        self._notices.note_changes(view, now, covered=covered, ending=stopping or watch.has_ended)

    def has_announced_stop(self, now: float) -> bool:
        """Returns whether other nodes have had time to read that this node is stopping the job."""
        if not self._notices.met or not self._seen.is_local:
            return True
        return self._stop_s is not None and now - self._stop_s >= STOP_NOTICE_S

    def _note_store(self) -> None:
        view, agent = self._seen, self._watch.roster.agent_page
        if view.page is not None:
            self._store = ""
        elif view.lost and agent is not None and agent_state(agent.pid) == "running":
            self._store = view.lost

    def final_status(self) -> PeerStatus:
        """Returns the other nodes' status. Waits a few seconds for a status that explains why ranks ended here."""
        until = time.monotonic() + LAST_STATUS_S
        while True:
            view = self._seen
            met = self._notices.met or self._notices.apart
            status = dataclasses.replace(view.status, lost=met and view.page is None)
            is_informed = status.stopping or status.troubles or status.quiet or status.lost or status.restarting
            if is_informed or not met or time.monotonic() > until:
                return status
            time.sleep(0.05)

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        """Returns the nodes of the job; empty if it has only one.

        Args:
            probing: Whether to probe the hosts of silent nodes, which takes seconds.
        """
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
            agent_error=self._context.redactor.job_text(self._watch.roster.agent_error),
            missed_s=self._watch.missed_s(time.monotonic()),
        )

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Returns the incomplete rendezvous of a job that isn't being stopped elsewhere; None otherwise."""
        return self._notices.rendezvous if not self._seen.status.stopping else None

    def request_survey(self) -> bool:
        if self._seen.page is None:
            return False
        self.channel.request_survey()
        return True

    def survey(self, since_s: float) -> tuple[NodeStatus, ...] | None:
        at_s, nodes = self._seen.survey
        return nodes if at_s > since_s else None

    # --- an incident ------------------------------------------------------------------------------------------------

    def suspect(self, window_s: float) -> bool:
        """Asks all nodes to look. Returns False if this node is alone."""
        page = self._page
        if page is None or not self._covers(page):
            return False
        self.channel.update(doing="suspecting", suspects=page.incident, window_s=min(window_s, 60.0), at_limit=False)
        return True

    def report_limit(self) -> None:
        self.channel.update(at_limit=True)

    @property
    def queries_nccl(self) -> bool:
        """True if this node queries NCCL for the whole job, because it is the leader or alone."""
        return self._page is None or self._seen.leads

    @property
    def why_ranks_must_live(self) -> str:
        """Returns a clause that says why ranks must live although the job hangs; empty if the job is ended next."""
        if self._action == "dump":
            return "the job continues"
        return "the nodes have yet to agree" if self._page is not None else ""

    def withdraw(self) -> None:
        self.channel.update(doing="watching", at_limit=False)

    def pending_call(self) -> LeaderPage | None:
        """Returns the leader's page if it calls all nodes to look and this node hasn't joined yet."""
        page = self._page
        return page if page is not None and page.phase == "looking" and page.incident > self._joined else None

    def join_call(self) -> LeaderPage | None:
        call = self.pending_call()
        if call is not None:
            self._joined = call.incident
            # This incident covers the node's own suspicion, which must not open the next one.
            asked = min(self._asked, call.incident - 1)
            self.channel.update(incident=call.incident, suspects=asked, vote="", agrees=False)
        return call

    def vote(self, vote: Vote) -> None:
        self.channel.update(vote=vote)

    def outcome(self, incident: int) -> RoundOutcome | None:
        """Returns the result of an incident; None if it is still open.

        Args:
            incident: The incident's number; 0 for the incident that this node asked for.
        """
        view = self._seen
        page = view.page if view.silent_s < SILENT_S + SUCCEED_S else None
        if page is None:
            return "alone"
        if page.incident > incident > 0:
            return "unseen"
        if incident == 0:
            asked = self._asked
            return page.result if page.phase == "idle" and page.incident > asked else None
        if page.incident < incident:
            return "alone"  # that incident was in another store
        return page.result if page.phase == "idle" else None if page.phase == "looking" else "hang"

    @property
    def _asked(self) -> int:
        return self.channel.beat.suspects
