"""Rules for ranks that were aborted inside a call: which call it was, and which side's size was wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile

from safelaunch.model import Claim, RankEvidence
from safelaunch.stacks import aborts, calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import conditions, wait_claims, waiting_culprit, waiting_culprits
from safelaunch.verdict.causes import FAILURES
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.exceptions import is_aborted
from safelaunch.verdict.exits import aborted_in, failed_at
from safelaunch.verdict.findings import DOUBTS_OF_VOTE, Finding, Ruling
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.mismatch import Mismatch
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.phrases import capital, each_of, ranks_do, ranks_word, waits_words
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.rules_mismatch import CallSite, ExpectedMatch, by_a_break, by_the_source, of_record
from safelaunch.verdict.wrong_group import habit_claim, unusual


def aborted_by_a_peer(facts: CaseFacts) -> Ruling:
    """A rank was aborted inside a collective, and the survivors' records disagree about that collective.

    gloo aborts the rank that *receives* an unexpected number of bytes, whichever side is wrong, and that rank's record
    is lost. So the survivors' disagreement is medium evidence at most. If they agree, the aborted rank remains the
    suspect (:func:`.rules_state.first_failure`).
    """
    failed = [facts.ranks[rank] for rank in conditions(facts, *FAILURES)]
    if not failed or not _in_communication(min(failed, key=lambda f: failed_at(f.evidence)).evidence):
        return ""
    aborted = [f.rank for f in failed if _in_communication(f.evidence)]
    mismatch = facts.histories.first_mismatch
    if mismatch is None:
        ranks_were = capital(ranks_do(aborted, "was", "were"))
        return f"{ranks_were} aborted in a collective, about which the surviving ranks' records agree"
    finding = of_record(facts, _with_aborted(facts, mismatch, aborted))
    text = (
        f"{finding.summary} {capital(each_of(aborted))} was aborted in it: it received something other than it "
        "expected."
    )
    claims = tuple(Claim(f"rank {r}: aborted in a collective", f"ranks/{r}/fault.txt") for r in aborted)
    ruled = f"{ranks_word(aborted)} failed first, but an abort in a collective is done to the receiver"
    return replace(
        finding,
        summary=text,
        doubts=(*finding.doubts, Doubt.ABORTED_CALL_LOST),
        claims=claims + finding.claims,
        ruled_out=(*finding.ruled_out, ruled),
    )


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


def _with_aborted(facts: CaseFacts, mismatch: Mismatch, aborted: Sequence[int]) -> Mismatch:
    """Adds the aborted ranks, whose records are lost, to the side that came to its call through the same frames."""
    sides = {key: list(ranks) for key, ranks in mismatch.classes.items()}
    classes = {rank: key for key, ranks in mismatch.classes.items() for rank in ranks}
    stacks = {rank: facts.alignment.stack(rank, entry) for rank, entry in mismatch.entries.items()}
    for rank in aborted:
        stack = aborted_in(facts.ranks[rank].evidence)
        way = [*map(fr.spot, stack.user_frames)] if stack is not None else []
        same = {classes[r] for r, stack in stacks.items() if way and [*map(fr.spot, stack.user_frames)] == way}
        if len(same) == 1:
            sides[same.pop()].append(rank)
    odd, majority = vote(sides)
    return replace(mismatch, odd=tuple(rank for rank in odd if rank in classes), majority=majority)


def wrong_size_received(facts: CaseFacts) -> Ruling:
    """gloo aborted a rank in a call: a peer sent more than it has room for, so the calls that met do not match.

    gloo aborts from its own thread, for hardly any other reason, and writes to stderr. No record shows which side is
    wrong. If several survivors wait in one call, the aborted rank is the odd one. If it was at the same line, the rank
    that came there through a different stack than most is. If one of them uses a different group than in all its
    earlier calls from that line, that rank is.
    """
    aborted = [rank for rank in facts.ranks.values() if rank.condition is not None and _aborted_by_gloo(facts, rank)]
    peers = {rank: wait for rank, wait in facts.waiting.items() if _may_meet(facts, wait, aborted)} or facts.waiting
    if not aborted or not peers:
        return ""
    stacks = {failed.rank: aborted_in(failed.evidence) for failed in aborted}
    sites = {rank: stack.user_frame if stack is not None else None for rank, stack in stacks.items()}
    places = {wait.frame for wait in peers.values()}
    named = [] if len(peers) > 1 and len(places) == 1 else sorted(peers)
    text = " and ".join(f"rank {rank} was aborted in a call{fr.at(site)}" for rank, site in sites.items())
    text += f", as {_why(aborted)}, while {waits_words(facts, peers)}: the calls do not match."
    unusual_calls = {rank: words for rank in peers if (words := unusual(facts, rank))}
    if len(unusual_calls) == 1:
        return _habit_finding(facts, *unusual_calls.popitem(), list(sites), text)
    ways = (
        _callers_of_c10d(facts, [*sites, *peers]) if places == {*sites.values()} and _in_one_group(facts, peers) else {}
    )
    revised, left_loop = by_the_source(facts, _match_by_stacks(facts, [*sites, *peers])) if not ways else (None, None)
    odd, majority = vote(ways) if ways else (revised.odd, revised.majority) if revised is not None else ((), False)
    text += f" {capital(left_loop.says)}." if left_loop is not None else ""
    if odd and majority:
        text += (
            f" {capital(ranks_word(odd))} reached that call through a different stack than most ranks." if ways else ""
        )
        sites, named = {r: site for r, site in sites.items() if r in odd}, [r for r in odd if r in peers]
    reason = "was aborted because a peer sent more than its call has room for"
    culprits = [waiting_culprit(facts.ranks[r], f"Rank {r} {reason}{fr.at(site)}.", site) for r, site in sites.items()]
    return Finding(
        left_loop.cause if left_loop is not None else "collective-mismatch",
        DOUBTS_OF_VOTE["open"] if named else (Doubt.ABORTED_CALL_LOST,),
        capital(text),
        (*culprits, *waiting_culprits(facts, named)),
        tuple(Claim(f"rank {r}: aborted in a collective", _shown_in(facts, r)) for r in sites)
        + wait_claims(facts, sorted(peers)),
        advice=by_a_break(left_loop),
        of="sizes" if len(ways) == 1 else "",
        vote="open" if named else "",
    )


def _why(aborted: Sequence[RankFacts]) -> str:
    abort = aborts.last_abort(aborted[0].evidence.log_tail) if len(aborted) == 1 else None
    return abort.means if abort is not None and "bytes into" in abort.means else "a peer sent more than it expected"


def _match_by_stacks(facts: CaseFacts, ranks: Iterable[int]) -> ExpectedMatch:
    stacks = {rank: facts.ranks[rank].user_stack for rank in ranks}
    sites = {
        rank: CallSite(f"a call{fr.at(stack[0])}", stack[0], stack) if stack else CallSite("another place", None, ())
        for rank, stack in stacks.items()
    }
    return ExpectedMatch(tuple(sorted(sites)), "tie", sites)


def _shown_in(facts: CaseFacts, rank: int) -> str:
    return f"ranks/{rank}/{'fault' if facts.evidence.printed is None else 'log_tail'}.txt"


def _callers_of_c10d(facts: CaseFacts, ranks: Iterable[int]) -> dict[tuple[fr.Spot, ...], list[int]]:
    ways = {}
    for rank in sorted(ranks):
        evidence = facts.ranks[rank].evidence
        seen = aborted_in(evidence) or evidence.exception or facts.ranks[rank].view
        frames = seen.frames if seen is not None else ()
        way = dropwhile(lambda frame: "/torch/distributed/" in fr.normal(frame.file), frames)
        ways[rank] = tuple(map(fr.spot, way))
    return sides_of(ways)


def _may_meet(facts: CaseFacts, wait: PeerWait, aborted: Iterable[RankFacts]) -> bool:
    members, complete = facts.alignment.members(wait.group) if wait.group is not None else (frozenset(), False)
    return not complete or any(failed.rank in members for failed in aborted)


def _in_one_group(facts: CaseFacts, waits: Mapping[int, PeerWait]) -> bool:
    groups = {wait.group for wait in waits.values()}
    listed = (members for rank in waits for members in facts.alignment.groups_of(rank).values())
    return len(groups) == 1 and (None not in groups or not any(1 < len(m) < len(facts.world) for m in listed))


def _habit_finding(facts: CaseFacts, rank: int, words: str, aborted: Sequence[int], text: str) -> Finding:
    claims = [habit_claim(rank), *(Claim(f"rank {r}: aborted in a collective", _shown_in(facts, r)) for r in aborted)]
    return Finding(
        "collective-mismatch",
        (Doubt.ABORTED_CALL_LOST,),
        f"{words} {capital(text)}",
        (waiting_culprit(facts.ranks[rank], words),),
        (*claims, *wait_claims(facts, sorted(facts.ranks))),
        victims=tuple(aborted),
        of="usual group",
    )
