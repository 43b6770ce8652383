"""Shows ranks, process groups and files on the page, with equal ones in one row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

from safelaunch.model import Artifact, Collective, RankEvidence, Verdict, format_ranks
from safelaunch.report.rank_rows import Alike, alike, row_of
from safelaunch.report.stacks import main_frames, without_ours
from safelaunch.report.tables import Frames, ItemNumbers
from safelaunch.system.printable import clean_lines, is_clean
from safelaunch.verdict.c10d import describe, number_of
from safelaunch.verdict.columns import Window
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.thread_view import View

MOST_CHILDREN = 12
MOST_THREADS = 40
MOST_LOG_LINES = 20
MOST_LOG_BYTES = 700_000  # of all ranks
MOST_LINE = 300
MOST_GROUPS = 200
MOST_STANDINGS = 40
MOST_CALLS = 5


def ranks(facts: CaseFacts, verdict: Verdict, frames: Frames) -> dict[str, Any]:
    """Returns ``rows``, one per set of equal ranks, and ``ranks``, which maps each rank to its row.

    ``logs`` contains the ends of the ranks' output, and ``calls`` their last calls.
    """
    named = {culprit.rank for culprit in verdict.culprits}
    rows: list[dict[str, Any]] = []
    number_of: dict[int, int] = {}
    for row in alike([row_of(rank) for rank in facts.ranks.values()], named):
        number_of |= dict.fromkeys(row.ranks, len(rows))
        rows.append(_row(row, facts, frames))
    every: list[dict[str, Any]] = []
    called = ItemNumbers[tuple[str, ...]]()
    for rank, state in facts.ranks.items():
        every.append({"r": rank, "row": number_of[rank], **_details(state, frames)})
        if calls := _calls(facts, rank):
            every[-1]["fr"] = called[calls]
    return {"rows": rows, "ranks": every, "logs": _add_logs(facts, every, named), "calls": list(called)}


def _row(row: Alike, facts: CaseFacts, frames: Frames) -> dict[str, Any]:
    frame, roots = row.first.frame, facts.ranks[row.ranks[0]].evidence.code_roots
    return {
        "r": format_ranks(row.ranks),
        "n": len(row.ranks),
        "c": int(row.culprit),
        "state": row.state,
        "doing": row.doing,
        "at": frames.number(frame, roots),
        "step": row.step,
        "hosts": row.hosts,
    }


def _details(one: RankFacts, frames: Frames) -> dict[str, Any]:
    evidence = one.evidence
    details = one.view
    found: dict[str, Any] = {"host": evidence.host, "pid": evidence.pid, "local": evidence.local_rank}
    if main_stack := main_frames(evidence):
        found["st"] = frames.stack(main_stack, evidence.code_roots)
    if evidence.exception is not None:
        found["raised"] = f"{evidence.exception.type}: {evidence.exception.message}"[:2000]
        found["trace"] = [line[:MOST_LINE] for line in clean_lines(evidence.exception.text)[-80:]]
    if handled := [f"{exception.type}: {exception.message}"[:500] for exception in evidence.gil.handling[:4]]:
        found["handles"] = handled
    if caught := [f"{exception.type}: {exception.message}"[:500] for exception in evidence.caught[-4:]]:
        found["caught"] = caught
    if details is not None and details.sample is not None:
        further = details.sample.main_thread
        others = [thread for thread in details.sample.threads if thread is not further][:MOST_THREADS]
        threads = [
            [
                thread.name or str(thread.os_tid or ""),
                frames.stack(details.stack_of(thread).frames, evidence.code_roots),
            ]
            for thread in others
            if without_ours(details.stack_of(thread).frames) == details.stack_of(thread).frames != ()
        ]
        found |= {"th": threads} if threads else {}
    if children := [_child(child, evidence, frames) for child in one.children[:MOST_CHILDREN]]:
        found["ch"] = children
    if (more := len(evidence.children) - MOST_CHILDREN) > 0:
        found["more_children"] = more
    progress = evidence.progress
    if progress is not None and progress.phase:
        found["phase"] = progress.phase
    if evidence.main is not None and evidence.main.states and evidence.main.states[-1].rss_bytes:
        found["mb"] = evidence.main.states[-1].rss_bytes >> 20
    return found


def _child(child: View, rank: RankEvidence, frames: Frames) -> list[Any]:
    states = child.process.states
    own = child.frames
    return [
        child.process.role,
        child.process.pid,
        f"{states[-1].state} {child.wait.call or child.wait.kind}" if states else "",
        frames.stack(own, rank.code_roots) if own else -1,
    ]


def _calls(facts: CaseFacts, rank: int) -> tuple[str, ...]:
    """Describes the last recorded calls, newest first: ``all_reduce of (4,) Float · #31 of group '0' · pending``."""
    record = facts.ranks[rank].evidence.flight_record
    if record is None or not record.entries:
        return ()
    last = [record.entries[-number] for number in range(1, min(MOST_CALLS, len(record.entries)) + 1)]
    state = {True: "completed", False: "pending"}
    return tuple(
        f"{describe(call)} · #{number_of(call)} of group {call.group!r} · {state[call.completed]}" for call in last
    )


