"""Rules that need no graph of waits: a rank failed, is stopped, or never joined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from safelaunch.model import Claim, Culprit
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.guards import conditions_to
from safelaunch.stacks.kernel import kind_of, thread_samples
from safelaunch.verdict.blame import blame, condition_claims, conditions, most_doubtful, wait_claims
from safelaunch.verdict.causes import FAILURES
from safelaunch.verdict.chance import has_no_pattern
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exceptions import (
    failure_of_rank,
    has_lost_a_peer,
    is_aborted,
    nccl_failure,
    one_line,
)
from safelaunch.verdict.exits import failed_at, logged_claim
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.guarding import guard_of
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.phrases import (
    by_place,
    capital,
    each_of,
    ranks_do,
    ranks_wait,
    ranks_word,
    summary_of,
    unseen_words,
    waits_words,
)
from safelaunch.verdict.rank_state import UNKNOWN_OP, CaseFacts, RankFacts
from safelaunch.verdict.suggestions import LAUNCHER, STORE_NOT_REACHED
from safelaunch.verdict.thread_view import View
from safelaunch.verdict.waits import Case

CLOCKS_S = 2.0
_STORE = frozenset({STORE_NOT_REACHED})


def _launcher_failed(facts: CaseFacts) -> Finding | None:
    """Returns the finding for the program that `exec` started if it failed in its own code before any rank was seen.

    It counts as rank 0 of a job of one, since no other process joined; it runs no user code and made no step or call.
    """
    launched, launched_rank = facts.evidence.launched, next(iter(facts.ranks.values()), None)
    if launched is None or launched.typed[:1] != ("exec",) or launched_rank is None or len(facts.world) > 1:
        return None
    raised, exited, record = (
        launched_rank.evidence.exception,
        launched_rank.evidence.exit_call,
        launched_rank.evidence.flight_record,
    )
    if launched_rank.step is not None or (record is not None and record.entries):
        return None
    stack = fr.stack_of(
        launched_rank.evidence, raised.frames if raised is not None else exited.frames if exited is not None else ()
    )
    program, advice = fr.program_of(stack), frozenset({LAUNCHER})
    if program and raised is not None:
        of_its_own = raised.type.rpartition(".")[2] not in ("CalledProcessError", "ChildFailedError")
        where = "in its own code: no rank was seen" if of_its_own else "for a process that it started"
        error = f"{raised.type}: {one_line(raised.message)}{fr.at(stack.frames[0])}"
        text = f"The launcher ({program}) raised {error}, {where}."
        claim = Claim(f"first exception: {raised.type}", f"{launched_rank.folder}/exception.json")
        return Finding("rank-exception", (), text, claims=(claim,), advice=advice)
    if program and exited is not None and exited.code:
        text = f"The launcher ({program}) called {exited.function}({exited.code}): no rank was seen."
        claim = Claim(f"it called {exited.function}()", f"{launched_rank.folder}/exit_call.json")
        return Finding("rank-exited", (), text, claims=(claim,), advice=advice)
    return None


def first_failure(facts: CaseFacts) -> Ruling:
    """The first rank to raise, exit or be killed independently of the others; what failed later is a consequence.

    Errors that report a peer's death are not failures (:mod:`.exits`). Times decide between the others: the exception's
    own clock, or the moment the launcher noticed. Ranks that failed in the same way (same exception at the same line,
    same status) are equally at fault. A clean exit is a failure only if there is no other: in a crash, the rank that
    left first broke its peers' connections. Before any rank, the launcher can fail.
    """
    crash = facts.evidence.outcome == "crash"
    if crash and (of_launcher := _launcher_failed(facts)) is not None:
        return of_launcher
    failed = conditions(facts, *FAILURES) or (conditions(facts, "uneven-batches") if crash else {})
    if not failed:
        return "no rank failed on its own" if crash else ""
    first = min((facts.ranks[r] for r in failed), key=lambda f: (failed_at(f.evidence), f.rank))
    main = failed[first.rank]
    named = {r: c for r, c in failed.items() if c is main or _failed_alike(facts.ranks[r], c, first, main)}
    unnamed = [r for r in facts.ranks if r not in named]
    later = [r for r in failed if r not in named]
    ruled = [f"{capital(ranks_word(later))} failed later, after {ranks_word([first.rank])}"] if later else []
    blamed = [r for r in unnamed if facts.ranks[r].evidence.exception is not None and r in facts.waiting]
    if blamed:
        ruled.append(f"the errors of {ranks_word(blamed)} report that a peer was gone: consequences")
    alone = _claim_under_condition(facts, unnamed, named) if main.cause == "uneven-batches" else ()
    paired = _left_in_p2p(facts, blamed) if main.cause == "uneven-batches" and not alone else []
    if alone:
        ruled.append(
            f"{alone[0].claim}, which only some ranks reach: an alternative explanation, as the batches might be even"
        )
    if paired:
        ruled.append(
            f"{ranks_word(paired)} might wait for a send or receive that a peer skipped before it ended: an "
            "alternative explanation, as the batches might be even"
        )
    doubts = {
        Doubt.CALL_ON_SOME_RANKS: bool(alone),
        Doubt.TRANSFER_LEFT_OUT: bool(paired),
        Doubt.MAY_BE_OWED: main.cause == "uneven-batches" and _might_have_extra_call(facts, named, blamed),
        Doubt.SAME_MOMENT: any(_at_the_same_moment(facts, first, facts.ranks[rank]) for rank in later),
        Doubt.UNSEEN_RANKS: bool(facts.unseen) and main.cause != "rank-exception",
        Doubt.OTHER_ORDER: facts.evidence.printed is not None and _ended_before(facts, first, later),
    }
    sure = (*main.doubts, *doubts_if(doubts))
    return blame(facts, main.cause, sure, named, claims=alone, ruled_out=ruled)


def _ended_before(facts: CaseFacts, first: RankFacts, later: Iterable[int]) -> bool:
    ends = {rank: state.evidence.exit for rank, state in facts.ranks.items()}
    own = ends[first.rank]
    return own is not None and any(
        (end := ends[rank]) is not None and end.time_unix_s + 1.0 <= own.time_unix_s for rank in later
    )


def _might_have_extra_call(facts: CaseFacts, ended: Collection[int], waiting: Collection[int]) -> bool:
    unrecorded = any(rank not in facts.alignment.records for rank in (*ended, *waiting))
    return 0 < len(waiting) <= len(ended) and unrecorded


def _left_in_p2p(facts: CaseFacts, blamed: Iterable[int]) -> list[int]:
    waits = {rank: facts.waiting[rank] for rank in blamed}
    return [rank for rank, wait in waits.items() if wait.kind == "p2p" or wait.op == UNKNOWN_OP]


def _claim_under_condition(facts: CaseFacts, ranks: Iterable[int], gone: Iterable[int]) -> tuple[Claim, ...]:
    for rank in (rank for rank in ranks if rank in facts.waiting):
        if (asked := guard_of(facts, rank, gone)) is not None:
            return (facts.ranks[rank].line_claim(f"rank {rank} waits under `{asked.words}`"),)
    return ()


def _at_the_same_moment(facts: CaseFacts, first: RankFacts, other: RankFacts) -> bool:
    if abs(failed_at(other.evidence) - failed_at(first.evidence)) > CLOCKS_S:
        return False
    nodes = [node for node in facts.evidence.nodes if first.rank in node.ranks or other.rank in node.ranks]
    return len({node.ranks for node in nodes}) > 1


def _failed_alike(facts: RankFacts, a: Condition, first: RankFacts, b: Condition) -> bool:
    if (a.cause, a.frame) != (b.cause, b.frame):
        return False
    if a.cause == "rank-exception":
        raised = [f.evidence.exception.type if f.evidence.exception else "" for f in (facts, first)]
        return raised[0] == raised[1]
    ends = [f.evidence.exit.returncode if f.evidence.exit else None for f in (facts, first)]
    return ends[0] == ends[1] and failed_at(facts.evidence) - failed_at(first.evidence) < 1.0


def stopped_ranks(facts: CaseFacts) -> Ruling:
    """A process cannot run: a signal stopped it, or its cgroup is frozen."""
    named = conditions(facts, "rank-stopped")
    if not named:
        return "no process is stopped (state T) or in a frozen cgroup"
    return blame(facts, "rank-stopped", (), named)


def init_not_joined(case: Case) -> Ruling:
    """Ranks wait in ``init_process_group`` for ranks that never reached it, or that do not reach its store.

    The reason quotes the absent rank's own stack. Unseen ranks are listed, not blamed: they might be on a node without
    evidence here.
    """
    inside = [rank for rank, wait in case.waiting.items() if wait.kind == "init"]
    if not inside:
        return ""
    locked_out = {r for r, holder in case.waits.holders.items() if holder.kind == "file" and holder.rank in inside}
    absent = {
        r: f.condition or Condition("missing-from-collective", "is elsewhere", f.frame)
        for r, f in case.ranks.items()
        if r not in inside
        and r not in locked_out
        and not case.alignment.has_joined(r)
        and not case.may_wait_elsewhere(r)
    }
    if not absent and locked_out:
        return ""  # a cycle: ranks inside hold locks that the others wait for
    if not absent and not case.unseen and (finding := _store_not_reached(case, inside)) is not None:
        return finding
    if not absent and not case.unseen:
        return f"{capital(ranks_wait(case, inside))} in init_process_group, and no rank is absent from it"
    named = {r: replace(c, reason=f"never reached init_process_group: it {c.reason}") for r, c in absent.items()}
    waits = capital(waits_words(case, inside))
    text = "" if named else f"{waits}, and {unseen_words(case)} at all: it might never have started."
    return blame(
        case, "init-not-joined", doubts_if({Doubt.UNSEEN_RANKS: bool(case.unseen)}), named, inside, summary=text
    )


def _store_not_reached(facts: CaseFacts, inside: Sequence[int]) -> Finding | None:
    """Blames ranks that keep retrying to connect to the store: their address is wrong, or they have no route to it.

    Only if they are the minority, or a peer is past that point, which proves that the store exists.
    """
    views = {rank: view for rank in inside if (view := facts.ranks[rank].view) is not None}
    retrying = [rank for rank, view in views.items() if _retries_connecting(view)]
    if not retrying:
        return _store_without_answer(facts, views)
    rest = [rank for rank in inside if rank not in retrying]
    past_it = [rank for rank in rest if rank in views and not calls.makes_store(views[rank].stack)]
    reason = "keeps trying to connect to the store of init_process_group"
    frames = {rank: facts.ranks[rank].frame for rank in retrying}
    named = {
        rank: Condition("init-not-joined", f"{reason}{fr.at(frame)}", frame, doubts=(Doubt.STATE_INFERRED,))
        for rank, frame in frames.items()
    }
    if past_it or 2 * len(retrying) < len(inside):
        finding = blame(facts, "init-not-joined", (Doubt.STATE_INFERRED,), named, rest)
        return replace(finding, advice=_STORE)
    wait_text = f", and {waits_words(facts, rest)}" if rest else ""
    text = (
        f"{capital(each_of(retrying))} {reason}{fr.at(frames[retrying[0]])}: nothing answers at its address{wait_text}."
    )
    doubts = (Doubt.STATE_INFERRED, *doubts_if({Doubt.EITHER_SIDE: bool(rest)}))
    return Finding("init-not-joined", doubts, text, claims=wait_claims(facts, inside), advice=_STORE)


def _store_without_answer(facts: CaseFacts, views: Mapping[int, View]) -> Finding | None:
    if views.keys() != facts.world or not all(calls.makes_store(view.stack) for view in views.values()):
        return None
    text = f"{capital(waits_words(facts, sorted(views)))}: all are blocked at the store. It waits for more"
    text += " ranks than there are, or what answers at its address is no store."
    return Finding("init-not-joined", (Doubt.STATE_INFERRED,), text, claims=wait_claims(facts, views), advice=_STORE)


_RETRY_S = 0.05  # the store's host polls every 10 ms; a rank that can't reach the store retries at longer intervals


def _retries_connecting(view: View) -> bool:
    return calls.makes_store(view.stack) and any(
        "(syn_sent)" in thread.fd_target
        or thread.syscall_name == "connect"
        or (kind_of(thread) == "sleep" and thread.ends_s is not None and thread.ends_s - at_s > _RETRY_S)
        for at_s, thread in thread_samples(view.process)
    )


def held_up_by_device(facts: CaseFacts) -> Ruling:
    """A rank's own device holds it up in a collective: the driver reports a device error, or all peers are past it."""
    lost = conditions(facts, "gpu-lost")
    named = lost or {
        rank: condition
        for rank, condition in conditions(facts, "gpu-kernel").items()
        if any(facts.alignment.is_over_elsewhere(rank, entry) for entry in facts.alignment.pending(rank))
    }
    if not named:
        return ""
    return blame(facts, "gpu-lost" if lost else "gpu-kernel", most_doubtful(named.values()), named)


