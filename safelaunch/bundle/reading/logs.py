"""Reads the output of a job, whoever launched it, as evidence."""

from __future__ import annotations

import re
import signal
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from safelaunch.bundle.reading.guard import Found, Unreadable, cannot_be_read
from safelaunch.bundle.reading.log_lines import (
    MAX_RANKS,
    NOT_GZIP,
    Signer,
    Speaker,
    hosts_of,
    is_of_a_job,
    lines_of,
    speakers_of_names,
)
from safelaunch.bundle.reading.log_reports import DEFAULT, OF_NCCL, UNNAMED, Ended, Heard, Printed
from safelaunch.capture.last_words import parse_fatal
from safelaunch.model import (
    UNKNOWN_SIZES,
    Collective,
    Evidence,
    FlightRecord,
    GroupStatus,
    MemoryKills,
    NcclLog,
    Outcome,
    RankEvidence,
    RankExit,
)
from safelaunch.verdict.exits import BAD_OPTIONS, OF_ITS_OWN, UNKNOWN_SIGNAL, is_consequence, one_line
from safelaunch.verdict.reading.failures import fingerprints, first_failure


def read_logs(paths: Sequence[Path], root: Path | None = None) -> Found:
    """The evidence in these files. Its ranks are empty where nothing in them reports an end. Raises Unreadable.

    ``root``: the folder from which they are called; without one, by their names alone.
    """
    job, count, is_output = Printed(), 0, False
    names = [str(path.relative_to(root)) if root is not None else path.name for path in paths]
    whose = speakers_of_names(names)
    for path, name in zip(paths, names, strict=True):
        try:
            lines, printed = _read(path, name, job, whose.get(name))
        except NOT_GZIP as error:
            raise Unreadable("it is damaged") from error
        except OSError as error:
            raise cannot_be_read(error) from error
        count, is_output = count + lines, is_output or printed
    job.end()
    found = _found(job, names, count)
    return replace(found, is_output=is_output or bool(found.evidence.ranks or found.remarks))


def _read(path: Path, name: str, job: Printed, speaker: Speaker | None) -> tuple[int, bool]:
    """Returns the number of lines, and whether the file is empty or a job may have printed one of its lines."""
    lines = lines_of(path, name)
    ahead = deque(islice(lines, 200))
    texts = [line.text for line in ahead if line is not None]
    known = Signer(speaker, hosts_of(texts))
    last, is_output = 0, not any(map(str.strip, texts))
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if line is not None:
            last = line.number
            said = known.said(line, ahead)
            is_output = is_output or said.speaker is not None or is_of_a_job(line.text)
            job.hear(said)
    return last, is_output


def _found(job: Printed, names: Sequence[str], count: int) -> Found:
    ranks, signed = _by_rank(job)
    signed += job.give_stalls(ranks)
    for rank, heard in ranks.items():
        crash = heard.crashed(ended=False)
        untold = rank not in job.ended or job.ended[rank].code == UNKNOWN_SIGNAL
        if crash is not None and untold and heard.uncaught(ended=False) is None:
            job.ended[rank] = Ended(-crash.signal, crash.line, root=True)
    seen = {*ranks, *job.ended, *job.absent}
    world = max([job.world, *(rank + 1 for rank in seen)], default=0)
    files: dict[str, str] = {}
    _name_groups(ranks)
    groups = _groups(ranks)
    evidence = [_rank(rank, ranks.get(rank), job, groups, files) for rank in sorted(seen)]
    failed = any(
        one.exception or one.flight_record or (one.exit and one.exit.returncode and one.exit.before_close)
        for one in evidence
    )
    what = f"{'a log' if len(names) == 1 else f'{len(names)} logs'} of {count} lines"
    remarks, warned = tuple(f"{text} [{where}]" for text, where in job.remarks.items()), _nccl_words(job)
    if job.nccl_failed is not None and not any(one.exception for one in evidence):
        remarks = (*remarks, f"NCCL failed{f': {warned}' if warned else f' [{job.nccl_failed.where}]'}")
    elif warned and not failed:
        what += f" (a warning of NCCL alone is no failure: {warned})"
    if not failed:
        return Found(what, Evidence("crash", max(world, 1), ()), remarks=remarks)
    missing = tuple(rank for rank in range(world) if rank not in seen)
    outcome: Outcome = (
        "hang" if any(one.flight_record for one in evidence) and not any(map(_failed, evidence)) else "crash"
    )
    told = Evidence(outcome, world, tuple(evidence), missing_ranks=missing, printed=signed)
    return Found(what, told, files=files, remarks=remarks, world_guessed=world > job.world)


def _nccl_words(job: Printed) -> str:
    """What NCCL has said that means something, the first of its own process's first."""
    found = first_failure(text for _, text in job.nccl_told)
    where = next((line.where for line, text in job.nccl_told if found is not None and text == found.text), "")
    return f"{one_line(found.text)} ({found.means}) [{where}]" if found is not None else ""


def _failed(one: RankEvidence) -> bool:
    """Not by the watchdog of a call whose time was up."""
    return one.exception is not None or (
        one.exit is not None
        and one.exit.before_close
        and one.exit.returncode not in (-signal.SIGABRT, 128 + signal.SIGABRT)
    )