def _add_logs(facts: CaseFacts, every: Sequence[dict[str, Any]], named: set[int]) -> list[tuple[str, ...]]:
    """Adds the ends of the ranks' output while there is room: first ranks at fault, then one rank per row."""
    firsts: set[int] = set()
    order = []
    for item in every:
        is_first = item["row"] not in firsts
        firsts.add(item["row"])
        order.append((item["r"] not in named, not is_first, item["r"], item))
    left = MOST_LOG_BYTES
    logs = ItemNumbers[tuple[str, ...]]()
    for *_, item in sorted(order, key=lambda one: one[:3]):
        text = facts.ranks[item["r"]].evidence.log_tail
        if not text:
            continue
        lines = tuple(line[:MOST_LINE] for line in clean_lines(text[-16_384:])[-MOST_LOG_LINES:])
        if lines not in logs:
            size = sum(map(len, lines))
            if size > left:
                continue
            left -= size
        item["log"] = logs[lines]
        if not is_clean(text):
            item["raw"] = 1
    return list(logs)


def groups(facts: CaseFacts) -> dict[str, Any]:
    """Returns the members and progress of each process group. Groups in which ranks wait come first."""
    alignment = facts.alignment
    waited = {rank.wait.group for rank in facts.ranks.values() if rank.wait is not None}
    names = {group for record in alignment.records.values() for group in (*record.groups, *record.status)}
    names |= {group for group in alignment.groups() if group}
    names |= {group for rank in facts.ranks.values() for group in rank.evidence.gil.groups}
    ordered = sorted(names, key=lambda name: (name not in waited, len(name), name))
    rows = [_group(facts, name, name in waited) for name in ordered[:MOST_GROUPS]]
    rows = [row for row in rows if row["name"] or any(last >= 0 for _, _, last, *_ in row["at"])]
    return {"rows": rows, "left_out": max(0, len(ordered) - MOST_GROUPS)}


def _group(facts: CaseFacts, name: str, waited: bool) -> dict[str, Any]:
    members, complete = _members(facts, name)
    standings: dict[_RankPosition, list[int]] = {}
    for rank in sorted(members):
        standings.setdefault(_standing(facts, rank, name), []).append(rank)
    at = sorted(standings.items(), key=lambda item: (-item[0][0], item[1][0]))
    windows = filter(None, (facts.alignment.window(rank, name) for rank in sorted(members)))
    names = (window.entries[window.positions[-1]].description for window in islice(windows, 1))
    told = (rank.evidence.gil.called.get(name, "") for rank in facts.ranks.values())
    description = next(filter(None, chain(names, told)), "")
    return {
        "name": name,
        "what": "" if description == "undefined" else description,
        "r": format_ranks(set(members)),
        "n": len(members),
        "known": int(complete),
        "waited": int(waited),
        "at": [[format_ranks(ranks), len(ranks), *standing] for standing, ranks in at[:MOST_STANDINGS]],
        "left_out": max(0, len(at) - MOST_STANDINGS),
    }


_RankPosition = tuple[int, int, str]  # numbers of the last call entered and completed (-1: none), and activity


def _standing(facts: CaseFacts, rank: int, name: str) -> _RankPosition:
    """Returns a rank's progress in a group: from its oldest pending call there, or else from its last call."""
    alignment = facts.alignment
    record = alignment.records.get(rank)
    if record is None:
        return -1, -1, "no record"
    waits = next((call for call in alignment.pending(rank) if call.group == name), None)
    if waits is not None and not waits.is_p2p:
        return _in_a_call(alignment.window(rank, name), waits)
    last, status = alignment.last(rank, name), record.status.get(name)
    entry = alignment.entry(rank, name, last)
    ended = entry if entry is not None and entry.completed else None
    completed = last if ended is not None else status.last_completed if status is not None else -1
    does = f"waits in {describe(waits)}" if waits is not None else f"completed {describe(ended)}" if ended else ""
    return last, min(completed, last), does  # NCCL's status also counts sends


def _in_a_call(window: Window | None, waits: Collective) -> _RankPosition:
    at = bisect_left(window.numbers, waits.seq) if window is not None else 0
    completed = window.numbers[at - 1] if window is not None and at else waits.seq - 1
    if waits.started is False:
        return completed, completed, f"has queued {describe(waits)}"
    return waits.seq, completed, f"waits in {describe(waits)}"


def _members(facts: CaseFacts, name: str) -> tuple[frozenset[int], bool]:
    # From the records, or else from a rank in the group.
    reports, known = facts.alignment.members(name)
    reported = (rank.evidence.gil.groups.get(name, ()) for rank in facts.ranks.values())
    mine = next(filter(None, reported), ())
    return (frozenset(mine), True) if mine and not facts.alignment.records else (reports, known)


def files(artifacts: Iterable[Artifact]) -> dict[str, Any]:
    """Returns the bundle's files. One that many ranks have is listed once: ``[name, how, ranks, total bytes]``."""
    own: list[list[Any]] = []
    shared: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    missing: dict[tuple[str, str, str], list[int]] = {}
    absent: list[list[str]] = []
    for artifact in artifacts:
        folder, _, name = artifact.path.rpartition("/")
        number = folder.removeprefix("ranks/")
        of_rank = folder.startswith("ranks/") and number.isdigit()
        if artifact.missing and of_rank:
            missing.setdefault((name, artifact.how, artifact.missing), []).append(int(number))
        elif artifact.missing:
            absent.append([artifact.path, artifact.missing, artifact.how])
        elif of_rank:
            entry = shared.setdefault((name, artifact.how), ([], []))
            entry[0].append(int(number))
            entry[1].append(artifact.bytes)
        elif not artifact.path.startswith("flight_recorder/"):
            own.append([artifact.path, artifact.how, artifact.bytes, artifact.note])
    return {
        "own": own[:400],
        "ranks": [[name, how, format_ranks(of), sum(sizes)] for (name, how), (of, sizes) in shared.items()],
        "missing": [
            *([f"ranks/{format_ranks(numbers)}/{name}", why, how] for (name, how, why), numbers in missing.items()),
            *absent[:400],
        ],
    }
