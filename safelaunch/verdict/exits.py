"""Ranks that exited: the condition of each one that raised, was killed or called exit."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from safelaunch.model import Claim, Frame, RankEvidence, RankException
from safelaunch.stacks import aborts, calls, gpu_shortage, tracebacks
from safelaunch.stacks import frames as fr
from safelaunch.verdict import causes, suggestions
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.exceptions import (
    DIST_TYPES,
    failure_kind,
    failure_of,
    is_aborted,
    is_consequence,
    is_timeout,
    nccl_failure,
    one_line,
    root_of,
)
from safelaunch.verdict.suggestions import Advice
from safelaunch.verdict.thread_view import View

GONE_CAUSES = (*causes.FAILURES, "uneven-batches")

FAULT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # launchers don't send these
_FATAL_SIGNALS = (*FAULT_SIGNALS, signal.SIGABRT)  # faulthandler catches these
_NOT_REACHED = re.compile(r"failed to connect to|while trying to connect to|connection refused", re.IGNORECASE)
_WATCHDOG = re.compile(
    r"watchdog (?:caught collective operation timeout|thread terminated|got stuck for)", re.IGNORECASE
)
# torch's message about a DataLoader worker that SIGKILL ended.
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed\b")


BAD_OPTIONS = 2  # exit code of argparse and click
UNKNOWN_SIGNAL = -127  # return code of a process that ended without a message


def signal_name(returncode: int) -> str:
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}" if returncode != UNKNOWN_SIGNAL else "an unknown signal"


def ended_by_others(rank: RankEvidence) -> bool:
    """Returns whether the launcher ended the rank after another's failure, or a timeout aborted it."""
    if rank.exit is None or -rank.exit.returncode in FAULT_SIGNALS:
        return False
    return not rank.exit.before_close or _aborted_for_a_peer(rank)


def _aborted_for_a_peer(rank: RankEvidence) -> bool:
    if not is_aborted(rank):
        return False
    logged = nccl_failure(rank)
    return not logged.own if logged is not None else _WATCHDOG.search(rank.log_tail) is not None


def was_a_hang(ranks: Iterable[RankEvidence]) -> bool:
    """Returns whether a crash is the end of a hang: no rank failed by itself, and some timed out."""
    ranks = tuple(ranks)
    failed = any(failed_by_itself(rank) or missed_the_store(rank, ranks) for rank in ranks)
    return not failed and any(map(_has_timed_out, ranks))


def missed_the_store(rank: RankEvidence, ranks: Iterable[RankEvidence]) -> list[View]:
    """Returns the peers that wait at the store to which this rank failed to connect.

    The rank has another address, for example the last attempt's.
    """
    raised = rank.exception
    if raised is None or failure_kind(raised) not in DIST_TYPES[1:3] or not _NOT_REACHED.search(raised.message):
        return []
    views = (
        View(peer.main, peer) for peer in ranks if peer is not rank and peer.exception is None and peer.main is not None
    )
    return [view for view in views if (wait := view.awaited.peers) is not None and wait.kind == "init"]


def failed_by_itself(rank: RankEvidence) -> bool:
    condition = gone_condition(rank, None)
    return condition is not None and condition.cause in causes.FAILURES


def _has_timed_out(rank: RankEvidence) -> bool:
    if rank.exception is not None:
        return is_timeout(rank.exception)
    logged = nccl_failure(rank)
    return _aborted_for_a_peer(rank) and (logged is None or logged.kind == "infiniband")


def failed_at(rank: RankEvidence) -> float:
    """Returns when the rank failed (CLOCK_REALTIME): its exception's time, or when the launcher noticed."""
    if rank.exception is not None:
        return rank.exception.time_unix_s
    return rank.exit.time_unix_s if rank.exit is not None else float("inf")


def gone_condition(rank: RankEvidence, view: View | None) -> Condition | None:
    """Returns the condition of a rank that raised, was killed or exited by itself."""
    if rank.exception is not None and is_consequence(rank.exception, rank.nccl_log):
        return None
    if rank.exception is not None and failure_kind(rank.exception) != "SystemExit":
        return exception_condition(rank, rank.exception)
    if rank.exit is None:
        dead = view is not None and bool(view.process.states) and view.process.states[-1].state in "ZX"
        text = "is a zombie; its exit status is unknown"
        claim = Claim("state Z", f"ranks/{rank.rank}/proc.json")
        doubts = (Doubt.STATUS_UNKNOWN,)
        return Condition("rank-exited", text, None, rank.pid, doubts=doubts, claims=(claim,)) if dead else None
    if ended_by_others(rank):
        return None
    return _killed_condition(rank) if rank.exit.returncode < 0 else _exit_condition(rank)


