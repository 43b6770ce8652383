"""Reads the output of a job, whoever launched it, as evidence."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from msgspec import structs

from safelaunch.addons.logs.calls import uneven_steps
from safelaunch.addons.logs.heard import DEFAULT, UNNAMED, Heard, LoggedJob, RankEnd, was_terminated
from safelaunch.addons.logs.lines import (
    NOT_GZIP,
    LogLine,
    Signer,
    Speaker,
    has_rank_field,
    hosts_of,
    is_of_a_job,
    lines_of,
    speakers_of_names,
    unwrapped,
)
from safelaunch.addons.logs.owners import Owners
from safelaunch.addons.logs.quoting import quote_of, unquoted
from safelaunch.addons.logs.reports import Printed
from safelaunch.bundle.reading.guard import FoundEvidence, ReportedError, Unreadable, cannot_be_read
from safelaunch.capture.last_words import parse_fatal
from safelaunch.model import (
    UNKNOWN_SIZES,
    Collective,
    Evidence,
    FlightRecord,
    GroupStatus,
    MemoryKills,
    NcclLog,
    NodeEvidence,
    Progress,
    RankEvidence,
    RankExit,
)
from safelaunch.stacks.failures import first_failure
from safelaunch.verdict.exceptions import is_consequence, one_line
from safelaunch.verdict.exits import BAD_OPTIONS, FAULT_SIGNALS


def read_logs(paths: Sequence[Path], root: Path | None = None) -> FoundEvidence:
    """Returns the evidence in these files. Its ranks are empty if nothing in them reports an end. Raises Unreadable.

    Args:
        paths: regular files
        root: the folder to which their names are relative; without one, the names alone count
    """
    printed, count, is_output = Printed(), 0, False
    names = [str(path.relative_to(root)) if root is not None else path.name for path in paths]
    whose = speakers_of_names(names)
    if len(names) > 1:  # each may be that of a node, whose launcher speaks of its own processes
        printed.job.files = {name for name in names if name not in whose}
        whose |= {name: name for name in printed.job.files}
    for path, name in zip(paths, names, strict=True):
        try:
            lines, of_a_job = _read(path, name, printed, whose.get(name))
        except NOT_GZIP as error:
            raise Unreadable("it is damaged") from error
        except OSError as error:
            raise cannot_be_read(error) from error
        count, is_output = count + lines, is_output or of_a_job
    printed.end()
    found = _found(printed, names, count)
    return replace(found, is_output=is_output or bool(found.evidence.ranks or found.remarks))


def _read(path: Path, name: str, printed: Printed, speaker: Speaker | None) -> tuple[int, bool]:
    """Returns the number of lines, and whether the file is empty or a job may have printed one of its lines."""
    lines = lines_of(path, name)
    first = list(islice(lines, 200))
    quote = quote_of(line.text for line in first if line is not None)
    if quote:
        first, lines = [_without(line, quote) for line in first], (_without(line, quote) for line in lines)
    ahead = deque(first)
    texts = [line.text for line in ahead if line is not None]
    known = Signer(speaker, hosts_of(texts), has_rank_field(texts))
    last, is_output = 0, not any(map(str.strip, texts))
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if line is not None:
            last = line.number
            if (whole := unwrapped(line, ahead[0] if ahead else None)) is not None:
                ahead.popleft()
                line = whole
            said = known.said(line, ahead)
            is_output = is_output or said.speaker not in (None, name) or is_of_a_job(line.text)
            printed.hear(said)
    return last, is_output


def _without(line: LogLine | None, quote: str) -> LogLine | None:
    return replace(line, text=unquoted(line.text, quote)) if line is not None else None


def _found(printed: Printed, names: Sequence[str], count: int, *, may_be_caught: bool = False) -> FoundEvidence:
    """Returns the evidence in what was printed.

    Args:
        may_be_caught: the last error counts though its process printed more afterwards
    """
    job, owners = printed.job, Owners.of(printed.job)
    stalled = printed.calls.give_stalls(owners.heard)
    owners.note_signals()
    steps = _steps(job, owners)
    seen = {*owners.heard, *owners.ended, *job.absent}
    world = max([job.world, *(rank + 1 for rank in seen)], default=0)
    files: dict[str, str] = {}
    _name_groups(owners.heard)
    groups = _groups(owners.heard)
    ranks = [_with_steps(_rank(rank, job, owners, groups, files), world, steps) for rank in sorted(seen)]
    ends = bool(owners.ended) or not job.events.finished
    failed = bool(steps) or (ends and any(map(_has_trouble, ranks)))
    remarks, warned = _remarks(job, ranks, failed=failed)
    what = f"{'a log' if len(names) == 1 else f'{len(names)} logs'} of {count} lines{warned}"
    found = FoundEvidence(
        what,
        Evidence("crash", max(world, 1), ()),
        remarks=remarks,
        errors=tuple(ReportedError(event.line.where, event.words) for event in job.events.causes()),
        summary=job.events.summary(" ".join(remarks)),
        is_quiet=not job.events.errors(),
        launch=job.launch,
    )
    nodes = _silent_hosts(job, owners)
    ranks = [rank for rank in ranks if not any(rank.rank in node.ranks for node in nodes)]
    rendezvous = None
    job.give_up_meeting()
    if job.rendezvous_at is not None and all(map(_only_lost_a_peer, ranks)):
        rendezvous, files["rendezvous.json"] = job.rendezvous, job.rendezvous_at.where
    if not failed and rendezvous is None and not job.failed_hosts:
        again = not may_be_caught and not job.remarks and job.end_with_the_last_error()
        return _found(printed, names, count, may_be_caught=True) if again else found
    waits = bool(steps) or any(rank.flight_record for rank in ranks)
    evidence = Evidence(
        "hang" if waits and not any(map(_failed, ranks)) else "crash", world, tuple(ranks),
        missing_ranks=tuple(sorted({*range(world)} - {rank.rank for rank in ranks})), nodes=nodes, rendezvous=rendezvous,
        printed=tuple(sorted({*owners.known, *stalled})), labels=owners.labels, world_guessed=world > job.world,
        may_be_caught=may_be_caught,
    )  # fmt: skip
    return replace(found, evidence=evidence, files=files)


def _steps(job: LoggedJob, owners: Owners) -> dict[int, int | None]:
    """Returns the last steps of the ranks, if they differ and nothing else shows a failure."""
    reported = any(one.raised or one.watchdog for one in owners.heard.values())
    ended_alone = any(one.code and not one.stopped for one in owners.ended.values())  # no launcher stopped it
    if reported or ended_alone or job.failed_hosts or job.events.finished:
        return {}
    return uneven_steps(owners.heard, owners.known, job.world)


def _has_trouble(one: RankEvidence) -> bool:
    exit_ = one.exit
    return bool(one.exception or one.flight_record or (exit_ and exit_.returncode and exit_.before_close))


def _remarks(job: LoggedJob, ranks: Sequence[RankEvidence], *, failed: bool) -> tuple[tuple[str, ...], str]:
    """Returns the remarks, and what to say of NCCL's warnings if nothing failed."""
    remarks, warned = tuple(f"{text} [{where}]" for text, where in job.remarks.items()), _nccl_words(job)
    if job.nccl_failed is not None and not any(rank.exception for rank in ranks):
        return (*remarks, f"NCCL failed{f': {warned}' if warned else f' [{job.nccl_failed.where}]'}"), ""
    if job.native > _FEW_FRAMES and not failed:
        return (*remarks, _ONLY_C), ""
    return remarks, f" (a warning of NCCL alone is no failure: {warned})" if warned and not failed else ""


