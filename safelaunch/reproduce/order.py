"""Where ranks go on, if they make the calls one after the other. Pure.

A record tells that a call is over, and not when its rank went on: two ranks that each send before they receive have
recorded what hangs with ``dist.send``, and passes with ``dist.isend``. And what does not end with another backend may
do so with gloo.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from safelaunch.reproduce.gloo import returns
from safelaunch.reproduce.program import ROOTED, Call, RankProgram

Keys = Mapping[int, Sequence[Collection[Hashable]]]  # of each call of a rank: what it meets; none where not known
Members = Callable[[str], Sequence[int]]
Programs = Mapping[int, RankProgram]


def passable(programs: Programs, keys: Keys, members: Members) -> tuple[dict[int, RankProgram], list[int]]:
    """The programs with as few of the calls that are over left unwaited for as let each rank come to its end; and the
    ranks that gloo lets come back from their last call, in which they were.

    All calls of one line are alike: so they were in the job.
    """
    left: set[object] = set()
    while True:
        at = _played(programs, keys, members, left)
        stuck = [
            one.calls[at[rank]] for rank, one in programs.items() if at[rank] < len(one.calls) and _over(one, at[rank])
        ]
        if not stuck:
            break
        left.add(_kind(stuck[0]))
    back = [rank for rank, one in programs.items() if one.end.kind == "waits" and 0 < len(one.calls) == at[rank]]
    return {rank: _unwaited(one, left) for rank, one in programs.items()} if left else dict(programs), back


def _kind(call: Call) -> object:
    return (call.op, call.site) if call.site is not None else (call.op, call.group)


def _over(program: RankProgram, at: int) -> bool:
    return at < len(program.entries) and all(entry.completed for entry in program.entries[at])


def _played(programs: Programs, keys: Keys, members: Members, left: Collection[object]) -> dict[int, int]:
    """Rank → how many of its calls it comes back from."""
    expected = Counter(key for mine in keys.values() for met in mine for key in met)
    inside: dict[Hashable, dict[int, object]] = defaultdict(dict)  # who is in it, with which operation and root
    at = dict.fromkeys(programs, 0)

    def passes(rank: int) -> bool:
        call = programs[rank].calls[at[rank]]
        met = keys[rank][at[rank]] if at[rank] < len(keys[rank]) else ()
        root = dict(call.other_roots).get(rank, call.root or 0)
        for key in met:
            inside[key][rank] = (call.op, root)
        if not call.waited_for or _kind(call) in left:
            return True
        if _over(programs[rank], at[rank]) and all(len(inside[key]) == expected[key] for key in met):
            return True
        if call.op not in ROOTED or not met:
            return False
        places = {one: place for place, one in enumerate(members(call.group))}
        there = inside[next(iter(met))]
        entered = {places[one] for one, made in there.items() if one in places and made == (call.op, root)}
        return rank in places and returns(call.op, root, entered, places[rank], len(places))

    before = (-1, -1)
    while before != (now := (sum(at.values()), sum(map(len, inside.values())))):
        before = now
        for rank, program in programs.items():
            while at[rank] < len(program.calls) and passes(rank):
                at[rank] += 1
    return at


def _unwaited(program: RankProgram, left: Collection[object]) -> RankProgram:
    """``End.work`` counts the calls that nobody has waited for: it still tells the same one."""
    calls = tuple(
        replace(call, waited_for=False) if _over(program, at) and _kind(call) in left else call
        for at, call in enumerate(program.calls)
    )
    end = program.end
    if end.kind == "waits for work":
        before = [at for at, call in enumerate(program.calls) if not call.waited_for]
        after = [at for at, call in enumerate(calls) if not call.waited_for]
        end = replace(end, work=sum(at > before[-end.work - 1] for at in after))
    return replace(program, calls=calls, end=end)
