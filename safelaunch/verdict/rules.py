"""The rules, as one table: in which order they are asked, and of each the kinds of case that it knows.

The order goes from what explains itself to what has to be inferred. The first finding wins; a kind that says why it has
none is kept among what was ruled out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from safelaunch.verdict.causes import CAUSES, FAILURES
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.rank_state import RankFacts
from safelaunch.verdict.rules_aborted import aborted_by_a_peer, wrong_size_received
from safelaunch.verdict.rules_history import (
    called_past_the_end,
    diverged_earlier,
    group_order,
    left_its_role,
    left_out_between_groups,
    out_of_step,
)
from safelaunch.verdict.rules_mismatch import compared_by_torch, mismatch
from safelaunch.verdict.rules_nodes import (
    failed_elsewhere,
    launcher_stopped,
    node_cut_off,
    node_lost,
    node_silent,
    rendezvous_incomplete,
    store_lost,
    versions_differ,
)
from safelaunch.verdict.rules_results import CAUSES as WRONG_RESULTS
from safelaunch.verdict.rules_results import wrong_results
from safelaunch.verdict.rules_state import (
    a_peer_ended,
    alone,
    first_failure,
    init_not_joined,
    launcher_failed,
    left_by_all,
    nobody_stands_out,
    slow_not_stuck,
    stopped_ranks,
)
from safelaunch.verdict.rules_unfit import groups_made_apart, threads_that_race, unfit_transfers
from safelaunch.verdict.rules_wait import (
    blocked_by,
    one_sided,
    other_peer,
    other_tags,
    sends_and_receives,
    unseen_peers,
    waits_outside_collectives,
)
from safelaunch.verdict.stalled import is_stalled
from safelaunch.verdict.waits import Case
from safelaunch.verdict.wrong_group import unusual_group

Need = Literal[
    "a live job",
    "a live job that moves",
    "a crash",
    "several nodes",
    "every rank seen",
    "ranks that wait for peers",
    "no rank that waits for peers",
    "a circle of waits",
    "a circle over several groups",
    "sends or receives in the circle",
]

_MET: Mapping[Need, Callable[[Case], bool]] = {
    "a live job": lambda case: case.evidence.outcome == "dump" and not is_stalled(case.evidence),
    "a live job that moves": lambda case: (
        case.evidence.outcome == "dump" and case.evidence.moving and not is_stalled(case.evidence)
    ),
    "a crash": lambda case: case.evidence.outcome == "crash",
    "several nodes": lambda case: len(case.evidence.nodes) > 1,
    "every rank seen": lambda case: not case.unseen,
    "ranks that wait for peers": lambda case: bool(case.waits.classes),
    "no rank that waits for peers": lambda case: not case.waits.classes,
    "a circle of waits": lambda case: bool(case.waits.circle),
    "a circle over several groups": lambda case: len(case.waits.groups_of_circle) > 1,
    "sends or receives in the circle": lambda case: bool(case.waits.transfers_of_circle),
}


# What has to have been seen of every rank for a kind to rule something out.
Witness = Literal["", "its process", "its record", "the rank"]

_WAS_SEEN: Mapping[Witness, Callable[[RankFacts], bool]] = {
    "": lambda one: True,
    "the rank": lambda one: True,
    "its process": lambda one: one.evidence.main is not None and bool(one.evidence.main.states),
    "its record": lambda one: one.evidence.flight_record is not None,
}


@dataclass(frozen=True)
class Kind:
    """``concludes``: the causes that it may name. ``witness``: without it of every rank, it rules nothing out."""

    decide: Callable[[Case], Ruling]
    concludes: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    witness: Witness = ""

    @property
    def name(self) -> str:
        return self.decide.__name__

    @property
    def says(self) -> str:
        """What has to be true for it to conclude: the first paragraph of its docstring."""
        return " ".join((self.decide.__doc__ or "").partition("\n\n")[0].split())

    def ask(self, case: Case) -> Ruling:
        ruling = self.decide(case) if all(_MET[need](case) for need in self.needs) else ""
        return ruling if isinstance(ruling, Finding) or self._has_seen(case) else ""

    def _has_seen(self, case: Case) -> bool:
        if self.witness and (case.unseen or not case.ranks):
            return False
        return all(_WAS_SEEN[self.witness](one) for one in case.ranks.values())


@dataclass(frozen=True)
class Rule:
    """One question, and the kinds of case that answer it, in the order in which they are asked."""

    asks: str
    kinds: tuple[Kind, ...]


_MISMATCH = ("collective-mismatch",)
_EITHER = ("collective-mismatch", "uneven-batches")
_FAILED = (*FAILURES, "uneven-batches")
_IN_CIRCLE: tuple[Need, ...] = ("sends or receives in the circle",)
_WHOLE: tuple[Need, ...] = ("every rank seen", "ranks that wait for peers")
OWN = tuple(name for name, cause in CAUSES.items() if cause.own)

RULES: tuple[Rule, ...] = (
    Rule("Did all nodes come?", (Kind(rendezvous_incomplete, ("init-not-joined",)),)),
    Rule("Does a live job compute wrong results?", (Kind(wrong_results, WRONG_RESULTS, ("a live job",)),)),
    Rule("Does it make progress?", (Kind(slow_not_stuck, ("slow-not-stuck",), ("a live job that moves",)),)),
    Rule(
        "What broke the calls between ranks?",
        (
            Kind(aborted_by_a_peer, _EITHER, ("a crash",)),
            Kind(wrong_size_received, _MISMATCH, ("a crash",)),
            Kind(node_lost, ("node-lost",), ("a crash", "several nodes")),
            Kind(unusual_group, ("missing-from-collective",), ("a crash",)),
            Kind(compared_by_torch, _MISMATCH, ("a crash",)),
        ),
    ),
    Rule(
        "Who ended first?",
        (
            Kind(called_past_the_end, _MISMATCH, _WHOLE),
            Kind(launcher_failed, ("rank-exception", "rank-exited"), ("a crash",)),
            Kind(first_failure, _FAILED, witness="the rank"),
            Kind(store_lost, ("launcher-stopped", "node-unreachable"), ("a crash", "several nodes")),
            Kind(a_peer_ended, ("rank-exited",), ("a crash",)),
        ),
    ),
    Rule(
        "What cannot run?",
        (
            Kind(stopped_ranks, ("rank-stopped",), witness="its process"),
            Kind(launcher_stopped, ("launcher-stopped",), ("several nodes",)),
            Kind(failed_elsewhere, ("rank-exited",), ("several nodes",)),
        ),
    ),
    Rule(
        "Who is missing where groups are made?",
        (Kind(init_not_joined, ("init-not-joined",)), Kind(groups_made_apart, _MISMATCH, _WHOLE)),
    ),
    Rule(
        "Did calls diverge long before?",
        (Kind(threads_that_race, _MISMATCH, _WHOLE), Kind(diverged_earlier, _MISMATCH, _WHOLE)),
    ),
    Rule(
        "Where do the waits end?",
        (
            Kind(waits_outside_collectives, OWN),
            Kind(blocked_by, OWN, witness="the rank"),
            Kind(node_cut_off, ("node-unreachable",), ("several nodes",)),
            Kind(node_silent, ("node-unreachable", "launcher-stopped"), ("several nodes", "ranks that wait for peers")),
            Kind(unseen_peers, ("missing-from-collective", "collective-mismatch"), ("ranks that wait for peers",)),
        ),
    ),
    Rule(
        "All wait for each other, or have arrived: where do their calls diverge?",
        (
            Kind(out_of_step, _MISMATCH, _WHOLE),
            Kind(other_tags, _MISMATCH, _IN_CIRCLE),
            Kind(other_peer, _MISMATCH, ("every rank seen", *_IN_CIRCLE)),
            Kind(sends_and_receives, ("p2p-cycle",), _IN_CIRCLE),
            Kind(one_sided, _MISMATCH, ("every rank seen", *_IN_CIRCLE)),
            Kind(left_its_role, _MISMATCH, ("every rank seen", "a circle of waits")),
            Kind(left_out_between_groups, _MISMATCH, ("a circle over several groups",)),
            Kind(group_order, ("group-order",), ("a circle over several groups",)),
            Kind(unfit_transfers, _MISMATCH, ("ranks that wait for peers",)),
            Kind(mismatch, _EITHER, ("ranks that wait for peers",), "its record"),
        ),
    ),
    Rule(
        "What is odd where nobody is seen to wait for it?",
        (
            Kind(left_by_all, ("gpu-kernel",)),
            Kind(alone, OWN, ("no rank that waits for peers",)),
            Kind(versions_differ, ("versions-differ",), ("several nodes",)),
        ),
    ),
    Rule("Nothing else?", (Kind(nobody_stands_out, ("no-rank-stands-out",)),)),
)
KINDS = tuple(kind for rule in RULES for kind in rule.kinds)
