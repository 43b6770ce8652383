"""The reason for a slow rank (``reasons.reason_of``) and the slow rank itself (``late_rank.slow_ranks``), by tables."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.slow.late_rank import slow_ranks
from safelaunch.addons.slow.readings import RankReadings
from safelaunch.addons.slow.reasons import reason_of
from safelaunch.addons.slow.service import Examination
from safelaunch.model import Gpu
from tests.unit.addons.record.recordings import ALL_REDUCE, AUGMENT, BACKWARD, FORWARD, Stack, recording

NORMAL = {"cpu-queue": 0.02, "stopped": 0.0, "disk": 0.01, "memory": 0.0, "garbage-collection": 0.01, "cpu-quota": 0.0}
WAITS = {FORWARD: 0.2, BACKWARD: 0.2, ALL_REDUCE: 0.6}
LATE = {FORWARD: 0.2, BACKWARD: 0.2, AUGMENT: 0.5, ALL_REDUCE: 0.1}


def readings(rank: int, **changed: float) -> RankReadings:
    return RankReadings(rank, shares={**NORMAL, **{name.replace("_", "-"): share for name, share in changed.items()}})


@pytest.mark.parametrize(
    ("own", "others", "before", "kind"),
    [
        ({}, {}, {}, ""),
        ({"disk": 0.3}, {}, {}, "disk"),
        ({"cpu-queue": 0.3}, {}, {}, "cpu-queue"),
        ({"cpu-quota": 0.3, "cpu-queue": 0.05}, {}, {}, "cpu-quota"),
        ({"stopped": 0.25, "cpu-queue": 0.2}, {}, {}, "stopped"),
        ({"garbage-collection": 0.2}, {}, {}, "garbage-collection"),
        ({"disk": 0.1}, {}, {}, ""),  # explains less than half of the loss
        ({"cpu-queue": 0.4}, {"cpu-queue": 0.25}, {}, ""),  # the others wait, too
        ({"cpu-queue": 0.3}, {}, {"cpu-queue": 0.3}, ""),  # it did so before
        ({"cpu-queue": 0.3}, {}, {"cpu-queue": 0.05}, "cpu-queue"),
    ],
)
def test_reason_differs_clearly_and_explains_most_of_the_loss(
    own: dict[str, float], others: dict[str, float], before: dict[str, float], kind: str
) -> None:
    late = replace(readings(1), shares={**NORMAL, **own}, before=before)
    rest = [replace(readings(rank), shares={**NORMAL, **others}) for rank in (0, 2)]
    reason = reason_of(1, 0.3, [*rest, late], [], since_start=False)
    assert (reason.kind if reason is not None else "") == kind


def test_past_is_no_argument_for_a_rank_that_is_slow_from_the_start() -> None:
    late = replace(readings(1, disk=0.3), before={"disk": 0.3})
    reason = reason_of(1, 0.3, [readings(0), late], [], since_start=True)
    assert reason is not None and reason.kind == "disk"


def test_unknown_is_no_difference() -> None:
    other = RankReadings(0, shares={name: share for name, share in NORMAL.items() if name != "disk"})
    assert reason_of(1, 0.3, [other, readings(1, disk=0.3)], [], since_start=True) is None
    assert reason_of(1, 0.3, [readings(1, disk=0.3)], [], since_start=True) is None
    assert reason_of(1, 0.3, [readings(0)], [], since_start=True) is None


@pytest.mark.parametrize(
    ("clocks", "kind"),
    [((1980.0, 1300.0, 1980.0), "gpu-clock"), ((1980.0, 1900.0, 1980.0), ""), ((1300.0, 1300.0, 1300.0), "")],
)
def test_slow_clock_is_a_reason_if_the_other_gpus_are_faster(clocks: Sequence[float], kind: str) -> None:
    seen = [
        replace(readings(rank), gpu=Gpu(rank, sm_clock_mhz=mhz, clocks_event_reasons=("hw_thermal_slowdown",)))
        for rank, mhz in enumerate(clocks)
    ]
    reason = reason_of(1, 0.3, seen, [], since_start=False)
    assert (reason.kind if reason is not None else "") == kind
    words = "its GPU's SM clock is 1,300 MHz (hw_thermal_slowdown), 34% below the other ranks'"
    assert reason is None or reason.words == words
    unread = [*seen[:2], replace(seen[2], gpu=None)]
    assert reason_of(1, 0.3, unread, [], since_start=False) is None


@pytest.mark.parametrize(
    ("changed", "is_reason"),
    [
        ({"clocks_event_reasons": ("sw_power_cap", "sw_thermal_slowdown")}, True),
        ({"clocks_event_reasons": ("sw_power_cap",), "power_limit_w": 400.0}, True),
        ({"clocks_event_reasons": ("sw_power_cap",), "power_limit_w": 700.0}, False),  # it computes, the others wait
        ({"clocks_event_reasons": ("sw_power_cap",)}, False),
        ({"clocks_event_reasons": ("gpu_idle",)}, False),  # it waits for its data
        ({"clocks_event_reasons": None}, False),
        ({"clocks_event_reasons": ()}, False),
        ({"name": "another model"}, False),
        ({"sm_clock_mhz": None}, False),
    ],
)
def test_clock_is_no_reason_if_the_gpu_idles_or_computes_at_its_limit(
    changed: dict[str, object], is_reason: bool
) -> None:
    gpu = Gpu(0, name="H100", sm_clock_mhz=1300.0, clocks_event_reasons=("hw_slowdown",), power_limit_w=700.0)
    quick = replace(gpu, sm_clock_mhz=1980.0, clocks_event_reasons=(), power_limit_w=700.0)
    own = replace(readings(1), gpu=replace(gpu, **{"power_limit_w": None, **changed}))
    others = [replace(readings(rank), gpu=quick) for rank in (0, 2)]
    reason = reason_of(1, 0.3, [*others, own], [], since_start=True)
    assert (reason is not None and reason.kind == "gpu-clock") == is_reason


def test_rival_is_named() -> None:
    late = replace(readings(1, cpu_queue=0.4), rival="stress (pid 4242) used 1.0 CPUs")
    reason = reason_of(1, 0.4, [readings(0), late], [], since_start=True)
    assert reason is not None
    assert reason.words == "it waited 40% of the time for a CPU, while stress (pid 4242) used 1.0 CPUs"


# --- the rank ---------------------------------------------------------------------------------------------------------


def on_hosts(recorded: Recording, hosts: str) -> Recording:
    return replace(recorded, ranks=[replace(rank, host=hosts[rank.rank]) for rank in recorded.ranks])


def examination(*ranks: dict[Stack, float], hosts: str = "aaaa", **arrivals: list[list[int]]) -> Examination:
    return Examination(on_hosts(recording(*ranks), hosts), [], arrivals)


NOBODY = (WAITS, WAITS, WAITS)


@pytest.mark.parametrize(
    ("examinations", "ranks"),
    [
        ([examination(WAITS, LATE, WAITS, a=[[1], [1]])], (1,)),
        ([examination(WAITS, LATE, WAITS, a=[[1], [2]])], None),
        ([examination(WAITS, LATE, WAITS, a=[[1], []])], None),
        ([examination(WAITS, LATE, WAITS, a=[[2], [2]])], None),
        ([examination(*NOBODY, a=[[1], [1]])], None),
        ([examination(WAITS, LATE, WAITS)], None),  # one witness
        ([examination(WAITS, LATE, WAITS)] * 2, (1,)),
        ([examination(WAITS, LATE, WAITS), examination(WAITS, WAITS, LATE)], None),
        # several nodes: only the late rank's own node sees it arrive last
        ([examination(WAITS, WAITS, WAITS, LATE, hosts="aabb", a=[[], []], b=[[3], [3]])], (3,)),
        ([examination(WAITS, WAITS, WAITS, LATE, hosts="aabb", a=[[0], [0]], b=[[3], [3]])], None),
        ([examination(WAITS, WAITS, WAITS, LATE, hosts="aabb", a=[[], []], b=[[], []])], None),
        ([examination(WAITS, WAITS, LATE, hosts="aab", a=[[], []])], None),
        ([examination(WAITS, WAITS, LATE, hosts="aab", a=[[], []])] * 2, (2,)),
    ],
)
def test_all_witnesses_have_to_name_the_same_ranks(
    examinations: list[Examination], ranks: tuple[int, ...] | None
) -> None:
    slow = slow_ranks(examinations, since_start=True)
    assert (slow.ranks if slow is not None else None) == ranks


def test_same_line_that_takes_longer_is_more_work_or_a_slower_device() -> None:
    late = {FORWARD: 0.5, BACKWARD: 0.4, ALL_REDUCE: 0.1}
    other = {FORWARD: 0.3, BACKWARD: 0.4, ALL_REDUCE: 0.3}
    slow = slow_ranks([examination(other, late, other, a=[[1], [1]])], since_start=True)
    assert slow is not None and slow.why == " (1.7 times as long: more work, or a slower device)"


@pytest.mark.parametrize(("busy", "ranks"), [((99, 100), None), ((99, 60), (1,)), ((70, 75), (1,)), ((None, 99), (1,))])
def test_rank_whose_gpu_never_idles_is_not_late(busy: Sequence[int | None], ranks: tuple[int, ...] | None) -> None:
    late = {FORWARD: 0.2, BACKWARD: 0.55, AUGMENT: 0.25}
    other = {FORWARD: 0.2, BACKWARD: 0.8}
    seen = [
        Examination(
            recording(other, late, other, active={BACKWARD: 0.0}),
            [replace(readings(1), gpu=Gpu(1, utilisation_percent=percents))],
        )
        for percents in busy
    ]
    slow = slow_ranks(seen, since_start=True)
    assert (slow.ranks if slow is not None else None) == ranks
