"""Evidence → one :class:`RankFacts` per rank: either it waits for its peers, or it has a condition of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from msgspec import structs

from safelaunch.model import Claim, Collective, Evidence, FileLock, Frame, ProcessEvidence, RankEvidence
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.source import NO_SOURCE, ReadSource
from safelaunch.verdict import exits, peers
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import described, number_of, op_name
from safelaunch.verdict.causes import BY_ITSELF
from safelaunch.verdict.conditions import Condition, View, gil_condition, record_claim, thread_condition
from safelaunch.verdict.divergence import Histories
from safelaunch.verdict.doubts import Doubt, doubts_if
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
from safelaunch.verdict.transfers import Transfers

UNKNOWN_OP = "communication"  # where ``work.wait()`` raised, on the user's own line: of what work, no frame tells


@dataclass(frozen=True)
class RankFacts:
    """One rank, understood as far as its own evidence goes.

    Either ``wait`` or ``condition`` is set; neither, when the rank was ended from outside before it was looked at.
    """

    evidence: RankEvidence
    frame: Frame | None
    wait: PeerWait | None
    condition: Condition | None

    @property
    def rank(self) -> int:
        return self.evidence.rank

    @property
    def step(self) -> int | None:
        return self.evidence.progress.step if self.evidence.progress else None

    @property
    def folder(self) -> str:
        return f"ranks/{self.rank}"

    def line_claim(self, text: str) -> Claim:
        """A claim that rests on the line at which the rank is, with the file that shows this line."""
        one = self.evidence
        name = "stack.txt" if one.main is not None and one.main.stacks else "flight_recorder.json"
        if one.exception is not None:
            name = "exception.json"
        elif exits.aborted_in(one) is not None:
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
        changed = {rank: one for rank in ranks if (one := _seen_from_the_others(facts, rank)) is not None}
        return replace(facts, ranks={**ranks, **changed}) if changed else facts

    @property
    def world(self) -> frozenset[int]:
        return frozenset(range(self.evidence.world_size)) | frozenset(self.ranks)

    @property
    def unseen(self) -> frozenset[int]:
        return frozenset(self.evidence.missing_ranks) | (self.world - frozenset(self.ranks))

    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(self.alignment)

    @cached_property
    def processes(self) -> dict[tuple[str, int], tuple[int, tuple[FileLock, ...]]]:
        """(host, pid) → whose process that is, be it a child of the rank, and the file locks that it holds."""
        found = {}
        for rank, one in self.ranks.items():
            host, main = one.evidence.host, one.evidence.main
            found[host, one.evidence.pid] = (rank, _locks_of(main) if main is not None else ())
            found |= {(host, child.pid): (rank, _locks_of(child)) for child in one.evidence.children}
        return found

    @cached_property
    def in_threads(self) -> list[PeerWait]:
        """The waits of background threads for which main threads wait, each once."""
        waits = (rank.wait for rank in self.ranks.values() if rank.wait is not None and rank.wait.thread is not None)
        return list({(wait.key, wait.thread): wait for wait in waits}.values())

    @cached_property
    def waiting(self) -> dict[int, PeerWait]:
        """What each rank waits in that waits for its peers."""
        return {rank: one.wait for rank, one in self.ranks.items() if one.wait is not None}

    def call_of(self, rank: int) -> Collective | None:
        """The recorded collective in which the rank waits, where that is known."""
        wait = self.waiting.get(rank)
        if wait is None or wait.group is None or wait.seq is None or wait.kind == "p2p":  # a number of its own
            return None
        return self.alignment.entry(rank, wait.group, wait.seq)

    def may_wait_elsewhere(self, rank: int) -> bool:
        """What this rank does may be to wait for a rank that was not seen: by polling for a file of its, say."""
        condition = self.ranks[rank].condition
        return bool(self.unseen) and condition is not None and not condition.for_good and not self.of_dump(rank)

    def of_dump(self, rank: int) -> bool:
        """Only a Flight Recorder dump is there: of what the rank does it says nothing, only what it did not come to."""
        return self.ranks[rank].evidence.main is None


def _locks_of(process: ProcessEvidence) -> tuple[FileLock, ...]:
    locks = process.states[-1].locks if process.states else ()
    return tuple(lock for lock in locks if lock.pid == process.pid)


def _seen_from_the_others(facts: CaseFacts, rank: int) -> RankFacts | None:
    """A rank as the others' evidence shows it, where that says more than its own."""
    one = facts.ranks[rank]
    if one.evidence.exception is not None and (others := exits.missed_the_store(one.evidence, facts.evidence.ranks)):
        failed = exits.exception_condition(one.evidence, one.evidence.exception)
        doubts = doubts_if({Doubt.STATE_INFERRED: all(calls.makes_store(other.stack) for other in others)})
        failed = replace(failed, advice=frozenset({STORE_NOT_REACHED}), doubts=doubts, for_good=True)
        return replace(one, wait=None, condition=failed)
    if one.condition is not None and one.condition.cause == "rank-exception" and facts.evidence.outcome != "crash":
        return _never_exited(facts, one, one.condition)
    absent = _absent_thread(facts, one)
    if absent is not None or one.wait is not None:
        return replace(one, wait=None, condition=absent) if absent is not None else None
    condition = one.condition
    if condition is not None and condition.cause == "uneven-batches" and one.evidence.exit is None:
        condition = _at_its_end(facts, one, condition)
    if condition is not None and condition.cause == "stuck-in-user-code":
        condition = _locked_by_a_peer(facts, one, condition)
    if condition is not None and condition.locks:
        condition = _locked_elsewhere(facts, one, condition)
    if condition is not None and condition.ends:
        condition = _at_the_other_end(facts, one, condition)
    return replace(one, condition=condition) if condition is not one.condition else None


