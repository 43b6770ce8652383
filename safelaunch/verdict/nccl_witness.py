"""NCCL's RAS service as a second witness: which ranks it means, and what it reports about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from safelaunch.model import (
    Claim,
    Evidence,
    NcclProcess,
    NcclState,
    NcclWitness,
)
from safelaunch.verdict.phrases import ranks_word

# It only supports or contradicts other evidence. It identifies a process by address, pid and GPU, and by its number in
# each communicator, so a process is a rank only if pids prove it; if two ranks are possible, it is neither.

_MOST = 4  # claims about ranks, and as many about unknown processes


def nccl_states(evidence: Evidence) -> dict[int, NcclState]:
    """Returns rank → state, for all ranks that NCCL identifies with certainty."""
    return {rank: process.state for rank, process in _in_nccl(evidence).items()}


def _in_nccl(evidence: Evidence) -> Mapping[int, NcclProcess]:
    if evidence.nccl is None:
        return {}
    pids = {rank.rank: rank.pid for rank in evidence.ranks if rank.pid > 0}
    return dict(_by_pid(evidence, evidence.nccl)) | dict(_by_number(evidence.nccl, pids, evidence.world_size))


def _by_number(witness: NcclWitness, pids: Mapping[int, int], world: int) -> Iterator[tuple[int, NcclProcess]]:
    """Yields the ranks of a communicator of all ranks, which numbers them as the job does, if the known pids agree."""
    for communicator in witness.communicators:
        members = {process.rank: process for process in communicator.processes}
        matched = [rank for rank in members if rank in pids and members[rank].pid > 0]
        agree = matched and all(pids[rank] == members[rank].pid for rank in matched)
        if communicator.size == world and agree and members.keys() <= set(range(world)):
            yield from members.items()


def _by_pid(evidence: Evidence, witness: NcclWitness) -> Iterator[tuple[int, NcclProcess]]:
    """Yields ranks of hosts identified by their pids: each of an address's pids is a rank there, and nowhere else.

    The text format names only processes in trouble, so an unseen node might have the same pids.
    """
    ranks: dict[str, dict[int, int]] = {}
    for rank in evidence.ranks:
        ranks.setdefault(rank.host, {})[rank.pid] = rank.rank
    processes: dict[str, dict[int, NcclProcess]] = {}
    for process in _all_processes(witness):
        processes.setdefault(process.host, {})[process.pid] = process
    if not witness.communicators and evidence.missing_ranks:
        return
    fits = [(a, host) for a in processes for host in ranks if processes[a].keys() <= ranks[host].keys()]
    for address, host in fits:
        if sum(address in pair or host in pair for pair in fits) == 1:
            yield from ((ranks[host][pid], process) for pid, process in processes[address].items())


def _all_processes(witness: NcclWitness) -> Iterator[NcclProcess]:
    yield from witness.processes
    for communicator in witness.communicators:
        yield from communicator.processes


def nccl_claims(evidence: Evidence) -> tuple[Claim, ...]:
    """Returns claims on ranks and unknown processes that NCCL reports as dead or unresponsive."""
    witness = evidence.nccl
    if witness is None:
        return ()
    by_rank = _in_nccl(evidence)
    named = {(process.host, process.pid) for process in by_rank.values()}
    texts = [
        f"{_STATE_WORDS[process.state]} {ranks_word([rank])} ({_where(process)})"
        for rank, process in sorted(by_rank.items())
        if process.state != "answers"
    ]
    unmatched = dict.fromkeys(
        p for p in _all_processes(witness) if p.state != "answers" and (p.host, p.pid) not in named
    )
    strangers = [
        f"{_STATE_WORDS[process.state]} a process that is no known rank ({_where(process)})" for process in unmatched
    ]
    return tuple(Claim(f"NCCL {text}", witness.file) for text in (*_limited(texts), *_limited(strangers)))


def nccl_rules_out(evidence: Evidence) -> tuple[str, ...]:
    """Rules out dead and stopped processes if each rank of the job has answered NCCL."""
    states = nccl_states(evidence)
    if len(states) < evidence.world_size or set(states.values()) != {"answers"}:
        return ()
    return (f"a process that is dead or stopped: NCCL has an answer from each of {ranks_word(states)}",)


_STATE_WORDS: Mapping[NcclState, str] = {"dead": "has given up", "unresponsive": "has no answer from"}


def _where(process: NcclProcess) -> str:
    gpu = f", GPU {process.gpu}" if process.gpu >= 0 else ""
    return f"pid {process.pid} on {process.host}{gpu}" if process.pid > 0 else f"a process that it does not know{gpu}"


def _limited(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _MOST else [*texts[: _MOST - 1], f"{texts[_MOST - 1]}, and {len(texts) - _MOST} more"]
