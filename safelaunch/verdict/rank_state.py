"""One :class:`RankFacts` per rank from the evidence: its wait for peers, or its own condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from msgspec import structs

from safelaunch.model import Claim, Collective, Evidence, FileLock, Frame, ProcessEvidence, RankEvidence
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.rank_values import Whereabouts
from safelaunch.stacks.source import NO_SOURCE, ReadSource
from safelaunch.verdict import exceptions, exits, gpu_waits, peers
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import call_words, number_of, op_name
from safelaunch.verdict.causes import BY_ITSELF
from safelaunch.verdict.conditions import Condition, record_claim, thread_condition
from safelaunch.verdict.divergence import Histories
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.gil import gil_condition
from safelaunch.verdict.peers import PeerWait, begins_at
from safelaunch.verdict.processes import ProcessView, may_train_elsewhere
from safelaunch.verdict.suggestions import (
    EXIT_WAITS,
    FOREIGN_LOCK,
    LOCK_FILE,
    OUTLIVES,
    OWED,
    STORE_NOT_REACHED,
)
from safelaunch.verdict.thread_view import View, child_views, view_of
from safelaunch.verdict.transfers import Transfers

UNKNOWN_OP = "communication"  # operation if ``work.wait()`` raised on the user's own line, with no frame to name it


@dataclass(frozen=True)
class RankFacts:
    """One rank by its own evidence.

    Neither ``wait`` nor ``condition`` is set if the rank was ended from outside before the look.
    """

    evidence: RankEvidence
    frame: Frame | None
    wait: PeerWait | None
    condition: Condition | None
    view: View | None = field(default=None, repr=False, compare=False)
    """main thread; None without evidence of the process"""
    children: tuple[View, ...] = field(default=(), repr=False, compare=False)
    """main threads of the child processes"""

    @property
    def rank(self) -> int:
        return self.evidence.rank

    @property
    def step(self) -> int | None:
        return self.evidence.progress.step if self.evidence.progress else None

    @property
    def folder(self) -> str:
        return f"ranks/{self.rank}"

    @cached_property
    def stack(self) -> fr.Stack | None:
        """The stack of the exception, the abort, or else the main thread."""
        if self.evidence.exception is not None:
            return fr.stack_of(self.evidence, self.evidence.exception.frames)
        aborted = exits.aborted_in(self.evidence)
        return aborted if aborted is not None or self.view is None else self.view.stack

    @property
    def user_stack(self) -> tuple[Frame, ...]:
        """The user's frames of it, innermost first."""
        return self.stack.user_frames if self.stack is not None else ()

    def line_claim(self, text: str) -> Claim:
        evidence = self.evidence
        name = "stack.txt" if evidence.main is not None and evidence.main.stacks else "flight_recorder.json"
        if evidence.exception is not None:
            name = "exception.json"
        elif exits.aborted_in(evidence) is not None:
            name = "fault.txt"
        return Claim(text, f"{self.folder}/{name}")


F = TypeVar("F", bound="CaseFacts")


