"""Rules over call histories: an extra call, a skipped one, a different one, or a different order.

Where ranks wait now is only a consequence; these rules name the call at which the histories diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from safelaunch.model import Claim, Collective, Frame
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict import suggestions
from safelaunch.verdict.blame import conditions, wait_claims, waiting_culprit, waiting_culprits
from safelaunch.verdict.c10d import describe, number_of, op_name, same_op
from safelaunch.verdict.call_history import UNKNOWN
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.divergence import Difference, Kind
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.own_words import is_outside_normal_flow
from safelaunch.verdict.phrases import apart, capital, ranks_wait, ranks_word, wait_words
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.waits import Case, Waiters


def diverged_earlier(case: Case) -> Ruling:
    """Peers wait for a rank that is behind only because of an extra or missing call long ago.

    Without that call no rank would wait, so the current state of the awaited rank (it sleeps, it has left its loop) is
    no cause. Applies only if the histories agree again for several calls after the shift.
    """
    waits = (waiters.wait for waiters in case.waits.classes.values())
    groups = {w.group for w in waits if w.kind == "collective" and w.group is not None}
    shifts = (shift for shift in case.histories.shifts(groups) if shift.sure and shift.explains_lag)
    shift = next(shifts, None)
    return shifted(case, shift, wait_words(case, shift.there)) if shift is not None else ""


def called_past_the_end(case: Case) -> Ruling:
    """Ranks ended on their own, and a peer waits in a call that they never make, or made an extra call earlier.

    So uneven batches don't explain it. Shown by the records, or by step counts: a rank with fewer batches can't have
    made more steps.
    """
    ended, waiting = _ended_and_waiting(case)
    if not ended or not waiting:
        return ""
    calls_of_waiters = {rank: call for rank in waiting if (call := _pending_or_failed_call(case, rank)) is not None}
    shifts = case.histories.shifts({call.group for call in calls_of_waiters.values()})
    shift = next((shift for shift in shifts if shift.sure or shift.explains_lag), None)
    if shift is not None:
        return shifted(case, shift)
    words, enders = apart(case, wait_words(case, waiting)), ranks_word(ended)
    if len(calls_of_waiters) == len(waiting) and all(
        _never_made(case, rank, calls_of_waiters[rank], ended) for rank in waiting
    ):
        text = f"{words}, which {enders} never called before {'it' if len(ended) == 1 else 'they'} ended"
        claim = record_claim(ended[0], f"rank {ended[0]}: none of its calls comes from there")
        late = any(case.alignment.first(rank, call.group) > 1 for rank in ended for call in calls_of_waiters.values())
        return _too_many(case, waiting, ended, text, claim, {Doubt.RINGS_NOT_WHOLE: late})
    steps = {rank: case.ranks[rank].step or 0 for rank in (*waiting, *ended)}
    if max(steps[rank] for rank in waiting) < min(steps[rank] for rank in ended):
        text = f"{words} after step {steps[waiting[0]]}, and {enders} ended after step {steps[ended[0]]}"
        claim = Claim(f"rank {ended[0]} is at step {steps[ended[0]]}", f"ranks/{ended[0]}/progress.json")
        text += "; the ranks with fewer steps made different calls"
        return _too_many(case, waiting, ended, text, claim, {Doubt.STACKS_ALONE: True})
    return ""


def _ended_and_waiting(case: Case) -> tuple[list[int], list[int]]:
    """Returns members of a group that reached the end of their script, and members that wait in its calls.

    Both are empty if more wait than ended, or if another rank is held up on its own.
    """
    own = conditions(case)
    if any(wait.kind != "collective" for wait in case.waiting.values()) or any(
        condition.cause != "uneven-batches" or condition.exits_early for condition in own.values()
    ):
        return [], []
    groups = {call.group for rank in case.waiting if (call := _pending_or_failed_call(case, rank)) is not None}
    members = frozenset.intersection(case.world, *(case.alignment.members(group)[0] for group in groups))
    ended = sorted(members & own.keys())
    return (ended, sorted(case.waiting)) if len(case.waiting) <= len(ended) else ([], [])


def _pending_or_failed_call(case: Case, rank: int) -> Collective | None:
    wait = case.waiting.get(rank)
    if wait is None or wait.seq is not None:
        return case.call_of(rank)
    newest = next((call for call in reversed(case.alignment.ring(rank)) if not call.is_p2p), None)
    site = case.alignment.stack(rank, newest).user_frame if newest is not None else None
    return newest if fr.same_line(site, wait.frame) else None


def _never_made(case: Case, rank: int, call: Collective, peers: Sequence[int]) -> bool:
    aligned = case.histories.in_group(call.group)
    own_history, peer_histories = aligned.histories.get(rank), [aligned.histories.get(other) for other in peers]
    if own_history is None or not aligned.by_frames or (this := own_history.at(call.seq)) == UNKNOWN:
        return False
    return all(
        their is not None and this not in their.all() | own_history.before(their.last + 1) for their in peer_histories
    )


def _too_many(
    case: Case, waiting: Sequence[int], ended: Sequence[int], text: str, shown: Claim, doubts: Mapping[Doubt, bool]
) -> Finding:
    ends = tuple(claim for condition in conditions(case).values() for claim in condition.claims[:1])[:1]
    return Finding(
        "collective-mismatch",
        doubts_if(doubts),
        f"{capital(text)}.",
        waiting_culprits(case, waiting),
        (shown, *ends, *wait_claims(case, waiting)),
        calls={**dict.fromkeys(ended, ()), **{rank: case.ranks[rank].user_stack for rank in waiting}},
        vote="tie" if len(waiting) == len(ended) else "",
    )


def left_expected_calls(case: Case) -> Ruling:
    """Histories show which ranks made an extra call, skipped one or made another, and ranks wait across groups.

    They are compared with their peers first, then with the others in their role, and last with their own habits
    (:meth:`.Histories.left_habit`), which need no third rank. Without a cycle, it applies if no group shows a mismatch:
    CPUs run ahead of their devices, so all calls might be queued.
    """
    left = _expected_call_left(case)
    if left is None:
        return ""
    if left.reference == "peers":
        return shifted(case, left)
    if left.reference == "role":
        return of_role(case, left)
    return _BY_HABIT[left.kind](case, left)


def _expected_call_left(case: Case) -> Difference | None:
    ranks, groups = case.waits.ranks_in_cycle, case.waits.groups_of_cycle
    between = len(groups) > 1 or bool(case.waits.transfers_of_cycle)
    if not case.unseen and (between if ranks else case.histories.first_mismatch is None):
        shift = next(iter(case.histories.shifts(groups)), None) or case.histories.shift_of_program
        left = shift or case.histories.left_role(ranks)
        if left is not None:
            return left
    if len(groups) < 2:
        return None
    broken = _left_habits(case, -1)
    if len(broken) == 1 and broken[0].kind == "missing" and broken[0].sure and _is_awaited(case, broken[0]):
        return broken[0]
    left_now = [left for left in _left_habits(case, 1) if left.sure]
    new = [left for left in left_now if left.kind == "changed"]
    are_alike = any({*waiters.ranks} == {left.ranks[0] for left in new} for waiters in case.waits.cycle)
    if not are_alike or 2 * len(new) > len(ranks) or not all(_is_awaited(case, left) for left in new):
        new = [left for left in left_now if left.kind == "swapped"]
    return replace(new[0], ranks=tuple(left.ranks[0] for left in new)) if new else None


def of_role(case: Case, left: Difference) -> Finding:
    """Returns the finding for a rank that left its role, at its own call, or at the one that it skipped."""
    (rank,), missing = left.ranks, left.kind == "missing"
    both = [(rank, left.there[rank]), (left.peers[0], left.expected)]
    sites = [case.alignment.stack(*rank_and_entry).user_frame for rank_and_entry in both]
    own, usual = (f"{op_name(call)} at {fr.place(site)}" for (_, call), site in zip(both, sites, strict=True))
    peers = ranks_word(left.peers)
    text = f"skipped {usual}, which {peers} called" if missing else f"called {own}, while {peers} called {usual}"
    text += "; until then they had all made the same calls"
    claims = [
        record_claim(rank, f"rank {rank}: {op_name(call)} is collective #{number_of(call)} of {case.group(call.group)}")
        for rank, call in both
    ]
    return Finding(
        "collective-mismatch",
        (Doubt.ROLE_ALONE,),
        f"Rank {rank} {text}; now {apart(case, wait_words(case, case.waits.ranks_in_cycle))}.",
        (waiting_culprit(case.ranks[rank], f"Rank {rank} {text}.", sites[missing]),),
        (*claims, *wait_claims(case, case.waits.ranks_in_cycle)),
        () if missing else (f"groups entered in different orders: rank {rank} might still make the other call",),
        calls={} if missing else {rank: case.alignment.stack(rank, call).user_frames for rank, call in both},
        advice=frozenset({suggestions.LEFT_OUT} if missing else ()),
    )


# --- calls too many or too few ----------------------------------------------------------------------------------------


def shifted(
    facts: CaseFacts, shift: Difference, words: Mapping[int, str] | None = None, claims: tuple[Claim, ...] = ()
) -> Finding:
    """Returns the finding for histories that diverged: which rank made an extra call or skipped one, and where.

    Args:
        words: rank → what it waits in now, by default of all ranks.
        claims: Evidence for ``words``.
    """
    single, extra = len(shift.ranks) == 1, shift.kind == "extra"
    words = wait_words(facts, facts.ranks) if words is None else words
    their = "its" if single else "their"
    ends = (shift.ranks[0], shift.peers[0]) if extra else (shift.peers[0], shift.ranks[0])
    stacks = {r: facts.alignment.stack(r, shift.there[r]).user_frames for r in (*shift.ranks, shift.peers[0])}
    there = stacks[ends[0]]
    what = _calls_words(shift, there, stacks[ends[1]])
    did = f"called {what}, which {their} peers did not" if extra else f"skipped {what}, which {their} peers called"
    group, seq = (shift.call.group, number_of(shift.call)) if extra else _own_number(facts, shift)
    number = f"collective #{seq} of {facts.group(group)}"
    summary = f"{capital(ranks_word(shift.ranks))} {did} ({number}); {'it has' if single else 'they have'}"
    summary += f" been {'ahead of' if extra else 'behind'} {their} peers since"
    summary += f", and now {apart(facts, words)}." if words else "."
    called = {
        rank: f"{op_name(shift.there[rank])} at {_way(stacks[rank])}" if stacks[rank] else describe(shift.there[rank])
        for rank in ends
    }
    match = "call matches" if shift.matched == 1 else f"{shift.matched} calls match"
    agree = f"the next {match} {their} peers' again, shifted by {shift.calls}"
    own = (f"rank {rank} {condition.reason}" for rank, condition in list(conditions(facts).items())[:4])
    sites = {rank: next(iter(stacks[rank] if extra or not there else there), None) for rank in shift.ranks}
    return Finding(
        "collective-mismatch",
        doubts_if({Doubt.FEW_AGREE_SINCE: not shift.sure, Doubt.NO_FRAMES: not shift.call.frames}),
        summary,
        tuple(waiting_culprit(facts.ranks[r], f"Rank {r} {did} ({number}).", sites[r]) for r in shift.ranks),
        (
            *(record_claim(rank, f"rank {rank}: #{shift.number} is {call}") for rank, call in called.items()),
            record_claim(shift.ranks[0], agree),
            *claims,
            *wait_claims(facts, sorted(words)),
        ),
        tuple(f"{reason}, but no rank would be waiting for it without that call" for reason in own),
        calls=dict.fromkeys(shift.ranks if extra else shift.peers, there),
        advice=_shift_advice(calls.purpose(facts.alignment.stack(ends[0], shift.call)), extra=extra),
    )


_MODEL_ADVICE: Mapping[calls.Purpose, suggestions.Advice] = {
    "ddp-forward": suggestions.DDP_FORWARD,
    "fsdp-forward": suggestions.FSDP_FORWARD,
    "sync-batchnorm": suggestions.SYNC_BATCHNORM,
    "state-dict": suggestions.STATE_DICT,
}


def _shift_advice(purpose: calls.Purpose, *, extra: bool) -> frozenset[suggestions.Advice]:
    if extra:
        return frozenset({_MODEL_ADVICE[purpose]} if purpose in _MODEL_ADVICE else ())
    return frozenset({suggestions.LEFT_OUT, *([suggestions.UNUSED_PARAMETERS] if purpose == "gradients" else [])})


def _calls_words(shift: Difference, stack: Sequence[Frame], other: Sequence[Frame]) -> str:
    """``all_reduce at train.py:9, called from train.py:30``, ``3 collectives from train.py:9``."""
    if not stack:
        call_words = describe(shift.call)
        return f"{shift.calls} collectives, the first of them {call_words}" if shift.calls > 1 else call_words
    both = zip(reversed(stack), reversed(other), strict=False)
    branch = next((frame for frame, its in both if not fr.same_line(frame, its)), stack[0])
    where = f"{fr.place(stack[0])}{f', called from {fr.place(branch)}' if branch != stack[0] else ''}"
    return f"{shift.calls} collectives from {where}" if shift.calls > 1 else f"{op_name(shift.call)} at {where}"


def _own_number(facts: CaseFacts, shift: Difference) -> tuple[str, int]:
    """Returns group and number that the skipped call would have had on the rank that skipped it.

    If the peer made that call in its own group, the rank's other calls from there show the rank's group.
    """
    rank, call, stack = shift.ranks[0], shift.call, facts.alignment.stack
    own_entries = facts.alignment.ring(rank).matching(lambda kind: kind.is_p2p == call.is_p2p)
    place = stack(shift.peers[0], call).user_frames
    group = next((e.group for e in own_entries if stack(rank, e).user_frames == place), call.group)
    if group == call.group and not call.is_p2p:
        return group, call.seq
    instead = shift.there[rank].record_id
    after = next((number_of(e) for e in own_entries if e.group == group and e.record_id >= instead), None)
    if after is not None:
        return group, after  # it took the number
    return group, 1 + max((number_of(e) for e in own_entries if e.group == group), default=0)


def _way(frames: Sequence[Frame]) -> str:
    return " < ".join(map(fr.place, frames[:3]))


# --- several groups: a skipped call, or a different order -------------------------------------------------------------


def _left_habits(case: Case, side: Literal[-1, 1]) -> list[Difference]:
    groups, calls = case.waits.groups_of_cycle, {rank: case.call_of(rank) for rank in case.waits.ranks_in_cycle}
    left = (case.histories.left_habit(rank, now, side, groups) for rank, now in calls.items() if now is not None)
    return [difference for difference in left if difference is not None]


def _is_awaited(case: Case, left: Difference) -> bool:
    waits = (waiters.wait for waiters in case.waits.cycle if left.ranks[0] not in waiters.ranks)
    return any(left.expected.group == wait.group and same_op(left.expected.op, wait.op) for wait in waits)


def _skipped_between_groups(case: Case, left: Difference) -> Finding:
    (rank,), usual = left.ranks, left.expected
    now = left.there[rank]
    site, after = (case.alignment.stack(rank, call).user_frame for call in (usual, now))
    number = case.alignment.last(rank, usual.group) + 1
    text = f"skipped {op_name(usual)} at {fr.place(site)} (#{number} of {case.group(usual.group)}), which it had"
    text += f" always called right before {op_name(now)} at {fr.place(after)}, and waits there"
    claim = record_claim(
        rank,
        f"rank {rank}: each earlier {op_name(now)} of {case.group(now.group)} at {fr.place(after)} follows"
        f" {op_name(usual)} of {case.group(usual.group)}; #{number_of(now)} does not",
    )
    claims = (claim, *wait_claims(case, case.waits.ranks_in_cycle))
    other = f"alternatively, the groups were entered in different orders: rank {rank} might still call the other"
    return replace(skipped(case, rank, site, text, claims), ruled_out=(other,))


def skipped(
    case: Case, rank: int, site: Frame | None, text: str, claims: tuple[Claim, ...], before: str = ""
) -> Finding:
    """Returns the finding for a call at ``site`` that ``rank`` usually makes and has skipped."""
    reason = f"Rank {rank} {text}."
    culprits = (waiting_culprit(case.ranks[rank], reason, site),)
    summary = f"{before}: rank {rank} {text}." if before else reason
    doubts, advice = (Doubt.HABIT_ALONE,), frozenset({suggestions.LEFT_OUT})
    return Finding("collective-mismatch", doubts, summary, culprits, claims, advice=advice, of="usual call")


def _new_between_groups(case: Case, left: Difference) -> Finding:
    ranks, rank = left.ranks, left.ranks[0]
    own, usual = (
        f"{op_name(call)} of {case.group(call.group)} at {_way(case.alignment.stack(rank, call).user_frames)}"
        for call in (left.there[rank], left.expected)
    )
    text = f"{ranks_wait(case, ranks)} in {own} for the first time; until then"
    text += f" {'it had' if len(ranks) == 1 else 'they had'} always called {usual} instead"
    others_in = {r: w for r, w in wait_words(case, case.waits.ranks_in_cycle).items() if r not in ranks}
    return Finding(
        "collective-mismatch",
        (Doubt.HABIT_ALONE,),
        f"{capital(text)}; {apart(case, others_in)}.",
        waiting_culprits(case, ranks),
        wait_claims(case, case.waits.ranks_in_cycle),
        of="usual call",
        vote="tie" if 2 * len(ranks) == len(case.waits.ranks_in_cycle) else "",
    )


def _releasing(case: Case) -> list[int]:
    # A missing record might hold the call that others wait for, and a new call of others might be the fault.
    rank, seen = case.waits.released_by, case.alignment.records
    if rank is None or not all(waiting in seen for waiting in case.waiting):
        return []
    return [rank] if all(left.ranks == (rank,) for left in _left_habits(case, 1)) else []


def _minority(case: Case) -> list[int]:
    # Groups with different members have no majority, because each pair has its own order; nor has a transfer, which
    # only two ranks make.
    members = {frozenset(case.alignment.members(group)[0]) for group in case.waits.groups_of_cycle}
    most = max((waiters.ranks for waiters in case.waits.cycle), key=len)
    if case.waits.transfers_of_cycle or len(members) != 1 or 2 * len(most) <= len(next(iter(members))):
        return []
    return [rank for rank in case.waits.ranks_in_cycle if rank not in most]


def _parties(case: Case, waiters: Waiters) -> Collection[int]:
    if waiters.wait.kind == "p2p":
        return {*waiters.ranks, *waiters.blockers}
    return case.alignment.members(str(waiters.wait.group))[0]


def group_order(case: Case) -> Ruling:
    """Ranks entered several groups in different orders, and nothing shows that one of them skipped a call."""
    return _in_other_order(case, [])


def _in_other_order(case: Case, changed: list[int]) -> Finding:
    """Returns the finding for groups entered in different orders: ``changed`` ranks had another one before."""
    ranks = case.waits.ranks_in_cycle
    words, known_of_all = [], True
    for waiters in case.waits.cycle:
        wait = waiters.wait
        members, complete = case.alignment.members(str(wait.group))
        known_of_all = known_of_all and complete
        of = f" of {ranks_word(members)}" if complete else ""
        words.append(f"{ranks_wait(case, waiters.ranks)} in {case.group(wait.group)}{of} ({wait.words})")
    more = f"; and so on in {len(words) - 3} more" if len(words) > 3 else ""
    text = (" while " if len(words) == 2 else "; ").join(words[:3]) + more
    aside = [rank for rank in ranks if is_outside_normal_flow(case, rank)]
    aside = aside if len(aside) < len(ranks) else []
    fewer = changed or aside or (_releasing(case) or _minority(case) if known_of_all else [])
    if known_of_all:  # a rank that takes part in only one of the calls had no order to choose
        parties = {(w.wait.group, w.wait.kind, w.wait.peer): _parties(case, w) for w in case.waits.cycle}
        ranks = [rank for rank in ranks if sum(rank in each for each in parties.values()) > 1] or ranks
    ranks = fewer or ranks
    alone = all(len(waiters.ranks) == 1 for waiters in case.waits.cycle)
    lines = {waiters.wait.frame for waiters in case.waits.cycle}
    subject, order = (ranks_word(changed), "another order than before") if changed else ("they", "different orders")
    doubts = {
        Doubt.HABIT_ALONE: bool(changed),
        Doubt.ROLE_ALONE: bool(fewer) and not (changed or aside),
        Doubt.WHOSE_ORDER: not fewer,
    }
    return Finding(
        "group-order",
        doubts_if(doubts),
        f"{capital(text)}: {subject} entered the groups in {order}.",
        waiting_culprits(case, ranks),
        wait_claims(case, case.waits.ranks_in_cycle if fewer else ranks, limit=10),
        advice=frozenset({suggestions.ALONE_IN_GROUPS}) if alone and len(lines) > 1 and not aside else frozenset(),
    )


_BY_HABIT: Mapping[Kind, Callable[[Case, Difference], Finding]] = {
    "missing": _skipped_between_groups,
    "changed": _new_between_groups,
    "swapped": lambda case, left: _in_other_order(case, [*left.ranks]),
}
