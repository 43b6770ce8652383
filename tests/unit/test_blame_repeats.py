"""When the same culprit again points at the hardware: what a script, or chance, explains is never said."""

from __future__ import annotations

import pytest

from safelaunch.blame.repeats import chance_of, repeats, suspected_gpus
from safelaunch.model import BlamedRank, Incident, Unit


def gpu(number: int, line: int, rank: int = 3, of: int = 8, **fields: object) -> Incident:
    """The GPU of one of ``of`` ranks does not come back, while the rank waits for it at ``line``."""
    return _incident(BlamedRank(rank, "a", f"GPU-{number}", "/train.py", line), of_gpus=of, **fields)


def host(name: str, line: int = 0, rank: int = 3, of: int = 4, **fields: object) -> Incident:
    at = ("/train.py", line) if line else ("", 0)
    ranks = () if not line else (BlamedRank(rank, name, "", *at),)
    told: dict[str, object] = {"cause": "node-lost", "hosts": (name,), "units": ("host",), "of_hosts": of} | fields
    return _incident(*ranks, **told)


_COUNT = iter(range(10_000))


def _incident(*ranks: BlamedRank, **fields: object) -> Incident:
    number = next(_COUNT)
    units: tuple[Unit, ...] = ("gpu", "host")
    known: dict[str, object] = {
        "id": str(number),
        "run_name": "train",
        "unix_s": float(number),
        "outcome": "hang",
        "cause": "gpu-kernel",
        "confidence": "high",
        "ranks": ranks,
        "units": units,
        "line_tells": False,
        "of_hosts": 1,
    }
    return Incident(**(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("incidents", "expected"),
    [
        ([], ""),
        ([gpu(3, 41)], ""),
        ([gpu(3, 41), gpu(3, 57)], "GPU-3"),
        ([gpu(3, 41), gpu(3, 41)], ""),  # one line, one rank: the script
        ([gpu(3, 41, rank=3), gpu(3, 41, rank=5)], "GPU-3"),  # the line only shows where a rank waits for its GPU
        ([gpu(3, 41, rank=3, line_tells=True), gpu(3, 41, rank=5, line_tells=True)], ""),  # the line at fault
        ([gpu(3, 41), gpu(3, 41), gpu(3, 57)], "GPU-3"),
        ([gpu(3, 41), gpu(4, 57)], ""),  # another GPU
        (
            [gpu(3, 41), gpu(4, 41), gpu(3, 57, rank=5)],
            "",
        ),  # a line of two GPUs tells nothing of either
        ([gpu(3, 41), gpu(3, 57, confidence="low")], ""),
        ([gpu(3, 41), gpu(3, 57, confidence="medium")], "GPU-3"),
        ([gpu(3, 41), gpu(3, 57, outcome="dump")], ""),
        ([gpu(3, 41), gpu(3, 57, units=())], ""),  # a cause that is no hardware's
        ([gpu(3, 41), gpu(3, 57, run_name="eval")], ""),  # of each run name by itself
        ([gpu(0, 41, of=1), gpu(0, 57, of=1)], ""),  # no other GPU could have been blamed
        ([gpu(0, 41, of=2), gpu(0, 57, of=2)], "GPU-0"),
        ([gpu(0, 41, of=8), gpu(0, 57, of=1)], ""),
        ([gpu(0, 41, of=0), gpu(0, 57, of=0)], ""),  # not known
        ([gpu(0, 41, of=2), gpu(1, 43, of=2, rank=1), gpu(0, 57, of=2)], ""),  # of three incidents, two have to meet
        ([gpu(3, 41), gpu(4, 43, rank=4), gpu(3, 57)], ""),  # on 8 GPUs, chance does that in 1 of 3 cases
        ([gpu(3, 41), gpu(4, 43, rank=4), gpu(3, 57), gpu(3, 60)], "GPU-3"),
        ([gpu(3, 41, of=512), gpu(4, 43, rank=4, of=512), gpu(3, 57, of=512)], "GPU-3"),
        ([gpu(3, 41), gpu(3, 57), gpu(5, 60)], ""),  # the same rank on another GPU: it goes with the rank
        ([gpu(3, 41, of=64), gpu(3, 57, rank=4, of=64), gpu(5, 60, of=64)], "GPU-3"),
        ([gpu(3, 41, of=64), gpu(3, 57, of=64), gpu(5, 60, rank=5, of=64)], "GPU-3"),
        ([*(gpu(n, 100 + n, rank=n) for n in range(8)), gpu(3, 57)], ""),  # nine incidents on eight GPUs
        ([gpu(3, 41), gpu(3, 57), *(gpu(5, 60 + n, rank=5) for n in range(3))], ""),
        ([gpu(3, 41), gpu(3, 57), *(gpu(5, 60 + n, rank=5) for n in range(4))], "GPU-5"),
        ([gpu(0, 41, rank=0), gpu(0, 41, rank=0), gpu(0, 41, rank=0)], ""),  # rank 0 saves, always there
        ([host("a"), host("a")], "a"),  # no line
        ([host("a", of=1), host("a", of=1)], ""),
        ([host("a", 41), host("a", 41, rank=5)], ""),
        ([host("a", 41), host("a", 57)], "a"),
        ([host("a"), host("b")], ""),
        ([host("a", host_ranks="8-15"), host("a", host_ranks="8-15")], "a"),
        ([host("a", host_ranks="0-7"), host("a", host_ranks="0-7")], ""),  # rank 0 may fill its node's memory
        ([host("a", host_ranks="0-7"), host("a", host_ranks="8-15")], "a"),
        ([host("a", host_ranks="8-15"), host("a", host_ranks="8-15"), host("b", host_ranks="8-15")], ""),
    ],
)
def test_repeats(incidents: list[Incident], expected: str) -> None:
    assert " ".join(one.name for one in repeats(incidents)) == expected


def test_a_repeat_says_how_often_of_how_many_and_where() -> None:
    first, second = gpu(3, 41), gpu(3, 57)
    (found,) = repeats([second, first])
    assert (found.unit, found.host, found.times, found.of) == ("gpu", "a", 2, 8)
    assert found.chance == pytest.approx(1 / 8)
    assert found.incidents == (first, second), "the oldest first"


@pytest.mark.parametrize(
    ("incidents", "firm", "chance"),
    [
        ([gpu(3, 41), gpu(3, 57)], False, 1 / 8),
        ([gpu(3, 41), gpu(3, 57), gpu(3, 60)], True, 1 / 64),
        ([gpu(3, 41, of=512), gpu(3, 57, of=512)], True, 1 / 512),
        ([gpu(0, 41, rank=0), gpu(0, 57, rank=0)], False, 1 / 4 + 3 / 4 * 1 / 8),
        ([gpu(0, 40 + n, rank=0) for n in range(9)], False, 1 / 4),  # rank 0 may do what no other rank does
        ([gpu(0, 41, rank=0), gpu(0, 57, rank=2), gpu(0, 60, rank=0)], True, 1 / 64),
    ],
)
def test_how_firm_a_suspicion_is(incidents: list[Incident], firm: bool, chance: float) -> None:
    (found,) = repeats(incidents)
    assert (found.is_firm, found.chance) == (firm, pytest.approx(chance, abs=1e-6))


def test_the_host_of_a_suspected_gpu_is_not_suspected_for_the_same() -> None:
    same = [gpu(3, 41, of_hosts=4), gpu(3, 57, of_hosts=4)]
    assert [one.unit for one in repeats(same)] == ["gpu"]
    assert [(one.unit, one.name) for one in repeats([*same, host("a")])] == [("gpu", "GPU-3"), ("host", "a")]


def test_two_gpus_of_one_host_make_the_host_suspect() -> None:
    found = repeats([gpu(3, 41, of_hosts=4), gpu(4, 57, of_hosts=4)])
    assert [(one.unit, one.name, one.host) for one in found] == [("host", "a", "a")]


def test_an_incident_that_blames_several_gpus_counts_for_none() -> None:
    several = _incident(
        BlamedRank(0, "a", "GPU-0", "/train.py", 70), BlamedRank(1, "a", "GPU-1", "/train.py", 70), of_gpus=8
    )
    assert not repeats([gpu(0, 41), several])


def test_what_several_nodes_write_down_of_one_event_counts_once() -> None:
    at = {"host_ranks": "8-15", "of": 3}
    first = [host("a", unix_s=100.0 + n, written_on=node, **at) for n, node in enumerate("bc")]
    assert not repeats(first)
    again = [host("a", unix_s=130.0 + n, written_on=node, **at) for n, node in enumerate("cb")]
    assert [one.times for one in repeats([*first, *again])] == [2], "anew, though soon after: they have written before"
    halves = [host("a", 41, unix_s=100.0, written_on="b"), host("a", 41, unix_s=101.0, written_on="c", units=())]
    other = host("a", 57, unix_s=900.0, written_on="b")
    assert [one.incidents for one in repeats([*halves, other])] == [(halves[0], other)], "the one that tells more"


def test_the_jobs_of_a_sweep_count_together() -> None:
    incidents = [gpu(3, 41, run_name="lr-1"), gpu(3, 57, run_name="lr-2"), gpu(5, 41, of=1)]
    assert suspected_gpus(incidents) == frozenset()
    assert suspected_gpus(incidents[:2], together=True) == {"GPU-3"}


@pytest.mark.parametrize(
    ("times", "incidents", "units", "expected"),
    [(2, 2, 8, 1 / 8), (2, 2, 2, 1 / 2), (2, 2, 1, 1.0), (2, 3, 8, 8 * (3 / 64 * 7 / 8 + 1 / 512)), (3, 3, 4, 1 / 16)],
)
def test_chance(times: int, incidents: int, units: int, expected: float) -> None:
    assert chance_of(times, incidents, units) == pytest.approx(expected)
