"""Evidence → one :class:`RankFacts` per rank: either it waits for its peers, or it has a condition of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from safelaunch.diagnose import calls
from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import Alignment, Signature, describe, number_of, op_name, signature
from safelaunch.diagnose.conditions import Condition, View
from safelaunch.diagnose.gil import gil_condition
from safelaunch.diagnose.gone import ended_by_others, gone_condition, is_consequence, one_line
from safelaunch.diagnose.gpu import device_condition, gpu_condition, waits_for_device
from safelaunch.diagnose.kernel import KernelWait, kernel_wait
from safelaunch.diagnose.loader import loader_condition
from safelaunch.diagnose.loops import ReadSource
from safelaunch.diagnose.threads import process_condition
from safelaunch.model import Claim, Collective, Evidence, Frame, RankEvidence

UNKNOWN_OP = "communication"  # where ``work.wait()`` raised, on the user's own line: of what work, no frame tells


@dataclass(frozen=True)
class PeerWait:
    """A rank waits for other ranks.

    ``kind``: init | collective | p2p | store. ``group`` and ``seq`` come from the Flight Recorder; None when only a
    stack tells. ``signature`` is what has to be equal among those that meet there.
    """

    kind: str
    op: str
    group: str | None
    seq: int | None
    signature: Signature
    frame: Frame | None
    words: str
    claims: tuple[Claim, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        return (self.kind, self.group, self.seq, self.signature)


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


@dataclass(frozen=True)
class Facts:
    evidence: Evidence
    ranks: Mapping[int, RankFacts]
    alignment: Alignment
    read_source: ReadSource = field(default=lambda path: None)

    @property
    def world(self) -> frozenset[int]:
        return frozenset(range(self.evidence.world_size)) | frozenset(self.ranks)

    @property
    def unseen(self) -> frozenset[int]:
        return frozenset(self.evidence.missing_ranks) | (self.world - frozenset(self.ranks))

    @property
    def roots(self) -> dict[int, tuple[str, ...]]:
        return {rank: facts.evidence.code_roots for rank, facts in self.ranks.items()}


def derive(evidence: Evidence, read_source: ReadSource | None = None) -> Facts:
    if evidence.outcome == "hang":
        evidence = structs.replace(evidence, ranks=tuple(map(_before_its_end, evidence.ranks)))
    alignment = Alignment(evidence.ranks, evidence.world_size)
    ranks = {r.rank: rank_facts(r, alignment) for r in evidence.ranks}
    return Facts(evidence, dict(sorted(ranks.items())), alignment, read_source or (lambda path: None))


def _before_its_end(rank: RankEvidence) -> RankEvidence:
    """A rank that ended while it was looked at, as it was before: its end came later than the stall, whose it is not
    the cause. (Somebody lost patience, or the out-of-memory killer came by.)
    """
    states = rank.main.states if rank.main is not None else ()
    living = tuple(state for state in states if state.state not in "ZX")
    if rank.main is None or not living or len(living) == len(states):
        return rank
    return structs.replace(rank, main=structs.replace(rank.main, states=living), exit=None)


def view_of(rank: RankEvidence) -> View | None:
    return View(rank.main, rank.code_roots, f"ranks/{rank.rank}") if rank.main else None


def user_stack_of(rank: RankEvidence) -> tuple[Frame, ...]:
    """The user's frames of the main thread, innermost first: where it raised, else where it is."""
    view = view_of(rank)
    frames = rank.exception.frames if rank.exception is not None else view.frames if view is not None else ()
    return fr.user_stack(frames, rank.code_roots)


def child_views(rank: RankEvidence) -> list[View]:
    return [View(child, rank.code_roots, f"ranks/{rank.rank}") for child in rank.children]


def rank_facts(rank: RankEvidence, alignment: Alignment) -> RankFacts:
    """The surest reading first.

    Gone or raised; held by the kernel (stopped, D state); holding the GIL; leaving the script; waiting for its GPU;
    waiting for peers; waiting for its DataLoader; then whatever its own stack and the kernel say.
    """
    view = view_of(rank)
    frame = view.user_frame if view else None
    condition = gone_condition(rank, view)
    if condition is None and view is not None:
        condition = _held(view) or gil_condition(rank, view) or _left(rank, view)
    if condition is None and view is not None and rank.exception is None:
        condition = gpu_condition(rank, view, alignment)
    if condition is None and (view is None or not view.frames) and not _kernel_says_busy(view):
        condition = device_condition(rank, alignment)
    wait = None
    if condition is None:
        wait = _raised_wait(rank) or _peer_wait(rank, view, alignment)
    if condition is None and wait is None and (view is not None or not ended_by_others(rank)):
        condition = _own(rank, view, alignment)
    if wait is not None and frame is None:
        frame = wait.frame
    return RankFacts(rank, frame, wait, condition)


def _held(view: View) -> Condition | None:
    if kernel_wait(view.process).kind in ("stopped", "disk"):
        return process_condition(view)
    return None


