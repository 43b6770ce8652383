"""Ranks that do not meet: one group, one number, and different operations, sizes, types or lines."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.branches import condition_on_rank
from safelaunch.diagnose.collectives import (
    Mismatch,
    describe,
    first_mismatch,
    mismatch_at,
    number_of,
    op_name,
    parting,
    vote,
)
from safelaunch.diagnose.facts import Facts, user_stack_of, view_of
from safelaunch.diagnose.findings import Finding, Ruling, ranks_word, small, wait_claims, waiting_culprit
from safelaunch.diagnose.history import Shift, departures, shift_in, shift_of_program
from safelaunch.diagnose.loops import loop_left
from safelaunch.diagnose.waits import Key, Waits, members_of, same_op
from safelaunch.model import Claim, Collective, Confidence, Frame


@dataclass(frozen=True)
class Meeting:
    """Ranks that should have met, by what each of them is in.

    ``words``: ``all_gather at train.py:41``. ``sites``: the user frame of the call. ``stacks``: the frames from it
    outwards, innermost first.
    """

    odd: tuple[int, ...]
    majority: bool
    words: Mapping[int, str]
    sites: Mapping[int, Frame | None]
    stacks: Mapping[int, tuple[Frame, ...]]
    confidence: Confidence
    claims: tuple[Claim, ...] = ()

    @property
    def rest(self) -> tuple[int, ...]:
        return tuple(r for r in sorted(self.words) if r not in self.odd)


def mismatch(facts: Facts, waits: Waits, circle: tuple[Key, ...]) -> Finding:
    """One group, and its members do not meet: who is in the minority?

    The Flight Recorder decides under the lowest number that is pending, counting also the ranks that got past it.
    Without it, the functions and lines in which the stacks wait are compared, with less confidence.
    """
    waiting = [waits.example[k] for k in circle]
    numbered = [w for w in waiting if w.kind == "collective" and w.seq is not None]
    if numbered:
        lowest = min(numbered, key=lambda w: w.seq or 0)
        found = mismatch_at(facts.alignment, str(lowest.group), lowest.seq or 0)
        if found is not None:
            return mismatch_finding(facts, found)
    meeting = _by_stacks(facts, members_of(waits, circle))
    if any(w.kind == "p2p" and w.seq is not None for w in waiting):  # some ranks send and others do not, by design
        meeting = replace(meeting, odd=tuple(sorted(meeting.words)), majority=False, confidence="low")
    return _finding(facts, meeting)


def mispaired(facts: Facts, waits: Waits) -> Ruling:
    """Every member has arrived and yet they wait: ranks may have met in different operations before.

    A backend pairs by number, not by kind, and may let a wrong pair pass; what it exchanged then is rubbish, and the
    ranks are one operation apart from there on.
    """
    if not waits.ranks:
        return ""
    found = first_mismatch(facts.alignment)
    if found is None and isinstance(late := parted_earlier(facts, waits), Finding):
        return late
    if found is None:
        return "all ranks recorded the same operations under the same numbers" if facts.alignment.records else ""
    if facts.alignment.members(found.group)[0] & facts.unseen:
        return ""
    return mismatch_finding(facts, found)


def mismatch_finding(facts: Facts, found: Mismatch) -> Finding:
    """The finding for a mismatch that the Flight Recorders show; where it began earlier, who began it."""
    meeting = _recorded(facts, found)
    shift = shift_in(facts.alignment, found.group, facts.roots)
    if shift is not None and shift.seq < found.seq:
        return _shifted(facts, shift, meeting.words, meeting.claims)
    return _finding(facts, meeting)


def parted_earlier(facts: Facts, waits: Waits) -> Ruling:
    """Peers wait for a rank that is behind, and it is behind only because of a call too many or too few long ago.

    Without that call nobody would wait, so what the rank that is waited for does now (it sleeps, it has ended its
    loop) is no cause. Asked only where the histories agree again behind the shift, several calls long.
    """
    groups = {w.group for w in waits.example.values() if w.kind == "collective" and w.group is not None}
    if facts.unseen:
        return ""
    for group in sorted(groups):
        shift = shift_in(facts.alignment, group, facts.roots)
        if shift is not None and shift.sure and shift.explains_lag():
            return _shifted(facts, shift, _words(facts, shift.entered), ())
    return ""


def parted_in(facts: Facts, groups: Iterable[str | None]) -> Finding | None:
    """Ranks wait for each other across groups because the calls of one of these groups are off by some on one rank."""
    if facts.unseen:
        return None
    shifts = [shift_in(facts.alignment, group, facts.roots) for group in sorted(filter(None, groups))]
    found = [shift for shift in shifts if shift is not None]
    best = max(found, key=lambda shift: shift.matched) if found else shift_of_program(facts.alignment, facts.roots)
    return _shifted(facts, best, _words(facts, sorted(facts.ranks)), ()) if best is not None else None


def departed(facts: Facts, ranks: Iterable[int]) -> Finding | None:
    """One of ``ranks``, which wait for each other, is where the others of its role were not at that place."""
    if facts.unseen:
        return None
    found = [
        one for one in departures(facts.alignment, facts.roots) if one.rank in set(ranks) and not one.call.completed
    ]
    if len(found) != 1:
        return None
    (one,) = found
    site = fr.user_frame(one.call.frames, facts.roots.get(one.rank, ()))
    theirs = fr.user_frame(one.theirs.frames, facts.roots.get(one.mates[0], ()))
    mates = small(ranks_word(one.mates))
    text = f"waits in {op_name(one.call)} at {fr.place(site)}, where {mates}, which had called alike until then, called"
    text += f" {op_name(one.theirs)} at {fr.place(theirs)}"
    claims = [
        Claim(
            f"rank {rank}: {op_name(call)} is number {number_of(call)} of group {call.group!r}",
            f"ranks/{rank}/flight_recorder.json",
        )
        for rank, call in ((one.rank, one.call), (one.mates[0], one.theirs))
    ]
    return Finding(
        "collective-mismatch",
        "medium",
        f"Rank {one.rank} {text}.",
        (waiting_culprit(facts.ranks[one.rank], f"Rank {one.rank} {text}.", site),),
        (*claims, *wait_claims(facts, sorted(ranks))),
    )


def _words(facts: Facts, ranks: Iterable[int]) -> dict[int, str]:
    """What those that wait wait in."""
    waits = {rank: facts.ranks[rank].wait for rank in ranks if rank in facts.ranks}
    return {rank: wait.words for rank, wait in waits.items() if wait is not None}


def _shifted(facts: Facts, shift: Shift, words: Mapping[int, str], claims: tuple[Claim, ...]) -> Finding:
    """The finding for histories that parted: who made the call too many, or left one out, and where."""
    who, one = ranks_word(shift.ranks), len(shift.ranks) == 1
    inner = shift.stack[0] if shift.stack else None
    where = fr.place(inner)
    if shift.branch is not None and shift.branch != inner:
        where += f", called from {fr.place(shift.branch)}"
    actor = shift.ranks[0] if shift.extra else next(r for r in shift.entered if r not in shift.ranks)
    op = op_name(shift.calls_there[actor])
    many = f"{shift.calls} collectives from" if shift.calls > 1 else f"{op} at"
    if shift.extra:
        did = f"called {many} {where}, which {'its' if one else 'their'} peers did not"
    else:
        did = f"left out {many} {where}, which {'its' if one else 'their'} peers called"
    call = shift.calls_there[actor]
    group, seq = (call.group, number_of(call)) if shift.extra else _own_number(facts, shift, call)
    number = f"number {seq} of group {group!r}"
    off = "ahead of" if shift.extra else "behind"
    now: dict[str, list[int]] = {}
    for rank, text in words.items():
        now.setdefault(text, []).append(rank)
    waits = [f"{small(ranks_word(m))} {'waits' if len(m) == 1 else 'wait'} in {text}" for text, m in now.items()]
    summary = f"{who} {did} ({number}); {'it is' if one else 'they are'} {off} {'its' if one else 'their'} peers since"
    summary += f", and now {' while '.join(waits[:3])}." if waits else "."
    places = [
        Claim(f"rank {rank}: number {shift.seq} is {_called(facts, rank, shift)}", f"ranks/{rank}/flight_recorder.json")
        for rank in (actor, next(r for r in shift.entered if (r in shift.ranks) != (actor in shift.ranks)))
    ]
    agree = Claim(
        f"{shift.matched} later calls are those of the peers again, {shift.calls} further on",
        f"ranks/{shift.ranks[0]}/flight_recorder.json",
    )
    others = [r for r, own in facts.ranks.items() if own.condition is not None and own.wait is None]
    ruled = tuple(
        f"rank {r} {facts.ranks[r].condition.reason}: nobody would wait for it without that"  # type: ignore[union-attr]
        for r in others[:4]
    )
    sites = {rank: _site_of(facts, rank, shift) for rank in shift.ranks}
    return Finding(
        "collective-mismatch",
        "high" if shift.sure else "medium",
        summary,
        tuple(waiting_culprit(facts.ranks[r], f"Rank {r} {did} ({number}).", sites[r]) for r in shift.ranks),
        (*places, agree, *claims, *wait_claims(facts, sorted(words))),
        ruled,
    )


def _own_number(facts: Facts, shift: Shift, call: Collective) -> tuple[str, int]:
    """Group and number of the call that was left out, as it would have been on the rank that left it out.

    A peer made that ``call`` in a group of its own, it may be: then the rank's own group is the one in which it made
    its other calls from there.
    """
    rank = shift.ranks[0]
    mine = [e for e in facts.alignment.records[rank].entries if e.is_p2p == call.is_p2p]
    peer = next(r for r in shift.entered if r not in shift.ranks)
    place, roots = fr.user_stack(call.frames, facts.roots.get(peer, ())), facts.roots.get(rank, ())
    group = next((e.group for e in mine if fr.user_stack(e.frames, roots) == place), call.group)
    if group == call.group and not call.is_p2p:
        return group, call.seq
    instead = shift.calls_there[rank].record_id
    after = next((number_of(e) for e in mine if e.group == group and e.record_id >= instead), None)
    if after is not None:
        return group, after  # it took the number
    return group, 1 + max((number_of(e) for e in mine if e.group == group), default=0)


def _called(facts: Facts, rank: int, shift: Shift) -> str:
    call = shift.calls_there[rank]
    stack = fr.user_stack(call.frames, facts.ranks[rank].evidence.code_roots)
    return f"{op_name(call)} at {' < '.join(fr.place(frame) for frame in stack[:3])}"


def _site_of(facts: Facts, rank: int, shift: Shift) -> Frame | None:
    """The line to show: of the call that was too many; of the one left out, where peers called it."""
    if not shift.extra and shift.stack:
        return shift.stack[0]
    return fr.user_frame(shift.calls_there[rank].frames, facts.ranks[rank].evidence.code_roots)


def _recorded(facts: Facts, found: Mismatch) -> Meeting:
    ranks = sorted(r for members in found.classes.values() for r in members)
    sizes_differ = len({key[0] for key in found.classes}) == 1
    words: dict[int, str] = {}
    sites: dict[int, Frame | None] = {}
    stacks: dict[int, tuple[Frame, ...]] = {}
    for rank in ranks:
        entry = facts.alignment.entry(rank, found.group, found.seq)
        assert entry is not None  # mismatch_at counts entries
        stacks[rank], sites[rank] = _user_stack(facts, rank, entry.frames)
        name = describe(entry) if sizes_differ else op_name(entry)
        words[rank] = f"{name} at {fr.place(sites[rank])}" if sites[rank] else f"{name} (number {entry.seq})"
    parts = (
        f"{words[members[0]].split(' at ')[0]} on {small(ranks_word(members))}" for members in found.classes.values()
    )
    text = f"number {found.seq} of group {found.group!r} is {', '.join(parts)}"
    claims = [Claim(text, f"ranks/{members[0]}/flight_recorder.json") for members in found.classes.values()]
    parted = parting(facts.alignment, ranks, found.group, found.seq, facts.roots)
    if parted is not None:
        places = (f"{small(ranks_word(m))} at {fr.basename(file)}:{line}" for (file, line), m in parted.sites.items())
        text = f"their call sites parted earlier, at number {parted.seq}: {' and '.join(places)}"
        claims.append(Claim(text, f"ranks/{ranks[0]}/flight_recorder.json"))
    sure: Confidence = "high" if found.majority else "medium"
    return Meeting(found.odd, found.majority, words, sites, stacks, sure, tuple(claims))


def _by_stacks(facts: Facts, ranks: list[int]) -> Meeting:
    by_op: dict[tuple[Hashable, ...], list[int]] = {}
    by_site: dict[tuple[Hashable, ...], list[int]] = {}
    for rank in ranks:
        wait = facts.ranks[rank].wait
        op = wait.op if wait else ""
        site = (wait.frame.file, wait.frame.line) if wait and wait.frame else ("", 0)
        known = next((key for key in by_op if same_op(str(key[0]), op)), (op,))
        by_op.setdefault(known, []).append(rank)
        by_site.setdefault((known, *site), []).append(rank)
    ops_differ = len(by_op) > 1
    odd, majority = vote(by_op if ops_differ else by_site)
    words, sites, stacks = {}, {}, {}
    for rank in ranks:
        one = facts.ranks[rank]
        stacks[rank], sites[rank] = _user_stack(facts, rank, ())
        words[rank] = one.wait.words if one.wait else "another place"
    return Meeting(odd, majority, words, sites, stacks, "medium" if majority and ops_differ else "low")


def _user_stack(facts: Facts, rank: int, recorded: tuple[Frame, ...]) -> tuple[tuple[Frame, ...], Frame | None]:
    """The user's call and its callers: as recorded with the entry, else as the main thread shows them."""
    one = facts.ranks[rank]
    view = view_of(one.evidence)
    frames = recorded or (view.frames if view else ())
    site = fr.user_frame(frames, one.evidence.code_roots) or (one.wait.frame if one.wait else None)
    return (frames[frames.index(site) :] if site in frames else ()), site


