"""Hangs of NCCL jobs from their dumps alone: torch 2.5 to 2.13, the recorders of each backend of 2.15, torchcomms."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.capture import flight_records
from safelaunch.capture.flight_dump import parse_json, parse_pickle, to_json
from safelaunch.capture.flight_records import merged
from safelaunch.model import RankEvidence, Verdict
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.comparable import Block, with_blocks_merged
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from tests.support.nccl_cases import CASES, all_but, device_behind, ranks
from tests.support.nccl_formats import FORMATS, NEWEST, Format, Hooked, Op, Pending, Recorder, State, TorchComms, write

WORLD = {"0": (0, 1, 2, 3)}
GRID = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}  # two tensor, two data groups
# Named as split_group does: by a counter that is the same on all ranks. A rank's record lists only its own groups.
SPLIT = [{"0": (0, 1, 2, 3), "1": tensor, "2": data} for tensor, data in zip(
    [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)], strict=True)]  # fmt: skip

by_format = pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.torch)
with_frames = pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])


def verdict_of(folder: Path, recorders: Sequence[Recorder], *, as_json: bool = False, window: int = 2000) -> Verdict:
    return diagnose(locate.read(write(folder, recorders, as_json=as_json, window=window)).evidence)


def named(verdict: Verdict) -> tuple[str, list[int]]:
    return verdict.cause, [culprit.rank for culprit in verdict.culprits]


def tells(verdict: Verdict, number: int, group: str = "0") -> bool:
    """Returns True if the verdict says which collective it is about."""
    texts = (verdict.summary, *(culprit.reason for culprit in verdict.culprits), *(c.claim for c in verdict.evidence))
    return any(f"#{number} of group {group!r}" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout.torch}")
        for name, case in CASES.items()
        for layout in FORMATS
        if layout.blocks or not case.blocks_only  # otherwise the format has a single entry for a whole block
    ],
)
@with_frames
def test_nccl_dumps_of_hang_give_expected_verdict(name: str, layout: Format, as_json: bool, tmp_path: Path) -> None:
    case = CASES[name]
    recorders = ranks(layout)
    case.play(recorders)
    verdict = verdict_of(tmp_path / "d", recorders, as_json=as_json)
    assert named(verdict) == (case.cause, case.culprits), verdict.summary
    number = recorders[(case.culprits[0] + 1) % 4].groups["0"].collectives if layout.bumps else case.number
    assert tells(verdict, case.number) or tells(verdict, number), (verdict.summary, verdict.evidence)
    if not as_json:
        assert all(culprit.frame is not None and culprit.frame.function == "train" for culprit in verdict.culprits)


@by_format
def test_skipped_call_in_past_iteration_is_found(layout: Format, tmp_path: Path) -> None:
    """Rank 2 skipped an all_reduce of its loop. Sizes agree, so the skip shows only at the barrier after the loop."""
    recorders = ranks(layout, past=0)
    for recorder in recorders:
        lines = [50, 51, 52] * 4
        if recorder.rank == 2:
            del lines[4]
        for number, line in enumerate(lines, 1):
            recorder.collective(state="completed" if number < 12 else "started", line=line)
    recorders[2].collective("all_reduce_barrier", "started", size=(1,), dtype="Byte", line=90)
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == ("collective-mismatch", [2])
    assert "Rank 2 skipped all_reduce at train.py:51 (train), which its peers called (collective #5" in verdict.summary


@by_format
@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_waits_across_communicators_lead_to_culprit(layout: Format, split: bool, timing: bool, tmp_path: Path) -> None:
    """Rank 3 blocks rank 2 (tensor) and rank 1 (data); rank 0 waits for rank 2 (data)."""
    tensor, data = (dict.fromkeys(range(4), "1"), dict.fromkeys(range(4), "2")) if split else (
        {0: "1", 1: "1", 2: "2", 3: "2"}, {0: "3", 2: "3", 1: "4", 3: "4"})  # fmt: skip
    recorders = [Recorder(n, SPLIT[n] if split else GRID, layout, timing=timing) for n in range(4)]
    for recorder in recorders:
        for _ in range(3):
            recorder.collective(group=tensor[recorder.rank], size=(16,))
            recorder.collective(group=data[recorder.rank], size=(64,), line=30)
        recorder.collective(size=(1,), line=40)
    recorders[0].collective(group=tensor[0], size=(16,)).collective("all_reduce", "started", group=data[0], size=(64,))
    recorders[1].collective(group=tensor[1], size=(16,)).collective("all_reduce", "started", group=data[1], size=(64,))
    recorders[2].collective("all_reduce", "started", group=tensor[2], size=(16,))
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == ("missing-from-collective", [3]), verdict.summary
    assert verdict.victims == "0-2"


@by_format
def test_groups_entered_in_different_order_name_both_ranks(layout: Format, tmp_path: Path) -> None:
    groups = {"0": (0, 1), "1": (0, 1)}
    recorders = [Recorder(n, groups, layout) for n in range(2)]
    for recorder, order in zip(recorders, ("01", "10"), strict=True):
        recorder.collective(group=order[0]).collective(group=order[1])
        recorder.collective("all_reduce", "started", group=order[0], line=50)
        recorder.collective("all_reduce", "scheduled", group=order[1], line=51)
    assert named(verdict_of(tmp_path / "d", recorders)) == ("group-order", [0, 1])


def two_stages(layout: Format, steps: int = 4) -> list[Recorder]:
    """Ranks 2-3, the later stage, make one more call in each step, from the same lines as ranks 0-1."""
    recorders = [Recorder(n, GRID, layout) for n in range(4)]
    for _ in range(steps):
        for recorder in recorders:
            step(recorder)
    return recorders


def step(recorder: Recorder, *states: State, left_out: bool = False) -> None:
    """Makes the calls of a step, the last of them in these states."""
    data, pipe = ("1" if recorder.rank < 2 else "2"), ("3" if recorder.rank % 2 == 0 else "4")
    calls = [(data, 41)] * (1 if recorder.rank < 2 else 2) + [(pipe, 52), (pipe, 63), ("0", 40)]
    calls = calls[left_out:]
    done: list[State] = ["completed"] * (len(calls) - len(states))
    for (group, line), state in zip(calls, (*done, *states), strict=True):
        recorder.collective(state=state, group=group, line=line)


@by_format
def test_pipeline_stages_with_different_call_counts_are_compared_separately(layout: Format, tmp_path: Path) -> None:
    """A stage that makes fewer calls by design skipped nothing, but a rank of the stage that did is found."""
    recorders = two_stages(layout)
    step(recorders[0], "started", left_out=True)
    step(recorders[1], "started", "scheduled", "scheduled", "scheduled")
    step(recorders[2], "started")
    step(recorders[3], "started", "scheduled", "scheduled")
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == ("collective-mismatch", [0])
    assert "skipped all_reduce at train.py:41 (train)" in verdict.summary


UNREADABLE: dict[str, dict[str, Any]] = {
    "no name": {"profiling_name": None},
    "no sizes": {"input_sizes": None},
    "sizes in words": {"input_sizes": "[[4]]"},
    "sizes without lists": {"input_sizes": [4]},
    "sizes that are no counts": {"input_sizes": [[float("nan")]]},
    "sizes beyond all memory": {"input_sizes": [[1 << 70]]},
    "sizes below zero": {"input_sizes": [[-4]]},
    "no types": {"input_dtypes": None},
    "types in numbers": {"input_dtypes": [6]},
    "no state, but retired": {"state": None},
}


@pytest.mark.slow
@by_format
@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("odd", [None, 1])
def test_unreadable_call_fields_are_no_mismatch(
    layout: Format, change: dict[str, Any], odd: int | None, tmp_path: Path
) -> None:
    """Rank 2 has the unreadable record. Another rank that differs is still found from the other records."""
    recorders = ranks(layout)
    for recorder in recorders:
        recorder.collective(state="started", size=(8,) if recorder.rank == odd == 1 else (4,))
    for entry in recorders[2].entries:
        entry.update(change if entry["retired"] or "state" not in change else {})
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == (("collective-mismatch", [1]) if odd == 1 else ("no-rank-stands-out", []))


@by_format
def test_calls_without_number_are_no_unfinished_block(layout: Format, tmp_path: Path) -> None:
    recorders = ranks(layout)
    for recorder in recorders:
        recorder.collective(state="started")
    for entry in recorders[2].entries:
        entry["collective_seq_id"] = None
    assert named(verdict_of(tmp_path / "d", recorders)) == ("no-rank-stands-out", [])


@by_format
def test_skipped_call_in_regular_pattern_is_no_order_change(layout: Format, tmp_path: Path) -> None:
    """The next three calls after it match the peers' calls in another order, and so does one more by chance."""
    recorders = ranks(layout, past=0, world=3)
    for recorder in recorders:
        lines = [52, 52, 63, 63] * 4
        if recorder.rank == 0:
            del lines[2]
        for number, line in enumerate(lines, 1):
            recorder.collective(state="completed" if number < 16 else "started", line=line)
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == ("collective-mismatch", [0])
    assert "skipped all_reduce at train.py:63 (train)" in verdict.summary