@dataclass(frozen=True)
class CaseFacts:
    evidence: Evidence
    ranks: Mapping[int, RankFacts]
    alignment: Alignment
    histories: Histories
    read_source: ReadSource = NO_SOURCE
    gone: frozenset[int] = frozenset()
    """the ranks that have ended, or raised: what they waited in they wait in no more"""

    @classmethod
    def of(cls: type[F], evidence: Evidence, read_source: ReadSource | None = None) -> F:
        read_source = read_source or NO_SOURCE
        gone = frozenset(
            rank.rank
            for rank in evidence.ranks
            if evidence.outcome == "crash" or rank.exit is not None or rank.exception is not None
        )
        if evidence.outcome in ("hang", "suspect"):
            evidence = structs.replace(evidence, ranks=tuple(map(_before_its_end, evidence.ranks)))
        alignment = Alignment(evidence.ranks, evidence.world_size)
        ordered = sorted(evidence.ranks, key=lambda r: r.rank)
        ranks = {r.rank: rank_facts(r, alignment, read_source) for r in ordered}
        histories = Histories(alignment)
        facts = cls(evidence, ranks, alignment, histories, read_source, gone)
        changed = {rank: corrected for rank in ranks if (corrected := _corrected_by_peers(facts, rank)) is not None}
        return replace(facts, ranks={**ranks, **changed}) if changed else facts

    def group(self, name: str | None) -> str:
        """Returns the group in words: ``group mesh_tp ('11')``."""
        return self.alignment.group(name)

    @property
    def world(self) -> frozenset[int]:
        return frozenset(range(self.evidence.world_size)) | frozenset(self.ranks)

    @property
    def unseen(self) -> frozenset[int]:
        return frozenset(self.evidence.missing_ranks) | (self.world - frozenset(self.ranks))

    def whereabouts(self, rank: int) -> Whereabouts:
        local = self.ranks[rank].evidence.local_rank if rank in self.ranks else -1
        return Whereabouts(rank, local, self.evidence.world_size)

    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(self.alignment)

    @cached_property
    def processes(self) -> dict[tuple[str, int], tuple[int, tuple[FileLock, ...]]]:
        """(host, PID) → rank of the process, or of its parent, and its file locks."""
        owners = {}
        for rank, facts in self.ranks.items():
            host, main = facts.evidence.host, facts.evidence.main
            owners[host, facts.evidence.pid] = (rank, _locks_of(main) if main is not None else ())
            owners |= {(host, child.pid): (rank, _locks_of(child)) for child in facts.evidence.children}
        return owners

    @cached_property
    def thread_waits(self) -> list[PeerWait]:
        """The waits of background threads that main threads wait for."""
        waits = (rank.wait for rank in self.ranks.values() if rank.wait is not None and rank.wait.thread is not None)
        return list({(wait.key, wait.thread): wait for wait in waits}.values())

    @cached_property
    def waiting(self) -> dict[int, PeerWait]:
        return {rank: facts.wait for rank, facts in self.ranks.items() if facts.wait is not None}

    def call_of(self, rank: int) -> Collective | None:
        """Returns the recorded collective in which the rank waits."""
        wait = self.waiting.get(rank)
        if wait is None or wait.group is None or wait.seq is None or wait.kind == "p2p":  # a separate number
            return None
        return self.alignment.entry(rank, wait.group, wait.seq)

    def may_wait_elsewhere(self, rank: int) -> bool:
        """Returns whether the rank might wait for one that wasn't seen."""
        condition = self.ranks[rank].condition
        return bool(self.unseen) and condition is not None and not condition.for_good and not self.has_only_dump(rank)

    def has_only_dump(self, rank: int) -> bool:
        """Returns whether only a Flight Recorder dump exists, which doesn't show the current state."""
        return self.ranks[rank].evidence.main is None


def _locks_of(process: ProcessEvidence) -> tuple[FileLock, ...]:
    locks = process.states[-1].locks if process.states else ()
    return tuple(lock for lock in locks if lock.pid == process.pid)


def _corrected_by_peers(facts: CaseFacts, rank: int) -> RankFacts | None:
    """Returns the rank as the others' evidence shows it, if that shows more."""
    subject = facts.ranks[rank]
    if subject.evidence.exception is not None and (
        waiting_peers := exits.missed_the_store(subject.evidence, facts.evidence.ranks)
    ):
        failed = exits.exception_condition(subject.evidence, subject.evidence.exception)
        doubts = doubts_if({Doubt.STATE_INFERRED: all(calls.makes_store(other.stack) for other in waiting_peers)})
        failed = replace(failed, advice=frozenset({STORE_NOT_REACHED}), doubts=doubts, for_good=True)
        return replace(subject, wait=None, condition=failed)
    if (
        subject.condition is not None
        and subject.condition.cause == "rank-exception"
        and facts.evidence.outcome != "crash"
    ):
        return _never_exited(facts, subject, subject.condition)
    absent = _absent_thread(facts, subject)
    if absent is not None or subject.wait is not None:
        return replace(subject, wait=None, condition=absent) if absent is not None else None
    condition = subject.condition
    if condition is not None and condition.cause == "uneven-batches" and subject.evidence.exit is None:
        condition = _with_exit_blocker(facts, subject, condition)
    if condition is not None and condition.cause == "stuck-in-user-code":
        condition = _with_peer_lock(facts, subject, condition)
    if condition is not None and condition.locks:
        condition = _with_remote_lock(facts, subject, condition)
    if condition is not None and condition.ends:
        condition = _with_other_end(facts, subject, condition)
    return replace(subject, condition=condition) if condition is not subject.condition else None


