"""Random jobs on paper with one fault: the verdict names the rank and the call, or says that the window is too short.

``SAFELAUNCH_EXAMPLES=1000`` makes a long run, with other jobs each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from safelaunch.model import Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.paths import ROOT
from tests.support.synthetic import Call, Fault, Layout, evidence_of, inject, number_of, play, schedule

KINDS = ("stop", "skip", "extra", "swap", "shape", "op", "group")
EXAMPLES = int(os.environ.get("SAFELAUNCH_EXAMPLES", "0"))
LAYOUTS = st.builds(
    Layout, st.sampled_from((1, 2, 3, 4, 8, 16)), st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 4)
).filter(lambda one: one.world > 1)
PIPELINES = LAYOUTS.filter(lambda one: one.pipeline > 1)
LARGEST = Layout(16, 8, 4)  # 512 ranks

jobs = settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def tells(verdict: Verdict, group: str, numbers: set[int]) -> bool:
    texts = (verdict.summary, *(c.reason for c in verdict.culprits), *(c.claim for c in verdict.evidence))
    return any(f"#{number} of group {group!r}" in text for text in texts for number in numbers)


def names(verdict: Verdict, fault: Fault, calls: list[Call], layout: Layout) -> bool:
    """The rank at fault, and its call. A circle has no end to name: all its members are, and with them that rank.

    Of two mismatched members, either can be wrong. It is unknown which of several equal calls in a row was skipped.
    If the ranks stop in a cycle within two calls, the call in which they wait in that group counts.
    """
    ranks, here = [culprit.rank for culprit in verdict.culprits], calls[fault.index]
    met = layout.world if fault.kind == "skip" else len(layout.groups()[here.group])
    alone = verdict.cause != "group-order" and (fault.kind == "stop" or met > 2)
    if ranks != [fault.rank] if alone else fault.rank not in ranks:
        return False
    at_once = verdict.cause == "group-order" and fault.kind == "skip"
    return tells(verdict, here.group, set(range(1000)) if at_once else alike(calls, fault.index))


def alike(calls: list[Call], index: int) -> set[int]:
    """The numbers of the calls in a row that are equal to call ``index``."""
    for _, run in groupby(range(len(calls)), key=lambda place: calls[place]):
        places = list(run)
        if index in places:
            return {number_of(calls, place) for place in places}
    raise AssertionError


def accuses_an_innocent(verdict: Verdict, fault: Fault) -> bool:
    return bool(verdict.culprits) and fault.rank not in [culprit.rank for culprit in verdict.culprits]


def made(data: st.DataObject, kind: str, layout: Layout, steps: int, layers: int, *, sends: bool = False):  # type: ignore[no-untyped-def]
    """``(fault, the calls as they ought to be, the job at rest)``; a job that does not hang is passed over."""
    programs = schedule(layout, steps, layers, sends=sends)
    rank = data.draw(st.integers(0, layout.world - 1), "rank")
    index = data.draw(st.integers(0, len(programs[rank]) - 2), "call")
    fault = Fault(kind, rank, index)
    faulty = inject(programs, fault)
    assume(faulty is not None)
    rest = play(layout, faulty)  # type: ignore[arg-type]
    assume(any(waits for _, waits in rest.values()))
    return fault, programs[rank], faulty, rest


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=LAYOUTS, steps=st.integers(4, 9), layers=st.integers(1, 3), stacks=st.booleans())
@jobs
def test_injected_fault_is_named_with_rank_and_call(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int, stacks: bool
) -> None:
    fault, calls, faulty, rest = made(data, kind, layout, steps, layers)
    verdict = diagnose(evidence_of(layout, faulty, rest, stacks=stacks))
    event(f"{verdict.cause}, {verdict.confidence}")
    assert names(verdict, fault, calls, layout), (fault, calls[fault.index], verdict.summary)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=PIPELINES, steps=st.integers(4, 9), layers=st.integers(1, 3), stacks=st.booleans())
@jobs
def test_pipeline_fault_names_the_rank_and_its_group(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int, stacks: bool
) -> None:
    """No innocent rank is named without the one at fault, and the call is told where more than two ranks have its role.

    Numbers of sends are each rank's own, and a circle of waits has no beginning: there it is the group that is told.
    """
    fault, calls, faulty, rest = made(data, kind, layout, steps, layers, sends=True)
    verdict = diagnose(evidence_of(layout, faulty, rest, stacks=stacks))
    event(f"{verdict.cause}, {verdict.confidence}")
    here = calls[fault.index]
    assert fault.rank in [culprit.rank for culprit in verdict.culprits], (fault, here, verdict.summary)
    if here.is_p2p or verdict.confidence == "low" or layout.data * layout.tensor < 3 or verdict.cause == "group-order":
        assert tells(verdict, here.group, set(range(1000))), (fault, here, verdict.evidence)
    elif kind == "group":
        mine = faulty[fault.rank]
        told = tells(verdict, mine[fault.index].group, {number_of(mine, fault.index)})
        assert told or tells(verdict, here.group, alike(calls, fault.index))
    else:
        assert tells(verdict, here.group, alike(calls, fault.index)), (fault, here, verdict.summary, verdict.evidence)


def test_rank_that_left_its_role_in_transfers_is_named_alone() -> None:
    layout, fault = Layout(4, 1, 2), Fault("extra", 0, 16)
    faulty = inject(schedule(layout, 8, 1, sends=True), fault)
    assert faulty is not None
    verdict = diagnose(evidence_of(layout, faulty, play(layout, faulty)))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [culprit.rank for culprit in verdict.culprits] == [0]  # rank 4, which waits to send to it, is not


def test_ranks_in_a_collective_are_no_majority_against_a_transfer() -> None:
    layout, fault = Layout(1, 1, 3), Fault("swap", 1, 12)
    faulty = inject(schedule(layout, 4, 1, sends=True), fault)
    assert faulty is not None
    verdict = diagnose(evidence_of(layout, faulty, play(layout, faulty), stacks=False))
    assert (verdict.cause, verdict.confidence) == ("group-order", "medium")
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1]  # rank 2 takes part in the collective alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=LAYOUTS, steps=st.integers(4, 9), layers=st.integers(1, 3))
@jobs
def test_dumps_without_frames_still_name_the_faulty_rank(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int
) -> None:
    """JSON dumps: calls are told by operation and size alone. The rank at fault is among those named, always."""
    fault, calls, faulty, rest = made(data, kind, layout, steps, layers)
    verdict = diagnose(evidence_of(layout, faulty, rest, stacks=False, frames=False))
    event(f"{verdict.cause}, {verdict.confidence}")
    assert fault.rank in [culprit.rank for culprit in verdict.culprits], (fault, calls[fault.index], verdict.summary)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(), layout=LAYOUTS, steps=st.integers(4, 9), layers=st.integers(1, 3), ahead=st.sampled_from((2, 4, 8))
)
@jobs
def test_cpus_ahead_of_devices_accuse_no_innocent_rank(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int, ahead: int
) -> None:
    """NCCL without timing: every rank has queued all that its peers wait in. Nobody is named wrongly; a call too many
    or left out is found by the order of whole programs.
    """
    fault, calls, faulty, rest = made(data, kind, layout, steps, layers)
    verdict = diagnose(evidence_of(layout, faulty, rest, stacks=False, ahead=ahead))
    event(f"{verdict.cause}, {verdict.confidence}, {'named' if verdict.culprits else 'nobody'}")
    assert not accuses_an_innocent(verdict, fault), (fault, calls[fault.index], verdict.summary)


def test_verdict_for_equal_evidence_is_deterministic() -> None:
    """Also where sets and dicts are walked in another order: every node of a job reaches the same document."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from tests.support.synthetic import Fault, Layout, evidence_of, inject, play, schedule\n"
        "from safelaunch.verdict.diagnose import diagnose\n"
        "layout = Layout(4, 2, 2)\n"
        "for kind, rank, index in (('skip', 6, 9), ('group', 3, 8), ('swap', 1, 4), ('group', 9, 12)):\n"
        "    faulty = inject(schedule(layout, 6, 2), Fault(kind, rank, index))\n"
        "    if faulty is not None:\n"
        "        print(diagnose(evidence_of(layout, faulty, play(layout, faulty))))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code, os.fspath(ROOT)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(said) == 1 and said != {""}