def odd_one_out(facts: CaseFacts) -> Ruling:
    """No rank waits for a peer: the one that differs from most is at fault, by its place or its last printed step."""
    ruling = _odd_by_place(facts)
    return ruling if isinstance(ruling, Finding) else _printed_fewer_steps(facts) or ruling


def _odd_by_place(facts: CaseFacts) -> Ruling:
    """Blames the ranks that are not where most are.

    Finished ranks don't count; a single unfinished one is at fault. If a strict majority is at one place and all ranks
    were seen, the ranks elsewhere are odd, with low confidence: nothing shows that the others wait for them. Several
    ranks with nothing in common are not. A process that might have no peers is compared with none.
    """
    if facts.evidence.world_guessed and len(facts.ranks) == 1:
        return ""
    ended = {
        r for r, state in facts.ranks.items() if state.evidence.exit is not None and state.evidence.exit.returncode == 0
    }
    named = {r: condition for r, condition in conditions(facts).items() if r not in ended}
    if not named or facts.unseen:
        return ""
    places = sides_of({rank: (c.cause, c.frame and (c.frame.file, c.frame.line)) for rank, c in named.items()})
    most = max(places.values(), key=len)
    first = named[most[0]]
    if len(named) == 1:
        return blame(facts, first.cause, first.doubts, named)
    if len(places) == 1 or 2 * len(most) <= len(named):
        return ""
    odd = {r: c for r, c in named.items() if r not in most}
    if has_no_pattern(facts, odd.keys()):
        alike = [ranks for ranks in places.values() if has_no_pattern(facts, set(ranks))]
        odd = {r: c for r, c in odd.items() if not any(r in ranks for ranks in alike)}
    if not odd:
        return "ranks rest in several places, and nothing sets those apart that are in each"
    rest = f"{capital(each_of(most))} {first.reason}; nothing shows that they wait for each other."
    text = f"{summary_of(odd, facts, [])} {rest}"
    return blame(facts, next(iter(odd.values())).cause, (Doubt.NO_WAIT_SHOWN,), odd, summary=text)