def _by_rank(job: Printed) -> tuple[dict[int, Heard], tuple[int, ...]]:
    """Who said what, by rank, and of whom that is sure. Also of processes that some line names a rank's, and of lines
    that nobody signs."""
    found: dict[int, Heard] = {one: heard for one, heard in job.heard.items() if isinstance(one, int)}
    named = {name: heard for name, heard in job.heard.items() if isinstance(name, str)}
    spare, guessed, nodes = iter(range(MAX_RANKS)), set[int](), job.nodes()
    for name, heard in sorted(named.items(), key=_in_order):
        if name in nodes:  # with ranks of its own
            guessed |= _give(heard, name, found, job)
        elif (rank := job.rank_of(name)) is not None or not job.ranks or heard.raised:
            heard.node = name if rank is None and "pid=" not in name and len(name.split()) == 1 else ""
            if rank is None:  # its place in their order
                guessed.add(rank := next(one for one in spare if one not in found))
            found.setdefault(rank, heard)
    signed = {*found, *job.ended} - guessed
    unsigned = job.heard.get(None)
    if unsigned is not None:
        signed -= _give(unsigned, None, found, job)
    signed |= _give_warnings([heard for name, heard in job.heard.items() if name is None or name in nodes], found, job)
    return found, tuple(sorted(signed))


