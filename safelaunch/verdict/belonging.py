"""Where the ranks at fault belong: their process groups (a pipeline stage, a tensor group) and their GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import msgspec

from safelaunch.model import Allocations, Claim, DeviceMemory, RankEvidence
from safelaunch.model.words import size as words
from safelaunch.stacks import frames as fr
from safelaunch.stacks.failures import Shortage, shortage
from safelaunch.verdict.causes import GPU_FRAGMENTED, GPU_FULL, GPU_OF_TWO_RANKS, GPU_SHARED, GPU_UNSHARDED, Advice
from safelaunch.verdict.collectives import DEFAULT_GROUPS, label_of
from safelaunch.verdict.findings import Annotation, Finding, ranks_word
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.waits import Case

MOST_RANKS, MOST_GROUPS = 4, 6


def belonging(case: Case, finding: Finding) -> Iterator[Annotation]:
    """The groups and the GPUs of the ranks at fault. Where these are all ranks of one group, and no others, a sentence
    says so: what that group alone does is then where to look.
    """
    named = sorted({culprit.rank for culprit in finding.culprits})
    claims = tuple(claim for rank in named[:MOST_RANKS] for claim in _claims(case, rank))
    whole = _groups(case, named[0]).get(tuple(named)) if len(named) > 1 else None
    yield Annotation(f"These are all the ranks of group {whole}." if whole is not None else "", context=claims)


def _claims(case: Case, rank: int) -> Iterator[Claim]:
    groups = _groups(case, rank)
    if groups:
        words = ", ".join(f"{name} ({ranks_word(ranks)})" for ranks, name in list(groups.items())[:MOST_GROUPS])
        record = case.ranks[rank].evidence.flight_record
        told = record is not None and any(record.groups.values())
        yield Claim(f"rank {rank} is in {words}", f"ranks/{rank}/{'flight_recorder' if told else 'rank'}.json")
    gpu = case.ranks[rank].evidence.gpu
    if gpu:
        yield Claim(f"rank {rank} has GPU {gpu}, by its CUDA_VISIBLE_DEVICES and LOCAL_RANK", f"ranks/{rank}/rank.json")


def _groups(case: Case, rank: int) -> dict[tuple[int, ...], str]:
    """Ranks → name, of the groups that the rank is in with others, but not with all, the smallest first."""
    labels = _labels(case, rank)
    found: dict[tuple[int, ...], str] = {}
    for name, ranks in case.alignment.listed(rank).items():
        members = tuple(sorted(ranks))
        if rank in members and 1 < len(members) < len(case.world):
            found.setdefault(members, labels.get(name) or f"'{name.partition(' of ranks ')[0]}'")
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def with_group_names(case: Case, finding: Finding) -> Finding:
    """Puts what people call a group before the name that torch gave it: ``group mesh_tp ('11')``."""
    called: dict[str, set[str]] = {}
    for rank in case.ranks:
        for name, label in _labels(case, rank).items():
            called.setdefault(name, set()).add(label)
    sure = {name: min(labels) for name, labels in called.items() if len(labels) == 1}

    def named(text: str) -> str:
        return _QUOTED.sub(lambda found: _with_label(found[0], found[1], sure.get(found[1], "")), text)

    return replace(
        finding,
        summary=named(finding.summary),
        claims=tuple(msgspec.structs.replace(claim, claim=named(claim.claim)) for claim in finding.claims),
        culprits=tuple(msgspec.structs.replace(culprit, reason=named(culprit.reason)) for culprit in finding.culprits),
        ruled_out=tuple(map(named, finding.ruled_out)),
    )


_QUOTED = re.compile(r"\bgroup '([^']{1,64})'")


def _with_label(text: str, name: str, label: str) -> str:
    return f"group {label} ('{name}')" if label and not label.startswith("'") else text


def _labels(facts: CaseFacts, rank: int) -> dict[str, str]:
    """Name → what people call a group: its description, by the rank itself or by its calls."""
    told, used = _told(facts.ranks[rank].evidence), facts.alignment.ring(rank).used().values()
    return {**told, **{kind.group: told.get(kind.group) or label_of(kind) for kind in used}}


def _told(rank: RankEvidence) -> dict[str, str]:
    return {name: text for name, text in rank.gil.called.items() if text not in ("undefined", *DEFAULT_GROUPS)}


# --- device meshes ----------------------------------------------------------------------------------------------------

_OF_A_MESH = "mesh_"  # begins the description of a DeviceMesh's groups; its dimension's name follows


def mesh(facts: CaseFacts) -> tuple[tuple[str, int], ...]:
    """Dimensions and sizes of the DeviceMesh over all ranks, the outermost first; empty where no such mesh is seen.

    A mesh leaves its name only in the descriptions of its groups. Those of flattened dimensions are made after them.
    """
    found = {_dimensions(facts, rank) for rank in facts.ranks} - {()}
    return found.pop() if len(found) == 1 else ()


def _dimensions(facts: CaseFacts, rank: int) -> tuple[tuple[str, int], ...]:
    labels, dimensions = _labels(facts, rank), []
    for name, members in facts.alignment.listed(rank).items():
        label = labels.get(name, "")
        if label.startswith(_OF_A_MESH) and rank in members:
            dimensions.append((label.removeprefix(_OF_A_MESH), len(members)))
            if prod(size for _, size in dimensions) == facts.evidence.world_size:
                return tuple(dimensions)
    return ()


# --- out of memory on a GPU: what torch had of it, and who else -------------------------------------------------------

_BLOCKS = 5
_NAMES = 3
_SHARE = 10  # a tenth of what is in tensors


def gpu_memory(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Where the memory of each rank's GPU is that had none left; the first one's in a sentence."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    short = [(rank, told) for rank in ranks if (told := shortage_of(rank)) is not None]
    for rank, told in short[:MOST_RANKS]:
        words = [f"Rank {rank.rank} {_sizes(told)}.", *_held(rank), *_whole(rank), *_others(facts, told)]
        claim = Claim(f"rank {rank.rank}: {_sizes(told)}", f"ranks/{rank.rank}/exception.json")
        text = " ".join(words) if rank is short[0][0] else ""
        yield Annotation(text, (claim, *_held_claims(rank)), advice=frozenset(_advice(facts, rank, told)))


def shortage_of(rank: RankEvidence) -> Shortage | None:
    return shortage(rank.exception.message) if rank.exception is not None else None


def _sizes(told: Shortage) -> str:
    """``requested 2.0 GiB on GPU 0 (79.2 GiB, 1.1 GiB free); torch has 70.0 GiB in tensors and 6.1 GiB unused``."""
    gpu = f"GPU {told.device}" if told.device >= 0 else "its GPU"
    free = f", {words(told.free)} free" if told.free is not None else ""
    size = f" ({words(told.total)}{free})" if told.total is not None else ""
    text = f"requested {words(told.asked)} on {gpu}{size}" if told.asked is not None else f"used up {gpu}"
    if told.allocated is not None and told.unused is not None:
        text += f"; torch has {words(told.allocated)} in tensors and {words(told.unused)} reserved and unused"
    return text


def _seen_then(rank: RankEvidence) -> DeviceMemory | None:
    """What filled the GPU when the allocation failed; None where the end of the script had freed some of it before."""
    seen, told = rank.device_memory, shortage_of(rank)
    if seen is None or told is None or seen.at_allocation or told.allocated is None:
        return seen
    return seen if (seen.allocated or 0) * 10 >= told.allocated * 9 else None


def _held(rank: RankEvidence) -> Iterator[str]:
    """Where most of the memory was allocated, if that is known and is much of it; else how large the blocks are."""
    seen = _seen_then(rank)
    if seen is None or not seen.blocks:
        return
    first = seen.blocks[0]
    if first.frames and _SHARE * first.size >= (seen.allocated or 0):
        yield f"The largest part is {_block(rank, first)}."
    elif seen.largest:
        yield f"Its largest allocation is {words(seen.largest)}."


def _held_claims(rank: RankEvidence) -> Iterator[Claim]:
    seen = _seen_then(rank)
    for block in seen.blocks[:_BLOCKS] if seen is not None else ():
        yield Claim(f"rank {rank.rank} holds {_block(rank, block)}", f"ranks/{rank.rank}/device_memory.json")


def _block(rank: RankEvidence, block: Allocations) -> str:
    """``41.2 GiB in 96 blocks, allocated at model.py:88 (forward)``."""
    frame = fr.stack_of(rank, block.frames).user_frame or (block.frames[0] if block.frames else None)
    count = "1 block" if block.count == 1 else f"{block.count} blocks"
    each = f" of {words(block.size // block.count)}" if block.count and not block.frames else ""
    return f"{words(block.size)} in {count}{each}{', allocated' if frame else ''}{fr.at(frame)}"


def _whole(rank: RankEvidence) -> Iterator[str]:
    seen = rank.device_memory
    if seen is None or not _is_hardly_sharded(seen):
        return
    names = ", ".join(seen.whole_names[:_NAMES])
    yield (
        f"Each rank holds {words(seen.whole or 0)} of its parameters whole ({names}); those that are sharded take"
        f" {words(seen.sharded or 0)} of it."
    )


def _is_hardly_sharded(seen: DeviceMemory) -> bool:
    """Most of what it holds of the parameters, and with gradients and optimizer state a part that counts."""
    return bool(
        seen.whole and seen.sharded and seen.whole >= seen.sharded and seen.whole * 4 * _SHARE >= (seen.allocated or 0)
    )


def _others(facts: CaseFacts, told: Shortage) -> Iterator[str]:
    """Who else is on that GPU."""
    by_pid = _by_pid(facts)
    for pid, size in told.others:
        who = by_pid.get(pid) or f"Process {pid}, which does not belong to this job,"
        yield f"{who} uses {words(size)} of the same GPU."
    if told.is_fragmented:
        yield "The memory that torch holds unused would have been enough, but it is fragmented."


def _advice(facts: CaseFacts, rank: RankEvidence, told: Shortage) -> Iterator[Advice]:
    by_pid = _by_pid(facts)
    others = [pid for pid, _ in told.others]
    if any(pid in by_pid for pid in others):
        yield GPU_OF_TWO_RANKS
    if any(pid not in by_pid for pid in others):
        yield GPU_SHARED
    if rank.device_memory is not None and _is_hardly_sharded(rank.device_memory):
        yield GPU_UNSHARDED
    if told.is_fragmented:
        yield from GPU_FRAGMENTED
    elif told.allocated is not None and told.total and 2 * told.allocated > told.total:
        yield GPU_FULL


def _by_pid(facts: CaseFacts) -> dict[int, str]:
    """The processes of the job's ranks, in words."""
    found: dict[int, str] = {}
    for number, one in facts.ranks.items():
        found |= {child.pid: f"A {child.role} of rank {number}" for child in one.evidence.children}
        found[one.evidence.pid] = f"Rank {number}"
    return found