def _printed_fewer_steps(facts: CaseFacts) -> Finding | None:
    steps = {rank: state.step for rank, state in facts.ranks.items() if state.evidence.progress is not None}
    if facts.evidence.printed is None or not steps:
        return None
    last = max(step or 0 for step in steps.values())
    behind = {rank: step for rank, step in steps.items() if step != last}
    if not behind or 2 * len(behind) >= len(steps):
        return None
    ahead = [rank for rank in steps if rank not in behind]
    parts = [
        f"{ranks_word(ranks)} printed {f'{step} as the last step' if step is not None else 'no step'}"
        for step, ranks in by_place(behind)
    ]
    culprits = tuple(
        Culprit(rank, facts.ranks[rank].evidence.host, 0, "main", None, step, f"Rank {rank} printed fewer steps.")
        for rank, step in behind.items()
    )
    claims = (
        Claim(f"rank {rank}: the last step that it printed is {step}", f"ranks/{rank}/log_tail.txt")
        for rank, step in list(steps.items())[:8]
        if step is not None
    )
    text = f"{capital(' and '.join(parts))}, while {ranks_word(ahead)} printed {last} and might wait for it."
    return Finding(
        "missing-from-collective", (Doubt.PRINTED_STEPS,), text, culprits, tuple(claims), victims=tuple(ahead)
    )


