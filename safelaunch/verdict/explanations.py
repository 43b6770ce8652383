"""The explanations, as one table, with the findings to which each applies.

An explanation adds annotations to a finding. The first phase shows why the ranks at fault went a different way, the
second what else is known about them. Within a phase, their order affects only the order of sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safelaunch.verdict.branching import diverging_conditions
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.framework_frames import frames_apart
from safelaunch.verdict.gpu_memory import gpu_memory
from safelaunch.verdict.gpu_witness import gpu_apart
from safelaunch.verdict.groups import groups_and_gpus
from safelaunch.verdict.guarding import guards
from safelaunch.verdict.link_errors import links_failing
from safelaunch.verdict.node_behind import node_behind
from safelaunch.verdict.own_words import own_words
from safelaunch.verdict.remarks import circumstances
from safelaunch.verdict.skipped_calls import skipped_calls
from safelaunch.verdict.steps_made import steps_made
from safelaunch.verdict.waits import Case
from safelaunch.verdict.wrong_group import wrong_group


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
_ORDER, _BEHIND = frozenset({"group-order"}), _UNEVEN | {"missing-from-collective"}

EXPLANATIONS: tuple[tuple[Explanation, ...], ...] = (
    (
        Explanation(wrong_group, _MISMATCH | _ORDER | _BEHIND),
        Explanation(guards, _MISMATCH | _ORDER | _BEHIND | {"p2p-cycle"}),
        Explanation(skipped_calls, _MISMATCH | _BEHIND | {"rank-exited"}),
        Explanation(frames_apart),
    ),
    (
        Explanation(diverging_conditions, _MISMATCH, needs_culprits=False),
        Explanation(own_words),
        Explanation(gpu_memory),
        Explanation(steps_made, _UNEVEN),
        Explanation(groups_and_gpus),
        Explanation(node_behind),
        Explanation(gpu_apart),
        Explanation(links_failing, frozenset({"no-rank-stands-out"}), needs_culprits=False),
        Explanation(circumstances, needs_culprits=False),
    ),
)
