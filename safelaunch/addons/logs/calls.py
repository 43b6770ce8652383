"""What c10d, NCCL and Horovod report of a job's calls: timeouts, mismatches, connections, and absent ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from itertools import chain

from safelaunch.addons.logs.heard import DEFAULT, MOST_WARNINGS, UNNAMED, Heard, LoggedJob, WatchdogReport
from safelaunch.addons.logs.lines import MAX_RANKS, LogLine, Speaker, SpokenLine
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
_OF_C = re.compile(r"#\d+ +0x[0-9a-f]+ in \w")
_OPS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
_OF_CUDA = re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?P<what>(?:CUDA|NCCL) error.*)")
_OF_A_SOCKET = re.compile(
    r"\[c10d\] (?P<what>The (?:\w+ socket has failed|IPv\d network addresses of .* cannot be retrieved)"
    r".*\((?:errno: (?!97\b)|gai error).*)"
)
_MONITORED = re.compile(r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier")
_MISMATCH = "Detected mismatch between coll"

# --- NCCL and hosts ---------------------------------------------------------------------------------------------------
OF_NCCL = re.compile(r"(?:^|\s)(?P<process>[\w.-]+:(?P<pid>\d+)):\d+ \[")
_IN_NCCL = re.compile(rf"{OF_NCCL.pattern}.* comm 0x\w+ rank (?P<rank>\d{{1,6}}) nranks (?P<world>\d{{1,6}}) ")
# What NCCL returns to its caller. A warning alone is no failure: NCCL tries something else, or a peer ended before.
_NCCL_FAILED = re.compile(
    r"\bnccl(?:\w+Error|Invalid\w+): |NCCL error: |NCCL error in: |NCCL INFO group\.cc:\d+ -> [1-6]\b"
)
_CLOSED_BY = re.compile(r"NCCL WARN .*(?:remote peer|recv from|send to|from peer) (?P<host>[\w.-]+)<\d+>")
_ON_HOST = re.compile(
    r"(?P<prefix>[\w.-]+):\d+:\d+ \[\d+\] |.*\b(?:on|host(?:name)?|node)[=:]? (?P<host>(?=[\w.-]*\d)[\w.-]+)(?=[ ,)]|$)"
)
_NODE_FAILED = re.compile(r"[Nn]ode failure on (?P<host>[\w.-]+)")

# --- Horovod, and steps -----------------------------------------------------------------------------------------------
# Horovod names the tensors that a rank has not submitted; before 0.18, the ranks that have not submitted a tensor.
_NOT_SUBMITTED = re.compile(
    r"(?P<rank>\d{1,6})!?: \[(?P<tensors>[^\]]+)\]$"
    r"|(?:.*\s|Stalled ops:|^)(?P<tensor>\S+) \[missing ranks: (?P<ranks>\d+(?:, \d+)*)\]$"
)
_STEP = re.compile(
    r"\b(?P<word>[Ss]tep|[Ii]t(?:er(?:ation)?)?|[Ee]poch|[Bb]atch)s?\b\W{0,4}(?P<number>\d{1,9})(?!\.\d)"
    r"|(?:\|| |:|\[|^) *(?P<done>\d{1,9})/\d{2,9}(?: |\]|$)"
)


class Calls:
    """Collects what libraries report of calls."""

    def __init__(self, job: LoggedJob) -> None:
        self.job = job
        self._stack: WatchdogReport | None = None  # the next lines might be the stack of its call
        self._stalled: dict[str, set[int]] = {}  # Horovod's tensors, and the ranks that have not submitted them
        self._stalled_at: LogLine | None = None
        self._since_stalled = 0

    def hear(self, one: Heard, said: SpokenLine) -> None:
        """Takes a line that may report an error."""
        text = said.text
        one.timed_out |= said.speaker is not None and "Watchdog caught collective operation timeout" in text
        if "atchdog" in text or "enqueued" in text:
            self._stack = self._note_watchdog(one, said) or self._stack
        if found := _OF_CUDA.search(text):
            one.fail(said.line, "RuntimeError", found["what"])
        if found := _OF_A_SOCKET.search(text):
            one.socket, one.socket_at = found["what"], said.line
        if _MISMATCH in text:
            self._note_mismatch(one, said)
        if "by subset of ranks and are waiting for remainder of ranks" in text:
            self._stalled, self._stalled_at = {}, said.line

    def hear_form(self, text: str) -> None:
        """Takes a line of a stack or of a list, which means nothing by itself."""
        self.job.native += text.startswith("#") and _OF_C.match(text) is not None
        if self._stack is not None and (found := _STACK.match(text)):
            self._stack.frames.append(Frame(found["file"], int(found["line"]), found["function"]))
        if self._stalled_at is not None and (found := _NOT_SUBMITTED.match(text)):
            self._since_stalled = 0
            ranks = _ranks(found["rank"] or found["ranks"])
            for tensor in (found["tensor"] or found["tensors"].removesuffix(" ...")).split(", "):
                self._stalled.setdefault(tensor, set()).update(ranks)

    def hear_nccl(self, one: Heard, said: SpokenLine) -> None:
        """Takes a line in which NCCL might report an error, a rank or a host."""
        text, line, job = said.text, said.line, self.job
        if ("nccl" in text or "NCCL" in text) and _NCCL_FAILED.search(text):
            job.nccl_failed = job.nccl_failed or line
        if " nranks " in text and (found := _IN_NCCL.search(text)):
            size, rank = min(int(found["world"]), MAX_RANKS), int(found["rank"])
            job.world = max(job.world, size)
            if size > job.nccl_places.get(found["process"], (0, 0))[0] and rank < MAX_RANKS:
                job.nccl_places[found["process"]] = size, rank
        if any(word in text for word in ("ode", "ost", " on ", "NCCL")) and (found := _ON_HOST.match(text)):
            one.hosts.add(found["prefix"] or found["host"])
        if "ode failure" in text and (found := _NODE_FAILED.search(text)):
            job.failed_hosts.setdefault(found["host"], line)
        _, warns, words = text.partition("NCCL WARN ")
        if warns and (found := _CLOSED_BY.search(text)):
            job.closed_by.setdefault(found["host"], line)
        words = text if one.before.startswith("Last error:") else words
        if words and len(job.nccl_told) < MOST_WARNINGS:
            job.nccl_told.append((line, words))
        if warns and len(one.warnings) < MOST_WARNINGS:
            one.warnings.append((line, words.strip()))

    def hear_progress(self, one: Heard, said: SpokenLine, *, own: bool) -> None:
        """Takes any line, which may give the number of a step.

        Args:
            own: the script printed the line itself
        """
        self._since_stalled += own
        if said.speaker is not None and (made := _STEP.search(said.text)):
            word, number = (made["word"] or "%").lower(), int(made["number"] or made["done"])
            one.steps[word] = max(number, one.steps.get(word, 0))

    def take(self, message: str) -> None:
        """Notes the ranks that an exception misses at a monitored barrier."""
        if absent := _MONITORED.search(message):
            self.job.absent |= _ranks(absent["ranks"])

    def restart(self) -> None:
        self._stalled.clear()

    def give_stalls(self, ranks: dict[int, Heard]) -> tuple[int, ...]:
        """Makes calls of Horovod's tensors, in which the ranks that have submitted them wait. Of tensors that lack the
        same ranks, one is enough. Returns the ranks that Horovod has named.
        """
        if self._stalled_at is None or not self._stalled or self._since_stalled > MOST_MESSAGE:
            return ()
        job, alike = self.job, {frozenset(lack): tensor for tensor, lack in reversed(self._stalled.items())}
        job.world = max(job.world, *(rank + 1 for rank in (*ranks, *job.ended, *chain(*alike))))
        job.world += len(max(alike, key=len)) == job.world  # some rank has submitted it
        for rank in range(job.world):
            one = ranks.setdefault(rank, Heard(self._stalled_at))
            one.watchdog = one.watchdog or self._stalled_at
            frames = next((raised.frames for _, raised in one.raised if is_consequence(raised)), None)
            if frames is not None:  # a shutdown has ended its wait
                one.raised, one.timed_out = [], True
            for lack, tensor in alike.items():
                submitted, name = rank not in lack, tensor.rpartition("/")[2]
                one.groups[tensor] = WatchdogReport("", rank, int(submitted), name, [*(frames or ())])
        return tuple(range(job.world))

    def _note_mismatch(self, one: Heard, said: SpokenLine) -> None:
        """Notes a report of torch's own check in a line of a logger. The other rank that it names is of the job."""
        message = said.text[said.text.index(_MISMATCH) :]
        ranks = [rank for rank in fingerprints(message) if rank < MAX_RANKS]
        if ranks and not isinstance(said.speaker, int):
            one = self.job.process(ranks[0], said.line)
        if ranks:
            one.fail(said.line, "RuntimeError", message)
        for rank in ranks[1:]:
            self.job.process(rank, said.line)

    def _note_watchdog(self, one: Heard, said: SpokenLine) -> WatchdogReport | None:
        """Notes the call that timed out, or how far the group has come. Returns the group if its stack may follow.

        Older watchdogs name the group behind the call only, and rank and process not at all if torch puts no prefix
        before its lines: then the rank in the group is the best there is.
        """
        group, work, status = (pattern.search(said.text) for pattern in (_GROUP, _WORK, _STATUS))
        if work is None and status is None:
            return None
        if not isinstance(said.speaker, int) and (whose := _WHOSE.search(said.text)):
            one = self._member(int(whose["rank"]), group, said)
        one.watchdog = one.watchdog or said.line
        name = (group["name"] or group["id"]) if group else UNNAMED
        at_work = _AT_WORK.search(said.text) if status else None
        seq, unnamed = int(at_work["seq"]) if at_work else 0, one.groups.get(UNNAMED)
        if group and unnamed is not None and at_work and seq == unnamed.seq:
            one.groups.setdefault(name, one.groups.pop(UNNAMED))
        mine = one.groups.setdefault(name, WatchdogReport())
        if group:
            mine.called, mine.place = group["called"] or "", int(group["place"])
        if work and not mine.op:
            op = work["op"] or ""
            mine.seq, mine.op, mine.ms = int(work["seq"] or 0), _OPS.get(op, op.lower()), int(work["ms"] or 0)
            mine.size = int(work["size"]) if work["size"] else None
        if status:
            mine.queued, mine.done = int(status["queued"]), int(status["done"])
            # A stream completes its works in their order.
            mine.seq = mine.seq or seq or (mine.done + 1 if mine.queued > mine.done else 0)
        return mine if not mine.frames else None

    def _member(self, place: int, group: re.Match[str] | None, said: SpokenLine) -> Heard:
        everybody = group is None or (group["name"] or group["id"]) == DEFAULT or group["called"] == "default_pg"
        called = (group["called"] or group["name"] or group["id"]) if group else ""
        key: Speaker = place if everybody else f"rank {place} of group {called}"
        one = self.job.process(key, said.line)
        one.tail.append(said.text)
        return one


def _ranks(text: str) -> set[int]:
    return {rank for one in text.split(", ") if (rank := int(one)) < MAX_RANKS}


def uneven_steps(ranks: dict[int, Heard], known: Collection[int], world: int) -> dict[int, int | None]:
    """Returns the last step that each rank printed, if most printed the same one and others, which printed something,
    did not come to it.
    """
    counts = Counter(word for rank in known if rank in ranks for word in ranks[rank].steps)
    if not counts:
        return {}
    word = counts.most_common(1)[0][0]
    made = {rank: ranks[rank].steps.get(word, -1) for rank in known if rank in ranks and not ranks[rank].raised}
    last = max(made.values(), default=-1)
    ahead = [rank for rank, number in made.items() if number == last]
    if len(ahead) < 2 or len(ahead) == len(made) or 2 * len(ahead) <= max(len(made), world):
        return {}
    return {rank: number if number >= 0 else None for rank, number in made.items()}
