"""Ranks that wait for each other in several groups: have they entered them in another order, or was a call left out?"""

from __future__ import annotations

from collections.abc import Iterable

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import number_of, op_name
from safelaunch.diagnose.facts import Facts
from safelaunch.diagnose.findings import Finding, wait_claims, waiting_culprit
from safelaunch.diagnose.habit import Broken, broken_by, taken_in_turns
from safelaunch.diagnose.waits import Key, Waits, members_of, same_op
from safelaunch.model import Claim, Collective


def broken_habits(facts: Facts, waits: Waits, circle: Iterable[Key]) -> dict[int, tuple[Collective, Broken]]:
    """rank → what it waits in, and the habit it broke by that: of those that wait for each other in several groups."""
    groups = {group for key in circle if (group := waits.example[key].group) is not None}
    found = {}
    for rank, now in _calls_waited_in(facts, waits, circle).items():
        broken = broken_by(facts.alignment, rank, now, groups, facts.roots.get(rank, ()))
        if broken is not None:
            found[rank] = (now, broken)
    return found


def calls_in_turns(facts: Facts, waits: Waits, circle: Iterable[Key]) -> bool:
    """Whether what they wait in may be the calls of one round, in another order on each of them."""
    return taken_in_turns(facts.alignment, _calls_waited_in(facts, waits, circle), facts.roots)


def _calls_waited_in(facts: Facts, waits: Waits, circle: Iterable[Key]) -> dict[int, Collective]:
    """rank → the recorded collective that it waits in."""
    found = {}
    for rank in members_of(waits, circle):
        wait = facts.ranks[rank].wait
        now = facts.alignment.entry(rank, str(wait.group), wait.seq) if wait and wait.seq is not None else None
        if now is not None:
            found[rank] = now
    return found


def left_out_between_groups(facts: Facts, waits: Waits, circle: tuple[Key, ...]) -> Finding | None:
    """Ranks wait for each other in several groups: one of them has left out the very call that the others wait in.

    Known by its own habit alone (``diagnose/habit.py``), so where two ranks are all there is, too.
    """
    found = broken_habits(facts, waits, circle)
    if len(found) != 1:
        return None
    ((rank, (now, broken)),) = found.items()
    usual = broken.usual
    others = [waits.example[key] for key in circle if rank not in waits.ranks[key]]
    if not broken.sure or not any(usual.group == one.group and same_op(usual.op, one.op) for one in others):
        return None
    roots = facts.roots.get(rank, ())
    site, after = fr.user_frame(usual.frames, roots), fr.user_frame(now.frames, roots)
    number = facts.alignment.last(rank, usual.group) + 1
    text = f"left out {op_name(usual)} at {fr.place(site)} (number {number} of group {usual.group!r}), which it had"
    text += f" always called right before {op_name(now)} at {fr.place(after)}, and waits there"
    claim = Claim(
        f"rank {rank}: each earlier {op_name(now)} of group {now.group!r} at {fr.place(after)} follows"
        f" {op_name(usual)} of group {usual.group!r}; number {number_of(now)} does not",
        f"ranks/{rank}/flight_recorder.json",
    )
    return Finding(
        "collective-mismatch",
        "medium",
        f"Rank {rank} {text}.",
        (waiting_culprit(facts.ranks[rank], f"Rank {rank} {text}.", site),),
        (claim, *wait_claims(facts, members_of(waits, circle))),
        (f"the groups entered in different orders is the runner-up: rank {rank} may yet call the other",),
    )
