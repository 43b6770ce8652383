"""Evidence → verdict, by rules, with no effects: ``diagnose(evidence)``.

Each rule either reaches a finding or says why not; the first finding wins, and what was ruled out on the way is kept.
The order goes from what explains itself to what has to be inferred:

1. ``slow_not_stuck``     a dump of a job that moves accuses nobody
2. ``aborted_by_a_peer``  the survivors' records disagree about the collective in which a rank was aborted
3. ``first_failure``      a rank raised, was killed or exited: the first in time
4. ``stopped_ranks``      a process that may not run (state T, frozen cgroup)
5. ``init_not_joined``    peers wait in init_process_group for ranks that never came
6. ``parted_earlier``     peers wait only because of a collective too many or too few, long ago
7. ``file_locks``         ranks wait for a file that another rank has locked
8. ``held_up``            peers wait for a rank that waits for nobody: its own state is the cause
9. ``unseen_peers``       peers wait for ranks that were not seen: nobody is named
10. ``cycles``            ranks wait for each other: group order, sends and receives, different collectives
11. ``mispaired``         all have arrived, and earlier met in different operations
12. ``alone``             nobody waits for a peer: the odd one out, if there is one
13. ``nobody_stands_out``

Where a rank is found behind its peers, an exception that it caught there says why: ``with_caught_exception``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from safelaunch.diagnose.collectives import out_of_sight
from safelaunch.diagnose.facts import Facts, derive
from safelaunch.diagnose.findings import Finding, Ruling, ranks_word, small
from safelaunch.diagnose.gone import GONE_CAUSES, was_a_hang
from safelaunch.diagnose.loops import ReadSource
from safelaunch.diagnose.rules_abort import aborted_by_a_peer
from safelaunch.diagnose.rules_locks import file_locks
from safelaunch.diagnose.rules_mismatch import mispaired, parted_earlier
from safelaunch.diagnose.rules_state import (
    alone,
    first_failure,
    init_not_joined,
    left_by_all,
    nobody_stands_out,
    slow_not_stuck,
    stopped_ranks,
)
from safelaunch.diagnose.rules_transfer import unfit_transfers
from safelaunch.diagnose.rules_wait import cycles, held_up, unseen_peers
from safelaunch.diagnose.suggestions import suggestions_for
from safelaunch.diagnose.swallowed import with_caught_exception
from safelaunch.diagnose.waits import waits_of
from safelaunch.model import Claim, Evidence, Verdict, format_ranks

__all__ = ["diagnose"]

SCHEMA = 1


def diagnose(evidence: Evidence, read_source: ReadSource | None = None) -> Verdict:
    """The verdict over one job's evidence; never raises on evidence that is merely incomplete.

    ``read_source`` gives the text of a source file, or None. It is asked only where ranks wait in different places
    of one function, to tell a loop that one of them has left from a collective that only some of them call.
    """
    if evidence.outcome == "crash" and was_a_hang(evidence.ranks):
        evidence = msgspec.structs.replace(evidence, outcome="hang")
    facts = derive(evidence, read_source)
    ruled_out: list[str] = []
    for rule in _rules(facts):
        ruling = rule()
        if isinstance(ruling, Finding):
            return _verdict(facts, with_caught_exception(facts, ruling), ruled_out)
        if ruling:
            ruled_out.append(ruling)
    return _verdict(facts, nobody_stands_out(facts), ruled_out)


def _rules(facts: Facts) -> Iterator[Callable[[], Ruling]]:
    for rule in (slow_not_stuck, aborted_by_a_peer, first_failure, stopped_ranks, init_not_joined):
        yield lambda rule=rule: rule(facts)  # type: ignore[misc]
    waits = waits_of(facts)
    for graph_rule in (parted_earlier, file_locks, held_up, unseen_peers, cycles, unfit_transfers, mispaired):
        yield lambda rule=graph_rule: rule(facts, waits)  # type: ignore[misc]
    yield lambda: left_by_all(facts)
    yield lambda: alone(facts)


def _verdict(facts: Facts, finding: Finding, ruled_out: list[str]) -> Verdict:
    named = {c.rank for c in finding.culprits}
    victims = [r for r in facts.ranks if r not in named and (r in finding.held_up or _is_held_up(facts, r))]
    if finding.cause == "slow-not-stuck":
        victims = []
    return Verdict(
        schema=SCHEMA,
        outcome=facts.evidence.outcome,
        cause=finding.cause,
        confidence=finding.confidence,
        summary=finding.summary,
        culprits=tuple(sorted(finding.culprits, key=lambda c: c.rank)),
        victims=format_ranks(victims),
        evidence=_distinct(finding.claims),
        ruled_out=(*ruled_out, *finding.ruled_out),
        missing=(*_missing(facts), *_lost(facts, finding)),
        suggestions=suggestions_for(finding.cause, (c.reason for c in finding.culprits)),
    )


def _is_held_up(facts: Facts, rank: int) -> bool:
    """In a crash the launcher ends everybody who did not fail, whatever they were about when they were looked at."""
    condition = facts.ranks[rank].condition
    if facts.evidence.outcome == "crash":
        return condition is None or condition.cause not in GONE_CAUSES
    return condition is None


def _distinct(claims: tuple[Claim, ...], limit: int = 24) -> tuple[Claim, ...]:
    return tuple(dict.fromkeys(claims))[:limit]


def _missing(facts: Facts) -> Iterator[str]:
    """What was not seen, rank by rank: the verdict is only as good as that."""
    if facts.unseen:
        yield f"ranks not seen: {format_ranks(set(facts.unseen))}"
    alive = [f.evidence for f in facts.ranks.values() if f.evidence.exit is None]
    without_stack = [r.rank for r in alive if r.main is None or not r.main.stacks]
    if without_stack:
        yield f"no Python stack: {_named(without_stack)}"
    without_record = [r.rank for r in alive if r.flight_record is None]
    if without_record:
        yield f"no Flight Recorder: {_named(without_record)}"


def _lost(facts: Facts, finding: Finding, limit: int = 3) -> Iterator[str]:
    """Where ranks did not meet, or met and stand still: what may have parted them before the ring buffers begin."""
    if finding.cause not in ("collective-mismatch", "group-order", "p2p-cycle", "no-rank-stands-out"):
        return
    groups = {f.wait.group for f in facts.ranks.values() if f.wait is not None and f.wait.group is not None}
    lost = out_of_sight(facts.alignment, sorted(groups))
    for group, first in list(lost.items())[:limit]:
        yield f"calls before number {first} of group {group!r}: the Flight Recorder no longer holds them"
    late = [rank for rank in facts.alignment.records if not facts.alignment.is_whole(rank)]
    if late and not lost:
        yield f"the first calls of {small(ranks_word(late))}: the Flight Recorder no longer holds them"


def _named(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