@pytest.mark.parametrize("kind", ("extra", "skip"))
def test_divergence_is_named_although_cpus_ran_ahead(kind: str) -> None:
    layout = Layout(4, 2, 1)
    programs = schedule(layout, 8, 2)
    fault = Fault(kind, 5, 7)
    faulty = inject(programs, fault)
    assert faulty is not None
    verdict = diagnose(evidence_of(layout, faulty, play(layout, faulty), stacks=False, ahead=4))
    assert names(verdict, fault, programs[5], layout), verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fault_in_the_largest_layout_is_named(kind: str) -> None:
    programs = schedule(LARGEST, 6, 2)
    fault = Fault(kind, 300, 9)
    faulty = inject(programs, fault)
    assert faulty is not None
    verdict = diagnose(evidence_of(LARGEST, faulty, play(LARGEST, faulty)))
    assert names(verdict, fault, programs[300], LARGEST), verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=LAYOUTS, steps=st.integers(6, 12), layers=st.integers(1, 3), stacks=st.booleans())
@jobs
def test_window_that_lost_the_call_is_reported_as_missing(
    kind: str, data: st.DataObject, layout: Layout, steps: int, layers: int, stacks: bool
) -> None:
    """Rings wrap at a point of their own on each rank. What they still hold is named; what not, is not guessed."""
    fault, calls, faulty, rest = made(data, kind, layout, steps, layers)
    shortest = data.draw(st.integers(2, 30), "shortest window")
    spread = data.draw(st.integers(0, 8), "spread")
    windows = {rank: shortest + (rank * 7919) % (spread + 1) for rank in rest}
    verdict = diagnose(evidence_of(layout, faulty, rest, window=windows.__getitem__, stacks=stacks))
    reaches_back = max(done + waits - windows[rank] for rank, (done, waits) in rest.items())
    event("two rounds before it are on record" if (held := reaches_back <= fault.index - 12) else "")
    if names(verdict, fault, calls, layout):
        return
    assert not held or reaches_back > 0, verdict.summary
    assert not accuses_an_innocent(verdict, fault), (fault, verdict.cause, verdict.summary)
    assert any("no longer holds them" in text for text in verdict.missing), (fault, verdict.summary)
    assert not (held and verdict.confidence == "high"), (fault, verdict.summary)