@by_format
@with_frames
def test_opposite_group_orders_name_both_ranks_with_doubt(layout: Format, as_json: bool, tmp_path: Path) -> None:
    recorders = [Recorder(n, {"0": (0, 1), "1": (0, 1)}, layout) for n in range(2)]
    for recorder, order in zip(recorders, ("01", "10"), strict=True):
        recorder.collective(group="0", line=10).collective(group="1", line=11)
        recorder.collective(state="started", group=order[0], line=50 + int(order[0]))
    verdict = verdict_of(tmp_path / "d", recorders, as_json=as_json)
    assert named(verdict) == ("group-order", [0, 1])
    assert verdict.confidence == "medium" and Doubt.WHOSE_ORDER.why in verdict.doubts


# --- sends and receives -----------------------------------------------------------------------------------------------


def pipeline(layout: Format, *, timing: bool = True) -> list[Recorder]:
    """Returns four stages that have passed on three micro-batches, batched and singly."""
    recorders = ranks(layout, past=1, timing=timing)
    for _ in range(3):
        for recorder in recorders:
            if recorder.rank:
                recorder.batch([Op("recv", peer=recorder.rank - 1)])
            if recorder.rank < 3:
                recorder.batch([Op("send", peer=recorder.rank + 1)])
    for recorder in recorders:
        if recorder.rank:
            recorder.recv(recorder.rank - 1)
        if recorder.rank < 3:
            recorder.send(recorder.rank + 1)
    return recorders


