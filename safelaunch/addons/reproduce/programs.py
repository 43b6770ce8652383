"""Builds the program that the ranks of a job ran, from shortly before they diverged until the hang."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from safelaunch.addons.reproduce.gloo import BARE, FUNCTIONS, can_return
from safelaunch.addons.reproduce.program import (
    TRANSFERS,
    WORLD,
    ElementCounts,
    Program,
    RankProgram,
    ScriptCall,
    ScriptEnd,
)
from safelaunch.addons.reproduce.recorded import Extent, MatchKey, RecordedEntry, recorded
from safelaunch.model import UNKNOWN_SIZES, Collective
from safelaunch.verdict.c10d import ROOTED, elements, is_root, number_of, op_name
from safelaunch.verdict.comparable import Block
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.rank_state import CaseFacts, RankFacts

Keys = Mapping[int, Sequence[Collection[Hashable]]]  # matching keys of each call of a rank; empty if unknown
GroupRanks = Callable[[str], Sequence[int]]
RankPrograms = Mapping[int, RankProgram]


def pass_calls(programs: RankPrograms, keys: Keys, members: GroupRanks) -> tuple[dict[int, RankProgram], list[int]]:
    """Makes completed calls asynchronous until each rank gets to its end.

    Changes as few lines as possible, and on a changed line, all calls. Returns the programs, and the ranks that gloo
    lets return from the last call although they waited in it in the job.
    """
    left: set[object] = set()
    while True:
        at = _played(programs, keys, members, left)
        stuck = [
            program.calls[at[rank]]
            for rank, program in programs.items()
            if at[rank] < len(program.calls) and _over(program, at[rank])
        ]
        if not stuck:
            break
        left.add(_kind(stuck[0]))
    back = [
        rank for rank, program in programs.items() if program.end.kind == "waits" and 0 < len(program.calls) == at[rank]
    ]
    return {rank: _unwaited(program, left) for rank, program in programs.items()} if left else dict(programs), back


def _kind(call: ScriptCall) -> object:
    return (call.op, call.site) if call.site is not None else (call.op, call.group)


def _over(program: RankProgram, at: int) -> bool:
    return at < len(program.entries) and all(entry.completed for entry in program.entries[at])


def _played(programs: RankPrograms, keys: Keys, members: GroupRanks, left: Collection[object]) -> dict[int, int]:
    expected = Counter(key for rank_keys in keys.values() for met in rank_keys for key in met)
    inside: dict[Hashable, dict[int, object]] = defaultdict(dict)  # ranks in each call, with their operation and root
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
        places = {member: place for place, member in enumerate(members(call.group))}
        others_inside = inside[next(iter(met))]
        entered = {
            places[member] for member, made in others_inside.items() if member in places and made == (call.op, root)
        }
        return rank in places and can_return(call.op, root, entered, places[rank], len(places))

    before = (-1, -1)
    while before != (now := (sum(at.values()), sum(map(len, inside.values())))):
        before = now
        for rank, program in programs.items():
            while at[rank] < len(program.calls) and passes(rank):
                at[rank] += 1
    return at


def _unwaited(program: RankProgram, left: Collection[object]) -> RankProgram:
    """Makes the calls in ``left`` asynchronous. Keeps ``ScriptEnd.work`` on the same call."""
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


_SCALAR = ((1,),)
_MOST_ROOTS = 512  # candidates to try
_ENDS = {"rank-killed": "is killed", "rank-exception": "raises", "rank-exited": "exits", "uneven-batches": "leaves"}


def program_of(facts: CaseFacts, extent: Extent) -> Program:
    """Builds the program of a job. Its notes list everything that can't be replayed."""
    return _EntryReader(facts, extent).program()