def _with_exit_blocker(facts: CaseFacts, subject: RankFacts, left: Condition) -> Condition:
    """Finds what keeps a rank from exiting after its script has ended."""
    view = subject.view
    if view is None or any(other.wait is not None for other in facts.ranks.values()):
        return left
    own = ProcessView(view, subject.children).condition()
    threads = view.beside()
    if own.frame is None and threads and calls.leaving(view.thread.frames if view.thread else ()):
        thread = threads[0]
        does = thread_condition(thread)
        reason = f"has ended its script, and its thread {thread.name} keeps it from exiting: it {does.reason}"
        claims = left.claims + does.claims
        return replace(does, cause="stuck-in-user-code", reason=reason, claims=claims, advice=frozenset({OUTLIVES}))
    if own.cause == "missing-from-collective" or own.frame is None:
        return left
    return replace(own, reason=f"has ended its script, and {own.reason}")


def _never_exited(facts: CaseFacts, subject: RankFacts, raised: Condition) -> RankFacts | None:
    """Adds what keeps a rank that raised from exiting. Returns None if it has exited."""
    view = subject.view
    if subject.evidence.exit is not None or view is None or not view.frames or view.wait.kind == "dead":
        return None
    callers = {entry.thread for entry in facts.alignment.pending(subject.rank)} - {0}
    inside = ProcessView(view, subject.children, callers)
    wait = peers.peer_wait(subject.evidence, view, facts.alignment)
    wait = wait or peers.through_a_thread(subject.evidence, inside, facts.alignment)
    raw = view.thread.frames if view.thread is not None else ()
    left, beside = calls.leaving(raw), view.beside()
    if wait is not None:
        does, claims = f"it waits in {wait.words if wait.frame else wait.call}", wait.claims[:1]
        advice = frozenset({EXIT_WAITS})
    elif view.user_frame is None and left and beside:
        own = thread_condition(beside[0])
        does, claims, advice = f"its thread {beside[0].name} {own.reason}", own.claims[:1], frozenset({OUTLIVES})
    else:
        own = inside.condition()
        does, claims, advice = f"it {own.reason}", own.claims[:1], frozenset()
    hook = any(fr.short(frame.function) == "excepthook" for frame in view.frames)
    when = ", called by sys.excepthook" if hook else ", called at interpreter exit" if left and not beside else ""
    reason = f"{raised.reason} and never exited: {does}{when}"
    failed = replace(raised, reason=reason, claims=(*raised.claims, *claims), advice=raised.advice | advice)
    return replace(subject, condition=failed)