def _at_its_end(facts: CaseFacts, one: RankFacts, left: Condition) -> Condition:
    """A rank whose script has ended, and which no peer waits for: what keeps it from its end is the cause."""
    view = view_of(one.evidence, facts.read_source)
    if view is None or any(other.wait is not None for other in facts.ranks.values()):
        return left
    own = ProcessView(view, child_views(one.evidence, facts.read_source)).condition()
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


def _never_exited(facts: CaseFacts, one: RankFacts, raised: Condition) -> RankFacts | None:
    """Returns a rank that raised with what keeps its process from exiting; None if that has ended."""
    view = view_of(one.evidence, facts.read_source)
    if one.evidence.exit is not None or view is None or not view.frames or view.wait.kind == "dead":
        return None
    callers = {entry.thread for entry in facts.alignment.pending(one.rank)} - {0}
    inside = ProcessView(view, child_views(one.evidence, facts.read_source), callers)
    wait = peers.peer_wait(one.evidence, view, facts.alignment)
    wait = wait or peers.through_a_thread(one.evidence, inside, facts.alignment)
    raw = view.thread.frames if view.thread is not None else ()
    left, beside = calls.leaving(raw), view.beside()
    if wait is not None:
        does, claims = f"it waits in {wait.words if wait.frame else wait.op}", wait.claims[:1]
    elif view.user_frame is None and left and beside:
        own = replace(thread_condition(beside[0]), advice=frozenset({OUTLIVES}))
        does, claims = f"its thread {beside[0].name} {own.reason}", own.claims[:1]
    else:
        own = inside.condition()
        does, claims = f"it {own.reason}", own.claims[:1]
    hook = any(fr.short(frame.function) == "excepthook" for frame in view.frames)
    when = ", called by sys.excepthook" if hook else ", called at interpreter exit" if left and not beside else ""
    reason = f"{raised.reason} and never exited: {does}{when}"
    advice = raised.advice | ({EXIT_WAITS} if wait is not None else own.advice & {OUTLIVES})
    return replace(one, condition=replace(raised, reason=reason, claims=(*raised.claims, *claims), advice=advice))


