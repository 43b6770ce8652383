"""Waits in a thread's communication: for other ranks, in which operation, or for its own GPU.

A stack in a synchronize only shows that some queued work doesn't end: a collective or a kernel. In the Flight Recorder,
a collective that the device has *started* waits for peers; a scheduled one is queued after something else. Without
start times (``TORCH_NCCL_ENABLE_TIMING`` off), a pending collective with peers counts as the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from safelaunch.model import Claim, Collective, Frame, Posted, RankEvidence
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.receivers import calls_method
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import Signature, call_words, number_of, op_name, signature
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.processes import ProcessView
from safelaunch.verdict.thread_view import View

CallPlace = tuple[str, str]  # file and function


@dataclass(frozen=True)
class PeerWait:
    """A rank's wait for other ranks."""

    kind: str  # init | collective | p2p | store
    op: str  # empty if unknown
    group: str | None  # None if only a stack shows the wait
    seq: int | None
    signature: Signature  # must be equal on all ranks of the call
    frame: Frame | None
    call: str  # in words
    place: str  # of the frame, in words; empty if unknown
    claims: tuple[Claim, ...] = ()
    detail: str = ""  # where it was called, if it waits elsewhere, or its number
    more: str = ""  # about the thread that waits
    thread: CallPlace | None = None  # start of the background thread that the main thread waits for
    holds_lock: bool = False  # the main thread waits for a lock of that thread
    source: int | None = None  # ranks and tag that the call names; None if unknown
    target: int | None = None
    tag: int | None = None

    @classmethod
    def unnumbered(cls, wait: calls.TorchWait, frame: Frame | None, claim: Claim, call: str = "") -> PeerWait:
        """Returns a wait without a group or number."""
        return cls(wait.kind, wait.op, None, None, (wait.op,), frame, call or wait.words, fr.place(frame), (claim,))

    @property
    def words(self) -> str:
        return f"{self.call}{self.detail}{f' at {self.place}' if self.place else ''}{self.more}"

    @property
    def peer(self) -> int | None:
        return (self.target if self.target is not None else self.source) if self.kind == "p2p" else None

    @property
    def key(self) -> tuple[object, ...]:
        return (self.kind, self.group, self.seq, self.signature)


def peer_wait(rank: RankEvidence, view: View | None, alignment: Alignment) -> PeerWait | None:
    """Returns the operation in which the thread waits for other ranks, if it does.

    Either its innermost frame is c10d's, or it rests inside torch or in a C call of the user's line
    (``loss.backward()``, ``work.wait()``) with an operation pending in the Flight Recorder. Without a stack, the record
    has to suffice.
    """
    pending = _of_thread(view, alignment.pending(rank.rank))
    if view is None or not view.frames:
        begun = next((entry for entry in pending if entry.started), pending[0] if pending else None)
        return _from_entry(rank, begun, alignment) if begun is not None and not kernel_says_busy(view) else None
    torch_wait = view.awaited.peers
    user_frame = view.user_frame
    if torch_wait is not None and torch_wait.kind == "init":
        claim = view.stack_claim(f"{view.words} is in {torch_wait.op}")
        return replace(PeerWait.unnumbered(torch_wait, user_frame, claim), signature=("init",))
    if torch_wait is not None:
        entry = _entry_for(torch_wait, pending, view)
        wait = _from_entry(rank, entry, alignment, view) if entry else _from_stack(view, torch_wait)
        return _with_arguments(wait, view, alignment)
    if pending and view.device:  # it might spin on work that the device doesn't finish
        return _from_entry(rank, next((entry for entry in pending if entry.started), pending[0]), alignment, view)
    return _quiet_wait(view, pending, alignment)


def _of_thread(view: View | None, entries: Sequence[Collective]) -> list[Collective]:
    # Without those that another Python thread made. An entry or a thread without an identifier is unknown.
    threads = view.threads if view is not None else ()
    other_threads = {thread.ident for thread in threads if view is None or thread is not view.thread} - {0}
    return [entry for entry in entries if entry.thread not in other_threads]


def calls_at(view: View, entries: Sequence[Collective], *, is_p2p: bool) -> list[Collective]:
    """Returns the calls that the thread might be in: from its line, or else every call that no other thread made."""
    candidates = [entry for entry in _of_thread(view, entries) if entry.is_p2p == is_p2p]
    sites = ((entry, fr.stack_of(view.rank, entry.frames).user_frame) for entry in candidates)
    return [entry for entry, site in sites if fr.same_line(site, view.user_frame)] or candidates