@by_format
@pytest.mark.parametrize("batched", [True, False])
def test_pipeline_stages_that_both_receive_first_are_cycle(layout: Format, batched: bool, tmp_path: Path) -> None:
    recorders = pipeline(layout)
    for rank, peer in ((1, 2), (2, 1)):
        if batched:
            recorders[rank].batch([Op("recv", peer=peer)], "started")
        else:
            recorders[rank].recv(peer, "started")
    verdict = verdict_of(tmp_path / "d", recorders)
    assert named(verdict) == ("p2p-cycle", [1, 2]), verdict.summary
    assert verdict.confidence == "high"


def send_without_receive(recorders: list[Recorder]) -> None:
    """Rank 1 sends on, rank 2 doesn't receive it; rank 3 waits for rank 2."""
    recorders[0].send(1)
    recorders[1].recv(0).send(2, "started")
    recorders[3].recv(2, "started")


def batch_with_both_neighbours(recorders: list[Recorder]) -> None:
    """Rank 1 exchanges with both; rank 0 takes part, rank 2 doesn't, so rank 1 waits only for rank 2."""
    recorders[0].batch([Op("send", peer=1), Op("recv", peer=1)], "started")
    recorders[1].batch([Op("recv", peer=0), Op("send", peer=0), Op("send", peer=2), Op("recv", peer=2)], "started")
    recorders[3].collective(state="started")


def batch_not_launched(recorders: list[Recorder]) -> None:
    """Rank 2 has recorded its receives and rests before the end of the batch, so nothing of it has started."""
    recorders[1].batch([Op("send", peer=2), Op("recv", peer=2)], "started")
    recorders[2].batch([Op("recv", peer=1), Op("send", peer=1)], None)


def pair(size: int) -> Callable[[list[Recorder]], object]:
    return lambda all_ranks: (
        all_ranks[1].send(2, "started", size=(4, 8)),
        all_ranks[2].recv(1, "started", size=(4, size)),
    )


SIZES = "sends 32 elements of Float to rank 2", "receives 16 elements of Float from rank 1"
TRANSFERS: dict[Callable[[list[Recorder]], object], tuple[str, list[int], tuple[str, ...]]] = {
    send_without_receive: ("missing-from-collective", [2], ("send 1->2", "recv 3<-2")),
    batch_with_both_neighbours: ("missing-from-collective", [2], ()),
    batch_not_launched: ("missing-from-collective", [2], ()),
    pair(4): ("collective-mismatch", [1, 2], SIZES),
    pair(8): ("no-rank-stands-out", [], ()),
}


@by_format
@with_frames
@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize("play", TRANSFERS, ids=["send", "batch", "unlaunched", "sizes differ", "met"])
def test_nccl_dumps_of_pipeline_give_expected_verdict(
    play: Callable[[list[Recorder]], object], layout: Format, as_json: bool, timing: bool, tmp_path: Path
) -> None:
    cause, culprits, words = TRANSFERS[play]
    recorders = pipeline(layout, timing=timing)
    play(recorders)
    verdict = verdict_of(tmp_path / "d", recorders, as_json=as_json)
    assert named(verdict) == (cause, culprits), verdict.summary
    assert all(word in verdict.summary for word in words)


