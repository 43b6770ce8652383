"""Builds the evidence for a verdict from the reports in a log."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from msgspec import structs

from safelaunch.addons.logs.assignment import RankAssignment
from safelaunch.addons.logs.calls import uneven_steps
from safelaunch.addons.logs.collector import ReportCollector
from safelaunch.addons.logs.records import DEFAULT, UNNAMED, LoggedJob, RankEnd, SpeakerOutput, was_terminated
from safelaunch.bundle.reading.evidence import EvidenceSource, ReportedError
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
from safelaunch.verdict.exceptions import is_consequence, one_line
from safelaunch.verdict.exits import BAD_OPTIONS, FAULT_SIGNALS


def log_evidence(
    collector: ReportCollector, names: Sequence[str], count: int, *, may_be_caught: bool = False
) -> EvidenceSource:
    """Returns the evidence found in a job's output.

    Args:
        may_be_caught: True if the last error counts even if its process printed more output afterwards.
    """
    job, assignment = collector.job, RankAssignment.of(collector.job)
    stalled = collector.calls.add_stalls(assignment.outputs)
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
    result = EvidenceSource(
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
    if job.rendezvous_at is not None and all(map(_only_lost_a_peer, ranks)):
        rendezvous, files["rendezvous.json"] = job.rendezvous, job.rendezvous_at.where
    if not failed and rendezvous is None and not job.failed_hosts:
        again = not may_be_caught and not job.remarks and job.accept_last_errors()
        return log_evidence(collector, names, count, may_be_caught=True) if again else result
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
    reported = any(output.errors or output.watchdog for output in assignment.outputs.values())
    ended_alone = any(end.code and not end.stopped for end in assignment.ends.values())
    if reported or ended_alone or job.failed_hosts or job.events.finished:
        return {}
    return uneven_steps(assignment.outputs, assignment.named_ranks, job.world)


def _has_trouble(rank: RankEvidence) -> bool:
    exit_ = rank.exit
    return bool(rank.exception or rank.flight_record or (exit_ and exit_.returncode and exit_.before_close))


def _remarks(job: LoggedJob, ranks: Sequence[RankEvidence], *, failed: bool) -> tuple[tuple[str, ...], str]:
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
    """Returns the one host that failed, according to Slurm, or closed connections; empty if there are several.

    Empty also if the host's ranks report their end.
    """
    nodes = []
    for host in job.failed_hosts or job.closed_by:
        ranks = [rank for rank, output in assignment.outputs.items() if host in output.hosts]
        if not any(rank in assignment.ends or assignment.outputs[rank].errors for rank in ranks):
            trouble = "Slurm reports its failure" if host in job.failed_hosts else ""
            nodes.append(NodeEvidence(host, ranks=tuple(sorted(ranks)), trouble=trouble))
    return tuple(nodes) if len(nodes) == 1 else ()


def _only_lost_a_peer(rank: RankEvidence) -> bool:
    if rank.exception is not None:
        return is_consequence(rank.exception)
    return rank.exit is None or rank.exit.returncode in (0, 1) or not rank.exit.before_close


def _nccl_failure(job: LoggedJob) -> str:
    failure = job.nccl_failure
    where = next((line.where for line, text in job.nccl_messages if failure is not None and text == failure.text), "")
    return f"{one_line(failure.text)} ({failure.means}) [{where}]" if failure is not None else ""


def _failed(rank: RankEvidence) -> bool:
    # A watchdog's abort after a timeout is no failure.
    return rank.exception is not None or (
        rank.exit is not None
        and rank.exit.before_close
        and rank.exit.returncode not in (-signal.SIGABRT, 128 + signal.SIGABRT)
    )


def _name_groups(ranks: Mapping[int, SpeakerOutput]) -> None:
    """Assigns each report without a group name to the only group with a similar call, or else to the default group."""
    named_reports = [
        (name, report) for rank in ranks.values() for name, report in rank.groups.items() if name != UNNAMED
    ]
    for output in ranks.values():
        unnamed = output.groups.pop(UNNAMED, None)
        if unnamed is not None:
            like = {
                name
                for name, report in named_reports
                if (report.op, report.size) == (unnamed.op, unnamed.size) or not report.op
            }
            output.groups.setdefault(like.pop() if len(like) == 1 else DEFAULT, unnamed)
    ops = {(name, report.seq): report for rank in ranks.values() for name, report in rank.groups.items() if report.op}
    for output in ranks.values():
        for name, report in output.groups.items():
            if not report.op and (twin := ops.get((name, report.seq))) is not None:
                report.op, report.size = twin.op, twin.size


def _groups(ranks: Mapping[int, SpeakerOutput]) -> dict[str, tuple[int, ...]]:
    """Returns the members of each group whose members all reported their rank in the group."""
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
    "its stacks show only C functions, no lines of Python: take them with `py-spy dump --pid PID`, or with gdb's "
    "`py-bt`"
)
_CLOCKS_S = 60.0  # largest difference between two nodes' clocks


def _seconds_between(first: str, second: str) -> float:
    try:
        begin, end = (datetime.strptime(f"{time}+0000", "%Y-%m-%d_%H:%M:%S%z") for time in (first, second))
    except ValueError:
        return 0.0
    return (end - begin).total_seconds()


def _failure_delay_s(end: RankEnd, times: Mapping[str, str]) -> float:
    """Returns a substitute for the time at which a rank failed; 0 for ranks that might have failed first.

    1 or 2 mean that the rank failed later, according to its host's summary. 3 means that failures on another host began
    at least a minute earlier.

    torchrun polls its ranks, and reports the same second for all that ended since the last poll; its "first observed
    failure" is the lowest of these ranks. A rank isn't killed by a fatal signal because a peer exited, but peers exit
    if a rank is killed by one. Therefore, of the ranks that ended in that second, those not killed by a signal get 0.5.
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
        tail = (*tail, *unnamed.tail)  # output of C++ and the kernel has no prefix
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
    error_text = f"{exception.message}\n{exception.text}" if exception is not None else ""  # perhaps of a worker
    killed = (
        kernel_line
        for killed_pid, kernel_line in job.kills.items()
        if (killed_pid == pid and end is not None) or f"(pid {killed_pid})" in error_text
    )
    kills = MemoryKills(kernel_line=next(killed, ""))
    return RankEvidence(
        rank=rank, host=host, pid=pid, flight_record=record, exception=exception, fatal=fatal, exit=exit_,
        beacon=False, log_tail="\n".join(tail), nccl_log=log, memory_kills=kills,
    )  # fmt: skip


def _ended_by_a_signal(end: RankEnd) -> bool:
    # SIGABRT might follow an exception.
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
        or (report.seq > 1 and report.op not in ("send", "recv"))  # a stream ends its operations in order
    }
    return FlightRecord("", tuple(entries), groups, status)
