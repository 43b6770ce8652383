"""The explanations, as one table, with the findings to which each applies.

An explanation adds annotations to a finding. The first phase shows why the ranks at fault went a different way, the
second what else is known about them. Within a phase, their order affects only the order of sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safelaunch.verdict import framework_frames, own_words, remarks, steps_made
from safelaunch.verdict.branching import diverging_conditions
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.gpu_memory import gpu_memory
from safelaunch.verdict.groups import groups_and_gpus
from safelaunch.verdict.guarding import guards
from safelaunch.verdict.node_behind import node_behind
from safelaunch.verdict.rules_wrong_results import WRONG_RESULTS
from safelaunch.verdict.skipped_calls import caught_exception, skipped_batch
from safelaunch.verdict.waits import Case
from safelaunch.verdict.wrong_group import another_group, wrong_group


@dataclass(frozen=True)
class Explanation:
    """A function that annotates findings, and the findings that it is asked about."""

    explain: Callable[[Case, Finding], Iterator[Annotation]]
    causes: frozenset[str] = frozenset(CAUSES)
    needs_culprits: bool = True

    @property
    def name(self) -> str:
        return self.explain.__name__

    def of(self, case: Case, finding: Finding) -> Iterator[Annotation]:
        if finding.cause in self.causes and (finding.culprits or not self.needs_culprits):
            yield from self.explain(case, finding)


_MISMATCH, _UNEVEN = frozenset({"collective-mismatch"}), frozenset({"uneven-batches"})
_APART = _MISMATCH | {"group-order", "p2p-cycle"}  # no rank is known to be behind
_BEHIND = _UNEVEN | {"missing-from-collective"}

EXPLANATIONS: tuple[tuple[Explanation, ...], ...] = (
    (
        Explanation(wrong_group, _MISMATCH | {"group-order", "missing-from-collective"}),
        Explanation(another_group, _MISMATCH),
        Explanation(guards, _APART | _BEHIND),
        Explanation(framework_frames.frames_below),
        Explanation(caught_exception, _MISMATCH | _BEHIND | {"rank-exited"}),
        Explanation(skipped_batch, _MISMATCH | _BEHIND),
    ),
    (
        Explanation(framework_frames.frames_above, _APART),
        Explanation(diverging_conditions, _MISMATCH, needs_culprits=False),
        Explanation(own_words.own_words),
        Explanation(gpu_memory),
        Explanation(remarks.debug_detail, frozenset({"rank-killed"})),
        Explanation(steps_made.steps_made, _UNEVEN),
        Explanation(remarks.driver_errors, frozenset(CAUSES) - {"gpu-lost"}),
        Explanation(groups_and_gpus),
        Explanation(node_behind),
        Explanation(remarks.wrong_results_before, frozenset(CAUSES).difference(WRONG_RESULTS), needs_culprits=False),
    ),
)