def exception_condition(rank: RankEvidence, exception: RankException) -> Condition:
    """Returns the condition of a rank that raised.

    An exception of a worker process is raised again in the rank; the worker's line is at fault. In a chain, the first
    exception is the cause.
    """
    root = root_of(exception)
    frame = fr.stack_of(rank, root.frames).user_frame
    if frame is None and root is not exception:
        root, frame = exception, fr.stack_of(rank, exception.frames).user_frame
    claim = Claim(f"first exception: {root.type}", f"ranks/{rank.rank}/exception.json")
    text, where, process = f"raised {_exception_words(root)}", fr.at(frame), "main"
    failure, logged = failure_of(root) or failure_of(exception), nccl_failure(rank)
    claims: tuple[Claim, ...] = (claim,)
    if failure is not None and failure.general and logged is not None:
        failure, claims = logged, (claim, logged_claim(rank))
    if failure is not None:
        text += f" ({failure.means})"
    worker, remote = tracebacks.of_worker(exception.text)
    inside = fr.stack_of(rank, remote.frames).user_frame
    if inside is not None:
        process = worker
        text = f"raised {root.type} in a {process}: {one_line(remote.message or root.message)}"
        where, frame = fr.at(inside), inside
    text, advice = text + where, frozenset[Advice]()
    if root is not exception:
        text += f", which became {_exception_words(exception)}{fr.at(fr.stack_of(rank, exception.frames).user_frame)}"
    if _WORKER_KILLED.search(f"{exception.message}\n{exception.text}"):
        words, memory, advice = _memory_words(rank)
        text, claims = text + words, (*claims, *memory)
    return Condition("rank-exception", text, frame, rank.pid, process, claims=claims, advice=advice)


def _exception_words(exception: RankException) -> str:
    message = one_line(_essence(exception.message)).rstrip(" .:")
    return (
        f"{exception.type.removeprefix('__main__.')}: {message}"
        if message
        else exception.type.removeprefix("__main__.")
    )


def logged_claim(rank: RankEvidence) -> Claim:
    failure = nccl_failure(rank)
    assert rank.nccl_log is not None and failure is not None
    return Claim(f"NCCL warns: {one_line(failure.text)}", rank.nccl_log.file)


def _essence(message: str) -> str:
    if gpu_shortage.shortage(message) is not None:
        return message.partition(".")[0]
    return message.rpartition("Last error:\n")[2] or message


def _claim_of_status(rank: RankEvidence) -> Claim:
    assert rank.exit is not None
    status = rank.exit.returncode if rank.exit.returncode != UNKNOWN_SIGNAL else "unknown"
    return Claim(f"exit status {status}, and its launcher had not stopped it", rank.exit.file)


def _killed_condition(rank: RankEvidence) -> Condition:
    assert rank.exit is not None
    number = -rank.exit.returncode
    by_itself = rank.fatal is not None and not rank.beacon  # its last output shows more than a launcher
    claims, clause, frame = [] if by_itself else [_claim_of_status(rank)], "", None
    advice: set[Advice] = {suggestions.FATAL_SIGNAL} if number not in (signal.SIGKILL, signal.SIGTERM) else set()
    doubts: tuple[Doubt, ...] = ()
    within = aborted_in(rank)
    if number in _FATAL_SIGNALS and rank.fatal is not None:
        frame = (within or fr.stack_of(rank, rank.fatal.frames)).user_frame
        claims.append(Claim(f"faulthandler: {rank.fatal.message}", f"ranks/{rank.rank}/fault.txt"))
    if number == signal.SIGKILL:
        words, memory, what_to_do = _memory_words(rank)
        clause += words
        claims += memory
        advice |= what_to_do
    if number in _FATAL_SIGNALS and rank.progress is not None and rank.progress.state == "exited":
        clause += " after its script had ended, while Python shut down"
        if number == signal.SIGABRT:
            advice.add(suggestions.AFTER_THE_END)
        claims.append(Claim("its progress page says that the script had ended", f"ranks/{rank.rank}/progress.json"))
    words = _abort_words(rank)
    if words:
        clause += words
        claims.append(Claim("the end of its output", f"ranks/{rank.rank}/log_tail.txt"))
    logged = nccl_failure(rank) if number in _FATAL_SIGNALS else None
    if logged is not None:
        clause += f"; NCCL had failed ({logged.means})"
        claims.append(logged_claim(rank))
    if within is not None:
        # Something that a peer sent might be the reason; nothing here shows it.
        doubts, clause = (
            (Doubt.ABORTED_IN_COLLECTIVE,),
            f", by its communication library in the middle of a collective{clause}",
        )
        advice |= suggestions.ABORTED
    text = f"was killed by {signal_name(rank.exit.returncode)}{fr.at(frame)}{clause}"
    return Condition(
        "rank-killed", text, frame, rank.pid, doubts=doubts, claims=tuple(claims), advice=frozenset(advice)
    )