def _with_peer_lock(facts: CaseFacts, subject: RankFacts, own: Condition) -> Condition:
    """Blames the only process of another rank that holds a file lock, if the rank retries one.

    ``filelock`` closes the file between attempts, so the kernel shows only which processes hold locks.
    """
    view = subject.view
    library = view is not None and calls.FILE_LOCK.on(view.stack.called)
    sqlite = view is not None and view.native(calls.SLEEPS) == "sqlite"
    if not library and not sqlite:
        return own
    holders = [(host, rank, locks) for (host, _), (rank, locks) in facts.processes.items() if locks]
    # Locks of other hosts count as well, because nodes can share files.
    nearest = [holder for holder in holders if holder[0] == subject.evidence.host] or holders
    if not nearest and library:
        words = (
            "no process that safelaunch can see has a file locked: another one has, or a dead one left its lock file"
        )
        return own.with_clause(words, Claim(words, f"{subject.folder}/proc.json"), advice=[LOCK_FILE])
    if len(nearest) != 1 or nearest[0][1] == subject.rank:
        return own
    ((host, rank, (lock, *_)),) = nearest
    text = f"of the processes safelaunch can see, only {lock.pid} of rank {rank} has a file locked: {lock.path}"
    return replace(
        own,
        cause="blocking-io",
        state="io",
        reason=f"keeps retrying a file lock at {fr.place(own.frame)}",
        doubts=(Doubt.STATE_INFERRED,),
        claims=(*own.claims, Claim(text, f"ranks/{rank}/proc.json")),
        locked_by=lock.pid,
        locked_on=host,
        for_good=False,
    )


def _with_remote_lock(facts: CaseFacts, subject: RankFacts, own: Condition) -> Condition:
    """Finds a rank on another node that has locked a file of this name.

    If nodes share files, each kernel knows only its own locks.
    """
    owner = facts.processes.get((subject.evidence.host, own.locked_by)) if own.locked_by is not None else None
    if owner is not None:
        rank, _ = owner
        who = f"rank {rank}" if facts.ranks[rank].evidence.pid == own.locked_by else f"{own.holder}, of rank {rank}"
        return own if rank == subject.rank else own.with_holder(who)
    remote_ranks = [
        (host, rank, lock)
        for (host, _), (rank, locks) in facts.processes.items()
        for lock in locks
        if host != subject.evidence.host and lock.path == own.locks
    ]
    if len({rank for _, rank, _ in remote_ranks}) == 1:
        host, rank, lock = remote_ranks[0]
        claim = Claim(f"{lock.pid} of rank {rank}, on {host}, has {lock.path} locked", f"ranks/{rank}/proc.json")
        return replace(own, locked_by=lock.pid, locked_on=host, claims=(*own.claims, claim))
    if own.locked_by is None:
        return own
    reason = f"{own.reason}, which is not one of this job's ranks"
    return replace(own, reason=reason, advice=own.advice | {FOREIGN_LOCK})


def _with_other_end(facts: CaseFacts, subject: RankFacts, own: Condition) -> Condition:
    """Names the owner of the other end of the rank's pipe or connection."""
    owners = {end.pid: facts.processes.get((subject.evidence.host, end.pid), (None, ()))[0] for end in own.ends}
    if len(set(owners.values())) > 1 or subject.rank in owners.values():
        return own
    pid, owner = next(iter(owners.items()))
    if owner is None:
        who = ", ".join(f"{end.pid} ({end.name})" if end.name else f"{end.pid}" for end in own.ends[:3])
        are, none = ("is process", "not one") if len(own.ends) == 1 else ("is open in processes", "none")
        words = f"the other end {are} {who}, {none} of this job's ranks"
        return own.with_clause(words, Claim(words, f"{subject.folder}/proc.json"))
    main = facts.ranks[owner].evidence.pid  # its forked children have inherited it
    pid = main if main in owners else pid
    words = f"the other end is rank {owner}'s"
    condition = own.with_clause(words, Claim(f"{words}, process {pid}", f"{subject.folder}/proc.json"), advice=[OWED])
    return replace(condition, awaits_message_from=pid)


def _absent_thread(facts: CaseFacts, subject: RankFacts) -> Condition | None:
    """Finds a thread of the rank that isn't in the call in which its peers' threads wait.

    A thread that waits to be fed by others isn't at fault.
    """
    main = subject.wait
    if main is None and (subject.condition is None or subject.condition.lock is None):
        return None  # the main thread's own condition shows more
    for wait in facts.thread_waits:
        if (main is not None and wait.thread == main.thread) or wait.group is None or wait.seq is None:
            continue
        members, _ = facts.alignment.members(wait.group)
        missing = subject.rank in members and facts.alignment.last(subject.rank, wait.group) < wait.seq
        for other in subject.view.beside() if missing and subject.view is not None else ():
            if begins_at(other.stack) != wait.thread or other.awaited.peers is not None:
                continue
            condition = thread_condition(other)
            if condition.lock is None or condition.lock.on == "lock":
                words = f"waits in {main.words}" if main is not None else "waits for its threads"
                return replace(condition, reason=f"{words}, and its thread {other.name} {condition.reason}")
    return None


