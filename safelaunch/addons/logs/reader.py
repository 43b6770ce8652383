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

from safelaunch.addons.logs.assignment import RankAssignment
from safelaunch.addons.logs.calls import uneven_steps
from safelaunch.addons.logs.collector import ReportCollector
from safelaunch.addons.logs.lines import (
    NOT_GZIP,
    LogLine,
    PrefixParser,
    Speaker,
    has_rank_field,
    host_pattern,
    join_wrapped,
    looks_like_output,
    read_lines,
    speakers_by_file,
)
from safelaunch.addons.logs.quoting import common_quote, without_quote
from safelaunch.addons.logs.records import DEFAULT, UNNAMED, LoggedJob, RankEnd, SpeakerOutput, was_terminated
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
    printed, count, is_output = ReportCollector(), 0, False
    names = [str(path.relative_to(root)) if root is not None else path.name for path in paths]
    speakers = speakers_by_file(names)
    if len(names) > 1:  # each may be that of a node, whose launcher speaks of its own processes
        printed.job.files = {name for name in names if name not in speakers}
        speakers |= {name: name for name in printed.job.files}
    for path, name in zip(paths, names, strict=True):
        try:
            lines, file_is_output = _read_file(path, name, printed, speakers.get(name))
        except NOT_GZIP as error:
            raise Unreadable("it is damaged") from error
        except OSError as error:
            raise cannot_be_read(error) from error
        count, is_output = count + lines, is_output or file_is_output
    printed.finish()
    result = log_evidence(printed, names, count)
    return replace(result, is_output=is_output or bool(result.evidence.ranks or result.remarks))


def _read_file(path: Path, name: str, printed: ReportCollector, speaker: Speaker | None) -> tuple[int, bool]:
    """Returns the number of lines, and whether the file is empty or a job may have printed one of its lines."""
    lines = read_lines(path, name)
    first = list(islice(lines, 200))
    quote = common_quote(line.text for line in first if line is not None)
    if quote:
        first, lines = [_without(line, quote) for line in first], (_without(line, quote) for line in lines)
    ahead = deque(first)
    texts = [line.text for line in ahead if line is not None]
    parser = PrefixParser(speaker, host_pattern(texts), has_rank_field(texts))
    last, is_output = 0, not any(map(str.strip, texts))
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if line is not None:
            last = line.number
            if (whole := join_wrapped(line, ahead[0] if ahead else None)) is not None:
                ahead.popleft()
                line = whole
            entry = parser.parse(line, ahead)
            is_output = is_output or entry.speaker not in (None, name) or looks_like_output(line.text)
            printed.read_line(entry)
    return last, is_output


def _without(line: LogLine | None, quote: str) -> LogLine | None:
    return replace(line, text=without_quote(line.text, quote)) if line is not None else None