def _locked_by_a_peer(facts: CaseFacts, one: RankFacts, own: Condition) -> Condition:
    """``filelock`` closes the file between its attempts, so the kernel tells only who holds one: where that is one
    other rank's process alone, it is what is waited for.
    """
    view = view_of(one.evidence)
    library = view is not None and calls.FILE_LOCK.on(view.stack.called)
    sqlite = view is not None and view.native(calls.SLEEPS) == "sqlite"
    if not library and not sqlite:
        return own
    holders = [(host, rank, locks) for (host, _), (rank, locks) in facts.processes.items() if locks]
    others = [holder for holder in holders if holder[0] == one.evidence.host] or holders  # of a file that nodes share
    if not others and library:
        words = (
            "no process that was seen has a file locked: another one has it, or a dead one left its lock file behind"
        )
        return own.with_clause(words, Claim(words, f"{one.folder}/proc.json"), advice=[LOCK_FILE])
    if len(others) != 1 or others[0][1] == one.rank:
        return own
    ((host, rank, (lock, *_)),) = others
    text = f"of all processes that were seen, {lock.pid} of rank {rank} alone has a file locked: {lock.path}"
    return replace(
        own,
        cause="blocking-io",
        reason=f"keeps asking for a file lock at {fr.place(own.frame)}",
        doubts=(Doubt.STATE_INFERRED,),
        claims=(*own.claims, Claim(text, f"ranks/{rank}/proc.json")),
        locked_by=lock.pid,
        locked_on=host,
        for_good=False,
    )


def _locked_elsewhere(facts: CaseFacts, one: RankFacts, own: Condition) -> Condition:
    """Of a lock that no rank's process here holds: whether one of another node has locked a file of this name.

    Where nodes share files, each kernel knows its own locks alone.
    """
    owner = facts.processes.get((one.evidence.host, own.locked_by)) if own.locked_by is not None else None
    if owner is not None:
        rank, _ = owner
        who = f"rank {rank}" if facts.ranks[rank].evidence.pid == own.locked_by else f"{own.holder}, of rank {rank}"
        return own if rank == one.rank else own.with_holder(who)
    others = [
        (host, rank, lock)
        for (host, _), (rank, locks) in facts.processes.items()
        for lock in locks
        if host != one.evidence.host and lock.path == own.locks
    ]
    if len({rank for _, rank, _ in others}) == 1:
        host, rank, lock = others[0]
        claim = Claim(f"{lock.pid} of rank {rank}, on {host}, has {lock.path} locked", f"ranks/{rank}/proc.json")
        return replace(own, locked_by=lock.pid, locked_on=host, claims=(*own.claims, claim))
    if own.locked_by is None:
        return own
    reason = f"{own.reason}, which is not one of this job's ranks"
    return replace(own, reason=reason, advice=own.advice | {FOREIGN_LOCK})


def _at_the_other_end(facts: CaseFacts, one: RankFacts, own: Condition) -> Condition:
    """Whose the other end of its pipe or connection is: another rank's, or a process's of no rank."""
    owners = {end.pid: facts.processes.get((one.evidence.host, end.pid), (None, ()))[0] for end in own.ends}
    if len(set(owners.values())) > 1 or one.rank in owners.values():
        return own
    pid, owner = next(iter(owners.items()))
    if owner is None:
        who = ", ".join(f"{end.pid} ({end.name})" if end.name else f"{end.pid}" for end in own.ends[:3])
        are, none = ("is process", "not one") if len(own.ends) == 1 else ("is open in processes", "none")
        words = f"the other end {are} {who}, {none} of this job's ranks"
        return own.with_clause(words, Claim(words, f"{one.folder}/proc.json"))
    main = facts.ranks[owner].evidence.pid  # the children that it has forked have inherited it
    pid = main if main in owners else pid
    words = f"the other end is rank {owner}'s"
    told = own.with_clause(words, Claim(f"{words}, process {pid}", f"{one.folder}/proc.json"), advice=[OWED])
    return replace(told, awaits_message_from=pid)