def _finding(facts: Facts, meeting: Meeting) -> Finding:
    """``uneven-batches`` where the source shows that a rank is past its peers' loop, else ``collective-mismatch``."""
    groups: dict[str, list[int]] = {}
    for rank in (*meeting.odd, *meeting.rest):
        groups.setdefault(meeting.words[rank], []).append(rank)
    parts = [f"{small(ranks_word(m))} {'waits' if len(m) == 1 else 'wait'} in {w}" for w, m in groups.items()]
    text = " while ".join(parts[:3])
    text = f"{text[:1].upper()}{text[1:]}"
    left, loop = _left_loop(facts, meeting)
    if left:
        meeting = replace(meeting, odd=left, majority=True, confidence="high")
        text += f"; {small(ranks_word(left))} {'has' if len(left) == 1 else 'have'} left the loop at line {loop}"
    tail, signs = ("", ()) if meeting.majority else _no_majority(facts, meeting)
    cause = "uneven-batches" if left else "collective-mismatch"
    return Finding(
        cause,
        meeting.confidence,
        f"{text}.{tail}",
        tuple(waiting_culprit(facts.ranks[r], _reason(meeting, r, loop), meeting.sites[r]) for r in meeting.odd),
        meeting.claims + signs + wait_claims(facts, sorted(meeting.words)),
        _other_end(facts, meeting),
    )