def log_evidence(
    printed: ReportCollector, names: Sequence[str], count: int, *, may_be_caught: bool = False
) -> FoundEvidence:
    """Returns the evidence in what was printed.

    Args:
        may_be_caught: the last error counts though its process printed more afterwards
    """
    job, assignment = printed.job, RankAssignment.of(printed.job)
    stalled = printed.calls.add_stalls(assignment.outputs)
    assignment.note_signals()
    steps = _steps(job, assignment)
    numbers = {*assignment.outputs, *assignment.ends, *job.absent}
    world = max([job.world, *(rank + 1 for rank in numbers)], default=0)
    files: dict[str, str] = {}
    _name_groups(assignment.outputs)
    groups = _groups(assignment.outputs)
    ranks = [
        _with_steps(_rank_evidence(rank, job, assignment, groups, files), world, steps) for rank in sorted(numbers)
    ]
    ends = bool(assignment.ends) or not job.events.finished
    failed = bool(steps) or (ends and any(map(_has_trouble, ranks)))
    remarks, warned = _remarks(job, ranks, failed=failed)
    what = f"{'a log' if len(names) == 1 else f'{len(names)} logs'} of {count} lines{warned}"
    result = FoundEvidence(
        what,
        Evidence("crash", max(world, 1), ()),
        remarks=remarks,
        errors=tuple(ReportedError(event.line.where, event.description) for event in job.events.causes()),
        summary=job.events.summary(" ".join(remarks)),
        is_quiet=not job.events.errors(),
        launch=job.launch,
    )
    nodes = _silent_hosts(job, assignment)
    ranks = [rank for rank in ranks if not any(rank.rank in node.ranks for node in nodes)]
    rendezvous = None
    job.note_failed_rendezvous()
    if job.rendezvous_at is not None and all(map(_may_have_lost_a_peer, ranks)):
        rendezvous, files["rendezvous.json"] = job.rendezvous, job.rendezvous_at.where
    if not failed and rendezvous is None and not job.failed_hosts:
        again = not may_be_caught and not job.remarks and job.accept_last_errors()
        return log_evidence(printed, names, count, may_be_caught=True) if again else result
    waits = bool(steps) or any(rank.flight_record for rank in ranks)
    evidence = Evidence(
        "hang" if waits and not any(map(_failed, ranks)) else "crash",
        world,
        tuple(ranks),
        missing_ranks=tuple(sorted({*range(world)} - {rank.rank for rank in ranks})),
        nodes=nodes,
        rendezvous=rendezvous,
        printed=tuple(sorted({*assignment.named_ranks, *stalled})),
        labels=assignment.labels,
        world_guessed=world > job.world,
        may_be_caught=may_be_caught,
    )
    return replace(result, evidence=evidence, files=files)


def _steps(job: LoggedJob, assignment: RankAssignment) -> dict[int, int | None]:
    """Returns the last steps of the ranks, if they differ and nothing else shows a failure."""
    reported = any(output.errors or output.watchdog for output in assignment.outputs.values())
    ended_alone = any(end.code and not end.stopped for end in assignment.ends.values())  # no launcher stopped it
    if reported or ended_alone or job.failed_hosts or job.events.finished:
        return {}
    return uneven_steps(assignment.outputs, assignment.named_ranks, job.world)


def _has_trouble(rank: RankEvidence) -> bool:
    exit_ = rank.exit
    return bool(rank.exception or rank.flight_record or (exit_ and exit_.returncode and exit_.before_close))


def _remarks(job: LoggedJob, ranks: Sequence[RankEvidence], *, failed: bool) -> tuple[tuple[str, ...], str]:
    """Returns the remarks, and what to say of NCCL's warnings if nothing failed."""
    remarks, warned = tuple(f"{text} [{where}]" for text, where in job.remarks.items()), _nccl_failure(job)
    if job.nccl_failed is not None and not any(rank.exception for rank in ranks):
        return (*remarks, f"NCCL failed{f': {warned}' if warned else f' [{job.nccl_failed.where}]'}"), ""
    if job.native > _FEW_FRAMES and not failed:
        return (*remarks, _ONLY_C), ""
    return remarks, f" (a warning of NCCL alone is no failure: {warned})" if warned and not failed else ""


def _with_steps(rank: RankEvidence, world: int, steps: Mapping[int, int | None]) -> RankEvidence:
    if rank.rank not in steps:
        return rank
    return structs.replace(rank, progress=Progress(rank.rank, -1, world, 0, 0, 0, "", steps[rank.rank]))


def _silent_hosts(job: LoggedJob, assignment: RankAssignment) -> tuple[NodeEvidence, ...]:
    """Returns the one host that Slurm reports as failed, or that closed connections of others, if no rank of it reports
    its own end.
    """
    nodes = []
    for host in job.failed_hosts or job.closed_by:
        ranks = [rank for rank, output in assignment.outputs.items() if host in output.hosts]
        if not any(rank in assignment.ends or assignment.outputs[rank].errors for rank in ranks):
            trouble = "Slurm reports its failure" if host in job.failed_hosts else ""
            nodes.append(NodeEvidence(host, ranks=tuple(sorted(ranks)), trouble=trouble))
    return tuple(nodes) if len(nodes) == 1 else ()


