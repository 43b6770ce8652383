"""The rules, as one table in the order in which they run: from self-evident to inferred.

The first finding wins; a rule that returns a reason instead adds it to ``ruled_out``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safelaunch.verdict import (
    gpu_witness,
    rules_aborted,
    rules_history,
    rules_live,
    rules_mismatch,
    rules_nodes,
    rules_state,
    rules_threads,
    rules_transfers,
    rules_unequal,
    rules_wait,
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
    "a cycle over several groups": lambda case: len(case.waits.groups_of_cycle) > 1,
    "sends or receives in the cycle": lambda case: bool(case.waits.transfers_of_cycle),
}


# Evidence that every rank must have before a rule can rule anything out.
_WAS_SEEN: Mapping[str, Callable[[RankFacts], bool]] = {
    "": lambda state: True,
    "the rank": lambda state: True,
    "its process": lambda state: state.evidence.main is not None and bool(state.evidence.main.states),
    "its record": lambda state: state.evidence.flight_record is not None,
}


@dataclass(frozen=True)
class Rule:
    """A function that returns a finding, and when it runs."""

    decide: Callable[[Case], Ruling]
    concludes: tuple[str, ...]  # causes that it can name
    needs: tuple[str, ...] = ()  # conditions of ``_MET``
    requires_seen: str = ""  # evidence that every rank must have before the rule can rule anything out

    @property
    def name(self) -> str:
        return self.decide.__name__

    @property
    def summary(self) -> str:
        """First paragraph of the function's docstring: when the rule returns a finding."""
        return " ".join((self.decide.__doc__ or "").partition("\n\n")[0].split())

    def ask(self, case: Case) -> Ruling:
        ruling = self.decide(case) if all(_MET[need](case) for need in self.needs) else ""
        return ruling if isinstance(ruling, Finding) or self._has_seen(case) else ""

    def _has_seen(self, case: Case) -> bool:
        if self.requires_seen and (case.unseen or not case.ranks):
            return False
        return all(_WAS_SEEN[self.requires_seen](rank) for rank in case.ranks.values())


@dataclass(frozen=True)
class Question:
    """One question and its rules, in order."""

    text: str
    rules: tuple[Rule, ...]


_MISMATCH = ("collective-mismatch",)
_EITHER = ("collective-mismatch", "uneven-batches")
_FAILED = (*FAILURES, "uneven-batches")
_WHOLE: tuple[str, ...] = ("every rank seen", "ranks that wait for peers")
OWN = tuple(name for name, cause in CAUSES.items() if cause.own)

QUESTIONS: tuple[Question, ...] = (
    Question("Did all nodes join?", (Rule(rules_nodes.rendezvous_incomplete, ("init-not-joined",)),)),
    Question(
        "Does a live job compute wrong results?",
        (Rule(rules_live.wrong_results, rules_live.WRONG_RESULTS, ("a live job",)),),
    ),
    Question(
        "Does it make progress?",
        (Rule(rules_live.slow_not_stuck, ("slow-not-stuck",), ("a live job that moves",)),),
    ),
    Question(
        "What broke the calls between ranks?",
        (
            Rule(rules_aborted.ended_by_mismatch, _EITHER, ("a crash",)),
            Rule(rules_nodes.node_lost, ("node-lost",), ("a crash",)),
        ),
    ),
    Question(
        "Which rank ended first?",
        (
            Rule(rules_history.called_past_the_end, _MISMATCH, _WHOLE),
            Rule(rules_state.first_failure, _FAILED, requires_seen="the rank"),
            Rule(rules_nodes.ended_elsewhere, ("rank-exited", "launcher-stopped", "node-unreachable"), ("a crash",)),
        ),
    ),
    Question(
        "What cannot run?",
        (
            Rule(rules_state.stopped_ranks, ("rank-stopped",), requires_seen="its process"),
            Rule(rules_nodes.node_reports_why, ("launcher-stopped", "rank-exited"), ("several nodes",)),
        ),
    ),
    Question(
        "Which ranks are missing when groups are created?",
        (
            Rule(rules_state.init_not_joined, ("init-not-joined",)),
            Rule(rules_unequal.unequal_new_groups, _MISMATCH, _WHOLE),
        ),
    ),
    Question(
        "Did calls diverge long before?",
        (
            Rule(rules_threads.racing_threads, _MISMATCH, _WHOLE),
            Rule(rules_history.diverged_earlier, _MISMATCH, _WHOLE),
        ),
    ),
    Question(
        "Where do the waits end?",
        (
            Rule(rules_wait.waits_outside_collectives, OWN),
            Rule(rules_wait.blocked_by, OWN, requires_seen="the rank"),
            Rule(
                rules_nodes.unseen_peers,
                ("node-unreachable", "launcher-stopped", "missing-from-collective", "collective-mismatch"),
            ),
        ),
    ),
    Question(
        "All wait for each other, or have arrived: where do their calls diverge?",
        (
            Rule(rules_history.left_expected_calls, (*_MISMATCH, "group-order"), ("ranks that wait for peers",)),
            Rule(
                rules_transfers.unmatched_transfers,
                (*_MISMATCH, "p2p-cycle"),
                ("sends or receives in the cycle",),
            ),
            Rule(rules_history.group_order, ("group-order",), ("a cycle over several groups",)),
            Rule(rules_mismatch.mismatch, _EITHER, ("ranks that wait for peers",), "its record"),
        ),
    ),
    Question(
        "What stands out when no rank visibly waits for it?",
        (
            Rule(rules_state.held_up_by_device, ("gpu-lost", "gpu-kernel")),
            Rule(rules_state.odd_one_out, OWN, ("no rank that waits for peers",)),
            Rule(rules_nodes.versions_differ, ("versions-differ",), ("several nodes",)),
            Rule(gpu_witness.gpu_differs, ("gpu-lost", "gpu-kernel")),
        ),
    ),
    Question("Does nothing stand out?", (Rule(rules_state.no_rank_stands_out, ("no-rank-stands-out",)),)),
)
RULES = tuple(rule for question in QUESTIONS for rule in question.rules)