@dataclass(frozen=True)
class _CallEntries:
    """A call and its record entries. A batch of sends and receives has several."""

    call: ScriptCall
    entries: tuple[Collective, ...]

    @property
    def over(self) -> bool:
        return all(entry.completed for entry in self.entries)

    @property
    def as_left(self) -> ScriptCall:
        """The call; asynchronous if the rank continued before the call was complete."""
        return self.call if self.over else replace(self.call, waited_for=False)

    def is_at(self, group: str | None, number: int | None) -> bool:
        return not self.over and any((e.group, number_of(e)) == (group, number) for e in self.entries)


class _EntryReader:
    def __init__(self, facts: CaseFacts, extent: Extent) -> None:
        self._facts = facts
        self._calls = recorded(facts, extent)
        self._roots = _Roots(facts, self._calls)
        self._notes: dict[str, None] = {}
        self._default = {name for name in facts.alignment.groups() if self._is_default(name)} | {WORLD, ""}

    def program(self) -> Program:
        ranks = {rank: self._rank(rank) for rank in range(self._world)}
        keys = {rank: self._keys(rank, program) for rank, program in ranks.items()}
        passing, stuck = pass_calls(ranks, keys, self._members)
        if ranks != passing:
            self._note("Some finished calls are asynchronous here: made one after the other, they would hang.")
        if stuck:
            self._note(f"The last call of {ranks_word(stuck)} would return with gloo: the script sleeps after it.")
        held_end = ScriptEnd("stalls", words="recorded in this call, from which gloo returns")
        ranks = {
            rank: replace(program, end=held_end) if rank in stuck else program for rank, program in passing.items()
        }
        self._note_missing_evidence()
        makers = self._makers()
        used = {call.group for rank in ranks.values() for call in rank.calls} - {WORLD} | set(makers)
        groups = {name: self._members(name) for name in sorted(used, key=lambda name: (len(name), name))}
        return Program(ranks, groups, makers, (*self._notes, *self._roots.notes()))

    def _keys(self, rank: int, program: RankProgram) -> list[list[MatchKey]]:
        met = {each.entry.record_id: each.key for each in self._calls.get(rank, ())}
        return [[met[entry.record_id] for entry in entries if entry.record_id in met] for entries in program.entries]

    @property
    def _world(self) -> int:
        return max([self._facts.evidence.world_size, *(rank + 1 for rank in self._facts.ranks)])

    def _is_default(self, group: str) -> bool:
        return group in ("0", "") or any(
            entry.entry.description == "default_pg" and entry.entry.group == group
            for calls in self._calls.values()
            for entry in calls
        )

    def _members(self, group: str) -> tuple[int, ...]:
        if group == WORLD:
            return tuple(range(self._world))
        recorded = [rank.evidence.gil.groups.get(group, ()) for rank in self._facts.ranks.values()]
        return tuple(sorted(next((ranks for ranks in recorded if ranks), ()) or self._facts.alignment.ranks_of(group)))

    def _makers(self) -> dict[str, frozenset[int]]:
        """Returns the creators of each group that some ranks didn't create: then each rank numbers groups by itself."""
        made: dict[int, int] = {}
        for rank, rank_facts in self._facts.ranks.items():
            number = rank_facts.evidence.gil.groups_made
            if number is None:
                return {}
            made[rank] = number - (rank_facts.wait is not None and rank_facts.wait.op == "new_group")
        names = {name for rank in self._facts.ranks.values() for name in rank.evidence.gil.groups if name.isdecimal()}
        makers = {name: frozenset(rank for rank, number in made.items() if number > int(name)) for name in names}
        return {name: ranks for name, ranks in makers.items() if ranks and ranks != frozenset(made)}

    def _note(self, words: str) -> None:
        self._notes[words] = None

    def _note_missing_evidence(self) -> None:
        without = set(self._facts.ranks) - set(self._facts.alignment.records)
        for ranks, words in ((self._facts.unseen, "Not seen"), (without, "No recorded calls")):
            if ranks:
                self._note(
                    f"{words}: {ranks_word(ranks)}. For these, the script makes the calls that their peers completed."
                )

    def _rank(self, rank: int) -> RankProgram:
        rank_facts = self._facts.ranks.get(rank)
        made = self._made(rank, self._calls[rank]) if rank in self._calls else self._borrowed(rank)
        return replace(self._program_of(rank, rank_facts, made), entries=tuple(call.entries for call in made))

    def _program_of(self, rank: int, rank_facts: RankFacts | None, made: list[_CallEntries]) -> RankProgram:
        if rank_facts is None:
            return RankProgram(_left(made), ScriptEnd("stalls", "missing-from-collective", "it was not seen"))
        if rank_facts.wait is not None:
            return self._waiting(rank_facts, made)
        end = _end_of(rank_facts)
        alone = not made and not self._facts.alignment.has_joined(rank_facts.rank)
        return RankProgram(_left(made), end, before=end.kind == "stalls" and alone and self._some_in_init)

    def _waiting(self, rank_facts: RankFacts, made: Sequence[_CallEntries]) -> RankProgram:
        """Returns the program of a rank that waits in its latest call, in an earlier one, or in an unrecorded one."""
        assert rank_facts.wait is not None
        wait = rank_facts.wait
        at = next((n for n, call in enumerate(made) if call.is_at(wait.group, wait.seq)), None)
        if at is None and wait.kind == "p2p" and wait.op not in FUNCTIONS and not rank_facts.evidence.gil.posted:
            self._note(
                f"Rank {rank_facts.rank} waits for an earlier {wait.op}: in the script, for a receive from any rank."
            )
            begun = ScriptCall("recv", WORLD, _SCALAR, waited_for=False)
            return RankProgram((*_left(made), begun), ScriptEnd("waits for work", site=wait.frame))
        if at is None:
            return RankProgram((*_left(made), *self._call_of_wait(rank_facts)), ScriptEnd("waits"))
        if at == len(made) - 1:
            return RankProgram((*_left(made[:at]), made[at].call), ScriptEnd("waits"))
        behind = sum(not call.over for call in made[at + 1 :])
        return RankProgram(_left(made), ScriptEnd("waits for work", site=wait.frame, work=behind))

    @property
    def _some_in_init(self) -> bool:
        return any(rank.wait is not None and rank.wait.kind == "init" for rank in self._facts.ranks.values())

    def _made(self, rank: int, calls: Sequence[RecordedEntry]) -> list[_CallEntries]:
        """Converts entries to calls, in the order of the record. A batch of sends and receives becomes one call."""
        result: list[_CallEntries] = []
        for (is_p2p, _), same in groupby(calls, key=_launch_of):
            together = list(same)
            made = [self._call(rank, entry) for entry in together]
            if is_p2p and len(made) > 1:
                parts = tuple(replace(part, site=None) for part in made)
                batch = ScriptCall("batch", made[0].group, site=made[0].site, parts=parts)
                result.append(_CallEntries(batch, tuple(entry.entry for entry in together)))
            else:
                result += [_CallEntries(call, (entry.entry,)) for call, entry in zip(made, together, strict=True)]
        return result

    def _borrowed(self, rank: int) -> list[_CallEntries]:
        """Returns the calls of a rank that has no record: those that its peers can't have completed without it."""
        over = {call.key for calls in self._calls.values() for call in calls if call.entry.completed}
        alignment = self._facts.alignment
        of_mine = {
            peer: [
                call
                for call in calls
                if call.transfer is None and call.key in over and rank in alignment.members(call.entry.group)[0]
            ]
            for peer, calls in self._calls.items()
        }
        peer = max(of_mine, key=lambda candidate: len(of_mine[candidate]), default=None)
        return [_CallEntries(self._call(peer, entry), ()) for entry in of_mine[peer]] if peer is not None else []

    def _call(self, rank: int, recorded: RecordedEntry) -> ScriptCall:
        entry = recorded.entry
        functions = _functions_of(entry)
        op = min(functions, default="all_reduce")
        if len(functions) != 1:
            self._note(f"{op_name(entry)[:80]!r} is replayed as {op}.")
        call = ScriptCall(
            op,
            group=WORLD if entry.group in self._default else entry.group,
            sizes=self._sizes(op, entry),
            dtypes=(_dtype(entry),) if op not in BARE else (),
            site=self._facts.alignment.stack(rank, entry).user_frame,
        )
        if op in ROOTED:
            root, other_roots = self._roots.of_all(recorded)
            call = replace(call, root=root, other_roots=other_roots)
        if recorded.transfer is not None:
            ranks = self._facts.alignment.ranks_of(entry.group)
            peer = recorded.transfer.peer
            call = replace(call, peer=sorted(ranks).index(peer) if peer in ranks else peer)
        return call

    def _sizes(self, op: str, entry: Collective) -> ElementCounts:
        if op in BARE:
            return ()
        if op == "all_to_all":  # each rank can split differently
            self._note("An all_to_all sends one element to each rank.")
            return ((len(self._members(entry.group)),),)
        sizes = self._with_defaults(entry.output_sizes if op == "scatter" else entry.input_sizes)
        if op == "all_reduce" or len(sizes) == 1:
            return sizes
        return ((elements(sizes) or 0,),)

    def _with_defaults(self, sizes: ElementCounts) -> ElementCounts:
        if elements(sizes) is None or sizes == UNKNOWN_SIZES:
            self._note("Some sizes are not recorded: one element each.")
            return _SCALAR
        return sizes

    def _call_of_wait(self, rank_facts: RankFacts) -> Iterator[ScriptCall]:
        """Yields a call that only the rank's stack shows: gloo records no sends, and some versions of torch nothing."""
        wait = rank_facts.wait
        assert wait is not None
        if wait.kind == "init":
            return
        op = FUNCTIONS.get(wait.op, "")
        posted = rank_facts.evidence.gil.posted
        if posted and (op not in TRANSFERS or len(posted) > 1):
            parts = [ScriptCall("send" if p.sends else "recv", WORLD, _SCALAR, peer=p.peer, tag=p.tag) for p in posted]
            self._note("gloo doesn't record sends and receives: pending ones are taken from the processes.")
            yield ScriptCall("batch", site=wait.frame, parts=tuple(parts))
        elif op in TRANSFERS:
            self._note("gloo doesn't record sends and receives: pending ones are taken from the stacks.")
            from_any = op == "recv" and wait.peer is None and wait.tag is not None
            if wait.peer is None and not from_any:
                self._note(f"Rank {rank_facts.rank}: the peer of its {op} is unknown.")
            peer = wait.peer if wait.peer is not None or op == "recv" else (rank_facts.rank + 1) % self._world
            named = wait.peer is not None
            yield ScriptCall(op, WORLD, _SCALAR, peer=peer, named=named, tag=wait.tag or 0, site=wait.frame)
        elif op:
            self._note(f"{op} of rank {rank_facts.rank} is not recorded: its group and sizes are unknown.")
            root = wait.source if wait.source is not None else wait.target
            root = root or 0 if op in ROOTED else None
            yield ScriptCall(op, WORLD, () if op in BARE else _SCALAR, root=root, site=wait.frame)
        else:
            self._note(
                f"Rank {rank_facts.rank} waits in {wait.op}, which is not recorded: the script uses a barrier instead."
            )
            yield ScriptCall("barrier", site=wait.frame)