def _absent_thread(facts: CaseFacts, one: RankFacts) -> Condition | None:
    """A thread of the rank is where its peers' threads are not: beside the call in which these wait, by its own doing.

    The peers wait in threads for the same thread of this rank, whatever its main thread waits in. A thread that waits
    for what others feed it, the main one, say, does nothing of its own.
    """
    main = one.wait
    if main is None and (one.condition is None or one.condition.lock is None):
        return None  # what its main thread does by itself says more
    for wait in facts.in_threads:
        if (main is not None and wait.thread == main.thread) or wait.group is None or wait.seq is None:
            continue
        members, _ = facts.alignment.members(wait.group)
        missing = one.rank in members and facts.alignment.last(one.rank, wait.group) < wait.seq
        view = view_of(one.evidence) if missing else None
        for other in view.beside() if view is not None else ():
            if begins_at(other.stack) != wait.thread or other.awaited.peers is not None:
                continue
            found = thread_condition(other)
            if found.lock is None or found.lock.on == "lock":
                words = f"waits in {main.words}" if main is not None else "waits for its threads"
                return replace(found, reason=f"{words}, and its thread {other.name} {found.reason}")
    return None


def _before_its_end(rank: RankEvidence) -> RankEvidence:
    """Returns a rank that ended during the look as it was before.

    Its end came after the stall, so it isn't the cause: the user or the out-of-memory killer ended it.
    """
    states = rank.main.states if rank.main is not None else ()
    living = tuple(state for state in states if state.state not in "ZX")
    if rank.main is None or not living or len(living) == len(states):
        return rank
    return structs.replace(rank, main=structs.replace(rank.main, states=living), exit=None)


def view_of(rank: RankEvidence, read_source: ReadSource = NO_SOURCE) -> View | None:
    return View(rank.main, rank, read_source=read_source) if rank.main else None


def user_stack_of(rank: RankEvidence) -> tuple[Frame, ...]:
    """The user's frames, innermost first: where the main thread raised, else the call in which the rank was aborted,
    else where the main thread is.
    """
    if rank.exception is not None:
        return fr.stack_of(rank, rank.exception.frames).user_frames
    aborted, view = exits.aborted_in(rank), view_of(rank)
    if aborted is not None:
        return aborted.user_frames
    return view.stack.user_frames if view is not None else ()


def child_views(rank: RankEvidence, read_source: ReadSource = NO_SOURCE) -> list[View]:
    return [View(child, rank, read_source=read_source) for child in rank.children]


def rank_facts(rank: RankEvidence, alignment: Alignment, read_source: ReadSource) -> RankFacts:
    """The surest reading first.

    Gone or raised; held by the kernel (stopped, D state); holding the GIL; leaving the script; waiting for its GPU;
    waiting for peers; waiting for its DataLoader; then whatever its own stack and the kernel say.
    """
    view = view_of(rank, read_source)
    frame = view.user_frame if view else None
    condition = exits.gone_condition(rank, view)
    condition = replace(condition, for_good=True) if condition is not None else None
    if condition is None and view is not None:
        condition = _held(view) or _left(view)
    if condition is None and view is not None and rank.exception is None:  # else its handler waits, for our look
        condition = gil_condition(view) or peers.lost_condition(view, alignment) or peers.gpu_condition(view, alignment)
    if condition is None and (view is None or not view.frames) and not peers.kernel_says_busy(view):
        condition = peers.device_condition(rank, alignment)
    wait = None
    if condition is None:
        wait = _raised_wait(rank) or peers.peer_wait(rank, view, alignment)
    if condition is None and wait is None and (view is not None or not exits.ended_by_others(rank)):
        callers = {entry.thread for entry in alignment.pending(rank.rank)} - {0}
        inside = ProcessView(view, child_views(rank, read_source), callers) if view is not None else None
        wait = peers.through_a_thread(rank, inside, alignment) if inside is not None else None
        condition = _own(rank, inside, alignment) if wait is None else None
    if wait is not None and frame is None:
        frame = wait.frame
    if condition is not None and condition.for_good and view is not None and condition.cause not in BY_ITSELF:
        condition = replace(condition, for_good=not may_train_elsewhere(view))
    return RankFacts(rank, frame, wait, condition)