def through_a_thread(rank: RankEvidence, inside: ProcessView, alignment: Alignment) -> PeerWait | None:
    """Returns the wait of a thread that the main thread waits for."""
    view = inside.end
    waits = view.awaited.peers is not None or inside.has_called(view) or _rests_without_a_record(view)
    thread_wait = peer_wait(rank, view, alignment) if waits and view.other is not None else None
    if thread_wait is None:
        return None
    on_the_way = tuple(claim for edge in inside.path for claim in edge.claims)
    more, lock = " in a separate thread", inside.lock_held
    if lock is not None:
        lock_held, waiter = lock
        more += f", which since line {lock_held.line} has held the lock that {waiter.words} waits for at {waiter.place}"
    return replace(
        thread_wait,
        more=more,
        claims=thread_wait.claims + on_the_way,
        thread=begins_at(view.stack),
        holds_lock=lock is not None,
    )


def begins_at(stack: fr.Stack) -> CallPlace | None:
    """Returns where a thread's code starts."""
    frames = stack.user_frames or [f for f in stack.frames if not f.file.endswith("/threading.py")]
    return (frames[-1].file, fr.short(frames[-1].function)) if frames else None


def _quiet_wait(view: View, pending: list[Collective], alignment: Alignment) -> PeerWait | None:
    """Returns the wait without a c10d frame: a backward pass with C++ hooks, or ``work.wait()``."""
    wait = view.wait
    native = view.native()
    torch_wait = calls.PEER_WAITS.get(native)
    if torch_wait is not None and torch_wait.kind == "store" and view.store_key is not None and view.store_key.set_at:
        return None  # it waits for the rank that should set the key, not for all
    if torch_wait is not None and not wait.busy:
        entry = _entry_for(None, pending, view) if torch_wait.kind == "collective" else None
        if entry is not None:
            return _from_entry(view.rank, entry, alignment, view)
        return _with_batch(_from_stack(view, torch_wait), view)
    if pending and view.poll is not None and view.poll.of == "work":
        return _from_entry(view.rank, pending[0], alignment, view)
    posted = not view.stack.called and _batch(view)
    recorded = view.rank.flight_record is not None and alignment.has_collectives  # sends and receives don't count
    if not native and wait.kind == "lock" and (posted or (recorded and not pending and _calls_wait(view))):
        return _with_batch(_from_stack(view, calls.PEER_WAITS["p2p"]), view)
    if not pending and wait.kind == "lock" and _rests_without_a_record(view):
        return _at_rest(view)
    if not pending or native == "lock" or wait.kind not in ("lock", "unknown"):
        return None
    if calls.in_torch(view.stack) or (view.user_frame is not None and not view.stack.called):
        return _from_entry(view.rank, pending[0], alignment, view)
    return None


def _calls_wait(view: View) -> bool:
    inner = line_before_c10d(view)
    return inner is not None and calls_method(inner, "wait", view.read_source)


def line_before_c10d(view: View) -> Frame | None:
    """Returns the line of the user's or of torch.distributed that calls C++."""
    return view.user_frame if not view.stack.called else calls.in_distributed(view.stack)


def _rests_without_a_record(view: View) -> bool:
    # torch 2.6 and 2.9 don't expose gloo's collectives. A backward pass without a Python frame of a hook nearly always
    # rests on its gradients' reduction.
    record = view.rank.flight_record
    recorded = record is not None and bool(record.entries)
    natively = any(sample.native for sample in view.process.stacks)
    return not recorded and not natively and (calls.in_backward(view.stack) or _calls_wait(view))


def _at_rest(view: View) -> PeerWait:
    what, why = "the backward pass", "as when gradients are reduced"
    if not calls.in_backward(view.stack):
        what, why = "work.wait()", "as for a call of torch.distributed"
    claim = view.stack_claim(f"{view.words} rests in {what} at {view.place}, {why}")
    return PeerWait.unnumbered(calls.PEER_WAITS["peers"], view.user_frame, claim, what)


def kernel_says_busy(view: View | None) -> bool:
    return view is not None and view.wait.kind in ("running", "sleep", "child", "disk", "stopped", "dead")


def _entry_for(torch_wait: calls.TorchWait | None, pending: list[Collective], view: View) -> Collective | None:
    # By the line, or the name, or else the newest: the main thread blocks in its last call, and older ones are
    # asynchronous.
    if torch_wait is not None and torch_wait.op == "new_group":
        return None
    possible = calls_at(view, pending, is_p2p=torch_wait is not None and torch_wait.kind == "p2p")
    named = [e for e in possible if torch_wait is not None and op_name(e).strip("_") in torch_wait.op]
    return next(reversed(named or possible), None)