def _may_have_lost_a_peer(rank: RankEvidence) -> bool:
    """Returns whether nothing ended it but that others could not be reached, as far as the log shows."""
    if rank.exception is not None:
        return is_consequence(rank.exception)
    return rank.exit is None or rank.exit.returncode in (0, 1) or not rank.exit.before_close


def _nccl_failure(job: LoggedJob) -> str:
    """Returns the first of NCCL's messages that means something; one about its own process comes first."""
    failure = first_failure(text for _, text in job.nccl_messages)
    where = next((line.where for line, text in job.nccl_messages if failure is not None and text == failure.text), "")
    return f"{one_line(failure.text)} ({failure.means}) [{where}]" if failure is not None else ""


def _failed(rank: RankEvidence) -> bool:
    """Returns whether it failed in another way than by the watchdog of a call that timed out."""
    return rank.exception is not None or (
        rank.exit is not None
        and rank.exit.before_close
        and rank.exit.returncode not in (-signal.SIGABRT, 128 + signal.SIGABRT)
    )


def _name_groups(ranks: Mapping[int, SpeakerOutput]) -> None:
    """Gives calls without a group to the only group in which others make such a call, or else to that of all ranks."""
    named = [(name, report) for rank in ranks.values() for name, report in rank.groups.items() if name != UNNAMED]
    for output in ranks.values():
        unnamed = output.groups.pop(UNNAMED, None)
        if unnamed is not None:
            like = {
                name
                for name, report in named
                if (report.op, report.size) == (unnamed.op, unnamed.size) or not report.op
            }
            output.groups.setdefault(like.pop() if len(like) == 1 else DEFAULT, unnamed)
    ops = {(name, report.seq): report for rank in ranks.values() for name, report in rank.groups.items() if report.op}
    for output in ranks.values():
        for name, report in output.groups.items():
            if not report.op and (twin := ops.get((name, report.seq))) is not None:
                report.op, report.size = twin.op, twin.size


def _groups(ranks: Mapping[int, SpeakerOutput]) -> dict[str, tuple[int, ...]]:
    """Returns the members of the groups all of whose members have reported their places."""
    places: dict[str, dict[int, int]] = {}
    for rank, output in ranks.items():
        for name, report in output.groups.items():
            if report.group_rank is not None:
                places.setdefault(name, {})[report.group_rank] = rank
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


def _seconds_between(first: str, second: str) -> float:
    """Returns the time between two times as torchrun prints them; 0 if either is none."""
    try:
        begin, end = (datetime.strptime(f"{time}+0000", "%Y-%m-%d_%H:%M:%S%z") for time in (first, second))
    except ValueError:
        return 0.0
    return (end - begin).total_seconds()


def _failure_delay_s(end: RankEnd, times: Mapping[str, str]) -> float:
    """Returns 0 for the ranks that may have failed first; 1 or 2 for those that failed later by the summary of their
    host; 3 for those of a host where the failures began a minute later than on another.

    torchrun looks at its ranks once in a while and gives all that it then finds ended the same second; of those, its
    "first observed failure" is the one with the lowest number. A rank that died of a signal of its own died of no
    peer's exit, but not the reverse: the others count half a second later.
    """
    first = times.get(end.host, "")
    if not end.time or not first:
        return 0.0 if end.root else 1.0
    if any(_seconds_between(time, first) > _CLOCKS_S for host, time in times.items() if host != end.host):
        return 3.0
    by_itself = -end.code in FAULT_SIGNALS or end.code == -signal.SIGKILL
    return 2.0 if end.time > first else 0.0 if by_itself else 0.5


