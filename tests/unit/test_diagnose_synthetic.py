"""Random jobs on paper with one fault: the rank at fault is named, or nobody is."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Fault, Layout, evidence_of, inject, play, schedule

from safelaunch.diagnose import diagnose

KINDS = ("stop", "skip", "extra", "swap", "shape", "op")
LAYOUTS = st.builds(Layout, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)).filter(lambda one: one.world > 1)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=LAYOUTS, steps=st.integers(4, 9), layers=st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_rank_at_fault_is_named_or_nobody(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int
) -> None:
    programs = schedule(layout, steps, layers)
    culprit = data.draw(st.integers(0, layout.world - 1), "rank")
    index = data.draw(st.integers(0, len(programs[culprit]) - 2), "call")
    faulty = inject(programs, Fault(kind, culprit, index))
    if faulty is None:
        return
    verdict = diagnose(evidence_of(layout, faulty, play(layout, faulty)))
    named = [one.rank for one in verdict.culprits]
    assert culprit in named or not named, (verdict.cause, verdict.confidence, named, verdict.summary)
    assert named or verdict.confidence != "high"