def _left(rank: RankEvidence, view: View) -> Condition | None:
    """The script has ended or has given up its process group, and the process is still there.

    A rank whose script ended by the error that reports a peer's death has not left: it was thrown out. The page of one
    that is gone was read at its end, and says nothing of where it stood when it was looked at.
    """
    if rank.exception is not None:
        return None
    folder = view.folder
    why, claim = "", view.stack_claim("its main thread is past the end of the script")
    raw = view.main.frames if view.main else ()
    if rank.exit is None and rank.progress is not None and rank.progress.state == "exited":
        why = "its script has ended"
        claim = Claim("its progress page says that the script has ended", f"{folder}/progress.json")
    elif raw:
        why = calls.leaving(raw)
    wait = calls.torch_wait(view.frames, rank.code_roots)
    if not why and wait is not None and wait.kind == "teardown":
        why = "it is in destroy_process_group"
        claim = view.stack_claim("its main thread is in destroy_process_group")
    if not why:
        return None
    frame = view.user_frame
    if frame is None:  # the interpreter waits for a thread of the user's
        threads = view.sample.threads if view.sample else ()
        inside = (fr.user_frame(fr.python_frames(thread), rank.code_roots) for thread in threads)
        frame = next((found for found in inside if found is not None), None)
    where = f", now at {fr.place(frame)}" if frame else ""
    text = f"has left the training loop: {why}{where}"
    return Condition("uneven-batches", text, frame, view.process.pid, claims=(claim,))


def _own(rank: RankEvidence, view: View | None, alignment: Alignment) -> Condition:
    if view is None or not (view.process.states or view.frames):
        return _only_record(rank, alignment)
    children = child_views(rank)
    if calls.loader_wait(view.frames, rank.code_roots):
        return loader_condition(view, children)
    condition = process_condition(view, children)
    if condition.cause == "missing-from-collective":
        return _only_record(rank, alignment)
    if calls.loader_on_stack(view.frames) and condition.cause != "busy-loop":
        return replace(condition, reason=f"{condition.reason}, in its dataset, called by a DataLoader without workers")
    return condition


def _only_record(rank: RankEvidence, alignment: Alignment) -> Condition:
    """No stack: the Flight Recorder alone says how far the rank came."""
    record = alignment.records.get(rank.rank)
    unended = alignment.unended(rank.rank)
    if unended is not None:
        site = fr.user_frame(unended.frames, rank.code_roots)
        text = f"has begun a group of operations that it has not ended: {op_name(unended)}"
        text += f" at {fr.place(site)}" if site else ""
        claim = Claim(f"its newest entries belong to no launch: {text}", f"ranks/{rank.rank}/flight_recorder.json")
        return Condition("missing-from-collective", text, site, rank.pid, confidence="medium", claims=(claim,))
    if record is None or not record.entries:
        text = "did not enter it; neither a stack nor a Flight Recorder entry says why"
        return Condition("missing-from-collective", text, None, rank.pid, confidence="low")
    last = record.entries[-1]
    site = fr.user_frame(last.frames, rank.code_roots)
    number = f"number {number_of(last)} of group {last.group!r}"
    text = f"entered nothing after {op_name(last)} {number}"
    text += f" at {fr.place(site)}" if site else ""
    claim = Claim(f"the last on its record: {describe(last)}, {number}", f"ranks/{rank.rank}/flight_recorder.json")
    return Condition("missing-from-collective", text, site, rank.pid, confidence="medium", claims=(claim,))


def _raised_wait(rank: RankEvidence) -> PeerWait | None:
    """The communication reported a peer's absence: the traceback shows what this rank was waiting in."""
    if rank.exception is None or not is_consequence(rank.exception):
        return None
    frames = rank.exception.frames
    mine = fr.user_frame(frames, rank.code_roots)
    own = bool(frames) and frames[0] == mine
    unknown = calls.TorchWait("collective", UNKNOWN_OP if own else "a collective")
    seen = calls.torch_wait(frames, rank.code_roots) or unknown
    claim = Claim(
        f"{rank.exception.type} reports what happened to a peer: {one_line(rank.exception.message)}",
        f"ranks/{rank.rank}/exception.json",
    )
    words = f"{seen.op} at {fr.place(mine)}"
    return PeerWait(seen.kind, seen.op, None, None, (seen.op,), mine, words, (claim,))


# --- waiting for peers --------------------------------------------------------------------------------------------