def _in_order(named: tuple[str, Heard]) -> str:
    """``worker-2`` before ``worker-10``."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), named[0])


def _give(said: Heard, by: str | None, found: dict[int, Heard], job: Printed) -> set[int]:
    """What no rank has signed, of a node or of all, is given to those who failed there: own errors to whoever failed
    first. Returns to whom, where that was a choice. torch's own check says whose call it is about.
    """
    ended = {rank: one for rank, one in job.ended.items() if one.by == by}
    known = {rank for rank, one in found.items() if one.raised}
    failed = [rank for rank, one in ended.items() if one.code == 1 and rank not in known]
    failed.sort(key=lambda rank: (not ended[rank].root, rank))
    crashed = [rank for rank, one in ended.items() if one.code < 0 and one.root]
    alone = not ended and (by is not None or not (job.ended or known))
    if alone:
        taken = {rank for rank, one in found.items() if by is not None or one.watchdog is not None}
        nobody = next(rank for rank in range(MAX_RANKS) if rank not in taken)
        failed = [nobody] if said.uncaught(ended=by in job.failed) else []
        crashed = [nobody] if said.crashed(ended=by in job.failed) else []
    if len(crashed) == len(said.crashes) == 1:
        found.setdefault(crashed[0], Heard(said.crashes[0].line, node=by or "")).crashes += said.crashes
    distinct = {(one.type, one.message, one.frames): (opened, one) for opened, one in said.raised}
    own = {next(iter(told)): pair for pair in distinct.values() if (told := fingerprints(pair[1].message))}
    errors = sorted(  # who ends, prints last
        (pair for pair in reversed(distinct.values()) if pair not in own.values()),
        key=lambda pair: is_consequence(pair[1]),
    )
    chosen = dict(zip([rank for rank in failed if rank not in own], errors, strict=False))
    for rank, (opened, raised) in {**own, **chosen}.items():
        one = found.setdefault(rank, Heard(opened.line, node=by or ""))
        one.raised.append((opened, raised))
        one.after.lines = 0
    return set(chosen) if len(errors) > 1 or len(failed) > 1 or (alone and by is not None) else set()


def _give_warnings(unsigned: Sequence[Heard], found: dict[int, Heard], job: Printed) -> set[int]:
    """NCCL signs what it warns of with the process: to the rank of that, or to who raises it in the same words.
    Returns the ranks of which NCCL has said which process they are.
    """
    warnings = [(line, text, OF_NCCL.search(line.text)) for one in unsigned for line, text in one.warnings]
    pids = {one.pid: rank for rank, one in job.ended.items()}
    several = Counter(rank for _, rank in job.nccl_places.values())
    places = {process: rank for process, (_, rank) in job.nccl_places.items() if several[rank] == 1}
    raised = [rank for rank, one in found.items() if one.raised]
    signers = {by["pid"] for _, _, by in warnings if by}
    if len(signers) == len(raised) == 1:
        pids.setdefault(int(signers.pop()), raised[0])
    for line, text, by in warnings:
        rank = places.get(by["process"], pids.get(int(by["pid"]))) if by else None
        alike = (one for one in raised if text[:80] in found[one].raised[-1][1].message)
        rank = rank if rank is not None else next(alike, None)
        if rank in found:
            found[rank].warnings.append((line, text))
        elif rank is not None and job.nccl_failed and (told := first_failure([text])) and told.own:
            found[rank] = Heard(line, warnings=[(line, text)])
            found[rank].fail(line, "NCCL error", text)
    return found.keys() & places.values()


def _name_groups(ranks: Mapping[int, Heard]) -> None:
    """A call whose group a rank has not named is that of the one group in which others make the like; else of all."""
    named = [(name, one) for heard in ranks.values() for name, one in heard.groups.items() if name != UNNAMED]
    for heard in ranks.values():
        mine = heard.groups.pop(UNNAMED, None)
        if mine is not None:
            like = {name for name, one in named if (one.op, one.size) == (mine.op, mine.size) or not one.op}
            heard.groups.setdefault(like.pop() if len(like) == 1 else DEFAULT, mine)
    ops = {(name, one.seq): one for heard in ranks.values() for name, one in heard.groups.items() if one.op}
    for heard in ranks.values():
        for name, one in heard.groups.items():
            if not one.op and (other := ops.get((name, one.seq))) is not None:
                one.op, one.size = other.op, other.size


def _groups(ranks: Mapping[int, Heard]) -> dict[str, tuple[int, ...]]:
    """The members of the groups, of which all have said which place they have in it."""
    places: dict[str, dict[int, int]] = {}
    for rank, heard in ranks.items():
        for name, one in heard.groups.items():
            if one.place is not None:
                places.setdefault(name, {})[one.place] = rank
    return {
        name: tuple(at[place] for place in range(len(at)))
        for name, at in places.items()
        if len(at) > 1 and set(at) == set(range(len(at)))
    }


def _after_the_first_s(ended: Ended, all_: Iterable[Ended]) -> float:
    """0 for the ranks that may have failed first, 1 or 2 for those that failed later; of one host's summaries.

    torchrun looks at its ranks once in a while and gives all that it then finds ended the same second; of those, its
    "first observed failure" is the one with the lowest number. Whoever died of a signal of its own died of no peer's
    exit, but not the reverse: half a second later.
    """
    roots = [one for one in all_ if one.root and one.host == ended.host]
    first = min((one.time for one in roots), default="")
    if not ended.time or not first:
        return 0.0 if ended.root else 1.0
    by_itself = -ended.code in OF_ITS_OWN or ended.code == -signal.SIGKILL
    return 2.0 if ended.time > first else 0.0 if by_itself else 0.5


def _rank(
    rank: int, heard: Heard | None, job: Printed, groups: dict[str, tuple[int, ...]], files: dict[str, str]
) -> RankEvidence:
    ended, folder = job.ended.get(rank), f"ranks/{rank}"
    exception = record = log = fatal = None
    tail = heard.tail if heard is not None else ()
    unsigned = job.heard.get(ended.by if ended is not None else None)
    if ended is not None and unsigned is not None and (ended.code < 0 or (ended.code == BAD_OPTIONS and heard is None)):
        tail = (*tail, *unsigned.tail)  # C++ and the kernel sign nothing
        files[f"{folder}/log_tail.txt"] = (unsigned.telling or unsigned.last or unsigned.first).where
    if heard is not None:
        if heard.telling is not None:
            files[f"{folder}/log_tail.txt"] = heard.telling.where
        files.setdefault(f"{folder}/log_tail.txt", (heard.last or heard.first).where)
        last = heard.uncaught(ended=ended is not None or bool(job.failed))
        if last is not None:
            opened, exception = last
            files[f"{folder}/exception.json"] = opened.line.where
        crash = heard.crashed(ended=ended is not None)
        if crash is not None and ended is not None and ended.code == -crash.signal:
            fatal = parse_fatal("\n".join(crash.lines))
            files[f"{folder}/fault.txt"] = crash.line.where
        if heard.watchdog is not None:
            record = _record(heard, groups)
            files[f"{folder}/flight_recorder.json"] = heard.watchdog.where
        if heard.warnings:
            log = NcclLog(heard.warnings[0][0].where, tuple(text for _, text in heard.warnings))
    exit_ = None
    if ended is not None:
        stopped = ended.stopped or ended.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        stopped |= heard is not None and heard.timed_out
        after_s = _after_the_first_s(ended, job.ended.values())
        exit_ = RankExit(ended.code, after_s, before_close=not stopped, file=ended.line.where)
    kill = job.kills.get(ended.pid, "") if ended is not None else ""
    return RankEvidence(
        rank=rank,
        host=ended.host if ended is not None else heard.node if heard is not None else "",
        pid=ended.pid if ended is not None else 0,
        flight_record=record,
        exception=exception,
        fatal=fatal,
        exit=exit_,
        beacon=False,
        log_tail="\n".join(tail),
        nccl_log=log,
        memory_kills=MemoryKills(kernel_line=kill),
    )


def _record(heard: Heard, groups: dict[str, tuple[int, ...]]) -> FlightRecord:
    entries = [
        Collective(
            name, one.seq, f"nccl:{one.op}", completed=False, state="started",
            description=one.called, record_id=at, timeout_ms=one.ms,
            input_sizes=((one.size,),) if one.size is not None else UNKNOWN_SIZES, frames=tuple(one.frames),
        )
        for at, (name, one) in enumerate(heard.groups.items(), start=1)
        if one.seq
    ]  # fmt: skip
    status = {name: GroupStatus(one.queued, -1, one.done) for name, one in heard.groups.items() if one.queued >= 0}
    return FlightRecord("", tuple(entries), groups, status)