def test_unsorted_group_ranks_map_to_job_ranks(tmp_path: Path) -> None:
    """Rank 0 of the group is rank 3 of the job."""
    groups = {"0": (0, 1, 2, 3), "1": (3, 0)}
    recorders = [Recorder(n, groups) for n in range(4)]
    for recorder in recorders:
        recorder.collective()
    recorders[0].recv(0, "started", group="1")
    assert named(verdict_of(tmp_path / "d", recorders)) == ("missing-from-collective", [3])


# --- windows and missing dumps ----------------------------------------------------------------------------------------


@pytest.mark.slow
@by_format
@pytest.mark.parametrize("window", [3, 7, 20])
@pytest.mark.parametrize("name", ["another operation", "a rank that does not come", "a device that has begun nothing"])
def test_wrapped_recorders_with_different_windows_are_aligned(
    name: str, window: int, layout: Format, tmp_path: Path
) -> None:
    """Ranks 2 and 3 have used their own group more often, so their windows reach back less far."""
    recorders = [Recorder(n, GRID, layout) for n in range(4)]
    for recorder in recorders:
        for number in range(30):
            recorder.collective()
            if recorder.rank > 1 and number % 3:
                recorder.collective(group="2")
    case = CASES[name]
    if name == "a device that has begun nothing":
        all_but(3, recorders, lambda recorder: recorder.collective(state="started"))
        recorders[3].collective(state="scheduled")
    else:
        for recorder in recorders:  # the case expects four earlier calls
            recorder.entries, earlier = recorder.entries[:4], recorder.entries
            recorder.earlier = earlier  # type: ignore[attr-defined]
        case.play(recorders)
        for recorder in recorders:
            new = recorder.entries[4:]
            for entry in new:
                entry["record_id"] += len(recorder.earlier) - 4  # type: ignore[attr-defined]
            recorder.entries = recorder.earlier + new  # type: ignore[attr-defined]
    verdict = verdict_of(tmp_path / "d", recorders, window=window)
    assert named(verdict) == (case.cause, case.culprits), verdict.summary
    assert tells(verdict, 31)


@by_format
@pytest.mark.parametrize("name", ["another operation", "another size"])
def test_unseen_node_prevents_culprit_by_majority(name: str, layout: Format, tmp_path: Path) -> None:
    recorders = [Recorder(rank, {"0": range(8)}, layout) for rank in range(8)]
    for recorder in recorders:
        for _ in range(4):
            recorder.collective()
    CASES[name].play(recorders)
    verdict = verdict_of(tmp_path / "d", recorders[:4])
    assert named(verdict) == ("collective-mismatch", [])
    assert "ranks not seen: 4-7" in verdict.missing
    assert verdict.confidence == "low"
    whole = verdict_of(tmp_path / "all", recorders)
    assert named(whole)[1] == CASES[name].culprits


@by_format
def test_ranks_waiting_for_unseen_node_name_no_culprit(layout: Format, tmp_path: Path) -> None:
    recorders = ranks(layout, world=8)
    for recorder in recorders[:4]:
        recorder.collective(state="started")
    verdict = verdict_of(tmp_path / "d", recorders[:4])
    assert named(verdict) == ("missing-from-collective", [])
    assert "ranks not seen: 4-7" in verdict.missing


@by_format
def test_unseen_rank_outside_group_leaves_culprit_named(layout: Format, tmp_path: Path) -> None:
    """Rank 3 was not seen, but all ranks of the stuck group, 0 to 2, have arrived."""
    groups = {"0": (0, 1, 2, 3), "1": (0, 1, 2)}
    recorders = [Recorder(n, groups, layout) for n in range(3)]
    for recorder in recorders:
        recorder.collective()
        recorder.collective("all_gather" if recorder.rank == 1 else "all_reduce", "started", group="1")
    assert named(verdict_of(tmp_path / "d", recorders)) == ("collective-mismatch", [1])


@by_format
def test_queued_calls_without_timing_name_no_device(layout: Format, tmp_path: Path) -> None:
    """All ranks have queued everything, so it is unknown whose device has not started."""
    recorders = ranks(layout, timing=False)
    device_behind(recorders)
    assert named(verdict_of(tmp_path / "d", recorders)) == ("no-rank-stands-out", [])


