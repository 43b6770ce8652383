"""The same culprit again: whom a verdict blames, as later ones will look at it, and what earlier ones blamed.

Only causes that can be hardware count. What decides is whether a fault of a GPU or a host, and nothing in the script,
would look exactly like this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from shlex import quote
from signal import SIGBUS, SIGFPE, SIGILL, SIGSEGV

import msgspec

from safelaunch.blame.repeats import FIRM, Repeat, place_words, repeats
from safelaunch.diagnose.advice import again
from safelaunch.model import (
    BlamedBefore,
    BlamedRank,
    Culprit,
    Evidence,
    Incident,
    Launched,
    NextStep,
    RankEvidence,
    Remembered,
    Suspect,
    Unit,
    Verdict,
    format_ranks,
)

MOST_RANKS = 8
_MOST_TEXT = 1000
_MOST_BEFORE = 4
_WITHOUT, _EXCLUDE = "Run again without the suspected GPU", "--exclude-blamed"
# Cause → the hardware that can be behind it. Causes that are not here are the script's, or a person's.
HARDWARE: Mapping[str, tuple[Unit, ...]] = {
    "gpu-kernel": ("gpu", "host"),
    "uninterruptible-io": ("host",),
    "node-lost": ("host",),
    "node-unreachable": ("host",),
    "node-behind": ("host",),
}
# A bad memory module or processor ends a process in these ways; so does native code, at a line of its own.
_OF_A_BAD_HOST = (SIGSEGV, SIGBUS, SIGILL, SIGFPE)
# What the CUDA driver and NVML say only of a device or its links.
_OF_A_BAD_GPU = re.compile(
    r"uncorrectable|hardware stack error|hardware error|gpu is lost|fallen off the bus", re.IGNORECASE
)
_WHERE_IT_MET_IT = ("gpu-kernel", "rank-exception")


def with_repeats(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Adds the hardware that this verdict blames anew, if earlier ones make it suspect."""
    known = evidence.remembered
    now = incident_of(verdict, evidence)
    if known is None or now is None:
        return verdict
    found = [one for one in repeats((*known.incidents, now)) if now in one.incidents]
    if not found:
        return verdict
    suspects = tuple(_suspect(one, now) for one in found)
    advice = tuple(text for one in suspects for text in _advice(one))
    step = _without_the_gpu(suspects, evidence.launched) or verdict.next
    return msgspec.structs.replace(verdict, suspects=suspects, suggestions=(*advice, *verdict.suggestions), next=step)


def incident_of(verdict: Verdict, evidence: Evidence) -> Incident | None:
    """What to remember of a verdict; None where it blames nobody, or nothing is to be remembered.

    ``id`` and ``bundle`` are for who writes it down.
    """
    known = evidence.remembered
    if known is None or verdict.outcome in ("dump", "suspect") or not (verdict.culprits or verdict.nodes_at_fault):
        return None
    sides = {rank.rank: rank for rank in evidence.ranks}
    units = _units(verdict, sides)
    hosts = {rank.host for rank in evidence.ranks} | {node.host for node in evidence.nodes}
    return Incident(
        id="",
        run_name=known.run_name,
        unix_s=known.unix_s,
        outcome=verdict.outcome,
        cause=verdict.cause,
        confidence=verdict.confidence,
        ranks=tuple(_blamed(one, sides.get(one.rank), known) for one in verdict.culprits[:MOST_RANKS]),
        hosts=tuple(node.host for node in verdict.nodes_at_fault[:MOST_RANKS]),
        units=units if len(verdict.culprits) <= MOST_RANKS else (),
        line_tells=verdict.cause not in _WHERE_IT_MET_IT,
        of_gpus=len({gpu for rank in evidence.ranks if (gpu := _gpu(rank, known))}),
        of_hosts=len(hosts - {""}),
        written_on=known.host,
        host_ranks=verdict.nodes_at_fault[0].ranks[:_MOST_TEXT] if len(verdict.nodes_at_fault) == 1 else "",
    )


def _units(verdict: Verdict, sides: Mapping[int, RankEvidence]) -> tuple[Unit, ...]:
    blamed = [sides[one.rank] for one in verdict.culprits if one.rank in sides]
    if verdict.cause == "rank-killed":
        return ("host",) if blamed and all(map(_died_of_itself, blamed)) else ()
    if verdict.cause == "rank-exception":
        said = [rank.exception.message for rank in blamed if rank.exception is not None]
        return ("gpu", "host") if said and all(map(_OF_A_BAD_GPU.search, said)) else ()
    return HARDWARE.get(verdict.cause, ())