def _before_its_end(rank: RankEvidence) -> RankEvidence:
    # The rank ended after the stall, by the user or the out-of-memory killer, so its end isn't the cause.
    states = rank.main.states if rank.main is not None else ()
    living = tuple(state for state in states if state.state not in "ZX")
    if rank.main is None or not living or len(living) == len(states):
        return rank
    return structs.replace(rank, main=structs.replace(rank.main, states=living), exit=None)


def rank_facts(rank: RankEvidence, alignment: Alignment, read_source: ReadSource) -> RankFacts:
    """Reads a rank's state, the surest sign first."""
    view, children = view_of(rank, read_source), child_views(rank, read_source)
    frame = view.user_frame if view else None
    condition = exits.gone_condition(rank, view)
    condition = replace(condition, for_good=True) if condition is not None else None
    if condition is None and view is not None:
        condition = _condition_in_kernel(view) or _condition_after_script(view)
    if condition is None and view is not None and rank.exception is None:  # otherwise its handler waits for our look
        condition = (
            gil_condition(view) or gpu_waits.lost_condition(view, alignment) or gpu_waits.gpu_condition(view, alignment)
        )
    if condition is None and (view is None or not view.frames) and not peers.kernel_says_busy(view):
        condition = gpu_waits.device_condition(rank, alignment)
    wait = None
    if condition is None:
        wait = _wait_in_traceback(rank) or peers.peer_wait(rank, view, alignment)
    if condition is None and wait is None and (view is not None or not exits.ended_by_others(rank)):
        callers = {entry.thread for entry in alignment.pending(rank.rank)} - {0}
        inside = ProcessView(view, children, callers) if view is not None else None
        wait = peers.through_a_thread(rank, inside, alignment) if inside is not None else None
        condition = _own_condition(rank, inside, alignment) if wait is None else None
    if wait is not None and frame is None:
        frame = wait.frame
    if condition is not None and condition.for_good and view is not None and condition.cause not in BY_ITSELF:
        condition = replace(condition, for_good=not may_train_elsewhere(view))
    return RankFacts(rank, frame, wait, condition, view, children)


def _condition_in_kernel(view: View) -> Condition | None:
    return thread_condition(view) if view.wait.kind in ("stopped", "disk") else None


def _condition_after_script(view: View) -> Condition | None:
    """Returns the condition of a process whose script ended or destroyed its process group.

    It doesn't count if the error that reports a peer's death ended the script. The beacon's page of a rank that is gone
    was read at its end, and doesn't show where the rank was during the look.
    """
    rank, folder = view.rank, view.folder
    if rank.exception is not None:
        return None
    why, claim = "", view.stack_claim(f"{view.words} is past the end of the script")
    raw = view.thread.frames if view.thread else ()
    if rank.exit is None and rank.progress is not None and rank.progress.state == "exited":
        why = "its script has ended"
        claim = Claim("its progress page says that the script has ended", f"{folder}/progress.json")
    elif rank.exit is None and rank.progress is not None and rank.progress.returned_ns:
        why = "its function has returned"
        claim = Claim("its progress page says that its function has returned", f"{folder}/progress.json")
    elif view.thread is not None and raw and not _handles_an_exception(view):  # an exception shows more than the end
        why = calls.leaving(raw, cut=view.thread.cut)
    wait = view.awaited.peers
    if not why and wait is not None and wait.kind == "teardown":
        why = "it is in destroy_process_group"
        claim = view.stack_claim(f"{view.words} is in destroy_process_group")
    if not why:
        return None
    frame = view.user_frame
    if frame is None:  # the interpreter waits for one of the user's threads
        inside = (view.stack_of(thread).user_frame for thread in view.threads)
        frame = next((inner_frame for inner_frame in inside if inner_frame is not None), None)
    where = f", now at {fr.place(frame)}" if frame else ""
    if (call := rank.exit_call) is not None and call.code:
        left = fr.stack_of(rank, call.frames).user_frame
        text = f"called {call.function}({call.code}){fr.at(left)} and never exited: {why}{where}"
        called = Claim(f"it called {call.function}({call.code}){fr.at(left)}", f"{folder}/exit_call.json")
        return Condition("rank-exited", text, left or frame, view.process.pid, claims=(called, claim), for_good=True)
    text = f"has left the training loop: {why}{where}"
    return Condition("uneven-batches", text, frame, view.process.pid, claims=(claim,), for_good=True)