def _with_steps(one: RankEvidence, world: int, steps: Mapping[int, int | None]) -> RankEvidence:
    if one.rank not in steps:
        return one
    return structs.replace(one, progress=Progress(one.rank, -1, world, 0, 0, 0, "", steps[one.rank]))


def _silent_hosts(job: LoggedJob, owners: Owners) -> tuple[NodeEvidence, ...]:
    """Returns the one host that Slurm reports as failed, or that closed connections of others, if no rank of it reports
    its own end.
    """
    found = []
    for host in job.failed_hosts or job.closed_by:
        ranks = [rank for rank, one in owners.heard.items() if host in one.hosts]
        if not any(rank in owners.ended or owners.heard[rank].raised for rank in ranks):
            trouble = "Slurm reports its failure" if host in job.failed_hosts else ""
            found.append(NodeEvidence(host, ranks=tuple(sorted(ranks)), trouble=trouble))
    return tuple(found) if len(found) == 1 else ()


def _only_lost_a_peer(one: RankEvidence) -> bool:
    """Returns whether nothing ended it but that others could not be reached, as far as the log shows."""
    if one.exception is not None:
        return is_consequence(one.exception)
    return one.exit is None or one.exit.returncode in (0, 1) or not one.exit.before_close


def _nccl_words(job: LoggedJob) -> str:
    """Returns the first of NCCL's messages that means something; one about its own process comes first."""
    found = first_failure(text for _, text in job.nccl_told)
    where = next((line.where for line, text in job.nccl_told if found is not None and text == found.text), "")
    return f"{one_line(found.text)} ({found.means}) [{where}]" if found is not None else ""


def _failed(one: RankEvidence) -> bool:
    """Returns whether it failed in another way than by the watchdog of a call that timed out."""
    return one.exception is not None or (
        one.exit is not None
        and one.exit.before_close
        and one.exit.returncode not in (-signal.SIGABRT, 128 + signal.SIGABRT)
    )


