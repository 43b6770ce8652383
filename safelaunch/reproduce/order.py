"""Where ranks go on, if they make the calls one after the other. Pure.

A record tells that a call is over, and not when its rank went on: two ranks that each send before they receive have
recorded what hangs with ``dist.send``, and passes with ``dist.isend``. And what does not end with another backend may
do so with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from safelaunch.reproduce.gloo import returns
from safelaunch.reproduce.program import ROOTED, Call, RankProgram

Keys = Sequence[Collection[Hashable]]  # of each call of a rank: what it meets; none where that is not known
Members = Callable[[str], Sequence[int]]


def passable(programs: Mapping[int, RankProgram], keys: Mapping[int, Keys]) -> dict[int, RankProgram]:
    """The programs with as few of the calls that are over left unwaited for as let each rank come to its end.

    All calls of one line are alike: so they were in the job.
    """
    if any(one.sides for one in programs.values()):
        return dict(programs)
    left: set[object] = set()
    while (blocked := _blocked(programs, keys, left)) is not None:
        left.add(_kind(blocked))
    return {rank: _unwaited(one, left) for rank, one in programs.items()} if left else dict(programs)


def returning(programs: Mapping[int, RankProgram], keys: Mapping[int, Keys], members: Members) -> list[int]:
    """The ranks that gloo lets come back from the rooted call that is the last of their record."""
    last = {
        (rank, key): one.calls[-1]
        for rank, one in programs.items()
        if one.end.kind == "waits" and one.calls and len(keys[rank]) == len(one.calls)
        for key in keys[rank][-1]
    }
    met = {(rank, key) for rank, mine in keys.items() for keys_of_call in mine for key in keys_of_call}
    found = []
    for (rank, key), call in last.items():
        ranks = list(members(call.group))
        if call.op in ROOTED and call.waited_for and rank in ranks and call.root is not None:
            alike = {r for r in ranks if (r, key) in met and last.get((r, key), call).op == call.op}
            root = dict(call.other_roots).get(rank, call.root)
            if returns(call.op, root, {ranks.index(r) for r in alike}, ranks.index(rank), len(ranks)):
                found.append(rank)
    return found


def _kind(call: Call) -> object:
    return (call.op, call.site) if call.site is not None else (call.op, call.group)


def _is_over(program: RankProgram, at: int) -> bool:
    made = program.entries[at] if at < len(program.entries) else None
    return made is not None and all(entry.completed for entry in made)


def _blocked(programs: Mapping[int, RankProgram], keys: Mapping[int, Keys], left: Collection[object]) -> Call | None:
    """The first call that is over, and that a rank does not come back from; None if all come to their ends."""
    expected: dict[Hashable, int] = {}
    for mine in keys.values():
        for met in mine:
            for key in met:
                expected[key] = expected.get(key, 0) + 1
    at = dict.fromkeys(programs, 0)
    entered: set[int] = set()  # ranks whose call is counted
    moved = True
    while moved:
        moved = False
        for rank, program in programs.items():
            while at[rank] < len(program.calls):
                call = program.calls[at[rank]]
                met = keys[rank][at[rank]] if at[rank] < len(keys[rank]) else ()
                if rank not in entered:
                    entered.add(rank)
                    moved = True
                    for key in met:
                        expected[key] -= 1
                waits = call.waited_for and call.op not in ROOTED and _kind(call) not in left
                if waits and (not _is_over(program, at[rank]) or any(expected[key] for key in met)):
                    break
                entered.discard(rank)
                at[rank] += 1
    stuck = ((rank, program.calls[at[rank]]) for rank, program in programs.items() if at[rank] < len(program.calls))
    return next((call for rank, call in stuck if _is_over(programs[rank], at[rank])), None)


def _unwaited(program: RankProgram, left: Collection[object]) -> RankProgram:
    """``End.work`` counts the calls that nobody has waited for: it still tells the same one."""
    calls = tuple(
        replace(call, waited_for=False) if _is_over(program, at) and _kind(call) in left else call
        for at, call in enumerate(program.calls)
    )
    end = program.end
    if end.kind == "waits for work":
        before = [at for at, call in enumerate(program.calls) if not call.waited_for]
        after = [at for at, call in enumerate(calls) if not call.waited_for]
        end = replace(end, work=sum(at > before[-end.work - 1] for at in after))
    return replace(program, calls=calls, end=end)
