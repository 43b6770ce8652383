"""Parses what c10d, NCCL and Horovod report about calls: timeouts, mismatches, connections, absent ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from itertools import chain

from safelaunch.addons.logs.lines import MAX_RANKS, LogLine
from safelaunch.addons.logs.records import DEFAULT, MOST_WARNINGS, UNNAMED, LoggedJob, SpeakerOutput, WatchdogReport
from safelaunch.addons.logs.speakers import LogEntry, Speaker
from safelaunch.addons.logs.tracebacks import MOST_MESSAGE
from safelaunch.model import Frame
from safelaunch.stacks.failures import fingerprints
from safelaunch.verdict.exceptions import is_consequence

# --- c10d -------------------------------------------------------------------------------------------------------------
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+))?(?:(?:, )?OpType=(?P<op>\w+))?(?:, NumelIn=(?P<size>\d+))?(?:, NumelOut=\d+)?"
    r"(?:, Timeout\(ms\)=(?P<ms>\d+))?"
)
_GROUP = re.compile(
    r"PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<name>[^\s(]+)(?:\((?P<called>[^)]*)\))?)? Rank (?P<place>\d+)"
)
_AT_WORK = re.compile(r"\bat (?:NCCL )?work(?: sequence id)?: (?P<seq>\d+)")
_WHOSE = re.compile(r"\[(?:[^\]]* )?Rank (?P<rank>\d{1,6})\]")
_STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<queued>-?\d+),(?: last started (?:NCCL )?work: -?\d+,)?"
    r" last completed (?:NCCL )?work: (?P<done>-?\d+)",
    re.IGNORECASE,
)
_STACK = re.compile(r"#\d+ (?P<function>\S+) from (?P<file>.+):(?P<line>\d+)$")
_C_FRAME = re.compile(r"#\d+ +0x[0-9a-f]+ in \w")
_OPS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
_CUDA_ERROR = re.compile(
    r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?P<what>(?:CUDA|NCCL) error.*)"
)
_SOCKET_ERROR = re.compile(
    r"\[c10d\] (?P<what>The (?:\w+ socket has failed|IPv\d network addresses of .* cannot be retrieved)"
    r".*\((?:errno: (?!97\b)|gai error).*)"
)
_MONITORED = re.compile(r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier")
_MISMATCH = "Detected mismatch between coll"

# --- NCCL and hosts ---------------------------------------------------------------------------------------------------
NCCL_PREFIX = re.compile(r"(?:^|\s)(?P<process>[\w.-]+:(?P<pid>\d+)):\d+ \[")
_NCCL_COMM = re.compile(rf"{NCCL_PREFIX.pattern}.* comm 0x\w+ rank (?P<rank>\d{{1,6}}) nranks (?P<world>\d{{1,6}}) ")
# Errors that NCCL returns. A warning alone is no failure: NCCL tries an alternative, or a peer ended first.
_NCCL_FAILED = re.compile(
    r"\bnccl(?:\w+Error|Invalid\w+): |NCCL error: |NCCL error in: |NCCL INFO group\.cc:\d+ -> [1-6]\b"
)
_CLOSED_BY = re.compile(r"NCCL WARN .*(?:remote peer|recv from|send to|from peer) (?P<host>[\w.-]+)<\d+>")
_ON_HOST = re.compile(
    r"(?P<prefix>[\w.-]+):\d+:\d+ \[\d+\] |.*\b(?:on|host(?:name)?|node)[=:]? (?P<host>(?=[\w.-]*\d)[\w.-]+)(?=[ ,)]|$)"
)
_NODE_FAILED = re.compile(r"[Nn]ode failure on (?P<host>[\w.-]+)")

# --- Horovod, and steps -----------------------------------------------------------------------------------------------
# Horovod lists tensors that a rank hasn't submitted; before 0.18, ranks that haven't submitted a tensor.
_NOT_SUBMITTED = re.compile(
    r"(?P<rank>\d{1,6})!?: \[(?P<tensors>[^\]]+)\]$"
    r"|(?:.*\s|Stalled ops:|^)(?P<tensor>\S+) \[missing ranks: (?P<ranks>\d+(?:, \d+)*)\]$"
)
_STEP = re.compile(
    r"\b(?P<word>[Ss]tep|[Ii]t(?:er(?:ation)?)?|[Ee]poch|[Bb]atch)s?\b\W{0,4}(?P<number>\d{1,9})(?!\.\d)"
    r"|(?:\|| |:|\[|^) *(?P<done>\d{1,9})/\d{2,9}(?: |\]|$)"
)


class Calls:
    def __init__(self, job: LoggedJob) -> None:
        self.job = job
        self._stack: WatchdogReport | None = None  # the following lines might be the stack of its call
        self._stalled: dict[str, set[int]] = {}  # Horovod's tensors -> ranks that haven't submitted them
        self._stalled_at: LogLine | None = None
        self._since_stalled = 0

    def read_line(self, output: SpeakerOutput, entry: LogEntry) -> None:
        text = entry.text
        output.timed_out |= entry.speaker is not None and "Watchdog caught collective operation timeout" in text
        if "atchdog" in text or "enqueued" in text:
            self._stack = self._note_watchdog(output, entry) or self._stack
        if match := _CUDA_ERROR.search(text):
            output.fail(entry.line, "RuntimeError", match["what"])
        if match := _SOCKET_ERROR.search(text):
            output.socket, output.socket_at = match["what"], entry.line
        if _MISMATCH in text:
            self._note_mismatch(output, entry)
        if "by subset of ranks and are waiting for remainder of ranks" in text:
            self._stalled, self._stalled_at = {}, entry.line

    def read_fragment(self, text: str) -> None:
        self.job.native += text.startswith("#") and _C_FRAME.match(text) is not None
        if self._stack is not None and (match := _STACK.match(text)):
            self._stack.frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if self._stalled_at is not None and (match := _NOT_SUBMITTED.match(text)):
            self._since_stalled = 0
            ranks = _ranks(match["rank"] or match["ranks"])
            for tensor in (match["tensor"] or match["tensors"].removesuffix(" ...")).split(", "):
                self._stalled.setdefault(tensor, set()).update(ranks)

    def read_nccl(self, output: SpeakerOutput, entry: LogEntry) -> None:
        text, line, job = entry.text, entry.line, self.job
        if ("nccl" in text or "NCCL" in text) and _NCCL_FAILED.search(text):
            job.nccl_failed = job.nccl_failed or line
        if " nranks " in text and (match := _NCCL_COMM.search(text)):
            size, rank = min(int(match["world"]), MAX_RANKS), int(match["rank"])
            job.world = max(job.world, size)
            if size > job.nccl_places.get(match["process"], (0, 0))[0] and rank < MAX_RANKS:
                job.nccl_places[match["process"]] = size, rank
        if any(word in text for word in ("ode", "ost", " on ", "NCCL")) and (match := _ON_HOST.match(text)):
            output.hosts.add(match["prefix"] or match["host"])
        if "ode failure" in text and (match := _NODE_FAILED.search(text)):
            job.failed_hosts.setdefault(match["host"], line)
        _, warns, message = text.partition("NCCL WARN ")
        if warns and (match := _CLOSED_BY.search(text)):
            job.closed_by.setdefault(match["host"], line)
        message = text if output.before.startswith("Last error:") else message
        if message and len(job.nccl_messages) < MOST_WARNINGS:
            job.nccl_messages.append((line, message))
        if warns and len(output.warnings) < MOST_WARNINGS:
            output.warnings.append((line, message.strip()))

    def read_progress(self, output: SpeakerOutput, entry: LogEntry, *, from_script: bool) -> None:
        """Reads the step number from any line; ``from_script`` means that the script itself might have printed it."""
        self._since_stalled += from_script
        if entry.speaker is not None and (match := _STEP.search(entry.text)):
            word, number = (match["word"] or "%").lower(), int(match["number"] or match["done"])
            output.steps[word] = max(number, output.steps.get(word, 0))

    def note_absent(self, message: str) -> None:
        if absent := _MONITORED.search(message):
            self.job.absent |= _ranks(absent["ranks"])

    def restart(self) -> None:
        self._stalled.clear()

    def add_stalls(self, ranks: dict[int, SpeakerOutput]) -> tuple[int, ...]:
        """Converts Horovod's stalled tensors into calls in which the submitting ranks wait; returns all ranks."""
        if self._stalled_at is None or not self._stalled or self._since_stalled > MOST_MESSAGE:
            return ()
        job, alike = self.job, {frozenset(lack): tensor for tensor, lack in reversed(self._stalled.items())}
        job.world = max(job.world, *(rank + 1 for rank in (*ranks, *job.ends, *chain(*alike))))
        job.world += len(max(alike, key=len)) == job.world  # at least one rank submitted it
        for rank in range(job.world):
            output = ranks.setdefault(rank, SpeakerOutput(self._stalled_at))
            output.watchdog = output.watchdog or self._stalled_at
            frames = next((error.frames for _, error in output.errors if is_consequence(error)), None)
            if frames is not None:  # a shutdown ended its wait
                output.errors, output.timed_out = [], True
            for lack, tensor in alike.items():
                submitted, name = rank not in lack, tensor.rpartition("/")[2]
                output.groups[tensor] = WatchdogReport("", rank, int(submitted), name, [*(frames or ())])
        return tuple(range(job.world))

    def _note_mismatch(self, output: SpeakerOutput, entry: LogEntry) -> None:
        """Records a mismatch that torch's debug check logged, for all ranks that it names."""
        message = entry.text[entry.text.index(_MISMATCH) :]
        ranks = [rank for rank in fingerprints(message) if rank < MAX_RANKS]
        if ranks and not isinstance(entry.speaker, int):
            output = self.job.process(ranks[0], entry.line)
        if ranks:
            output.fail(entry.line, "RuntimeError", message)
        for rank in ranks[1:]:
            self.job.process(rank, entry.line)

    def _note_watchdog(self, output: SpeakerOutput, entry: LogEntry) -> WatchdogReport | None:
        """Records the call that timed out, or a group's progress; returns the report if a stack might follow it.

        Older watchdogs name the group only after the call. Without torch's prefix, they report only the rank within the
        group.
        """
        group, work, status = (pattern.search(entry.text) for pattern in (_GROUP, _WORK, _STATUS))
        if work is None and status is None:
            return None
        if not isinstance(entry.speaker, int) and (rank_match := _WHOSE.search(entry.text)):
            output = self._member(int(rank_match["rank"]), group, entry)
        output.watchdog = output.watchdog or entry.line
        name = (group["name"] or group["id"]) if group else UNNAMED
        at_work = _AT_WORK.search(entry.text) if status else None
        seq, unnamed = int(at_work["seq"]) if at_work else 0, output.groups.get(UNNAMED)
        if group and unnamed is not None and at_work and seq == unnamed.seq:
            output.groups.setdefault(name, output.groups.pop(UNNAMED))
        report = output.groups.setdefault(name, WatchdogReport())
        if group:
            report.description, report.group_rank = group["called"] or "", int(group["place"])
        if work and not report.op:
            op = work["op"] or ""
            report.seq, report.op, report.timeout_ms = (
                int(work["seq"] or 0),
                _OPS.get(op, op.lower()),
                int(work["ms"] or 0),
            )
            report.size = int(work["size"]) if work["size"] else None
        if status:
            report.last_enqueued, report.last_completed = int(status["queued"]), int(status["done"])
            # A stream completes its operations in order.
            report.seq = (
                report.seq or seq or (report.last_completed + 1 if report.last_enqueued > report.last_completed else 0)
            )
        return report if not report.frames else None

    def _member(self, place: int, group: re.Match[str] | None, entry: LogEntry) -> SpeakerOutput:
        everybody = group is None or (group["name"] or group["id"]) == DEFAULT or group["called"] == "default_pg"
        called = (group["called"] or group["name"] or group["id"]) if group else ""
        key: Speaker = place if everybody else f"rank {place} of group {called}"
        output = self.job.process(key, entry.line)
        output.tail.append(entry.text)
        return output


def _ranks(text: str) -> set[int]:
    return {rank for number in text.split(", ") if (rank := int(number)) < MAX_RANKS}


def uneven_steps(ranks: dict[int, SpeakerOutput], named_ranks: Collection[int], world: int) -> dict[int, int | None]:
    """Returns each rank's last step, if most ranks printed the same one and the others earlier ones; else empty."""
    counts = Counter(word for rank in named_ranks if rank in ranks for word in ranks[rank].steps)
    if not counts:
        return {}
    word = counts.most_common(1)[0][0]
    last_steps = {
        rank: ranks[rank].steps.get(word, -1) for rank in named_ranks if rank in ranks and not ranks[rank].errors
    }
    last = max(last_steps.values(), default=-1)
    ahead = [rank for rank, number in last_steps.items() if number == last]
    if len(ahead) < 2 or len(ahead) == len(last_steps) or 2 * len(ahead) <= max(len(last_steps), world):
        return {}
    return {rank: number if number >= 0 else None for rank, number in last_steps.items()}