def _name_groups(ranks: Mapping[int, Heard]) -> None:
    """Gives calls without a group to the only group in which others make such a call, or else to that of all ranks."""
    named = [(name, one) for rank in ranks.values() for name, one in rank.groups.items() if name != UNNAMED]
    for heard in ranks.values():
        mine = heard.groups.pop(UNNAMED, None)
        if mine is not None:
            like = {name for name, one in named if (one.op, one.size) == (mine.op, mine.size) or not one.op}
            heard.groups.setdefault(like.pop() if len(like) == 1 else DEFAULT, mine)
    ops = {(name, one.seq): one for rank in ranks.values() for name, one in rank.groups.items() if one.op}
    for heard in ranks.values():
        for name, one in heard.groups.items():
            if not one.op and (other := ops.get((name, one.seq))) is not None:
                one.op, one.size = other.op, other.size


def _groups(ranks: Mapping[int, Heard]) -> dict[str, tuple[int, ...]]:
    """Returns the members of the groups all of whose members have reported their places."""
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


_FEW_FRAMES = 3
_ONLY_C = (
    "its stacks are those of C functions, which show no line of Python: take them with `py-spy dump --pid PID`, or "
    "with gdb's `py-bt`"
)
_CLOCKS_S = 60.0  # how far the clocks of two nodes may be apart


def _seconds_between(one: str, other: str) -> float:
    """Returns the time between two times as torchrun prints them; 0 if either is none."""
    try:
        begin, end = (datetime.strptime(f"{time}+0000", "%Y-%m-%d_%H:%M:%S%z") for time in (one, other))
    except ValueError:
        return 0.0
    return (end - begin).total_seconds()


def _after_the_first_s(ended: RankEnd, times: Mapping[str, str]) -> float:
    """Returns 0 for the ranks that may have failed first; 1 or 2 for those that failed later by the summary of their
    host; 3 for those of a host where the failures began a minute later than on another.

    torchrun looks at its ranks once in a while and gives all that it then finds ended the same second; of those, its
    "first observed failure" is the one with the lowest number. A rank that died of a signal of its own died of no
    peer's exit, but not the reverse: the others count half a second later.
    """
    first = times.get(ended.host, "")
    if not ended.time or not first:
        return 0.0 if ended.root else 1.0
    if any(_seconds_between(time, first) > _CLOCKS_S for host, time in times.items() if host != ended.host):
        return 3.0
    by_itself = -ended.code in FAULT_SIGNALS or ended.code == -signal.SIGKILL
    return 2.0 if ended.time > first else 0.0 if by_itself else 0.5


def _rank(
    rank: int, job: LoggedJob, owners: Owners, groups: dict[str, tuple[int, ...]], files: dict[str, str]
) -> RankEvidence:
    heard, ended, folder = owners.heard.get(rank), owners.ended.get(rank), f"ranks/{rank}"
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
        if last is not None and not (ended is not None and _ended_by_a_signal(ended)):
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
    exit_, pid, host = None, 0, heard.node if heard is not None else ""
    if ended is not None:
        stopped = ended.stopped or was_terminated(ended.code)
        stopped |= heard is not None and heard.timed_out
        after_s = _after_the_first_s(ended, owners.first_times)
        exit_ = RankExit(ended.code, after_s, before_close=not stopped, file=ended.line.where)
        pid, host = ended.pid, ended.host or host
    said = f"{exception.message}\n{exception.text}" if exception is not None else ""  # perhaps how a worker ended
    killed = (words for one, words in job.kills.items() if (one == pid and ended is not None) or f"(pid {one})" in said)
    kills = MemoryKills(kernel_line=next(killed, ""))
    return RankEvidence(
        rank=rank, host=host, pid=pid, flight_record=record, exception=exception, fatal=fatal, exit=exit_,
        beacon=False, log_tail="\n".join(tail), nccl_log=log, memory_kills=kills,
    )  # fmt: skip


def _ended_by_a_signal(ended: RankEnd) -> bool:
    """Returns whether a signal ended it, and not its last exception; an abort may follow an exception."""
    return ended.code < 0 and -ended.code not in (signal.SIGABRT, signal.SIGTERM) and not ended.stopped


def _record(heard: Heard, groups: dict[str, tuple[int, ...]]) -> FlightRecord:
    entries = [
        Collective(
            name, one.seq, f"nccl:{one.op}", completed=False, state="started",
            is_p2p=one.op in ("send", "recv"), p2p_seq=one.seq,
            description=one.called, record_id=at, timeout_ms=one.ms,
            input_sizes=((one.size,),) if one.size is not None else UNKNOWN_SIZES, frames=tuple(one.frames),
        )
        for at, (name, one) in enumerate(heard.groups.items(), start=1)
        if one.seq
    ]  # fmt: skip
    status = {
        name: GroupStatus(max(one.queued, one.seq), -1, one.done if one.done >= 0 else one.seq - 1)
        for name, one in heard.groups.items()
        if one.queued >= 0 or (one.seq > 1 and one.op not in ("send", "recv"))  # a stream ends its works in their order
    }
    return FlightRecord("", tuple(entries), groups, status)