def _peer_wait(rank: RankEvidence, view: View | None, alignment: Alignment) -> PeerWait | None:
    """Does the main thread wait for other ranks, and in which operation?

    Its stack says so (a c10d frame innermost); or it rests inside torch or in a C call of the user's own line
    (``loss.backward()``, ``work.wait()``) with an operation pending in the Flight Recorder: a pending operation that
    some rank has not joined cannot complete whatever this thread does. With no stack the record alone has to do.
    """
    pending = alignment.pending(rank.rank)
    if view is None or not view.frames:
        begun = next((entry for entry in pending if entry.started), pending[0] if pending else None)
        return _from_entry(rank, begun, None) if begun is not None and not _kernel_says_busy(view) else None
    seen = calls.torch_wait(view.frames, rank.code_roots)
    mine = view.user_frame
    if seen is not None and seen.kind == "init":
        claim = view.stack_claim("its main thread is in init_process_group")
        text = f"init_process_group at {fr.place(mine)}"
        return PeerWait("init", seen.op, None, None, ("init",), mine, text, (claim,))
    if seen is not None:
        entry = _entry_for(seen, pending, mine, rank)
        return _from_entry(rank, entry, mine) if entry else _from_stack(view, seen)
    if pending and waits_for_device(view):  # spinning, it may be, on what the device does not finish
        return _from_entry(rank, next((entry for entry in pending if entry.started), pending[0]), mine)
    return _quiet_wait(rank, view, pending)


def _quiet_wait(rank: RankEvidence, view: View, pending: list[Collective]) -> PeerWait | None:
    """No c10d frame: a backward pass with its hooks in C++, or ``work.wait()`` called from the user's line."""
    wait = kernel_wait(view.process)
    native = calls.native_wait(view.process.stacks, view.process.pid)
    seen = calls.native_peer_wait(view.process.stacks, view.process.pid)
    if seen is not None and not wait.busy:
        entry = _entry_for(None, pending, view.user_frame, rank) if seen.kind == "collective" else None
        return _from_entry(rank, entry, view.user_frame) if entry else _from_stack(view, seen)
    if not pending and wait.kind == "lock" and _backward_without_a_record(rank, view):
        return _of_backward(view)
    if not pending or native == "lock" or wait.kind not in ("lock", "unknown"):
        return None
    inner, mine = fr.user_part(view.frames, rank.code_roots)
    if calls.in_torch(view.frames, rank.code_roots) or (mine is not None and not inner):
        return _from_entry(rank, pending[0], mine)
    return None


def _backward_without_a_record(rank: RankEvidence, view: View) -> bool:
    """A backward pass that rests, where neither C frames nor a Flight Recorder can say on what.

    torch 2.6 and 2.9 let nobody outside see gloo's collectives, and reading C frames takes its time. What a backward
    pass rests on without a Python frame of a hook inside it is its gradients' reduction, as good as always.
    """
    recorded = rank.flight_record is not None and bool(rank.flight_record.entries)
    natively = any(sample.native for sample in view.process.stacks)
    return not recorded and not natively and calls.in_backward(view.frames, rank.code_roots)


def _of_backward(view: View) -> PeerWait:
    where = fr.place(view.user_frame)
    claim = view.stack_claim(f"its main thread rests in the backward pass at {where}, as when gradients are reduced")
    op = "a collective"
    return PeerWait("collective", op, None, None, (op,), view.user_frame, f"the backward pass at {where}", (claim,))


def _kernel_says_busy(view: View | None) -> bool:
    wait = kernel_wait(view.process) if view else KernelWait("unknown")
    return wait.kind in ("running", "sleep", "child", "disk", "stopped", "dead")


def _entry_for(
    seen: calls.TorchWait | None, pending: list[Collective], mine: Frame | None, rank: RankEvidence
) -> Collective | None:
    """The pending entry that the stack shows: made by the same user line, else of the same name, else the newest.

    The main thread blocks in what it called last; older entries are asynchronous ones, which wait on their own.
    """
    fitting = [e for e in pending if e.is_p2p == (seen is not None and seen.kind == "p2p")]
    if seen is not None and seen.op == "new_group":
        return None
    for entry in reversed(fitting):
        site = fr.user_frame(entry.frames, rank.code_roots)
        if site is not None and mine is not None and (site.file, site.line) == (mine.file, mine.line):
            return entry
    named = [e for e in fitting if seen is not None and op_name(e).strip("_") in seen.op]
    best = named or fitting
    return best[-1] if best else None


def _from_entry(rank: RankEvidence, entry: Collective, mine: Frame | None) -> PeerWait:
    site = mine or fr.user_frame(entry.frames, rank.code_roots)
    number = number_of(entry)
    words = f"{op_name(entry)} at {fr.place(site)}" if site else f"{op_name(entry)} (number {number})"
    claim = Claim(
        f"pending: {op_name(entry)} number {number} of group {entry.group!r}, {describe(entry)}",
        f"ranks/{rank.rank}/flight_recorder.json",
    )
    stack = (Claim(f"its main thread waits at {fr.place(mine)}", f"ranks/{rank.rank}/stack.txt"),) if mine else ()
    kind = "p2p" if entry.is_p2p else "collective"
    return PeerWait(kind, op_name(entry), entry.group, number, signature(entry), site, words, (claim, *stack))


def _from_stack(view: View, seen: calls.TorchWait) -> PeerWait:
    mine = view.user_frame
    claim = view.stack_claim(f"its main thread waits in {seen.op} at {fr.place(mine)}")
    words = f"{seen.op} at {fr.place(mine)}"
    return PeerWait(seen.kind, seen.op, None, None, (seen.op,), mine, words, (claim,))
