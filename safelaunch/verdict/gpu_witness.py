"""GPUs as a witness: while ranks wait in a collective, their GPUs spin, so one that doesn't is the one to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from safelaunch.model import Claim, Gpu, GpuUse, RankEvidence
from safelaunch.verdict.blame import blame, conditions
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exits import kernel_claim
from safelaunch.verdict.findings import Annotation, Finding, Ruling
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import capital, ranks_word, summary_of, waits_words
from safelaunch.verdict.rank_state import CaseFacts

# A kernel of NCCL that waits uses the whole GPU, no memory and little power. Percent, and a factor.
_IDLE, _BUSY, _NO_MEMORY, _MEMORY, _MORE_POWER = 10, 90, 1, 10, 1.5
_BROKEN = re.compile(r"is lost|fallen off the bus|requires? reset", re.IGNORECASE)

# "": unknown
GpuActivity = Literal["", "idle", "spins", "computes"]


@dataclass(frozen=True)
class OddGpu:
    """The only GPU that differs from those that spin."""

    rank: int
    activity: GpuActivity
    spinning: tuple[int, ...]

    @property
    def does(self) -> str:
        does = "is idle" if self.activity == "idle" else "computes"
        return f"{does}, while the GPUs of {ranks_word(self.spinning)} spin"


def activity_of(reading: Gpu, usual: Gpu | None = None) -> GpuActivity:
    """Returns what a reading shows. A GPU that is as idle while the job makes steps takes no part."""
    busy, memory = reading.utilisation_percent, reading.memory_utilisation_percent
    if busy is not None and busy < _IDLE:
        usual_busy = usual.utilisation_percent if usual is not None else None
        return "" if usual_busy is not None and usual_busy < _IDLE else "idle"
    if busy is None or memory is None or busy < _BUSY or _NO_MEMORY < memory < _MEMORY:
        return ""
    return "spins" if memory <= _NO_MEMORY else "computes"


def odd_gpu(looks: Sequence[Mapping[int, Gpu]], usual: Mapping[int, Gpu], world_size: int) -> OddGpu | None:
    """Returns the GPU that differs, if in every look the GPUs of most ranks spin and no other GPU differs.

    Args:
        looks: Readings by rank, at least two.
        usual: Readings while the job was stepping.
    """
    each = [_activities(look, usual) for look in looks]
    same = {rank: activity for rank, activity in each[0].items() if {look.get(rank) for look in each} == {activity}}
    spinning = tuple(rank for rank, activity in same.items() if activity == "spins")
    odd = [rank for rank, activity in same.items() if activity not in ("", "spins")]
    if len(each) < 2 or len(odd) != 1 or 2 * len(spinning) <= world_size:
        return None
    return OddGpu(odd[0], same[odd[0]], spinning)


def _activities(look: Mapping[int, Gpu], usual: Mapping[int, Gpu]) -> dict[int, GpuActivity]:
    found = {rank: activity_of(reading, usual.get(rank)) for rank, reading in look.items()}
    power = {rank: look[rank].power_w for rank, activity in found.items() if activity == "spins"}
    first = _highest(power)
    # A GPU that always draws more than the others must draw more even in proportion.
    normal = {rank: usual[rank].power_w for rank in power if rank in usual}
    shares = {rank: drawn / normal[rank] for rank, drawn in power.items() if drawn and normal.get(rank)}  # type: ignore[operator]
    if first is not None and (len(shares) < len(power) or _highest(shares) == first):
        found[first] = "computes"
    return found


def _highest(values: Mapping[int, float | None]) -> int | None:
    # By far the highest of at least three.
    known = {rank: value for rank, value in values.items() if value is not None}
    first, second, *others = sorted(known, key=lambda rank: known[rank], reverse=True) if len(known) > 2 else (0, 0)
    return first if others and len(known) == len(values) and known[first] >= _MORE_POWER * known[second] else None


# --- the ranks of a case ----------------------------------------------------------------------------------------------


def gpu_differs(facts: CaseFacts) -> Ruling:
    """All ranks wait, and one rank's GPU differs: the driver reports its error, or it doesn't spin like the others'."""
    if facts.gone or facts.evidence.stopped or facts.evidence.labels:
        return ""
    gpus = _own_gpus(facts)
    broken = {rank: words for rank in facts.ranks if (words := _error_of(facts.ranks[rank].evidence, gpus.get(rank)))}
    if len(broken) == 1:
        ((rank, words),) = broken.items()
        others = [other for other in facts.ranks if other != rank]
        return _blamed(facts, "gpu-lost", rank, words, others, gpus)
    odd = _odd_gpu(facts, gpus) if not broken else None
    if odd is None:
        return ""
    return _blamed(facts, "gpu-kernel", odd.rank, f"its GPU {odd.does}", odd.spinning, gpus)


