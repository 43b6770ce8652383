"""The rules, as one table in the order in which they run: from self-evident to inferred.

The first finding wins; a rule that returns a reason instead adds it to ``ruled_out``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safelaunch.verdict import (
    rules_aborted,
    rules_history,
    rules_live,
    rules_mismatch,
    rules_new_group,
    rules_nodes,
    rules_state,
    rules_threads,
    rules_transfers,
    rules_wait,
    rules_wrong_results,
    wrong_group,
)
from safelaunch.verdict.causes import CAUSES, FAILURES
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.rank_state import RankFacts
from safelaunch.verdict.rhythm import is_stalled
from safelaunch.verdict.waits import Case

# Conditions on the case without which a rule doesn't run.
_MET: Mapping[str, Callable[[Case], bool]] = {
    "a live job": lambda case: case.evidence.outcome == "dump" and not is_stalled(case.evidence),
    "a live job that moves": lambda case: (
        case.evidence.outcome == "dump" and case.evidence.moving and not is_stalled(case.evidence)
    ),
    "a crash": lambda case: case.evidence.outcome == "crash",
    "several nodes": lambda case: len(case.evidence.nodes) > 1,
    "every rank seen": lambda case: not case.unseen,
    "ranks that wait for peers": lambda case: bool(case.waits.classes),
    "no rank that waits for peers": lambda case: not case.waits.classes,
    "a cycle of waits": lambda case: bool(case.waits.circle),
    "a cycle over several groups": lambda case: len(case.waits.groups_of_circle) > 1,
    "sends or receives in the cycle": lambda case: bool(case.waits.transfers_of_circle),
}


# Evidence that every rank must have before a rule may rule anything out.
_WAS_SEEN: Mapping[str, Callable[[RankFacts], bool]] = {
    "": lambda state: True,
    "the rank": lambda state: True,
    "its process": lambda state: state.evidence.main is not None and bool(state.evidence.main.states),
    "its record": lambda state: state.evidence.flight_record is not None,
}


@dataclass(frozen=True)
class RuleKind:
    """A function that returns a finding, and when it runs."""

    decide: Callable[[Case], Ruling]
    concludes: tuple[str, ...]  # causes that it can name
    needs: tuple[str, ...] = ()  # conditions of ``_MET``
    witness: str = ""  # evidence that every rank must have, before it may rule anything out

    @property
    def name(self) -> str:
        return self.decide.__name__

    @property
    def says(self) -> str:
        """First paragraph of the function's docstring: when the rule returns a finding."""
        return " ".join((self.decide.__doc__ or "").partition("\n\n")[0].split())

    def ask(self, case: Case) -> Ruling:
        ruling = self.decide(case) if all(_MET[need](case) for need in self.needs) else ""
        return ruling if isinstance(ruling, Finding) or self._has_seen(case) else ""

    def _has_seen(self, case: Case) -> bool:
        if self.witness and (case.unseen or not case.ranks):
            return False
        return all(_WAS_SEEN[self.witness](rank) for rank in case.ranks.values())


@dataclass(frozen=True)
class Rule:
    """One question and its rules, in order."""

    asks: str
    kinds: tuple[RuleKind, ...]


_MISMATCH = ("collective-mismatch",)
_EITHER = ("collective-mismatch", "uneven-batches")
_FAILED = (*FAILURES, "uneven-batches")
_IN_CIRCLE: tuple[str, ...] = ("sends or receives in the cycle",)
_WHOLE: tuple[str, ...] = ("every rank seen", "ranks that wait for peers")
OWN = tuple(name for name, cause in CAUSES.items() if cause.own)