def _died_of_itself(rank: RankEvidence) -> bool:
    signal = -rank.exit.returncode if rank.exit is not None else 0
    return signal in _OF_A_BAD_HOST and not rank.memory_kills.kernel_line


def _blamed(culprit: Culprit, side: RankEvidence | None, known: Remembered) -> BlamedRank:
    frame = culprit.frame
    return BlamedRank(
        rank=culprit.rank,
        host=culprit.host,
        gpu=_gpu(side, known) if side is not None else "",
        file=frame.file[-_MOST_TEXT:] if frame is not None else "",
        line=frame.line if frame is not None else 0,
    )


def _gpu(rank: RankEvidence, known: Remembered) -> str:
    """The UUID. A rank that has its GPU by a number is told by this node's list, which other nodes don't have."""
    if rank.gpu.startswith(("GPU-", "MIG-")):
        return rank.gpu[:_MOST_TEXT]
    return known.uuids.get(rank.gpu, "") if rank.host == known.host else ""


def _suspect(repeat: Repeat, now: Incident) -> Suspect:
    earlier = [one for one in reversed(repeat.incidents) if one is not now]
    what = f"GPU {repeat.name}" if repeat.unit == "gpu" else f"Host {repeat.name}"
    where = f" of {repeat.host}" if repeat.unit == "gpu" and repeat.host else ""
    again = f"{what}{where} is blamed for the {_nth(repeat.times)} time{_under(repeat)}."
    return Suspect(
        unit=repeat.unit,
        name=repeat.name,
        host=repeat.host,
        times=repeat.times,
        chance=round(repeat.chance, 4),
        words=f"{again} {_weight(repeat)}{_or_the_rank(repeat)}",
        before=tuple(_before(one, repeat) for one in earlier[:_MOST_BEFORE]),
    )


def _weight(repeat: Repeat) -> str:
    kind, odds = "GPUs" if repeat.unit == "gpu" else "hosts", _odds(repeat.chance)
    if repeat.is_firm:
        return f"Among {repeat.of} {kind}, chance alone does that in at most {odds}: suspect the hardware."
    if repeat.of_rank_0:
        return "That may be the hardware, or what the script does on rank 0 alone."
    return f"That may be the hardware; among {repeat.of} {kind}, chance alone does it in {odds}."


def _under(repeat: Repeat) -> str:
    if len(repeat.ranks) > 1:
        return f", as ranks {format_ranks(repeat.ranks)}"
    return ", each time at another line" if repeat.ranks else ""


def _or_the_rank(repeat: Repeat) -> str:
    if len(repeat.ranks) != 1:
        return ""
    other = "GPU" if repeat.unit == "gpu" else "host"
    return f" If the trouble follows rank {repeat.ranks[0]} to another {other}, it is the script."


def _before(one: Incident, repeat: Repeat) -> BlamedBefore:
    when = datetime.fromtimestamp(one.unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    words = f"{when}: {one.cause}, {place_words(one, repeat.name, repeat.unit)}"
    return BlamedBefore(words, one.bundle, one.written_on)


def _advice(one: Suspect) -> tuple[str, ...]:
    if one.unit == "gpu":
        return (
            f"{_WITHOUT}: `safelaunch {_EXCLUDE} ...`",
            f"Look for Xid and ECC errors of that GPU (`nvidia-smi -q -i {one.name}`, and the kernel's log), and have"
            " it tested (`dcgmi diag -r 3`).",
        )
    when = "" if one.chance <= FIRM else "If that happens again, "
    return (
        f"{when}{'k' if when else 'K'}eep jobs off the suspected host until it is checked:"
        f" `scontrol update nodename={quote(one.name)} state=drain reason=...`, `kubectl cordon`.",
    )


def _without_the_gpu(suspects: Sequence[Suspect], launched: Launched | None) -> NextStep | None:
    if launched is None or _EXCLUDE in launched.typed or all(one.unit != "gpu" for one in suspects):
        return None
    command = again(launched, options=[_EXCLUDE])
    return NextStep(_WITHOUT, command) if command else None


def _nth(times: int) -> str:
    return {2: "second", 3: "third"}.get(times, f"{times}th")


def _odds(chance: float) -> str:
    return f"1 of {1 / chance:.0f} cases" if chance > 0.001 else "1 of 1000 cases"