def gpu_apart(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Names the rank whose GPU differs, if several ranks are at fault."""
    at_fault = {culprit.rank for culprit in finding.culprits}
    gpus = _own_gpus(facts) if len(at_fault) > 1 and not facts.gone else {}
    odd = _odd_gpu(facts, gpus)
    if odd is not None and odd.rank in at_fault:
        yield Annotation(
            f"Only the GPU of rank {odd.rank} {odd.does}.",
            (_claim(gpus[odd.rank], f"rank {odd.rank}: "),),
        )


def _blamed(
    facts: CaseFacts, cause: str, rank: int, words: str, others: Sequence[int], gpus: Mapping[int, GpuUse]
) -> Finding:
    state = facts.ranks[rank]
    errors = state.evidence.gpu_errors
    waits = f"waits in {state.wait.words}" if state.wait is not None else ""
    condition = state.condition or Condition(cause, waits, state.frame)
    claims = tuple(kernel_claim(state.evidence, line) for line in errors)
    claims += (_claim(gpus[rank]),) if rank in gpus else ()
    compared = tuple(_claim(gpus[other], f"rank {other}: ") for other in others[:1] if other in gpus)
    condition = replace(condition, reason="; ".join(filter(None, (condition.reason, words))), claims=claims)
    own = conditions(facts)
    text = f"{capital(waits_words(facts, facts.waiting))}." if facts.waiting else summary_of(own, facts, [])
    by_driver = cause == "gpu-lost" and (bool(errors) or bool(gpus[rank].looks[-1].error))
    doubts = {
        Doubt.GPUS_ALONE: not by_driver,
        Doubt.GPUS_UNREAD: cause == "gpu-kernel" and len(others) + 1 < len(facts.world),
        Doubt.GPU_BY_NUMBER: not errors and _is_by_number(state.evidence, gpus[rank]),
        Doubt.UNSEEN_RANKS: bool(facts.unseen),
    }
    summary = f"{text} Rank {rank} differs: {words}."
    finding = blame(facts, cause, doubts_if(doubts), {rank: condition}, summary=summary, claims=compared)
    return replace(finding, victims=tuple(others))


def _odd_gpu(facts: CaseFacts, gpus: Mapping[int, GpuUse]) -> OddGpu | None:
    # Its rank must wait at the same place as one whose GPU spins.
    usual = {rank: gpu.usual for rank, gpu in gpus.items() if gpu.usual is not None}
    looks = [{rank: gpu.looks[n] for rank, gpu in gpus.items() if len(gpu.looks) > 1} for n in (0, -1)]
    odd = odd_gpu(looks, usual, len(facts.world))
    places = {rank: state.frame and (state.frame.file, state.frame.line) for rank, state in facts.ranks.items()}
    return odd if odd is not None and places[odd.rank] in {places[rank] for rank in odd.spinning} else None


def _own_gpus(facts: CaseFacts) -> dict[int, GpuUse]:
    # Without GPUs that several ranks or other programs use.
    here: dict[str, list[GpuUse]] = {}
    for gpu in facts.evidence.gpus:
        here.setdefault(gpu.host, []).append(gpu)
    ranks = ((rank, state.evidence) for rank, state in facts.ranks.items())
    found = {rank: own for rank, one in ranks if (own := _gpu_of(facts, one, here.get(one.host, []))) is not None}
    owners = sides_of({rank: (gpu.host, gpu.index) for rank, gpu in found.items()})
    return {rank: found[rank] for (rank, *others) in owners.values() if not others and _is_alone(facts, found[rank])}


def _gpu_of(facts: CaseFacts, rank: RankEvidence, here: Sequence[GpuUse]) -> GpuUse | None:
    own = [gpu for gpu in here if gpu.uuid and gpu.uuid == rank.gpu]
    own = own or [gpu for gpu in here if rank.pid in {process.pid for process in gpu.processes}]
    if not own and not any((rank.host, process.pid) in facts.processes for gpu in here for process in gpu.processes):
        own = [gpu for gpu in here if _is_by_number(rank, gpu)]  # in a container with its own pids
    return own[0] if len(own) == 1 else None


def _is_by_number(rank: RankEvidence, gpu: GpuUse) -> bool:
    number = rank.gpu or (str(rank.device) if rank.device is not None else "")
    is_certain = (gpu.uuid and gpu.uuid == rank.gpu) or rank.pid in {process.pid for process in gpu.processes}
    return number == str(gpu.index) and not is_certain


def _is_alone(facts: CaseFacts, gpu: GpuUse) -> bool:
    # In a container, the rank's process has another pid.
    owners = [facts.processes.get((gpu.host, process.pid)) for process in gpu.processes]
    return len({owner and owner[0] for owner in owners}) < 2 and (None not in owners or len(owners) == 1)


def _error_of(rank: RankEvidence, gpu: GpuUse | None) -> str:
    # A clause.
    if rank.gpu_errors:
        number = re.search(r"\): (\d+)", rank.gpu_errors[-1])
        return f"the driver has reported Xid {number[1] if number else ''} of its GPU"
    if gpu is None or len(gpu.looks) < 2:
        return ""
    last, before = gpu.looks[-1], gpu.usual or gpu.looks[0]
    if _BROKEN.search(last.error):
        return f"the driver reports an error of its GPU ({last.error})"
    if last.ecc_errors and before.ecc_errors is not None and last.ecc_errors > before.ecc_errors:
        return "its GPU has new uncorrected memory errors"
    failed = last.row_remap_failed and before.row_remap_failed is False
    return "its GPU has no spare row left for a bad one in its memory" if failed else ""


def _claim(gpu: GpuUse, whose: str = "") -> Claim:
    looks = "; then ".join(dict.fromkeys(filter(None, map(_words_of, gpu.looks))))
    usual = f"; while the job made steps: {_words_of(gpu.usual)}" if gpu.usual is not None else ""
    return Claim(f"{whose}GPU {gpu.index}: {looks}{usual}", f"node/{gpu.host}/gpus.json")


def _words_of(gpu: Gpu) -> str:
    values = {
        "{:.0f} % busy": gpu.utilisation_percent,
        "memory {:.0f} %": gpu.memory_utilisation_percent,
        "{:.0f} W": gpu.power_w,
        "{:.0f} uncorrected memory errors": gpu.ecc_errors or None,
    }
    return gpu.error or ", ".join(words.format(value) for words, value in values.items() if value is not None)