@by_format
def test_queued_mismatch_ahead_of_devices_is_ignored(layout: Format, tmp_path: Path) -> None:
    """All devices are in call 5. Call 9, which the CPUs have queued, will be the next problem."""
    recorders = ranks(layout)
    for number in range(5, 12):
        for recorder in recorders:
            op = "all_gather" if number == 9 and recorder.rank == 1 else "all_reduce"
            recorder.collective(op, "started" if number == 5 else "scheduled")
    assert named(verdict_of(tmp_path / "d", recorders)) == ("no-rank-stands-out", [])


# --- dump formats -----------------------------------------------------------------------------------------------------


@by_format
def test_batch_members_share_its_state(layout: Format) -> None:
    recorder = Recorder(0, WORLD, layout).collective()
    recorder.batch([Op("send", peer=1), Op("recv", peer=1)]).collective().batch([Op("send", peer=2)], "started")
    record = with_blocks_merged(parse_pickle(write_one(recorder)))
    assert [(e.op, e.completed) for e in record.entries] == [
        ("nccl:all_reduce", True),
        ("nccl:send 0->1", True),
        ("nccl:recv 0<-1", True),
        ("nccl:all_reduce", True),
        ("nccl:send 0->2", False),
    ]
    assert [e.seq for e in record.entries if not e.is_p2p] == [1, 2]
    assert record.entries[-1].started


@by_format
def test_coalesced_block_is_merged_into_single_call(layout: Format) -> None:
    recorder = Recorder(0, WORLD, layout).collective()
    recorder.block([Op("all_reduce"), Op("all_reduce", (8,)), Op("broadcast")], "started")
    *_, entry = with_blocks_merged(parse_pickle(write_one(recorder))).entries
    assert (entry.completed, entry.started, entry.is_p2p) == (False, True, False)
    if layout.blocks:
        assert isinstance(entry, Block)
        assert (entry.op, entry.ops) == ("nccl:coalesced 2 x all_reduce, broadcast", (*["all_reduce"] * 2, "broadcast"))
        assert entry.input_sizes == ((4,), (8,), (4,))
    else:
        assert (entry.op, entry.input_sizes) == ("nccl:coalesced", ())


@by_format
@pytest.mark.parametrize("window", [2000, 5, 4, 3, 2])
def test_record_beginning_with_sends_is_no_contradiction(layout: Format, window: int, tmp_path: Path) -> None:
    """The end of the batch has the number of the last collective, but no collective was called before it."""
    recorders = [Recorder(rank, {"0": (0, 1)}, layout) for rank in (0, 1)]
    for recorder in recorders:
        recorder.batch([Op("send", peer=1 - recorder.rank), Op("recv", peer=1 - recorder.rank)])
        recorder.collective()
        recorder.collective()
    recorders[0].collective(state="started")
    for recorder in recorders:
        assert not flight_records.contradicts_itself(parse_pickle(write_one(recorder, window)))
    verdict = verdict_of(tmp_path, recorders, window=window)
    assert (verdict.cause, [culprit.rank for culprit in verdict.culprits]) == ("missing-from-collective", [1])
    assert not [text for text in verdict.missing if "Flight Recorder" in text and "no longer" not in text]


@pytest.mark.parametrize("window", range(1, 8))
def test_window_starting_inside_block_skips_block(window: int) -> None:
    recorder = Recorder(0, WORLD).collective()
    recorder.block([Op("all_reduce"), Op("all_reduce", (8,)), Op("broadcast")])
    recorder.batch([Op("send", peer=1), Op("send", peer=2)]).collective()
    record = parse_pickle(write_one(recorder, window))
    alignment = Alignment([RankEvidence(rank=0, host="", pid=0, flight_record=record)], 4)
    entries = [alignment.entry(0, "0", number) for number in range(5)]
    ops = {entry.seq: entry.op for entry in entries if entry is not None}
    block = {2: "nccl:coalesced 2 x all_reduce, broadcast"} if window > 7 else {}
    assert ops == {**block, 3: "nccl:all_reduce"}


def test_record_without_blocks_is_unchanged() -> None:
    record = parse_pickle(write_one(Recorder(0, WORLD).collective().send(1).recv(1).collective(state="started")))
    assert with_blocks_merged(record) is record


@by_format
def test_nccl_json_equals_pickle_without_frames(layout: Format) -> None:
    from msgspec.structs import replace

    recorder = Recorder(1, GRID, layout).collective().collective(group="4").send(0, "timed out")
    recorder.batch([Op("recv", peer=0)]).block([Op("all_reduce")], "started")
    pickled = parse_pickle(write_one(recorder))
    assert parse_json(recorder.json()) == replace(
        pickled, entries=tuple(replace(e, frames=()) for e in pickled.entries)
    )
    assert (pickled.version, pickled.groups["4"]) == (layout.version, (1, 3))
    assert pickled.entries[2].completed is False  # retired, but its device hasn't reported the end