def _functions_of(entry: Collective) -> set[str]:
    names = entry.ops if isinstance(entry, Block) else (op_name(entry).split(" ")[0],)
    return {FUNCTIONS[name] for name in names if name in FUNCTIONS}


def _left(made: Iterable[_CallEntries]) -> tuple[ScriptCall, ...]:
    return tuple(entries.as_left for entries in made)


def _launch_of(recorded: RecordedEntry) -> tuple[bool, object]:
    entry = recorded.entry
    return (True, (entry.group, entry.p2p_seq)) if entry.is_p2p else (False, 0)


def _dtype(entry: Collective) -> str:
    return next((name for name in (*entry.input_dtypes, *entry.output_dtypes) if name), "")


def _end_of(rank_facts: RankFacts) -> ScriptEnd:
    condition, exit = rank_facts.condition, rank_facts.evidence.exit
    if condition is None:
        return ScriptEnd("stalls", "missing-from-collective", "it was ended before it was looked at", rank_facts.frame)
    kind = _ENDS.get(condition.cause, "stalls")
    if kind == "is killed" and exit is None:
        kind = "stalls"
    code = 0 if exit is None else -exit.returncode if kind == "is killed" else exit.returncode
    return ScriptEnd(kind, condition.cause, condition.reason, condition.frame or rank_facts.frame, code)  # type: ignore[arg-type]