def _rank_evidence(
    rank: int, job: LoggedJob, assignment: RankAssignment, groups: dict[str, tuple[int, ...]], files: dict[str, str]
) -> RankEvidence:
    output, end, folder = assignment.outputs.get(rank), assignment.ends.get(rank), f"ranks/{rank}"
    exception = record = log = fatal = None
    tail = output.tail if output is not None else ()
    unnamed = job.outputs.get(end.reporter if end is not None else None)
    if end is not None and unnamed is not None and (end.code < 0 or (end.code == BAD_OPTIONS and output is None)):
        tail = (*tail, *unnamed.tail)  # C++ and the kernel sign nothing
        files[f"{folder}/log_tail.txt"] = (unnamed.abort_line or unnamed.last or unnamed.first).where
    if output is not None:
        if output.abort_line is not None:
            files[f"{folder}/log_tail.txt"] = output.abort_line.where
        files.setdefault(f"{folder}/log_tail.txt", (output.last or output.first).where)
        last = output.final_error(has_failed=end is not None or bool(job.failed_speakers))
        if last is not None and not (end is not None and _ended_by_a_signal(end)):
            traceback, exception = last
            files[f"{folder}/exception.json"] = traceback.line.where
        crash = output.final_crash(has_failed=end is not None)
        if crash is not None and end is not None and end.code == -crash.signal:
            fatal = parse_fatal("\n".join(crash.lines))
            files[f"{folder}/fault.txt"] = crash.line.where
        if output.watchdog is not None:
            record = _flight_record(output, groups)
            files[f"{folder}/flight_recorder.json"] = output.watchdog.where
        if output.warnings:
            log = NcclLog(output.warnings[0][0].where, tuple(text for _, text in output.warnings))
    exit_, pid, host = None, 0, output.node if output is not None else ""
    if end is not None:
        stopped = end.stopped or was_terminated(end.code)
        stopped |= output is not None and output.timed_out
        after_s = _failure_delay_s(end, assignment.first_times)
        exit_ = RankExit(end.code, after_s, before_close=not stopped, file=end.line.where)
        pid, host = end.pid, end.host or host
    error_text = f"{exception.message}\n{exception.text}" if exception is not None else ""  # perhaps how a worker ended
    killed = (
        words
        for killed_pid, words in job.kills.items()
        if (killed_pid == pid and end is not None) or f"(pid {killed_pid})" in error_text
    )
    kills = MemoryKills(kernel_line=next(killed, ""))
    return RankEvidence(
        rank=rank, host=host, pid=pid, flight_record=record, exception=exception, fatal=fatal, exit=exit_,
        beacon=False, log_tail="\n".join(tail), nccl_log=log, memory_kills=kills,
    )  # fmt: skip


def _ended_by_a_signal(end: RankEnd) -> bool:
    """Returns whether a signal ended it, and not its last exception; an abort may follow an exception."""
    return end.code < 0 and -end.code not in (signal.SIGABRT, signal.SIGTERM) and not end.stopped


def _flight_record(output: SpeakerOutput, groups: dict[str, tuple[int, ...]]) -> FlightRecord:
    entries = [
        Collective(
            name, report.seq, f"nccl:{report.op}", completed=False, state="started",
            is_p2p=report.op in ("send", "recv"), p2p_seq=report.seq,
            description=report.description, record_id=at, timeout_ms=report.timeout_ms,
            input_sizes=((report.size,),) if report.size is not None else UNKNOWN_SIZES, frames=tuple(report.frames),
        )
        for at, (name, report) in enumerate(output.groups.items(), start=1)
        if report.seq
    ]  # fmt: skip
    status = {
        name: GroupStatus(
            max(report.last_enqueued, report.seq),
            -1,
            report.last_completed if report.last_completed >= 0 else report.seq - 1,
        )
        for name, report in output.groups.items()
        if report.last_enqueued >= 0
        or (report.seq > 1 and report.op not in ("send", "recv"))  # a stream ends its works in their order
    }
    return FlightRecord("", tuple(entries), groups, status)