@pytest.mark.parametrize(("backend", "completed"), [("gloo", True), ("nccl", False), ("xccl", False)])
def test_retired_call_is_completed_only_for_gloo(backend: str, completed: bool) -> None:
    """gloo has no events, so a retired call has completed."""
    recorder = Recorder(0, WORLD).collective(state="timed out")
    recorder.entries[0]["profiling_name"] = f"{backend}:all_reduce"
    assert parse_pickle(write_one(recorder)).entries[0].completed is completed


# --- recorders of each backend, and torchcomms ------------------------------------------------------------------------


def hooked(*, past: int = 4, world: int = 4, **of_recorder: Any) -> list[Recorder]:
    """Returns ranks whose ``nccl2`` has completed ``past`` all_reduces of all ranks."""
    recorders: list[Recorder] = [Hooked(rank, {"0": range(world)}, **of_recorder) for rank in range(world)]
    for recorder in recorders:
        for _ in range(past):
            recorder.collective()
    return recorders


TELL_WITHOUT_STARTS = (
    "another operation", "another size", "another type", "a rank that does not come", "CPUs that run ahead",
    "sends are no collectives", "batches are no collectives",
)  # fmt: skip


@with_frames
@pytest.mark.parametrize("name", TELL_WITHOUT_STARTS)
@pytest.mark.parametrize("of_recorder", [{}, {"backend": "relay", "early": True}], ids=["nccl2", "early"])
def test_hook_dumps_give_expected_verdict(
    of_recorder: dict[str, Any], name: str, as_json: bool, tmp_path: Path
) -> None:
    recorders = hooked(**of_recorder)
    CASES[name].play(recorders)
    verdict = verdict_of(tmp_path / "d", recorders, as_json=as_json)
    expected = (CASES[name].cause, CASES[name].culprits)
    if of_recorder and name == "sends are no collectives":  # the newest send might be the call that the rank waits in
        expected = ("no-rank-stands-out", [])
    assert named(verdict) == expected, verdict.summary


def test_nccl2_device_without_start_events_names_no_culprit(tmp_path: Path) -> None:
    recorders = hooked()
    device_behind(recorders)
    assert named(verdict_of(tmp_path / "d", recorders)) == ("no-rank-stands-out", [])


def test_nccl2_sends_are_completed_by_later_calls() -> None:
    recorder = Hooked(0, WORLD).batch([Op("send", peer=1), Op("recv", peer=1)]).collective().send(2, "scheduled")
    record = parse_pickle(write_one(recorder))
    alignment = Alignment([RankEvidence(rank=0, host="", pid=0, flight_record=record)], 4)
    assert [entry.op for entry in alignment.pending(0)] == ["nccl2:send 0->2"]


def test_early_retired_call_is_completed_when_all_ranks_passed_it() -> None:
    """Rank 2 has made one call less than the others, and rank 3 none; rank 4 has no record."""
    calls, world = {0: 3, 1: 3, 2: 2}, {"0": range(5), "1": (0, 1, 2)}
    ranks = []
    for rank in range(4):
        recorder = Hooked(rank, world, "relay", early=True)
        for _ in range(calls.get(rank, 0)):
            recorder.collective().collective(group="1")
        ranks.append(
            RankEvidence(rank=rank, host="", pid=0, flight_record=parse_pickle(write_one(recorder.send(1).recv(1))))
        )
    alignment = Alignment(ranks, 5)
    pending = {
        rank: [(e.group, e.seq) for e in alignment.records[rank].entries if not e.completed and not e.is_p2p]
        for rank in range(4)
    }
    all_open = [("0", 1), ("0", 2), ("0", 3)]  # not even the first has completed: rank 3 never joined it
    assert sorted(pending[0]) == sorted(pending[1]) == [*all_open, ("1", 3)]
    assert sorted(pending[2]) == all_open[:2] and pending[3] == []
    assert [entry.op for entry in alignment.transfers(0, "0") if not entry.completed] == ["relay:recv 0<-1"]


def test_dumps_of_some_ranks_name_no_culprit_by_majority(tmp_path: Path) -> None:
    """nccl2 dumps only on ranks that detect the failure."""
    recorders = hooked(world=8)
    CASES["another operation"].play(recorders)
    verdict = verdict_of(tmp_path / "d", recorders[:3])
    assert named(verdict) == ("collective-mismatch", []) and "ranks not seen: 3-7" in verdict.missing