def _held(view: View) -> Condition | None:
    return thread_condition(view) if view.wait.kind in ("stopped", "disk") else None


def _left(view: View) -> Condition | None:
    """The script has ended or has given up its process group, and the process is still there.

    A rank whose script ended by the error that reports a peer's death has not left: it was thrown out. The page of one
    that is gone was read at its end, and says nothing of where it stood when it was looked at.
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
    elif view.thread is not None and raw and not _handles_an_exception(view):  # else that says more than its end
        why = calls.leaving(raw, cut=view.thread.cut)
    wait = view.awaited.peers
    if not why and wait is not None and wait.kind == "teardown":
        why = "it is in destroy_process_group"
        claim = view.stack_claim(f"{view.words} is in destroy_process_group")
    if not why:
        return None
    frame = view.user_frame
    if frame is None:  # the interpreter waits for a thread of the user's
        inside = (view.stack_of(thread).user_frame for thread in view.threads)
        frame = next((found for found in inside if found is not None), None)
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
    return bool(ident) and any(one.thread == ident for one in view.rank.gil.handling)


def _own(rank: RankEvidence, inside: ProcessView | None, alignment: Alignment) -> Condition:
    view = inside.main if inside is not None else None
    if inside is None or view is None or not (view.process.states or view.frames):
        return _only_record(rank, alignment)
    condition = inside.condition()
    if condition.cause == "missing-from-collective":
        return _only_record(rank, alignment)
    computes = condition.cause in ("busy-loop", "data-loading")
    if calls.without_workers(view.frames) and not computes:
        return replace(condition, reason=f"{condition.reason}, in its dataset, called by a DataLoader without workers")
    return condition


def _only_record(rank: RankEvidence, alignment: Alignment) -> Condition:
    """No stack: the Flight Recorder alone says how far the rank came."""
    record, unended = alignment.records.get(rank.rank), alignment.unended(rank.rank)
    last = unended or (record.entries[-1] if record is not None and record.entries else None)
    site = fr.stack_of(rank, last.frames).user_frame if last is not None else None
    if unended is not None:
        text = f"has begun a group of operations that it has not ended: {op_name(unended)}{fr.at(site)}"
        shown = f"its newest entries belong to no launch: {text}"
    elif last is not None:
        text = f"made no call after {op_name(last)} #{number_of(last)} of group {last.group!r}{fr.at(site)}"
        shown = f"last recorded call: {described(last)}"
    elif record is not None and record.groups and alignment.has_collectives:
        text = "did not take part: by its record, no call of it is pending; no stack says where it is"
        shown = "its record holds no pending call"
    else:
        text = "did not take part; neither a stack nor a Flight Recorder entry says why"
        return Condition("missing-from-collective", text, None, rank.pid, doubts=(Doubt.STATE_UNKNOWN,))
    claims = (record_claim(rank.rank, shown),)
    return Condition("missing-from-collective", text, site, rank.pid, doubts=(Doubt.RECORD_ALONE,), claims=claims)


def _raised_wait(rank: RankEvidence) -> PeerWait | None:
    """The communication reported a peer's absence: the traceback shows what this rank was waiting in."""
    if rank.exception is None or not exits.is_consequence(rank.exception, rank.nccl_log):
        return None
    stack = fr.stack_of(rank, rank.exception.frames)
    mine = stack.user_frame
    own = bool(stack.frames) and stack.frames[0] == mine
    remote = calls.RPC.on(stack.called)
    unknown = calls.TorchWait("collective", UNKNOWN_OP if own else "a remote call" if remote else "a collective")
    seen = calls.torch_wait(stack) or unknown
    claim = Claim(
        f"{rank.exception.type} reports what happened to a peer: {exits.one_line(rank.exception.message)}",
        f"ranks/{rank.rank}/exception.json",
    )
    return PeerWait.unnumbered(seen.kind, seen.op, mine, claim)