def _handles_an_exception(view: View) -> bool:
    ident = view.thread.ident if view.thread is not None else 0
    return bool(ident) and any(handler.thread == ident for handler in view.rank.gil.handling)


def _own_condition(rank: RankEvidence, inside: ProcessView | None, alignment: Alignment) -> Condition:
    view = inside.main if inside is not None else None
    if inside is None or view is None or not (view.process.states or view.frames):
        return _condition_by_record(rank, alignment)
    condition = inside.condition()
    if condition.cause == "missing-from-collective":
        return _condition_by_record(rank, alignment)
    computes = condition.state in ("computes", "loader")
    if calls.without_workers(view.frames) and not computes:
        return replace(condition, reason=f"{condition.reason}, in its dataset, called by a DataLoader without workers")
    return condition


def _condition_by_record(rank: RankEvidence, alignment: Alignment) -> Condition:
    record, unended = alignment.records.get(rank.rank), alignment.unfinished_block(rank.rank)
    last = unended or (record.entries[-1] if record is not None and record.entries else None)
    site = fr.stack_of(rank, last.frames).user_frame if last is not None else None
    if unended is not None:
        text = f"has begun a group of operations and not ended it: {op_name(unended)}{fr.at(site)}"
        shown = f"its latest entries were never launched: {text}"
    elif last is not None:
        text = f"made no call after {op_name(last)} #{number_of(last)} of {alignment.group(last.group)}{fr.at(site)}"
        shown = f"last recorded call: {call_words(last, alignment.group(last.group))}"
    elif record is not None and record.groups and alignment.has_collectives:
        text = "did not join: its record has no pending call, and there is no stack to show where it is"
        shown = "its record has no pending call"
    else:
        text = "did not join; neither a stack nor a Flight Recorder entry shows why"
        return Condition("missing-from-collective", text, None, rank.pid, doubts=(Doubt.STATE_UNKNOWN,))
    claims = (record_claim(rank.rank, shown),)
    return Condition("missing-from-collective", text, site, rank.pid, doubts=(Doubt.RECORD_ALONE,), claims=claims)


def _wait_in_traceback(rank: RankEvidence) -> PeerWait | None:
    """Returns what the rank waited in, by the traceback of an error that reports a missing peer."""
    if rank.exception is None or not exceptions.is_consequence(rank.exception, rank.nccl_log):
        return None
    stack = fr.stack_of(rank, rank.exception.frames)
    user_frame = stack.user_frame
    own = bool(stack.frames) and stack.frames[0] == user_frame
    remote = calls.RPC.on(stack.called)
    unknown = calls.TorchWait("collective", UNKNOWN_OP if own else "a remote call" if remote else "")
    torch_wait = calls.torch_wait(stack) or unknown
    claim = Claim(
        f"{rank.exception.type} reports what happened to a peer: {exceptions.one_line(rank.exception.message)}",
        f"ranks/{rank.rank}/exception.json",
    )
    return PeerWait.unnumbered(torch_wait, user_frame, claim)