@pytest.mark.parametrize("odd", [None, 2])
def test_dumps_of_each_backend_are_compared_separately(odd: int | None, tmp_path: Path) -> None:
    """With ``cpu:gloo,cuda:nccl2``, both backends count calls of the same group, but their calls differ."""
    recorders = hooked()
    cpus: list[Recorder] = [Hooked(rank, WORLD, "gloo") for rank in range(4)]
    for rank, (device, cpu) in enumerate(zip(recorders, cpus, strict=True)):
        for _ in range(6):
            cpu.collective("broadcast", size=(1,), line=20)
        device.collective("all_gather" if rank == odd else "all_reduce", "scheduled")
    folder = write(tmp_path / "d", recorders)
    for path in write(tmp_path / "cpu", cpus).iterdir():
        path.rename(folder / path.name.replace("nccl", "gloo"))
    contents = locate.read(folder)
    assert contents.problems == ()
    ops = {entry.op for rank in contents.evidence.ranks for entry in rank.flight_record.entries}  # type: ignore[union-attr]
    assert {"gloo:broadcast", "nccl2:all_reduce"} <= ops
    cause = "collective-mismatch" if odd is not None else "no-rank-stands-out"
    verdict = diagnose(contents.evidence)
    assert named(verdict) == (cause, [] if odd is None else [odd]), verdict.summary