class _Roots:
    """Finds the root of each rooted collective, as a rank of its group.

    The root comes from the ranks' stacks, or from the sizes of a gather or scatter. If neither shows it, it is the root
    for which gloo's behaviour fits best: most of the waiting ranks wait, and the others return.
    """

    def __init__(self, facts: CaseFacts, calls: Mapping[int, Sequence[RecordedEntry]]) -> None:
        self._facts = facts
        self._there: dict[object, dict[int, Collective]] = {}
        for rank, made in calls.items():
            for entry in made:
                if _functions_of(entry.entry) & ROOTED:
                    self._there.setdefault(entry.key, {})[rank] = entry.entry
        self._assumed = self._deduced = False
        self._found: dict[object, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._usual: dict[object, int] = {}  # position of the root, by the line of an unfinished call
        for rank, made in calls.items():
            for entry in made:
                if entry.key in self._there and not entry.entry.completed:
                    self._usual.setdefault(entry.entry.frames, self._place(rank, entry))

    def notes(self) -> Iterator[str]:
        if self._assumed:
            yield "Roots are not recorded: for finished calls, one is assumed."
        if self._deduced:
            yield "The root of a hanging call is one that the waiting ranks could be waiting for."

    def of_all(self, entry: RecordedEntry) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Returns the root that most ranks of the call report, and the roots that the other ranks report."""
        if entry.key not in self._found:
            roots = {rank: self._place(rank, entry) for rank in self._there[entry.key]}
            usual, _ = Counter(roots.values()).most_common(1)[0]
            other_roots = tuple((rank, root) for rank, root in sorted(roots.items()) if root != usual)
            self._found[entry.key] = (usual, other_roots)
        return self._found[entry.key]

    def _place(self, rank: int, recorded: RecordedEntry) -> int:
        entries, ranks = self._there[recorded.key], sorted(self._facts.alignment.ranks_of(recorded.entry.group))
        roots = {r: root for r in entries if (root := self._root_of_entry(r, entries[r])) is not None}
        if roots:
            votes = Counter(roots.values())
            shows = op_name(recorded.entry) in (
                "gather",
                "scatter",
            )  # its sizes would show if the rank itself were the root
            able = [root for root in votes if root != rank or not shows] or votes
            best = max(able, key=lambda root: (root in entries and entries[root].completed, votes[root], -root))
            self._deduced = self._deduced or rank not in roots
            root = roots.get(rank, best)
            return ranks.index(root) if root in ranks else 0
        if set(entries) >= set(ranks) and all(entry.completed for entry in entries.values()):
            self._assumed = True
            usual = self._usual.get(recorded.entry.frames, 0)
            return usual if usual < len(ranks) else 0
        self._deduced = True
        op = min(_functions_of(recorded.entry), default="broadcast")
        over = {place: entries[r].completed for place, r in enumerate(ranks) if r in entries}
        tries = range(min(len(ranks), _MOST_ROOTS))
        fits = [sum(can_return(op, root, over, p, len(ranks)) == done for p, done in over.items()) for root in tries]
        return fits.index(max(fits, default=0)) if fits else 0

    def _root_of_entry(self, rank: int, entry: Collective) -> int | None:
        wait = self._facts.ranks[rank].wait
        if wait is not None and (wait.group, wait.seq) == (entry.group, entry.seq) and not entry.completed:
            named = wait.source if wait.source is not None else wait.target
            if named is not None:
                return named
        return rank if is_root(entry) else None