def _from_entry(rank: RankEvidence, entry: Collective, alignment: Alignment, view: View | None = None) -> PeerWait:
    user_frame = view.user_frame if view is not None else None
    called = fr.stack_of(rank, entry.frames).user_frame
    site, number, op = user_frame or called, number_of(entry), _called_op(rank, entry)
    place, detail = (fr.place(site), "") if site else ("", f" #{number}")
    elsewhere = (
        user_frame is not None
        and called is not None
        and (user_frame.file, user_frame.line) != (called.file, called.line)
    )
    if elsewhere and view is not None and not calls.C10D.on(view.stack.called):  # in ``work.wait()`` or a synchronize
        detail = f" of {fr.place(called)}"
    text = f"pending: {call_words(entry, alignment.group(entry.group))}"
    claim = record_claim(rank.rank, text)
    stack = (
        (view.stack_claim(f"{view.words} waits at {fr.place(user_frame)}"),) if view is not None and user_frame else ()
    )
    kind = "p2p" if entry.is_p2p else "collective"
    of = kind, op_name(entry), entry.group, number, signature(entry)
    return PeerWait(*of, site, op, place, (claim, *stack), detail)


def _called_op(rank: RankEvidence, entry: Collective) -> str:
    op = op_name(entry)
    torch_wait = calls.torch_wait(fr.stack_of(rank, entry.frames)) if entry.by_gloo and op == "all_reduce" else None
    return torch_wait.op if torch_wait is not None and torch_wait.op.startswith("reduce_scatter") else op


def _from_stack(view: View, torch_wait: calls.TorchWait) -> PeerWait:
    claim = view.stack_claim(f"{view.words} waits in {torch_wait.words} at {view.place}")
    return PeerWait.unnumbered(torch_wait, view.user_frame, claim)


def _with_arguments(wait: PeerWait, view: View, alignment: Alignment) -> PeerWait:
    """Adds the ranks that the call names, as ranks of the world."""
    call = view.thread.call if view.thread is not None else None
    if call is None:
        return wait
    source = call.src if call.src is not None else _world_rank(wait.group, call.group_src, alignment)
    target = call.dst if call.dst is not None else _world_rank(wait.group, call.group_dst, alignment)
    named = replace(wait, source=source, target=target, tag=call.tag)
    if named.peer is None:
        return named
    words = f"{wait.op} {'to' if target is not None else 'from'} rank {named.peer}"
    words += f" (tag {call.tag})" if call.tag else ""
    claim = view.stack_claim(f"{view.words} is in {words}")
    return replace(named, call=words, claims=(*wait.claims, claim))


def _with_batch(wait: PeerWait, view: View) -> PeerWait:
    """Adds the peer of the thread's batch (``batch_isend_irecv``), if it is the only one."""
    op = view.native(calls.TRANSFERS) if wait.kind == "p2p" else ""
    posted = _batch(view)
    ends = {
        (transfer.sends, transfer.peer, transfer.tag)
        for transfer in posted
        if not op or transfer.sends == (op == "send")
    }
    if wait.kind != "p2p" or len(ends) != 1:
        return wait
    ((sends, peer, tag),) = ends
    posted_op = "isend" if sends else "irecv"
    words = f"{posted_op} {'to' if sends else 'from'} rank {peer}"
    batch = ", ".join(f"{'to' if transfer.sends else 'from'} rank {transfer.peer}" for transfer in posted[:8])
    claim = Claim(f"{view.words} waits for its {words}; its batch: {batch}", f"ranks/{view.rank.rank}/rank.json")
    changed = replace(wait, op=posted_op, call=words, tag=tag)
    return replace(
        changed, target=peer if sends else None, source=None if sends else peer, claims=(*wait.claims, claim)
    )


def _batch(view: View) -> list[Posted]:
    return [
        transfer
        for transfer in view.rank.gil.posted
        if view.thread is not None and transfer.thread == view.thread.ident
    ]


def _world_rank(group: str | None, rank: int | None, alignment: Alignment) -> int | None:
    if rank is None or group is None or not alignment.members(group)[1]:
        return None
    ranks = alignment.ranks_of(group)
    return ranks[rank] if 0 <= rank < len(ranks) else None


def has_peers(rank: int, entry: Collective, alignment: Alignment) -> bool:
    return bool(alignment.members(entry.group)[0] - {rank})