def test_dumps_of_same_backend_under_two_names_are_not_joined(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", hooked())
    for path in write(tmp_path / "e", hooked(past=9)).iterdir():
        path.rename(folder / f"other_{path.name}")
    contents = locate.read(folder)
    assert [problem for problem in contents.problems if "other dumps here have the same ranks" in problem]


def test_merged_records_have_unique_ids_and_known_groups() -> None:
    device, cpu = (
        parse_pickle(write_one(Hooked(0, WORLD, name).collective().collective())) for name in ("nccl2", "gloo")
    )
    record = merged([cpu, device, cpu])
    assert [entry.op for entry in record.entries].count("gloo:all_reduce") == 2
    assert [entry.record_id for entry in record.entries] == [0, 1, 2, 3]
    assert (record.groups, record.damaged) == ({"0": (0, 1, 2, 3)}, ())
    contradicting = parse_pickle(write_one(Hooked(0, {"0": (0, 1)}, "gloo").collective()))
    assert (merged([device, contradicting]).groups, merged([device, contradicting]).damaged) == ({}, ("pg_config",))
    assert parse_json(to_json(record)) == record


def test_torchcomms_numbers_across_groups_are_aligned(tmp_path: Path) -> None:
    """Ranks 0 and 1 have also called in their own group; rank 3 doesn't join."""
    recorders: list[Recorder] = [TorchComms(rank, GRID) for rank in range(4)]
    for recorder in recorders:
        for _ in range(3):
            if recorder.rank < 2:
                recorder.collective(group="1")
            recorder.collective()
        if recorder.rank != 3:
            recorder.collective(state="scheduled")
    assert named(verdict_of(tmp_path / "d", recorders)) == ("missing-from-collective", [3])
    late = diagnose(locate.read(write(tmp_path / "late", recorders, window=4)).evidence)
    assert [culprit.rank for culprit in late.culprits] in ([], [3])


def write_one(recorder: Recorder, window: int = 2000) -> bytes:
    return pickle.dumps(recorder.dump(window), protocol=2)


# --- dumps that are damaged or contradict each other ------------------------------------------------------------------


def _no_names(dump: dict[str, Any], dice: random.Random) -> None:
    for entry in dice.sample(dump["entries"], dice.randint(1, len(dump["entries"]))):
        entry["profiling_name"] = dice.choice([None, 7, "", ["all_reduce"]])


def _scalars(dump: dict[str, Any], dice: random.Random) -> None:
    for entry in dice.sample(dump["entries"], dice.randint(1, len(dump["entries"]))):
        entry["input_sizes"] = entry["output_sizes"] = dice.choice([[], [[]], [[1]], [[1, 1]]])


def _another_config(dump: dict[str, Any], dice: random.Random) -> None:
    ranks = dice.choice(["[0, 1]", "[3, 2, 1, 0]", "[0, 1, 2, 3, 4]", "[]", "[7]"])
    dump["pg_config"]["0"] = {"name": "0", "desc": "default_pg", "ranks": ranks}


def _doubled(dump: dict[str, Any], dice: random.Random) -> None:
    at = dice.randrange(len(dump["entries"]))
    dump["entries"][at:at] = [dict(entry) for entry in dump["entries"][at : at + dice.randint(1, 3)]]


def _lost(dump: dict[str, Any], dice: random.Random) -> None:
    at = dice.randrange(1, len(dump["entries"]) - 2)
    del dump["entries"][at : at + dice.randint(1, min(3, len(dump["entries"]) - 2 - at))]


def _no_numbers(dump: dict[str, Any], dice: random.Random) -> None:
    for entry in dice.sample(dump["entries"], dice.randint(1, len(dump["entries"]))):
        entry["collective_seq_id"] = dice.choice([None, 0, -1, "x", 5])


DAMAGES = (_no_names, _scalars, _another_config, _doubled, _lost, _no_numbers)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("make", [hooked, lambda: ranks(NEWEST)], ids=["nccl2", "nccl"])
@pytest.mark.parametrize("absentee", [None, 1])
def test_damaged_dump_names_no_innocent_rank(
    damage: Callable[..., None], make: Callable[[], list[Recorder]], absentee: int | None, tmp_path: Path
) -> None:
    """One of four ranks has a damaged dump. In the job, all ranks have arrived, or all but one."""
    for seed in range(12):
        dice = random.Random(seed)
        recorders = make()
        for recorder in recorders:
            for entry in recorder.entries:
                entry["input_sizes"] = entry["output_sizes"] = [[1]]
            if recorder.rank != absentee:
                recorder.collective(state="started", size=())
        victim = dice.choice([0, 2, 3])
        folder = write(tmp_path / str(seed), recorders)
        dump = recorders[victim].dump()
        dump["entries"] = [dict(entry) for entry in dump["entries"]]
        damage(dump, dice)
        (folder / f"nccl_trace_rank_{victim}").write_bytes(pickle.dumps(dump, protocol=2))
        verdict = diagnose(locate.read(folder).evidence)
        innocent = [culprit.rank for culprit in verdict.culprits if culprit.rank != absentee]
        assert not innocent, (seed, victim, verdict.confidence, verdict.summary)


def test_newest_format_matches_installed_torch() -> None:
    """Keys of the installed torch's dump are exactly these."""
    torch = pytest.importorskip("torch")
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip("this torch has no recorder for gloo")
    dump = pickle.loads(c10d._dump_fr_trace())
    if str(torch.__version__).startswith("2.13"):
        assert dump["version"] == NEWEST.version
        assert {"version", "pg_config", "pg_status", "entries", NEWEST.library} >= dump.keys()


TENSOR = ("tp0", "tp1", "tp2", "tp3")


def _of_pairs(stuck: Sequence[int], missing: Sequence[int]) -> list[Recorder]:
    """Returns four pairs of ranks, which also share a group.

    Args:
        stuck: Ranks whose devices don't finish calls that their partners' devices have finished.
        missing: Ranks that make no further calls.
    """
    groups = {"0": range(8), **{name: (2 * at, 2 * at + 1) for at, name in enumerate(TENSOR)}}
    recorders = [Pending(rank, groups, timing=False) for rank in range(8)]
    for recorder in recorders:
        group = TENSOR[recorder.rank // 2]
        over = 5 if recorder.rank in stuck else 9 if recorder.rank ^ 1 in (*stuck, *missing) else 7
        for number in range(9 if recorder.rank in missing else 12):
            ends = number < 9 if recorder.rank in missing else number < over
            recorder.collective(group=group, state="completed" if ends else "scheduled")
        if recorder.rank not in missing:
            recorder.collective(state="scheduled")
    return recorders


def test_calls_pending_after_peers_completed_them_name_gpu_kernel(tmp_path: Path) -> None:
    """If dumps hold only pending calls and a peer's oldest one is later, the peer has completed the call."""
    verdict = verdict_of(tmp_path, _of_pairs(stuck=(2, 5), missing=()))
    assert (*named(verdict), verdict.confidence) == ("gpu-kernel", [2, 5], "medium")


def test_rank_without_pending_calls_its_peers_wait_in_is_missing(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, _of_pairs(stuck=(), missing=(2, 5)))
    assert (*named(verdict), verdict.confidence) == ("missing-from-collective", [2, 5], "medium")


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_2nd"])
def test_published_fault_injections_name_injected_ranks(name: str) -> None:
    """Faults were injected into two of 16 ranks, in dumps published with NVIDIA's resiliency package."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "nccl-dumps" / name
    if not folder.is_dir():
        pytest.skip("needs the published dumps")
    truth = [int(word) for word in re.findall(r"^Rank (\d+)", (folder / "fault_injection.log").read_text(), re.M)]
    verdict = diagnose(locate.read(folder).evidence)
    assert ([culprit.rank for culprit in verdict.culprits], verdict.confidence) == (truth, "medium")
