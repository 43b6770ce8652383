"""Recordings as they travel: merged, bounded, checked."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch.addons.record.recording import Recording, decode, merge, shrink
from safelaunch.addons.record.slowness import verdict_of
from safelaunch.model.words import ranks_in
from tests.unit.addons.record.recordings import ALL_REDUCE, AUGMENT, BACKWARD, FORWARD, MODULE, recorded, recording


def test_recordings_of_several_nodes_are_merged() -> None:
    first, second = recording({FORWARD: 0.5, BACKWARD: 0.5}), recording({AUGMENT: 0.5, BACKWARD: 0.5})
    second = replace(second, ranks=[replace(one, rank=one.rank + 1) for one in second.ranks], rate_hz=5.0)
    whole = merge([first, second, second])
    assert [one.rank for one in whole.ranks] == [0, 1] and whole.rate_hz == 5.0
    assert len(whole.stacks) == 3
    times = verdict_of(whole).times
    assert [dict(one.kinds) for one in times] == [{"forward": 0.5, "backward": 0.5}, {"script": 0.5, "backward": 0.5}]


def test_oversized_recording_loses_the_least_important_stacks() -> None:
    whole = recorded("loader")
    sizes = [10_000_000, 5000, 3000, 1000, 10]
    found = [shrink(whole, lambda one, most=size: len(msgspec.json.encode(one)) <= most) for size in sizes]  # type: ignore[misc]
    assert found[0] is whole
    assert [len(one.stacks) for one in found] == sorted((len(one.stacks) for one in found), reverse=True)
    assert all(rank.missing for rank in found[-1].ranks)
    assert all(one.notes for one in found[1:])


def test_loss_of_rare_stacks_does_not_change_the_shares_of_the_others() -> None:
    lines = [(MODULE, replace(FORWARD[1], line=line)) for line in range(1000, 1200)]
    ranks = [{ALL_REDUCE: 0.5, FORWARD: 0.5}, {ALL_REDUCE: 0.5, **dict.fromkeys(lines, 0.0025)}]
    answers = iter([False, False, False, True])
    smaller = shrink(recording(*ranks), lambda one: next(answers))
    first, second = verdict_of(smaller).times
    assert first.waits == pytest.approx(second.waits, abs=0.01) and len(smaller.stacks) < 40


@pytest.mark.parametrize(
    "bad",
    ['{"stacks": [[3]]}', '{"ranks": [{"rank": 0, "main": {"pid": 1, "threads": [{"stacks": [[9, 1.0]]}]}}]}', "[]"],
)
def test_recording_with_invalid_references_is_refused(bad: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(bad.encode())


def test_recording_survives_encoding() -> None:
    one = recorded("gil")
    assert decode(msgspec.json.encode(one)) == one
    assert decode(b"{}") == Recording()


@pytest.mark.parametrize(("text", "ranks"), [("", ()), ("0-2,5", (0, 1, 2, 5)), ("3", (3,)), ("1,0-1", (0, 1))])
def test_rank_ranges_are_parsed(text: str, ranks: tuple[int, ...]) -> None:
    assert ranks_in(text) == ranks


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "0-70000", "1,,2", "0-999999999999"])
def test_invalid_rank_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        ranks_in(text)
