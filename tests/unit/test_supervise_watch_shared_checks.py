"""Checks on their way to the node that compares those of all: what arrives, and what does not."""

from __future__ import annotations

import math

import pytest

from safelaunch.capture.checks import About, Check
from safelaunch.model import Inconsistency
from safelaunch.supervise.cluster.messages import BadMessage, packed
from safelaunch.supervise.watch.consistency import Comparison
from safelaunch.supervise.watch.shared_checks import (
    MOST_POSITIONS,
    Found,
    decode,
    decode_found,
    encode,
    encode_found,
    share_of,
)

NAMES = ("0.weight", "0.bias", "2.weight")


def check(rank: int, position: int, prints: tuple[int, ...] = (1, -2, 3), **numbers: tuple[float, ...]) -> Check:
    about = About("AdamW 0 ab 29500", "parameters", 3, rank, ((0, 1, 2, 3),), tuple((name, 0) for name in NAMES))
    fine = (1.0,) * len(prints)
    sizes, gradients = numbers.get("sizes", fine), numbers.get("gradients", fine)
    losses = tuple((position + n, value) for n, value in enumerate(numbers.get("losses", ())))
    return Check(rank, about, position, prints, sizes, gradients, ((position, gradients[0]),), losses)


def test_what_tells_a_difference_arrives() -> None:
    sent = [check(0, 3), check(1, 3, (1, 9, 3)), check(1, 6, gradients=(math.nan, 1.0, 1.0), losses=(0.5, math.inf))]
    first, second, third = decode(encode(sent, share_of(2)))
    assert [one.prints for one in (first, second, third)] == [(1, -2, 3), (1, 9, 3), (1, -2, 3)]
    assert (second.rank, second.position, second.about.tensors) == (1, 3, sent[1].about.tensors)
    assert not math.isfinite(third.gradients[0]) and third.gradients[1:] == (0.0, 0.0) and third.sizes == (0.0,) * 3
    assert third.sentinel[0][0] == 6 and third.losses == ((6, 0.5), (7, math.inf))


def test_the_halves_of_two_nodes_make_one_finding() -> None:
    comparison = Comparison()
    comparison.add([check(rank, position) for rank in (0, 1) for position in (3, 6)])
    there = [check(2, 3), check(3, 3), check(2, 6), check(3, 6, (1, -2, 7))]
    comparison.add(decode(encode(there, share_of(2))))
    (found,) = comparison.found((0, 1, 2, 3), 0.0)
    assert (found.kind, found.ranks, found.step, found.since_step) == ("replicas-diverged", (3,), 6, 3)
    assert found.parameter == "2.weight"


def test_a_rank_of_another_number_in_its_job_stays_at_home() -> None:
    about = About("key", "parameters", 3, 5, ((0, 5),), (("weight", 0),))
    assert decode(encode([Check(0, about, 3, (1,), (1.0,), (1.0,))], share_of(2))) == []


def test_only_the_newest_positions_travel() -> None:
    found = decode(encode([check(0, position) for position in range(3, 303, 3)], share_of(2)))
    assert [one.position for one in found] == list(range(303 - 3 * MOST_POSITIONS, 303, 3))


def test_where_tensors_are_too_many_neighbours_share_a_fingerprint() -> None:
    names = tuple(f"layers.{number}.weight" for number in range(9000))
    groups = ((0, 1), (0, 1, 2, 3))
    about = About("key", "parameters", 3, -1, groups, tuple((name, n // 6000) for n, name in enumerate(names)))
    prints = tuple(hash((name, "bits")) >> 1 for name in names)
    fine = (1.0,) * len(names)

    def arrived(rank: int, prints: tuple[int, ...], bad: int = -1) -> Check:
        sizes = tuple(math.nan if n == bad else 1.0 for n in range(len(names)))
        data = encode([Check(rank, about, 3, prints, sizes, fine)], share_of(2000))
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


@pytest.mark.parametrize("data", [b"", b"x" * 50, b"".join(packed(b"\x93\x90\x90\x91\x94\x00\x00\x05\x00") or [])])
def test_what_a_stranger_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


def test_findings_travel_back() -> None:
    found = Found((Inconsistency("loss", 1.0, step=3, ranks=(1,), words="loss: ..."),), True, "node1: /bundle")
    assert decode_found(encode_found(found)) == found
    with pytest.raises(BadMessage):
        decode_found(b"\xc1")
