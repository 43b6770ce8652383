"""Explains why a rank is slow, if a counter differs clearly from the other ranks' and explains most of the loss.

Has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.addons.record.shares import RankTime
from safelaunch.addons.record.slowness import percent
from safelaunch.addons.slow.readings import RankReadings
from safelaunch.model import Gpu

MOST = 0.5  # share of the loss that a reason has to explain
TIMES = 2.0  # how many times the other ranks' share
TIMES_BEFORE = 1.5  # how many times the rank's own share since its start

_WORDS: Mapping[str, Callable[[str, RankReadings], str]] = {
    "stopped": lambda share, _: f"signals or a debugger stopped it {share} of the time",
    "cpu-quota": lambda share, _: f"its cgroup's CPU limit stopped it {share} of the time",
    "cpu-queue": lambda share, readings: (
        f"it waited {share} of the time for a CPU" + (f", while {readings.rival}" if readings.rival else "")
    ),
    "cpu-steal": lambda share, _: f"the hypervisor took {share} of its node's CPU time",
    "memory": lambda share, readings: (
        f"it waited {share} of the time for memory to be read from disk ({readings.major_faults:,} major faults)"
    ),
    "disk": lambda share, readings: (
        f"it waited {share} of the time for a disk"
        + ("" if readings.read_bytes or readings.written_bytes else ", or for a driver: it read and wrote no data")
    ),
    "garbage-collection": lambda share, _: f"Python's garbage collector took {share} of the time",
    "gil": lambda share, _: f"another of its threads held the GIL {share} of the time",
    "gpu-clock": lambda share, readings: f"its GPU's SM clock is {_clock(readings)}, {share} below the other ranks'",
}
REASONS = tuple(_WORDS)


@dataclass(frozen=True, slots=True)
class SlowReason:
    kind: str
    """one of ``REASONS``"""
    share: float
    """share of the rank's time"""
    words: str


def _clock(readings: RankReadings) -> str:
    assert readings.gpu is not None and readings.gpu.sm_clock_mhz
    limits = f" ({', '.join(readings.gpu.clocks_event_reasons)})" if readings.gpu.clocks_event_reasons else ""
    return f"{readings.gpu.sm_clock_mhz:,.0f} MHz{limits}"


def reason_of(
    rank: int,
    lost: float,
    readings: Sequence[RankReadings],
    times: Sequence[RankTime],
    *,
    since_start: bool,
) -> SlowReason | None:
    """Returns the reason that explains most of ``lost``, the share of time that the others wait for ``rank``.

    Args:
        since_start: The rank is slow from the start, so its past doesn't differ.
    """
    own = next((each for each in readings if each.rank == rank), None)
    others = [each for each in readings if each.rank != rank]
    if own is None or not others:
        return None
    shares = {each.rank: _with_samples(each, times) for each in readings}
    gpus = [each.gpu for each in others if each.gpu is not None and each.gpu.sm_clock_mhz]
    if own.gpu is not None and len(gpus) == len(others) and _is_held_down(own.gpu, gpus):
        clock_mhz, *others_mhz = (gpu.sm_clock_mhz or 0.0 for gpu in (own.gpu, *gpus))
        shares[rank]["gpu-clock"] = max(0.0, 1.0 - clock_mhz / min(others_mhz))
        for each in others:
            shares[each.rank]["gpu-clock"] = 0.0
    found: list[SlowReason] = []
    for kind in REASONS:
        share = shares[rank].get(kind, 0.0)
        if any(kind not in shares[each.rank] for each in others):
            continue  # unknown is no difference
        most = max(shares[each.rank][kind] for each in others)
        past = 0.0 if since_start else own.before.get(kind, 0.0)
        if share - most >= MOST * lost and share >= max(TIMES * most, TIMES_BEFORE * past):
            found.append(SlowReason(kind, share, _WORDS[kind](percent(share), own)))
    return max(found, key=lambda reason: reason.share, default=None)


def _is_held_down(gpu: Gpu, others: Sequence[Gpu]) -> bool:
    # A GPU that waits for data lowers its clock, and one that computes reaches its power limit before one that waits.
    limits = set(gpu.clocks_event_reasons or ("gpu_idle",))
    if not gpu.sm_clock_mhz or "gpu_idle" in limits or any(gpu.name != other.name for other in others):
        return False
    others_w = [other.power_limit_w or 0.0 for other in others]
    return limits != {"sw_power_cap"} or (gpu.power_limit_w is not None and gpu.power_limit_w < min(others_w))


def _with_samples(readings: RankReadings, times: Sequence[RankTime]) -> dict[str, float]:
    time = next((each for each in times if each.rank == readings.rank), None)
    held = {} if time is None else {"gil": max((holder.share for holder in time.holders), default=0.0)}
    return {**readings.shares, **held}
