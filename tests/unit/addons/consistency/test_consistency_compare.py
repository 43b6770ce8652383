"""Findings of the comparison, as a table of cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import msgspec
import pytest

from safelaunch.addons.consistency.capture import SeriesCheck, SeriesInfo
from safelaunch.addons.consistency.compare import KEPT, Comparison
from safelaunch.addons.consistency.wire import MOST_POSITIONS, SharedFindings, decode, encode, share_of
from safelaunch.model import WrongResult
from safelaunch.supervise.cluster.codec import BadMessage, pack, parse

NAMES = ("0.weight", "0.bias", "2.weight")
FINE = 1.0


def check(
    rank: int,
    position: int,
    prints: tuple[int, ...] = (1, 2, 3),
    *,
    group: tuple[int, ...] = (0, 1, 2),
    gradients: tuple[float, ...] = (FINE, FINE, FINE),
    bad_since: int | None = None,
    losses: tuple[float, ...] = (),
    sizes: tuple[float, ...] = (FINE, FINE, FINE),
    kind: str = "parameters",
) -> SeriesCheck:
    about = SeriesInfo(f"{kind} of SGD", kind, 3, rank, (group,), tuple((name, 0) for name in NAMES))
    steps = range(position - 2, position + 1)
    sentinel = tuple((step, math.nan if bad_since is not None and step >= bad_since else FINE) for step in steps)
    numbered = tuple((position + n, value) for n, value in enumerate(losses))
    return SeriesCheck(rank, about, position, prints, sizes, gradients, sentinel, numbered)


def found(*checks: SeriesCheck, here: tuple[int, ...] = (0, 1, 2), last: bool = False) -> list[WrongResult]:
    comparison = Comparison()
    comparison.add(checks)
    return comparison.new_findings(here, 0.0, last=last)


def at(position: int, prints: Mapping[int, tuple[int, ...]]) -> list[SeriesCheck]:
    return [check(rank, position, one) for rank, one in prints.items()]


SAME = (1, 2, 3)


def test_equal_replicas_give_no_finding() -> None:
    assert not found(*at(3, {0: SAME, 1: SAME, 2: SAME}), *at(6, {0: (4, 5, 6), 1: (4, 5, 6), 2: (4, 5, 6)}))


def test_diverged_rank_is_named_with_first_parameter() -> None:
    (one,) = found(*at(3, {0: SAME, 1: SAME, 2: SAME}), *at(6, {0: SAME, 1: SAME, 2: (1, 9, 9)}))
    assert (one.kind, one.step, one.since_step, one.parameter) == ("replicas-diverged", 6, 3, "0.bias")
    assert (one.ranks, one.sides, one.count, one.total) == ((2,), ((0, 1), (2,)), 2, 3)
    assert "between steps 3 and 6: rank 2 differs from the others in 2 of 3 parameters" in one.words


def test_two_diverged_ranks_have_no_culprit() -> None:
    checks = [check(rank, 1, (rank, 2, 3), group=(0, 1)) for rank in (0, 1)]
    (one,) = found(*checks, here=(0, 1))
    assert (one.ranks, one.sides) == ((), ((0,), (1,)))
    assert "at step 1: rank 0 against rank 1 in 0.weight" in one.words


def test_tensors_without_group_are_not_compared() -> None:
    assert not found(*(check(rank, 3, (rank, 2, 3), group=()) for rank in range(3)))
    shards = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    checks = [check(rank, 3, (rank % 2, 2, 3), group=group) for rank, group in shards.items()]
    assert not found(*checks, here=(0, 1, 2, 3))


def test_position_waits_for_last_rank_until_job_end() -> None:
    apart = [check(0, 3), check(1, 3, (9, 2, 3))]
    assert not found(*apart)
    assert found(*apart, last=True)


def test_finding_is_reported_once_for_parameters_and_buffers() -> None:
    comparison = Comparison()
    for position in (3, 6):
        comparison.add(at(position, {0: SAME, 1: SAME, 2: (9, 9, 9)}))
        comparison.add([check(rank, position, (rank, 1, 1), kind="buffers") for rank in range(3)])
        said = [one.words.split()[0] for one in comparison.new_findings((0, 1, 2), 0.0)]
        assert said == (["parameters", "buffers"] if position == 3 else [])


def test_non_finite_values_are_no_divergence() -> None:
    nan = (math.nan,) * 3
    checks = [check(rank, 3, (rank, rank, rank), gradients=nan, sizes=nan) for rank in range(3)]
    assert [one.kind for one in found(*checks)] == ["non-finite-gradient"]


def test_non_finite_gradient_names_rank_where_it_began() -> None:
    nan = (FINE, math.nan, math.nan)
    since = {0: 6, 1: 5, 2: 6}
    (one,) = found(*(check(rank, 6, gradients=nan, bad_since=step) for rank, step in since.items()))
    assert (one.ranks, one.step, one.parameter) == ((1,), 5, "2.weight")
    assert "one rank diverged" in one.words


def test_overflow_in_skipped_step_gives_no_finding() -> None:
    assert not found(*(check(rank, 6, bad_since=5 if rank == 1 else None) for rank in range(3)))


def test_loss_far_above_others_or_non_finite_is_found() -> None:
    usual, far = (1.0, 1.2) * 10, (5.0, 6.0) * 10
    (one,) = found(*(check(rank, 3, losses=far if rank == 1 else usual) for rank in range(3)))
    assert (one.kind, one.ranks) == ("loss", (1,))
    assert not found(*(check(rank, 3, losses=(0.5, 1.5) * 10 if rank == 1 else usual) for rank in range(3)))
    (one,) = found(*(check(rank, 3, losses=(1.0, math.nan if rank == 2 else 1.0)) for rank in range(3)))
    assert (one.ranks, one.step) == ((2,), 4)


def told(*groups: tuple[int, ...]) -> str:
    """Returns the final report on a job whose tensors have these replicas."""
    comparison = Comparison()
    for rank in (0, 1):
        about = SeriesInfo(
            "parameters of SGD", "parameters", 3, rank, groups, tuple((f"{n}.w", n) for n in range(len(groups)))
        )
        numbers = (FINE,) * len(groups)
        comparison.add([SeriesCheck(rank, about, 3, (1,) * len(groups), numbers, numbers, ((3, FINE),), ())])
    comparison.new_findings((0, 1), 0.0, last=True)
    return comparison.report


def test_report_lists_uncompared_tensors() -> None:
    assert told((0, 1)) == "nothing inconsistent: 1 check, 1 tensor compared"
    assert told((0, 1), ()).endswith("1 tensor compared; 1 not known to be replicated: 1.w")
    assert told((0, 1), (), (), (), ()).endswith("; 4 not known to be replicated: 1.w, 2.w, 3.w, ...")
    assert told((), ()).startswith("nothing compared: ")
    assert "no tensor is known to be replicated (safelaunch.probes.check_consistent()" in told((), ())
    assert Comparison().report == ""


def named(rank: int, position: int, prints: Mapping[str, int], rounds: int = 0) -> SeriesCheck:
    about = SeriesInfo("module", "parameters", 3, rank, ((0, 1),), tuple((name, 0) for name in prints))
    fine = (FINE,) * len(prints)
    return SeriesCheck(rank, about, position, tuple(prints.values()), fine, fine, rounds=rounds)


def test_tensor_on_one_rank_is_reported_and_others_compared() -> None:
    comparison = Comparison()
    comparison.add([named(0, 3, {"w": 1, "b": 2}), named(1, 3, {"adapter": 9, "w": 1, "b": 2})])
    assert not comparison.new_findings((0, 1), 0.0)
    assert (
        comparison.report
        == "nothing inconsistent: 1 check, 2 tensors compared; NOT compared between ranks 0-1: adapter"
    )
    comparison.add([named(0, 6, {"w": 1, "b": 2}), named(1, 6, {"adapter": 9, "w": 1, "b": 3})])
    assert [one.parameter for one in comparison.new_findings((0, 1), 0.0)] == ["b"]


def test_replicas_never_compared_give_no_clean_report() -> None:
    comparison = Comparison()
    comparison.add([named(0, 3, {"w": 1}), named(1, 3, {"v": 1})])
    comparison.new_findings((0, 1), 0.0, last=True)
    assert comparison.report == "nothing compared: 1 check, 0 tensors compared; NOT compared between ranks 0-1: w, v"


def test_checks_of_different_moments_are_not_compared() -> None:
    alone = [named(0, 3, {"w": 1}, rounds=2), named(1, 3, {"w": 2}, rounds=3)]
    assert not found(*alone, here=(0, 1), last=True)
    assert found(*alone, named(0, 3, {"w": 1}, rounds=3), here=(0, 1), last=True)


def test_position_missing_one_rank_is_compared_at_end() -> None:
    comparison = Comparison()
    comparison.add([check(rank, 3, (rank, 2, 3)) for rank in (0, 1)])
    assert not comparison.new_findings((0, 1, 2), 0.0)
    comparison.add([check(0, 3 * n) for n in range(2, KEPT + 2)])
    assert [one.step for one in comparison.new_findings((0, 1, 2), 0.0)] == [3]


of_four = partial(check, group=(0, 1, 2, 3))


def test_encoded_checks_keep_differences() -> None:
    sent = [
        of_four(0, 3, (1, -2, 3)),
        of_four(1, 3, (1, 9, 3)),
        of_four(1, 6, gradients=(math.nan, 1.0, 1.0), bad_since=6, losses=(0.5, math.inf)),
    ]
    first, second, third = decode(encode(sent, share_of(2)))
    assert [one.prints for one in (first, second, third)] == [(1, -2, 3), (1, 9, 3), SAME]
    assert (second.rank, second.position, second.about.tensors) == (1, 3, sent[1].about.tensors)
    assert not math.isfinite(third.gradients[0]) and third.gradients[1:] == (0.0, 0.0) and third.sizes == (0.0,) * 3
    assert third.sentinel[0][0] == 6 and third.losses == ((6, 0.5), (7, math.inf))


def test_checks_of_two_nodes_give_one_finding() -> None:
    comparison = Comparison()
    comparison.add([of_four(rank, position) for rank in (0, 1) for position in (3, 6)])
    there = [of_four(2, 3), of_four(3, 3), of_four(2, 6), of_four(3, 6, (1, 2, 7))]
    comparison.add(decode(encode(there, share_of(2))))
    (found,) = comparison.new_findings((0, 1, 2, 3), 0.0)
    assert (found.kind, found.ranks, found.step, found.since_step) == ("replicas-diverged", (3,), 6, 3)
    assert found.parameter == "2.weight"


def test_rank_with_other_number_is_not_sent() -> None:
    about = SeriesInfo("key", "parameters", 3, 5, ((0, 5),), (("weight", 0),))
    assert decode(encode([SeriesCheck(0, about, 3, (1,), (1.0,), (1.0,))], share_of(2))) == []


def test_only_latest_positions_are_sent() -> None:
    found = decode(encode([of_four(0, position) for position in range(3, 303, 3)], share_of(2)))
    assert [one.position for one in found] == list(range(303 - 3 * MOST_POSITIONS, 303, 3))


def test_too_many_tensors_share_fingerprints() -> None:
    names = tuple(f"layers.{number}.weight" for number in range(9000))
    groups = ((0, 1), (0, 1, 2, 3))
    about = SeriesInfo("key", "parameters", 3, -1, groups, tuple((name, n // 6000) for n, name in enumerate(names)))
    prints = tuple(hash((name, "bits")) >> 1 for name in names)
    fine = (1.0,) * len(names)

    def arrived(rank: int, prints: tuple[int, ...], bad: int = -1) -> SeriesCheck:
        sizes = tuple(math.nan if n == bad else 1.0 for n in range(len(names)))
        data = encode([SeriesCheck(rank, about, 3, prints, sizes, fine)], share_of(2000))
        assert len(data) <= share_of(2000)
        (one,) = decode(data)
        return one

    here, same, other = arrived(0, prints), arrived(1, prints), arrived(1, (*prints[:7000], 1, *prints[7001:]))
    assert here.prints == same.prints and len(here.prints) < len(names) / 8
    (differs,) = (n for n, (one, two) in enumerate(zip(here.prints, other.prints, strict=True)) if one != two)
    name, group = other.about.tensors[differs]
    first, last = (int(part.split(".")[1]) for part in name.split(" to "))
    assert first <= 7000 <= last and group == 1
    assert sum(not math.isfinite(one) for one in arrived(1, prints, bad=10).sizes) == 1


@pytest.mark.parametrize("data", [b"", b"x" * 50, b"".join(pack(b"\x93\x90\x90\x91\x94\x00\x00\x05\x00") or [])])
def test_foreign_data_is_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


def test_shared_findings_survive_encoding() -> None:
    found = SharedFindings((WrongResult("loss", 1.0, step=3, ranks=(1,), words="loss: ..."),), True, "node1: /bundle")
    assert parse(msgspec.msgpack.encode(found), SharedFindings) == found
    with pytest.raises(BadMessage):
        parse(b"\xc1", SharedFindings)
