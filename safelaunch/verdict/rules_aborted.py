"""Crashes because calls did not match: torch compared them, or gloo aborted a rank inside its call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile

from safelaunch.model import Claim, Frame, RankEvidence
from safelaunch.stacks import aborts, calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.failures import Fingerprint, fingerprints
from safelaunch.verdict.blame import blame_calls, conditions, waits_in
from safelaunch.verdict.causes import FAILURES
from safelaunch.verdict.conflict import Call, Conflict, outvoted
from safelaunch.verdict.conflict_source import by_the_source
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exceptions import is_aborted
from safelaunch.verdict.exits import aborted_in, failed_at
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.phrases import by_place, capital, each_of, ranks_do, ranks_word, waits_words
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.rules_history import shifted
from safelaunch.verdict.rules_mismatch import call_site, of_record


def ended_by_mismatch(facts: CaseFacts) -> Ruling:
    """Calls did not match, and that ended the job: torch had compared them, or a rank was aborted inside its call."""
    return _compared_by_torch(facts) or _aborted_by_a_peer(facts)


def _compared_by_torch(facts: CaseFacts) -> Finding | None:
    """Returns the finding for calls that torch compared before they started (``TORCH_DISTRIBUTED_DEBUG=DETAIL``)."""
    calls_compared = _compared(facts)
    by_call = sides_of(dict(sorted(calls_compared.items())))
    if len(by_call) < 2:
        return None
    shifts = facts.histories.shifts(facts.alignment.groups())
    earlier = next((shift for shift in shifts if shift.sure), None)
    if earlier is not None:
        return shifted(facts, earlier)
    odd, decided = outvoted(by_call)
    examined = [rank for rank in calls_compared if rank in facts.ranks]
    unseen = len(examined) < len(calls_compared)
    sites = {rank: call_site(facts, rank)[0] for rank in examined}
    stacks = {rank: fr.stack_of(facts.ranks[rank].evidence, facts.ranks[rank].user_stack) for rank in examined}
    called = {rank: f"called {call.words}{fr.at(sites.get(rank))}" for rank, call in calls_compared.items()}
    sides = by_place({rank: called[rank] for rank in sorted(called, key=lambda rank: (rank not in odd, rank))})
    text = capital(" while ".join(f"{ranks_word(ranks)} {words}" for words, ranks in sides))
    claims = [Claim(f"rank {r}: torch's own check found a mismatch", f"ranks/{r}/exception.json") for r in examined[:4]]
    conflict = Conflict(
        {r: Call(called[r], sites[r], stacks[r], f"{called[r]}, its peers did not") for r in examined},
        tuple(rank for rank in odd if rank in sites and not (decided and unseen)),
        decided,
        claims=tuple(claims),
        of="sizes" if len({call.op for call in by_call}) == 1 else "",
    )
    finding = blame_calls(facts, conflict, f"{text}: torch compared these calls, and they do not match.")
    return replace(finding, doubts=(*finding.doubts, *doubts_if({Doubt.UNSEEN_RANKS: unseen})))


def _compared(facts: CaseFacts) -> dict[int, Fingerprint]:
    """Returns each rank's call as torch compared it.

    Errors number ranks within their group. Each starts with its own call and quotes another, whose error might be
    missing.
    """
    raised = {rank: state.evidence.exception for rank, state in facts.ranks.items()}
    calls_by_rank = {rank: fingerprints(error.message) for rank, error in raised.items() if error is not None}
    own = {next(iter(calls)): rank for rank, calls in calls_by_rank.items() if calls}
    alike = all(number == rank for number, rank in own.items())
    expected = {own.get(n, n if alike else -1): call for calls in calls_by_rank.values() for n, call in calls.items()}
    return {rank: call for rank, call in expected.items() if rank >= 0}


def _aborted_by_a_peer(facts: CaseFacts) -> Ruling:
    """Finds the call in which a rank was aborted, by the survivors' records or else by the stacks.

    gloo aborts the rank that *receives* an unexpected number of bytes, whichever side is wrong, and that rank's record
    is lost. So the survivors' disagreement is medium evidence at most. If they agree and the stacks show nothing, the
    aborted rank remains the suspect (:func:`.rules_state.first_failure`).
    """
    failed = [facts.ranks[rank] for rank in conditions(facts, *FAILURES)]
    agree = ""
    if failed and _in_communication(min(failed, key=lambda f: failed_at(f.evidence)).evidence):
        aborted = [f.rank for f in failed if _in_communication(f.evidence)]
        recorded = facts.histories.first_mismatch
        if recorded is not None:
            return _by_records(facts, recorded, aborted)
        ranks_were = capital(ranks_do(aborted, "was", "were"))
        agree = f"{ranks_were} aborted in a collective, about which the surviving ranks' records agree"
    finding = _by_stacks(facts)
    return replace(finding, ruled_out=(agree,) if agree else ()) if finding is not None else agree


def _by_records(facts: CaseFacts, recorded: Conflict, aborted: Sequence[int]) -> Finding:
    finding = of_record(facts, _with_aborted(facts, recorded, aborted))
    received = f"{capital(each_of(aborted))} was aborted in it: it received something other than it expected."
    ruled = f"{ranks_word(aborted)} failed first, but an abort in a collective is done to the receiver"
    return replace(
        finding,
        summary=f"{finding.summary} {received}",
        doubts=(*finding.doubts, Doubt.ABORTED_CALL_LOST),
        claims=_claims(facts, aborted) + finding.claims,
        ruled_out=(*finding.ruled_out, ruled),
    )


def _claims(facts: CaseFacts, aborted: Iterable[int]) -> tuple[Claim, ...]:
    name = "fault" if facts.evidence.printed is None else "log_tail"
    return tuple(Claim(f"rank {r}: aborted in a collective", f"ranks/{r}/{name}.txt") for r in aborted)


def _in_communication(rank: RankEvidence) -> bool:
    if not is_aborted(rank) or rank.fatal is None:
        return False
    return aborted_in(rank) is not None or calls.in_torch(fr.stack_of(rank, rank.fatal.frames))


def _aborted_by_gloo(facts: CaseFacts, state: RankFacts) -> bool:
    """Returns whether gloo aborted the rank during a c10d call, as opposed to torch at the end of its script."""
    if facts.evidence.printed is not None:
        return is_aborted(state.evidence) and "gloo::EnforceNotMet" in state.evidence.log_tail
    if aborted_in(state.evidence) is None or (state.evidence.progress and state.evidence.progress.state == "exited"):
        return False
    messages = [other.exception.message for other in facts.evidence.ranks if other.exception is not None]
    recorded = (facts.alignment.pending(rank) for rank in facts.ranks)
    return any("gloo" in text for text in messages) or any(e.by_gloo for entries in recorded for e in entries)


def _with_aborted(facts: CaseFacts, recorded: Conflict, aborted: Sequence[int]) -> Conflict:
    """Adds the aborted ranks, whose records are lost, to the side that came to its call through the same frames."""
    sides = {key: list(ranks) for key, ranks in recorded.sides.items()}
    ways = {rank: _spots(facts.alignment.stack(rank, entry).user_frames) for rank, entry in recorded.entries.items()}
    for rank in aborted:
        way = _spots(facts.ranks[rank].user_stack)
        same = [key for key, ranks in recorded.sides.items() if way and way in map(ways.get, ranks)]
        if len(same) == 1:
            sides[same[0]].append(rank)
    odd, decided = outvoted(sides)
    return replace(recorded, odd=tuple(rank for rank in odd if rank in ways), vote=decided)


def _spots(frames: Iterable[Frame]) -> tuple[fr.Spot, ...]:
    return tuple(map(fr.spot, frames))


def _by_stacks(facts: CaseFacts) -> Finding | None:
    """Returns the finding for a rank that gloo aborted: a peer sent more than its call has room for.

    gloo aborts from its own thread, for hardly any other reason, and writes to stderr. No record shows which side is
    wrong. If several survivors wait in one call, the aborted rank is the odd one. If it was at the same line, the rank
    that came there through a different stack than most is.
    """
    failed = [rank for rank in facts.ranks.values() if rank.condition is not None and _aborted_by_gloo(facts, rank)]
    peers = {rank: wait for rank, wait in facts.waiting.items() if _may_meet(facts, wait, failed)} or facts.waiting
    if not failed or not peers:
        return None
    aborted = {state.rank: next(iter(state.user_stack), None) for state in failed}
    text = " and ".join(f"rank {rank} was aborted in a call{fr.at(site)}" for rank, site in aborted.items())
    text = capital(f"{text}, as {_why(failed)}, while {waits_words(facts, peers)}: the calls do not match.")
    conflict = _odd_by_stacks(facts, aborted, peers)
    text += f" {capital(conflict.note)}." if conflict.note else ""
    if not conflict.odd or conflict.tie:
        named = [] if len(peers) > 1 and len({wait.frame for wait in peers.values()}) == 1 else sorted(peers)
        conflict = replace(conflict, odd=(*aborted, *named))
    reason = "was aborted because a peer sent more than its call has room for"
    does = {r: Call(does=f"{reason}{fr.at(site)}", site=site) for r, site in aborted.items()}
    does |= {r: Call(does=waits_in(facts, r)) for r in peers}
    named_peers = peers.keys() & {*conflict.odd}
    conflict = replace(
        conflict,
        calls=does,
        vote="open" if named_peers else "",
        doubts=() if named_peers else (Doubt.ABORTED_CALL_LOST,),
        of="sizes" if conflict.of == "sizes" else "",
        claims=_claims(facts, [rank for rank in aborted if rank in conflict.odd]),
    )
    return replace(blame_calls(facts, conflict, text), victims=(*aborted,))


def _odd_by_stacks(facts: CaseFacts, aborted: Mapping[int, Frame | None], peers: Mapping[int, PeerWait]) -> Conflict:
    stacks = {rank: fr.Stack(facts.ranks[rank].user_stack) for rank in (*aborted, *peers)}
    calls = {rank: Call(f"a call{fr.at(stack.user_frame)}", stack.user_frame, stack) for rank, stack in stacks.items()}
    conflict = Conflict(calls, tuple(sorted(calls)), "tie")
    if {wait.frame for wait in peers.values()} != {*aborted.values()} or not _in_one_group(facts, peers):
        judged = by_the_source(facts, conflict)
        return replace(judged, cause="uneven-batches" if judged.note else judged.cause)
    ways = sides_of({rank: _callers_of_c10d(facts.ranks[rank]) for rank in sorted(calls)})
    odd, decided = outvoted(ways)
    words = f"{ranks_word(odd)} reached that call through a different stack than most ranks"
    note = words if odd and not decided else ""
    return replace(conflict, odd=odd, vote=decided, note=note, of="sizes" if len(ways) == 1 else "")


def _why(aborted: Sequence[RankFacts]) -> str:
    abort = aborts.last_abort(aborted[0].evidence.log_tail) if len(aborted) == 1 else None
    return abort.means if abort is not None and abort.has_sizes else "a peer sent more than it expected"


def _callers_of_c10d(rank: RankFacts) -> tuple[fr.Spot, ...]:
    frames = rank.stack.frames if rank.stack is not None else ()
    return _spots(dropwhile(lambda frame: "/torch/distributed/" in fr.normal(frame.file), frames))


def _may_meet(facts: CaseFacts, wait: PeerWait, aborted: Iterable[RankFacts]) -> bool:
    members, complete = facts.alignment.members(wait.group) if wait.group is not None else (frozenset(), False)
    return not complete or any(failed.rank in members for failed in aborted)


def _in_one_group(facts: CaseFacts, waits: Mapping[int, PeerWait]) -> bool:
    groups = {wait.group for wait in waits.values()}
    listed = (members for rank in waits for members in facts.alignment.groups_of(rank).values())
    return len(groups) == 1 and (None not in groups or not any(1 < len(m) < len(facts.world) for m in listed))
