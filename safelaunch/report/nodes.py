"""Shows a job's nodes on the page, with equal nodes in one row, and ranks that use another rank's GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safelaunch.model import Gpu, format_ranks
from safelaunch.report.about import Link, NodeSummary, ReportHeader
from safelaunch.report.tables import ItemNumbers, hosts_word
from safelaunch.system.printable import clean
from safelaunch.verdict.rank_state import CaseFacts

FULL = 0.95
MOST_LINE = 300
MOST_GPUS = 64
MOST_LINKS = 24
MOST_LOG_BYTES = 400_000  # of all nodes
_UP = ("up", "active", "unknown", "")  # a virtual interface reports "unknown"


@dataclass(frozen=True)
class _NodeRow:
    host: str
    ranks: str
    state: str
    culprit: bool
    files: NodeSummary | None
    notes: tuple[str, ...]  # without numbers


def nodes(
    facts: CaseFacts, about: ReportHeader, states: Mapping[str, tuple[str, str]], culprits: Collection[int]
) -> dict[str, Any]:
    """Returns ``rows``, one per class of equal nodes, and ``every``, all nodes.

    Rows with ranks at fault come first, then conspicuous rows.

    Args:
        states: Host → its ranks, and its state in words.
    """
    classes: dict[Hashable, list[_NodeRow]] = {}
    for node in _all(facts, about, states, set(culprits)):
        classes.setdefault(_class_of(node), []).append(node)
    ordered = sorted(classes.values(), key=lambda members: (not members[0].culprit, not members[0].notes))
    versions, environments = ItemNumbers[tuple[tuple[str, str], ...]](), ItemNumbers[tuple[tuple[str, str], ...]]()
    logs, names = ItemNumbers[tuple[str, ...]](), ItemNumbers[str]()
    every: list[dict[str, Any]] = []
    left = MOST_LOG_BYTES
    for number, members in enumerate(ordered):
        for node in members:
            row: dict[str, Any] = {"host": node.host, "row": number, "r": node.ranks, "state": node.state}
            if node.files is not None:
                row |= _details(node.files, names)
                row["v"] = versions[node.files.versions[:40]]
                row["e"] = environments[node.files.environment[:60]]
                log = tuple(line[:MOST_LINE] for line in node.files.kernel_log)
                if log and (size := sum(map(len, log))) <= left:
                    left -= size
                    row["log"] = logs[log]
            every.append(row)
    return {
        "rows": [_row(members) for members in ordered],
        "every": every,
        "versions": list(versions),
        "environments": list(environments),
        "logs": list(logs),
        "names": list(names),
    }


def _all(
    facts: CaseFacts, about: ReportHeader, states: Mapping[str, tuple[str, str]], culprits: set[int]
) -> Iterable[_NodeRow]:
    files = {node.host: node for node in about.nodes}
    of_host: dict[str, list[int]] = {}
    for rank, one in facts.ranks.items():
        of_host.setdefault(one.evidence.host, []).append(rank)
    for host in dict.fromkeys([*states, *files, *of_host]):
        if host:
            knowledge, state = states.get(host, ("", ""))
            ranks, summary = of_host.get(host, []), files.get(host)
            notes = _standing_out(summary) if summary is not None else ()
            yield _NodeRow(host, knowledge or format_ranks(ranks), state, bool(culprits & set(ranks)), summary, notes)


def _class_of(node: _NodeRow) -> Hashable:
    """Returns a key that is equal for nodes that differ only in numbers. Network speed and MTU must be equal, too."""
    state = re.sub(r"\d+", "", node.state)
    if node.files is None:
        return node.culprit, state, node.notes
    files = node.files
    return (
        node.culprit,
        state,
        node.notes,
        files.cpus,
        _gpu_words(files),
        files.versions,
        tuple(link.speed for link in files.network),
    )


def _standing_out(one: NodeSummary) -> tuple[str, ...]:
    notes = [f"GPU {gpu.index} does not answer" for gpu in one.gpus if gpu.error]
    notes += [f"GPU {gpu.index} counts ECC errors" for gpu in one.gpus if gpu.ecc_errors]
    notes += [f"GPU {gpu.index} replaces a memory row at its next reset" for gpu in one.gpus if gpu.row_remap_pending]
    notes += [f"GPU {gpu.index} has no spare memory row left" for gpu in one.gpus if gpu.row_remap_failed]
    notes += [f"{place} is nearly full" for place, share in one.disks if share > FULL]
    notes += ["memory is nearly full"] if _used(one) > FULL else []
    notes += [f"{link.name} is {link.state}" for link in one.network if link.state.lower() not in _UP]
    notes += ["the kernel log has a message"] if one.kernel_log else []
    return tuple(notes)


def _used(one: NodeSummary) -> float:
    return 1 - one.memory_available_bytes / one.memory_total_bytes if one.memory_total_bytes else 0.0


def _row(members: Sequence[_NodeRow]) -> dict[str, Any]:
    first = members[0]
    files = [node.files for node in members if node.files is not None]
    gpus = [gpu for file in files for gpu in file.gpus if not gpu.error]
    ranks = ",".join(node.ranks for node in members if node.ranks)
    return {
        "hosts": hosts_word([node.host for node in members]),
        "n": len(members),
        "c": int(first.culprit),
        "r": format_ranks(_numbers(ranks)) if ranks else "",
        "state": first.state,
        "gpus": _gpu_words(files[0]) if files else "",
        "busy": _span([gpu.utilisation_percent for gpu in gpus]),
        "gpu_memory": _span([
            100 * gpu.memory_used_bytes / gpu.memory_total_bytes
            for gpu in gpus
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes
        ]),
        "memory": _span([100 * _used(file) for file in files if file.memory_total_bytes]),
        "load": _span([file.load[0] for file in files if file.load]),
        "network": _network_words(files[0].network) if files else "",
        "notes": list(first.notes),
    }  # fmt: skip


def _numbers(ranges: str) -> set[int]:
    numbers: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _span(values: Iterable[float | None]) -> list[float]:
    numbers = [value for value in values if value is not None]
    return [round(min(numbers), 1), round(max(numbers), 1)] if numbers else []


def _gpu_words(one: NodeSummary) -> str:
    counts = Counter(gpu.name or "GPU" for gpu in one.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or one.no_gpus


def _network_words(links: Sequence[Link]) -> str:
    # ``eth0 (25000 Mbit/s, MTU 9000), 8 InfiniBand ports``
    plain = [link.name + f" ({link.speed})" * bool(link.speed) for link in links if "/" not in link.name]
    ports = len(links) - len(plain)
    more = [f"{len(plain) - 3} more"] if len(plain) > 3 else []
    return ", ".join([*plain[:3], *more, *([f"{ports} InfiniBand port{'s' * (ports > 1)}"] if ports else [])])


def _details(one: NodeSummary, names: ItemNumbers[str]) -> dict[str, Any]:
    return {
        "gpus": [_gpu(gpu, names) for gpu in one.gpus[:MOST_GPUS]],
        "no_gpus": one.no_gpus,
        "cpus": one.cpus,
        "load": [round(load, 1) for load in one.load[:3]],
        "memory": [one.memory_total_bytes, one.memory_available_bytes],
        "disks": [[place, round(share, 3)] for place, share in one.disks[:8]],
        "links": [[link.name, link.state, link.speed, link.errors] for link in one.network[:MOST_LINKS]],
    }


def _gpu(gpu: Gpu, names: ItemNumbers[str]) -> list[Any]:
    # Index, name's number, % busy, used, total, °C, W, ECC errors, error
    numbers = (gpu.utilisation_percent, gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.temperature_c, gpu.power_w)
    rounded = [None if number is None else round(number) for number in numbers]
    return [gpu.index, names[gpu.name or ""], *rounded, gpu.ecc_errors or 0, gpu.error]


# --- devices ----------------------------------------------------------------------------------------------------------


def misplaced(facts: CaseFacts, about: ReportHeader) -> str:
    """Describes ranks that, according to NVML, have memory on a GPU other than their own, or share a GPU.

    An example is ``ranks 0-1 share GPU 0 of node1; rank 1 has memory on GPU 0 and was given GPU 1``.
    """
    held: dict[tuple[str, int], list[str]] = {}
    for node in about.nodes:
        for gpu in node.gpus:
            for process in gpu.processes or ():
                held.setdefault((node.host, process.pid), []).append(str(gpu.index))
    users: dict[tuple[str, str], list[int]] = {}
    sentences = []
    for rank, state in facts.ranks.items():
        evidence = state.evidence
        places = held.get((evidence.host, evidence.pid), [])
        for place in places:
            users.setdefault((evidence.host, place), []).append(rank)
        if evidence.gpu.isdecimal() and places and evidence.gpu not in places:
            sentences.append(f"rank {rank} has memory on GPU {', '.join(places[:4])} and was given GPU {evidence.gpu}")
    shared = [
        f"ranks {format_ranks(ranks)} share GPU {place}{f' of {clean(host)}' if len(about.nodes) > 1 else ''}"
        for (host, place), ranks in users.items()
        if len(ranks) > 1
    ]
    both = [*shared, *sentences]
    return "; ".join([*both[:4], *([f"and {len(both) - 4} more"] if len(both) > 4 else [])])