def aborted_in(rank: RankEvidence) -> fr.Stack | None:
    """Returns the c10d call in which a rank was aborted.

    gloo aborts from its own thread, so any thread's call might be the one.
    """
    if not is_aborted(rank) or rank.fatal is None:
        return None
    stacks = (fr.stack_of(rank, frames) for frames in (rank.fatal.frames, *rank.fatal.threads))
    return next((stack for stack in stacks if calls.torch_wait(stack) is not None or calls.C10D.on(stack.called)), None)


def kernel_claim(rank: RankEvidence, line: str, whose: str = "") -> Claim:
    return Claim(f"{whose}the kernel's log: {one_line(line)}", f"node/{rank.host}/kernel_log.txt")


def _memory_words(rank: RankEvidence) -> tuple[str, list[Claim], frozenset[Advice]]:
    """Describes a SIGKILL by the out-of-memory killer's messages or counts."""
    taken, outside = frozenset({suggestions.OUT_OF_MEMORY}), frozenset({suggestions.KILLED_FROM_OUTSIDE})
    kills, node = rank.memory_kills, f"node/{rank.host}"
    if kills.kernel_line:
        claim = kernel_claim(rank, kills.kernel_line)
        return ": the kernel's out-of-memory killer took it", [claim], taken
    for count, where in ((kills.cgroup, "in the job's control group"), (kills.node, "on this node")):
        if count:
            many = "process" if count == 1 else "processes"
            clause = f"the out-of-memory killer took {count} {many} {where} while the job ran"
            return f": {clause}", [Claim(clause, f"{node}/resources.json")], taken
    if kills.cgroup is None and kills.node is None:
        return "", [], outside
    clause = "the kernel counts no out-of-memory kill while the job ran"
    words = f"; {clause}, so a process sent it, possibly the rank itself"
    return words, [Claim(clause, f"{node}/resources.json")], outside


def _exit_condition(rank: RankEvidence) -> Condition:
    assert rank.exit is not None
    code, call = rank.exit.returncode, rank.exit_call
    claims = [_claim_of_status(rank)]
    frame, where = None, ""
    if call is not None and call.code == code:
        frame = fr.stack_of(rank, call.frames).user_frame
        where = f": {call.function}(){fr.at(frame)}" if frame else ""
        claims.append(Claim(f"it called {call.function}()", f"ranks/{rank.rank}/exit_call.json"))
    if code > 0:
        text = f"exited with code {code}{where}"
        clause = aborts.options_refused(rank.log_tail) if code == BAD_OPTIONS else ""
        if clause:
            text += f"; it printed: {one_line(clause)}"
            claims.append(Claim("the end of its output", f"ranks/{rank.rank}/log_tail.txt"))
        refused = clause or (call is not None and any(_is_of_parser(frame) for frame in call.frames))
        advice = frozenset({suggestions.OPTIONS_REFUSED}) if refused else frozenset[Advice]()
        return Condition("rank-exited", text, frame, rank.pid, claims=tuple(claims), advice=advice)
    returned = rank.progress is not None and bool(rank.progress.returned_ns)  # multiprocessing then calls exit
    early = frame is not None and frame.function != "<module>" and not returned  # `sys.exit(main())` ends most scripts
    text, cause = f"has left the training loop: it exited cleanly (code 0{where})", "uneven-batches"
    if call is not None and call.function == "os._exit" and early:
        text, cause = f"ended itself with code 0{where}", "rank-exited"
    return Condition(cause, text, frame, rank.pid, claims=tuple(claims), exits_early=early)


def _is_of_parser(frame: Frame) -> bool:
    return fr.normal(frame.file).endswith(("/argparse.py", "/click/core.py", "/optparse.py"))


def _abort_words(rank: RankEvidence) -> str:
    abort = aborts.last_abort(rank.log_tail)
    if abort is None:
        return ""
    return f"; it printed: {one_line(abort.words)}{f' ({abort.means})' if abort.means else ''}"