def no_rank_stands_out(facts: CaseFacts) -> Finding:
    """No rank stands out."""
    waits = list(facts.waiting)
    # Without ranks that have neither a stack nor a record.
    own = {r: c for r, c in conditions(facts).items() if c.cause != "missing-from-collective" or c.frame is not None}
    alike = len({(c.cause, c.frame) for c in own.values()}) == 1 and not waits
    claims = wait_claims(facts, waits) + condition_claims(own)
    only = facts.evidence.world_guessed and len(facts.ranks) == 1 and bool(waits or own)
    lost = [r for r in waits if has_lost_a_peer(facts.ranks[r].evidence)]
    cut = [r for r, f in facts.ranks.items() if is_aborted(f.evidence) and nccl_failure(f.evidence) is not None]
    apart = frozenset(waits) & set(facts.evidence.stopped)
    if apart and not own:
        text = _seen_at_different_times(facts, sorted(apart), [r for r in waits if r not in apart])
    elif lost and not own:
        text = f"{capital(ranks_word(lost))} lost the connection to a peer: {waits_words(facts, waits)}."
        alone = "None of them failed" if len(lost) > 1 else "It did not fail"
        text += f" {alone} on its own: what ended the connection was not seen."
        text += _first_report(facts, lost)
    elif alike and own and facts.unseen:
        them = "them" if len(own) > 1 else "it"
        text = summary_of(own, facts, [])
        text += f" {capital(unseen_words(facts))} and might be what keeps {them} there."
    elif only:
        text = summary_of(own, facts, waits) if own else f"{capital(waits_words(facts, waits))}."
        text += " No other rank was seen: it cannot be compared with its peers."
    elif alike and own:
        text = f"{summary_of(own, facts, [])} All are at the same place: no rank stands out."
        text += _line_that_sets(facts, next(iter(own.values())))
    elif waits and not own:
        which = "every rank that was seen" if facts.evidence.world_guessed else "every rank"
        which = which if facts.evidence.printed is None else "every rank in the log"
        text = f"{capital(waits_words(facts, waits))}; {which} has arrived: no rank stands out."
        text += _first_report(facts, [r for r in waits if facts.ranks[r].evidence.exception is not None])
    elif own:
        text = f"{summary_of(own, facts, waits)} The evidence does not single out a rank."
    elif cut:
        text = f"{capital(ranks_do(cut, 'was', 'were'))} aborted when the communication failed, and did not fail alone."
        text += _first_report(facts, cut)
        logged = ((rank, logged_claim(facts.ranks[rank].evidence)) for rank in cut)
        claims += tuple(Claim(f"rank {rank}: {claim.claim}", claim.file) for rank, claim in logged)
    elif ended := [r for r, f in facts.ranks.items() if is_aborted(f.evidence)]:
        text = f"{capital(ranks_do(ended, 'was', 'were'))} aborted by torch's watchdog. What blocked them was not seen."
        claims += (Claim("the end of its output", f"ranks/{ended[0]}/log_tail.txt"),)
    else:
        text = "No rank left enough evidence to say where it was."
    examined = bool(waits or own)
    doubts = {
        Doubt.STATE_UNKNOWN: not examined,
        Doubt.BY_EXCLUSION: examined,
        Doubt.SEVERAL_PLACES: examined and not (alike or (waits and not own)),
        Doubt.UNSEEN_RANKS: bool(facts.unseen or apart or lost or only or facts.evidence.printed is not None),
    }
    advice = frozenset(advice for condition in own.values() for advice in condition.advice)
    return Finding("no-rank-stands-out", doubts_if(doubts), text, claims=claims, advice=advice)


def _line_that_sets(facts: CaseFacts, own: Condition) -> str:
    for line in own.key.set_at if own.key is not None else ():
        steps = [f"`{step.words}`" for step in conditions_to(line, facts.read_source)]
        under = f", under {' and '.join(steps)}" if steps else ""
        return f" No rank has set it; {fr.place(line)} is the line that would{under}."
    return ""


def _first_report(facts: CaseFacts, lost: list[int]) -> str:
    first = min(lost, key=lambda rank: failed_at(facts.ranks[rank].evidence), default=None)
    failure = failure_of_rank(facts.ranks[first].evidence) if first is not None else None
    if failure is None or failure.kind == "peer-late":
        return ""
    return (
        f" Rank {first} reported it first: {failure.means}." if len(lost) > 1 else f" Its error means: {failure.means}."
    )


def _seen_at_different_times(facts: CaseFacts, first: list[int], rest: list[int]) -> str:
    text = f"{capital(waits_words(facts, first))}, and their own safelaunch stopped them."
    if rest:
        text += f" {capital(ranks_do(rest, 'was', 'were'))} looked at only afterwards: {waits_words(facts, rest)}."
    return f"{text} What blocked the ranks until then was not seen."