def _other_end(facts: Facts, meeting: Meeting) -> tuple[str, ...]:
    """A rank alone in a send or receive, while its peers are in a collective: as likely as that it made one too many is
    that a peer left out the other end. gloo records neither.
    """
    alone = [r for r in meeting.odd if (wait := facts.ranks[r].wait) is not None and wait.kind == "p2p"]
    if not alone or not meeting.majority:
        return ()
    who = small(ranks_word(alone))
    return (f"a peer that left out the other end of what {who} {'waits' if len(alone) == 1 else 'wait'} in: runner-up",)


def _no_majority(facts: Facts, meeting: Meeting) -> tuple[str, tuple[Claim, ...]]:
    """What to say where nobody is in the minority: a side that is alone under a condition on the rank is the likelier.

    Returns the words, and a claim for each rank of that side.
    """
    asked = {
        r: found
        for r in meeting.odd
        if (found := condition_on_rank(user_stack_of(facts.ranks[r].evidence), facts.read_source)) is not None
    }
    text = " With no majority, either side may be the one at fault"
    if len({meeting.words[r] for r in asked}) != 1 or len(asked) == len(meeting.odd):
        return f"{text}.", ()
    words = next(iter(asked.values())).words
    claims = tuple(Claim(f"rank {r} waits under `{found.words}`", f"ranks/{r}/stack.txt") for r, found in asked.items())
    return f"{text}; only {small(ranks_word(asked))} {'is' if len(asked) == 1 else 'are'} under `{words}`.", claims


def _reason(meeting: Meeting, rank: int, loop: int | None) -> str:
    if loop is not None:
        where = meeting.words[rank]
        return f"Rank {rank} has left the loop at line {loop}, where its peers still are, and waits in {where}."
    return f"Rank {rank} waits in {meeting.words[rank]}, its peers do not."


def _left_loop(facts: Facts, meeting: Meeting) -> tuple[tuple[int, ...], int | None]:
    """The ranks past a loop that the others are still in.

    The one that left has had fewer batches: it is named whether it is in the minority or not.
    """
    sides: dict[str, list[int]] = {}
    for rank, words in meeting.words.items():
        sides.setdefault(words, []).append(rank)
    if len(sides) != 2:
        return (), None
    first, second = sides.values()
    for ahead, behind in ((first, second), (second, first)):
        loop = loop_left(meeting.stacks[ahead[0]], meeting.stacks[behind[0]], facts.read_source)
        if loop is not None:
            return tuple(sorted(ahead)), loop
    return (), None
