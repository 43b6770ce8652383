"""Rules that need no wait-for graph: the job moves, a rank failed, a rank is stopped, a rank never joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from safelaunch.diagnose.branches import condition_on_rank
from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.facts import UNKNOWN_OP, Facts, RankFacts, user_stack_of
from safelaunch.diagnose.findings import (
    Finding,
    Ruling,
    condition_claims,
    culprit,
    least,
    lower,
    plural,
    ranks_word,
    small,
    summary_of,
    wait_claims,
    waits_words,
)
from safelaunch.diagnose.gone import FAILURES, failed_at
from safelaunch.model import Claim, Confidence, format_ranks


def slow_not_stuck(facts: Facts) -> Ruling:
    """A look at a live job that still makes progress accuses nobody.

    Only for ``dump``: in a hang the watchdog has confirmed that nothing moves, and a crash is not a matter of speed.
    """
    if facts.evidence.outcome != "dump" or not facts.evidence.moving:
        return ""
    steps = [f"rank {r.rank} at step {r.step}" for r in facts.ranks.values() if r.step is not None]
    where = f" ({', '.join(steps[:4])})" if steps else ""
    text = f"The job is making progress{where}; nothing is stuck."
    claims = tuple(
        Claim(f"rank {r.rank} is at step {r.step}", f"{r.folder}/progress.json")
        for r in list(facts.ranks.values())[:4]
        if r.step is not None
    )
    return Finding("slow-not-stuck", "high", text, claims=claims)


def first_failure(facts: Facts) -> Ruling:
    """The first rank to fail on its own account; what came later is a consequence until shown otherwise.

    Errors that report a peer's death are no failures of their own (:mod:`.gone`). Times decide between the others:
    an exception's own clock, else the moment the launcher noticed. Ranks that failed alike (same exception at the
    same line, same status) are equally at fault, however far apart their clocks are. A clean exit is a failure only
    where nothing else is: in a crash, the rank that left first made its peers lose their connections.
    """
    failed = {r: f for r, f in facts.ranks.items() if f.condition and f.condition.cause in FAILURES}
    if not failed and facts.evidence.outcome == "crash":
        failed = {r: f for r, f in facts.ranks.items() if f.condition and f.condition.cause == "uneven-batches"}
    if not failed:
        return "no rank failed on its own account" if facts.evidence.outcome == "crash" else ""
    first = min(failed.values(), key=lambda f: (failed_at(f.evidence), f.rank))
    named = {r: f.condition for r, f in failed.items() if f.condition and _alike(f, first)}
    main = named[first.rank]
    others = [r for r in facts.ranks if r not in named]
    later = [r for r in failed if r not in named]
    ruled = [f"{ranks_word(later)} failed later, after {ranks_word([first.rank])}"] if later else []
    blamed = [r for r in others if facts.ranks[r].evidence.exception is not None and facts.ranks[r].wait]
    if blamed:
        ruled.append(f"the errors of {small(ranks_word(blamed))} report that a peer was gone: consequences")
    confidence = main.confidence
    alone = _alone_by_condition(facts, others) if main.cause == "uneven-batches" else ()
    if alone:
        confidence = lower(confidence)
        ruled.append(
            f"{alone[0].claim}, which only some ranks reach: the runner-up, as they need not be uneven batches"
        )
    paired = _left_in_p2p(facts, blamed) if main.cause == "uneven-batches" else []
    if paired and not alone:
        confidence = lower(confidence)
        ruled.append(
            f"{small(ranks_word(paired))} may wait for a send or receive that a peer left out before it ended:"
            " the runner-up, as they need not be uneven batches"
        )
    if facts.unseen and main.cause != "rank-exception":
        confidence = lower(confidence)
    return Finding(
        main.cause,
        confidence,
        summary_of(named, facts, [r for r in others if facts.ranks[r].wait]),
        tuple(culprit(facts.ranks[r], c) for r, c in named.items()),
        condition_claims(named) + wait_claims(facts, others) + alone,
        tuple(ruled),
    )


def _left_in_p2p(facts: Facts, blamed: Iterable[int]) -> list[int]:
    """Those of ``blamed`` whose error came out of a send or receive, or out of a ``wait()`` that may be for one."""
    waits = ((rank, facts.ranks[rank].wait) for rank in blamed)
    return [rank for rank, wait in waits if wait is not None and (wait.kind == "p2p" or wait.op == UNKNOWN_OP)]


def _alone_by_condition(facts: Facts, ranks: Iterable[int]) -> tuple[Claim, ...]:
    """The first of ``ranks`` that waits at a line under a condition on the rank: its peers may never come there."""
    for rank in ranks:
        one = facts.ranks[rank]
        asked = condition_on_rank(user_stack_of(one.evidence), facts.read_source) if one.wait else None
        if asked is not None:
            file = "exception.json" if one.evidence.exception is not None else "stack.txt"
            return (Claim(f"rank {rank} waits under `{asked.words}`", f"{one.folder}/{file}"),)
    return ()


def _alike(one: RankFacts, first: RankFacts) -> bool:
    if one is first:
        return True
    a, b = one.condition, first.condition
    assert a is not None and b is not None
    if a.cause != b.cause:
        return False
    if a.cause == "rank-exception":
        kinds = [f.evidence.exception.type if f.evidence.exception else "" for f in (one, first)]
        return kinds[0] == kinds[1] and a.frame == b.frame
    gap = failed_at(one.evidence) - failed_at(first.evidence)
    return a.reason == b.reason and gap < 1.0


def stopped_ranks(facts: Facts) -> Ruling:
    """A process that may not run explains everything about itself, wherever it was when it was stopped."""
    named = {r: f.condition for r, f in facts.ranks.items() if f.condition and f.condition.cause == "rank-stopped"}
    if not named:
        return "no process is stopped (state T) or in a frozen cgroup"
    rest = [r for r in facts.ranks if r not in named]
    return Finding(
        "rank-stopped",
        "high",
        summary_of(named, facts, rest),
        tuple(culprit(facts.ranks[r], c) for r, c in named.items()),
        condition_claims(named) + wait_claims(facts, rest),
    )


def init_not_joined(facts: Facts) -> Ruling:
    """Some ranks wait in ``init_process_group``; whoever has neither entered it nor ever been a member is missing.

    Where an absent rank is instead comes from its own stack and goes into the reason. Ranks that were not seen at all
    are listed, not blamed: they may be on another node whose evidence is not here.
    """
    inside = [r for r, f in facts.ranks.items() if f.wait is not None and f.wait.kind == "init"]
    if not inside:
        return ""
    absent = {
        r: f.condition or Condition("missing-from-collective", "is elsewhere", f.frame)
        for r, f in facts.ranks.items()
        if r not in inside and not facts.alignment.joined(r) and (f.wait is None or f.wait.kind != "init")
    }
    waits = waits_words(facts, inside)
    if not absent and not facts.unseen:
        return f"{ranks_word(inside)} wait in init_process_group, and no rank is absent from it"
    named = {r: replace(c, reason=f"never reached init_process_group: it {c.reason}") for r, c in absent.items()}
    unseen = f"{small_ranks(facts)} not seen at all" if facts.unseen else ""
    if named:
        text = summary_of(named, facts, inside)
    else:
        text = f"{waits[:1].upper()}{waits[1:]}, and {unseen}: it may never have started."
    return Finding(
        "init-not-joined",
        ("medium" if facts.unseen else "high") if named else "medium",
        text,
        tuple(culprit(facts.ranks[r], c) for r, c in named.items()),
        condition_claims(named) + wait_claims(facts, inside),
    )


def small_ranks(facts: Facts) -> str:
    verb = "was" if len(facts.unseen) == 1 else "were"
    word = "rank" if len(facts.unseen) == 1 else "ranks"
    return f"{word} {format_ranks(set(facts.unseen))} {verb}"


def left_by_all(facts: Facts) -> Ruling:
    """All peers have completed a collective in which a rank still is: nobody keeps it there but its own device."""
    named = {
        rank: one.condition
        for rank, one in facts.ranks.items()
        if one.condition is not None
        and one.condition.cause == "gpu-kernel"
        and any(facts.alignment.is_over_elsewhere(rank, entry) for entry in facts.alignment.pending(rank))
    }
    if not named:
        return ""
    rest = [rank for rank in facts.ranks if rank not in named]
    return Finding(
        "gpu-kernel",
        least(condition.confidence for condition in named.values()),
        summary_of(named, facts, rest),
        tuple(culprit(facts.ranks[rank], condition) for rank, condition in named.items()),
        condition_claims(named) + wait_claims(facts, rest),
    )


def alone(facts: Facts) -> Ruling:
    """Nobody waits for a peer: each rank is where it is by its own doing.

    Ranks that have finished are left out; a single one that has not is at fault by itself. Where a strict majority
    rests at one place and all ranks were seen, those elsewhere are the odd ones out, with low confidence: nothing
    shows that the others wait for them. All ranks at one place is not anybody's fault in particular.
    """
    if any(f.wait is not None for f in facts.ranks.values()):
        return ""
    named = {r: f.condition for r, f in facts.ranks.items() if f.condition and not _finished(f)}
    if not named:
        return "no rank left evidence of where it was"
    if len(named) == 1 and not facts.unseen:
        return _odd_ones(facts, named, "")
    places: dict[tuple[object, ...], list[int]] = {}
    for rank, condition in named.items():
        frame = condition.frame
        site = (frame.file, frame.line) if frame else None
        places.setdefault((condition.cause, site), []).append(rank)
    most = max(places.values(), key=len)
    if len(places) > 1 and 2 * len(most) > len(named) and not facts.unseen:
        odd = {r: c for r, c in named.items() if r not in most}
        return _odd_ones(facts, odd, f"{ranks_word(most)} {plural_of(facts, most)}")
    return ""


def _finished(one: RankFacts) -> bool:
    return one.evidence.exit is not None and one.evidence.exit.returncode == 0


def plural_of(facts: Facts, ranks: list[int]) -> str:
    condition = facts.ranks[ranks[0]].condition
    reason = condition.reason if condition else "are elsewhere"
    return plural(reason) if len(ranks) > 1 else reason


def _odd_ones(facts: Facts, named: dict[int, Condition], others: str) -> Finding:
    single = not others
    first = next(iter(named.values()))
    text = summary_of(named, facts, [])
    if not single:
        text += f" {others}; nothing shows that they wait for each other."
    return Finding(
        first.cause,
        first.confidence if single else "low",
        text,
        tuple(culprit(facts.ranks[r], c) for r, c in named.items()),
        condition_claims(named),
    )


def _tells_nothing(condition: Condition) -> bool:
    """A rank of which neither a stack nor a record is there."""
    return condition.cause == "missing-from-collective" and condition.frame is None


def nobody_stands_out(facts: Facts) -> Finding:
    """The last rule: say what is seen, and that it singles nobody out."""
    waits = [r for r, f in facts.ranks.items() if f.wait is not None]
    own = {
        r: f.condition for r, f in facts.ranks.items() if f.condition is not None and not _tells_nothing(f.condition)
    }
    alike = len({(c.cause, c.frame) for c in own.values()}) == 1 and not waits
    claims = wait_claims(facts, waits) + condition_claims(own)
    if alike and own:
        text = f"{summary_of(own, facts, [])} All are at the same place: no rank stands out."
    elif waits and not own:
        words = waits_words(facts, waits)
        text = f"{words[:1].upper()}{words[1:]}; every rank has arrived: no rank stands out."
    elif own:
        text = f"{summary_of(own, facts, waits)} The evidence does not single out a rank."
    else:
        text = "No rank left enough evidence to say where it was."
    sure: Confidence = "medium" if (alike or (waits and not own)) and not facts.unseen else "low"
    return Finding("no-rank-stands-out", sure, text, claims=claims)
