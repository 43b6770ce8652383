"""Findings from the samples of all ranks: by tables, and by recordings of real jobs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from safelaunch.addons.record.comparison import compare
from safelaunch.addons.record.recording import RankRecord, Recording
from safelaunch.addons.record.shares import OWN_CODE, activity_of
from safelaunch.addons.record.slowness import verdict_of
from safelaunch.model import Frame
from tests.unit.addons.record.recordings import (
    ALL_REDUCE,
    AUGMENT,
    BACKWARD,
    FORWARD,
    LOADER,
    MODULE,
    OPTIMIZER,
    OTHER,
    SAVE,
    TORCH,
    Stack,
    recorded,
    recording,
)

EVEN = {FORWARD: 0.4, BACKWARD: 0.4, OPTIMIZER: 0.1, ALL_REDUCE: 0.1}
WAITS = {FORWARD: 0.2, BACKWARD: 0.2, ALL_REDUCE: 0.6}
LATE = {FORWARD: 0.2, BACKWARD: 0.2, AUGMENT: 0.5, ALL_REDUCE: 0.1}
LOADS = {LOADER: 0.5, FORWARD: 0.3, BACKWARD: 0.2}


@pytest.mark.parametrize(
    ("ranks", "kinds", "blamed"),
    [
        ([EVEN] * 4, [], ()),
        ([EVEN], [], ()),
        ([WAITS, WAITS, LATE, WAITS], ["late-rank"], (2,)),
        ([WAITS, LATE], ["late-rank"], (1,)),
        ([WAITS, LATE, WAITS, LATE, WAITS], ["late-rank"], (1, 3)),
        ([WAITS, LATE, LATE, LATE], [], ()),  # one that waits for three is not waited for
        ([WAITS] * 4, ["communication"], (0, 1, 2, 3)),
        ([LOADS] * 4, ["data-loading"], (0, 1, 2, 3)),
        ([{SAVE: 0.3, FORWARD: 0.7}] * 2, ["checkpoint"], (0, 1)),
        ([{AUGMENT: 0.4, FORWARD: 0.6}] * 2, ["script"], (0, 1)),
    ],
)
def test_slowness_findings_name_kind_and_ranks(
    ranks: list[dict[Stack, float]], kinds: list[str], blamed: tuple[int, ...]
) -> None:
    found = verdict_of(recording(*ranks))
    assert [one.kind for one in found.findings] == kinds
    assert not kinds or found.findings[0].ranks == blamed
    assert found.headline.startswith("Nothing stands out: ") is not bool(kinds)


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        ([{ALL_REDUCE: 0.32, AUGMENT: 0.47, FORWARD: 0.21}] * 2, ["script", "communication"]),
        ([{ALL_REDUCE: 0.47, AUGMENT: 0.32, FORWARD: 0.21}] * 2, ["communication", "script"]),
        ([{LOADER: 0.2, SAVE: 0.5, FORWARD: 0.3}] * 2, ["checkpoint", "data-loading"]),
        # What one rank does for longer than the others wait is part of why they wait.
        ([{ALL_REDUCE: 0.5, FORWARD: 0.5}, {LOADER: 0.6, FORWARD: 0.4}], ["late-rank", "data-loading"]),
        # What all do for longer than they wait for one rank counts more.
        (
            [{LOADER: 0.5, ALL_REDUCE: 0.2, FORWARD: 0.3}] * 3 + [{LOADER: 0.5, FORWARD: 0.5}],
            ["data-loading", "late-rank"],
        ),
    ],
)
def test_headline_is_the_most_expensive_finding(ranks: list[dict[Stack, float]], kinds: list[str]) -> None:
    found = verdict_of(recording(*ranks))
    assert [one.kind for one in found.findings] == kinds
    assert found.headline == found.findings[0].text


def test_slow_line_of_a_late_rank_is_named() -> None:
    (finding,) = verdict_of(recording(WAITS, WAITS, LATE, WAITS)).findings
    assert finding.text == (
        "Ranks 0-1,3 wait 60% of the time, mostly in all_reduce at train.py:41, for rank 2, which waits 10%: "
        "it spends 50% in data.py:12 (augment); the others spend 0%."
    )
    assert finding.frame is not None and finding.frame.line == 12


def test_equal_waits_in_receives_suggest_micro_batches() -> None:
    recv = (*ALL_REDUCE[:2], replace(ALL_REDUCE[2], function="recv"))
    (finding,) = verdict_of(recording(*[{recv: 0.6, FORWARD: 0.2, BACKWARD: 0.2}] * 4)).findings
    assert (finding.kind, "micro-batches" in finding.advice) == ("communication", True)
    (finding,) = verdict_of(recording(*[WAITS] * 4)).findings
    assert "micro-batches" not in finding.advice


def test_difference_within_sampling_noise_gives_no_finding() -> None:
    ranks = [{ALL_REDUCE: 0.25, FORWARD: 0.75}, {ALL_REDUCE: 0.10, FORWARD: 0.90}]
    assert verdict_of(recording(*ranks, rate_hz=2)).findings == ()
    assert verdict_of(recording(*ranks, rate_hz=200)).findings[0].ranks == (1,)


def test_backward_time_counts_as_wait_only_off_cpu() -> None:
    ranks = [{BACKWARD: 0.9, FORWARD: 0.1}, {BACKWARD: 0.1, AUGMENT: 0.9}]
    found = verdict_of(recording(*ranks, active={BACKWARD: 0.1}))
    assert [one.kind for one in found.findings] == ["late-rank"] and found.findings[0].ranks == (1,)
    assert [round(one.waits, 2) for one in found.times] == [0.81, 0.09]
    assert verdict_of(recording(*[{BACKWARD: 0.9, FORWARD: 0.1}] * 2)).findings == ()


def test_gil_holder_explains_its_late_rank() -> None:
    held = recording(LATE, WAITS, gil=[{FORWARD: 0.1}, {FORWARD: 0.1}], holders=[{OTHER: 0.8}, {}])
    (finding,) = verdict_of(held).findings
    assert finding.ranks == (0,) and "its thread 'prefetch' holds the GIL 80% of the time at data.py:30" in finding.text


@pytest.mark.parametrize(("share", "found"), [(0.1, []), (0.8, ["gil"])])
def test_gil_finding_needs_a_long_hold(share: float, found: list[str]) -> None:
    held = recording(EVEN, EVEN, gil=[{FORWARD: 0.1}] * 2, holders=[{OTHER: share}] * 2)
    assert [one.kind for one in verdict_of(held).findings] == found


def test_unsampled_ranks_are_reported_with_their_reason() -> None:
    whole = recording(EVEN, EVEN)
    gone = [RankRecord(2, missing="the process has ended"), RankRecord(3, missing="the process has ended")]
    found = verdict_of(replace(whole, ranks=[*whole.ranks, *gone]))
    assert found.missing == ("ranks 2-3: the process has ended",)
    assert len(found.times) == 2
    assert verdict_of(Recording(ranks=gone)).headline == "No rank could be sampled."


def test_possible_wait_for_an_unsampled_rank_is_reported() -> None:
    whole = recording(WAITS, WAITS)
    (finding,) = verdict_of(
        replace(whole, ranks=[*whole.ranks, RankRecord(2, missing="it is stopped by a signal")])
    ).findings
    assert "while other ranks weren't sampled (rank 2: it is stopped by a signal)" in finding.text
    assert finding.advice == "They might be waiting for the ranks that weren't sampled."


# --- real jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "words"),
    [
        ("straggler", "late-rank", (1,), "train_ddp.py:11 (augment)"),
        ("nodes", "late-rank", (1,), "train_ddp.py:11 (augment)"),
        ("loader", "data-loading", (0, 1), "workers are busy 100%, mostly at loader.py:8 (Slow.__getitem__)"),
        ("gil", "late-rank", (0,), "its thread 'prefetch' holds the GIL 80% of the time at gil.py:10 (tokenize)"),
    ],
)
def test_recorded_job_gives_its_expected_finding(name: str, kind: str, ranks: tuple[int, ...], words: str) -> None:
    found = verdict_of(recorded(name))
    assert (found.findings[0].kind, found.findings[0].ranks) == (kind, ranks)
    assert words in found.headline


def test_recorded_even_job_gives_no_finding() -> None:
    assert verdict_of(recorded("healthy")).headline.startswith("Nothing stands out: ")


# --- what takes longer than in an earlier recording -------------------------------------------------------------------

BEFORE = recording(*[{FORWARD: 0.5, BACKWARD: 0.5}] * 2, steps=100)  # 0.1 s each


def test_growth_is_reported_in_seconds_per_step() -> None:
    # 0.2 s a step: forward and backward take as long as before, though their shares are half of what they were.
    now = recording(*[{FORWARD: 0.25, BACKWARD: 0.25, AUGMENT: 0.5}] * 2, steps=50)
    found = compare(BEFORE, now)
    assert [(one.place.function, round(one.more, 3)) for one in found.changes] == [("augment", 0.1)]
    assert found.text == (
        "A step takes 200.0 ms (was 100.0 ms); what grew most: script at data.py:12 (augment), 100.0 ms more."
    )


def test_growth_of_a_late_rank_compares_its_own_lines() -> None:
    """Else each of the others would wait longer by as much, and they are more."""
    late = {FORWARD: 0.25, BACKWARD: 0.25, AUGMENT: 0.5}
    others = {FORWARD: 0.25, BACKWARD: 0.25, ALL_REDUCE: 0.5}
    now = recording(others, late, others, others, steps=50)
    before = recording(*[{FORWARD: 0.5, BACKWARD: 0.5}] * 4, steps=100)
    found = compare(before, now)
    assert found.text.endswith("what grew most on rank 1: script at data.py:12 (augment), 100.0 ms more.")
    assert [one.place.function for one in found.changes] == ["augment"]


def test_growth_without_steps_compares_time_shares() -> None:
    found = compare(recording({FORWARD: 1.0}), recording({FORWARD: 0.6, AUGMENT: 0.4}))
    assert [(one.place.function, round(one.more, 2)) for one in found.changes] == [("augment", 0.4), ("<module>", -0.4)]
    assert "script at data.py:12 (augment), 40% more" in found.text


def test_equal_recordings_show_no_growth() -> None:
    assert compare(BEFORE, BEFORE).changes == ()
    assert compare(BEFORE, BEFORE).text.endswith("no line takes noticeably longer.")


def test_own_code_that_a_backward_pass_calls_does_not_wait_for_peers() -> None:
    scale = (*BACKWARD, Frame("/home/user/job/ops.py", 7, "Scale.backward"))
    late = {BACKWARD: 0.1, scale: 0.5, FORWARD: 0.4}
    rest = {BACKWARD: 0.6, FORWARD: 0.4}
    found = verdict_of(recording(rest, late, rest, active={BACKWARD: 0.0, scale: 0.0}))
    assert found.findings[0].kind == "late-rank" and found.findings[0].ranks == (1,)
    assert "it spends 50% in the backward pass at ops.py:7 (Scale.backward)" in found.findings[0].text


def test_line_of_a_late_rank_is_the_one_that_differs_most() -> None:
    often, slow = (Frame("/home/user/job/data.py", line, "augment") for line in (12, 15))
    late = {(MODULE, often): 0.35, (MODULE, slow): 0.3, ALL_REDUCE: 0.05, FORWARD: 0.3}
    rest = {(MODULE, often): 0.34, ALL_REDUCE: 0.36, FORWARD: 0.3}
    (finding,) = verdict_of(recording(rest, late, rest)).findings
    assert "data.py:15 (augment)" in finding.text


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("    work.wait()", "collective"),
        ("    time.sleep(1)", "script"),
        ("    os.wait()", "script"),
        ("    augment(batch)  # before work.wait()", "script"),
        (None, "script"),
    ],
)
def test_users_line_that_waits_for_its_work_is_a_wait_for_peers(line: str | None, kind: str) -> None:
    assert activity_of([MODULE], read_line=lambda file, number: line).kind == kind


def test_transfer_of_a_pipeline_is_a_wait_for_peers() -> None:
    wait = Frame(f"{TORCH}/distributed/pipelining/schedules.py", 683, "_wait_batch_p2p")
    assert activity_of([wait, MODULE]).kind == "send or receive"


def test_copy_from_a_gpu_is_a_wait_for_it_only_if_there_is_a_gpu() -> None:
    def line(file: str, number: int) -> str:
        return "    total += loss.item()"

    assert activity_of([MODULE], read_line=line, on_gpu=True).kind == "device"
    assert activity_of([MODULE], read_line=line).kind == "script"


def test_ranks_that_wait_for_their_gpu_wait_for_a_late_rank_but_not_for_communication() -> None:
    synchronize = (MODULE, Frame(f"{TORCH}/cuda/__init__.py", 1085, "synchronize"))
    rest, late = {synchronize: 0.6, FORWARD: 0.4}, {synchronize: 0.1, AUGMENT: 0.5, FORWARD: 0.4}
    (finding,) = verdict_of(recording(rest, late, rest)).findings
    assert (finding.kind, finding.ranks) == ("late-rank", (1,))
    assert verdict_of(recording(rest, rest, rest)).findings == ()


def test_hook_of_a_backward_pass_can_wait_for_peers() -> None:
    hook = (Frame("/home/user/job/train.py", 9, "hook"), *reversed(BACKWARD))
    assert activity_of(hook, (), lambda file, line: "    work.wait()").kind == "collective"
    assert activity_of(hook, (), lambda file, line: "    scale(grad)").what == OWN_CODE