RULES: tuple[Rule, ...] = (
    Rule("Did all nodes join?", (RuleKind(rules_nodes.rendezvous_incomplete, ("init-not-joined",)),)),
    Rule(
        "Does a live job compute wrong results?",
        (RuleKind(rules_wrong_results.wrong_results, rules_wrong_results.WRONG_RESULTS, ("a live job",)),),
    ),
    Rule(
        "Does it make progress?",
        (RuleKind(rules_live.slow_not_stuck, ("slow-not-stuck",), ("a live job that moves",)),),
    ),
    Rule(
        "What broke the calls between ranks?",
        (
            RuleKind(rules_aborted.aborted_by_a_peer, _EITHER, ("a crash",)),
            RuleKind(rules_aborted.wrong_size_received, _EITHER, ("a crash",)),
            RuleKind(rules_nodes.node_lost, ("node-lost",), ("a crash", "several nodes")),
            RuleKind(rules_nodes.silent_host, ("node-lost",), ("a crash",)),
            RuleKind(wrong_group.unusual_group, ("missing-from-collective",), ("a crash",)),
            RuleKind(rules_mismatch.compared_by_torch, _MISMATCH, ("a crash",)),
        ),
    ),
    Rule(
        "Who ended first?",
        (
            RuleKind(rules_history.called_past_the_end, _MISMATCH, _WHOLE),
            RuleKind(rules_state.launcher_failed, ("rank-exception", "rank-exited"), ("a crash",)),
            RuleKind(rules_state.first_failure, _FAILED, witness="the rank"),
            RuleKind(rules_nodes.store_lost, ("launcher-stopped", "node-unreachable"), ("a crash", "several nodes")),
            RuleKind(rules_state.a_peer_ended, ("rank-exited", "node-unreachable"), ("a crash",)),
        ),
    ),
    Rule(
        "What cannot run?",
        (
            RuleKind(rules_state.stopped_ranks, ("rank-stopped",), witness="its process"),
            RuleKind(rules_nodes.launcher_stopped, ("launcher-stopped",), ("several nodes",)),
            RuleKind(rules_nodes.failed_elsewhere, ("rank-exited",), ("several nodes",)),
        ),
    ),
    Rule(
        "Who is missing when groups are created?",
        (
            RuleKind(rules_state.init_not_joined, ("init-not-joined",)),
            RuleKind(rules_new_group.groups_made_apart, _MISMATCH, _WHOLE),
        ),
    ),
    Rule(
        "Did calls diverge long before?",
        (
            RuleKind(rules_threads.threads_that_race, _MISMATCH, _WHOLE),
            RuleKind(rules_history.diverged_earlier, _MISMATCH, _WHOLE),
        ),
    ),
    Rule(
        "Where do the waits end?",
        (
            RuleKind(rules_wait.waits_outside_collectives, OWN),
            RuleKind(rules_wait.blocked_by, OWN, witness="the rank"),
            RuleKind(rules_nodes.node_cut_off, ("node-unreachable",), ("several nodes",)),
            RuleKind(
                rules_nodes.node_silent,
                ("node-unreachable", "launcher-stopped"),
                ("several nodes", "ranks that wait for peers"),
            ),
            RuleKind(
                rules_wait.unseen_peers,
                ("missing-from-collective", "collective-mismatch"),
                ("ranks that wait for peers",),
            ),
        ),
    ),
    Rule(
        "All wait for each other, or have arrived: where do their calls diverge?",
        (
            RuleKind(rules_history.out_of_step, _MISMATCH, _WHOLE),
            RuleKind(rules_wait.other_tags, _MISMATCH, _IN_CIRCLE),
            RuleKind(rules_wait.other_peer, _MISMATCH, ("every rank seen", *_IN_CIRCLE)),
            RuleKind(rules_wait.sends_and_receives, ("p2p-cycle",), _IN_CIRCLE),
            RuleKind(rules_wait.one_sided, _MISMATCH, ("every rank seen", *_IN_CIRCLE)),
            RuleKind(rules_history.left_its_role, _MISMATCH, ("every rank seen", "a cycle of waits")),
            RuleKind(rules_history.left_out_between_groups, _MISMATCH, ("a cycle over several groups",)),
            RuleKind(rules_history.new_between_groups, _MISMATCH, ("a cycle over several groups",)),
            RuleKind(rules_history.group_order, ("group-order",), ("a cycle over several groups",)),
            RuleKind(rules_transfers.unfit_transfers, _MISMATCH, ("ranks that wait for peers",)),
            RuleKind(rules_mismatch.mismatch, _EITHER, ("ranks that wait for peers",), "its record"),
        ),
    ),
    Rule(
        "What stands out when no rank visibly waits for it?",
        (
            RuleKind(rules_state.kept_by_its_device, ("gpu-lost", "gpu-kernel")),
            RuleKind(rules_state.alone, OWN, ("no rank that waits for peers",)),
            RuleKind(rules_live.printed_fewer_steps, ("missing-from-collective",), ("no rank that waits for peers",)),
            RuleKind(rules_nodes.versions_differ, ("versions-differ",), ("several nodes",)),
        ),
    ),
    Rule("Nothing else?", (RuleKind(rules_state.nobody_stands_out, ("no-rank-stands-out",)),)),
)
KINDS = tuple(kind for rule in RULES for kind in rule.kinds)
