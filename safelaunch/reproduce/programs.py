"""The evidence of a job → the program that its ranks ran, from a little before they parted to the hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from safelaunch.diagnose.collectives import elements, number_of, op_name
from safelaunch.diagnose.comparable import Block
from safelaunch.diagnose.findings import ranks_word
from safelaunch.diagnose.rank_state import Facts, RankFacts
from safelaunch.diagnose.transfers import is_root
from safelaunch.model import UNKNOWN_SIZES, Collective
from safelaunch.reproduce.gloo import FUNCTIONS
from safelaunch.reproduce.order import passable
from safelaunch.reproduce.program import OBJECTS, ROOTED, TRANSFERS, WORLD, Call, End, Program, RankProgram, Side
from safelaunch.reproduce.recorded import Extent, Meeting, Recorded, recorded
from safelaunch.reproduce.threads import SideThread, threads_of

_SCALAR = ((1,),)
_OP_OF_WAIT = {
    "isend": "send",
    "irecv": "recv",
    "all_gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
}


def program_of(facts: Facts, extent: Extent) -> Program:
    """Raises nothing: what cannot be replayed stands in the notes."""
    return _Reader(facts, extent).program()


@dataclass(frozen=True)
class _Made:
    """A call, and the entries that it left. A batch of sends and receives leaves several."""

    call: Call
    entries: tuple[Collective, ...]

    @property
    def thread(self) -> int:
        """0: not known."""
        return self.entries[0].thread if self.entries else 0

    @property
    def over(self) -> bool:
        return all(entry.completed for entry in self.entries)

    @property
    def as_left(self) -> Call:
        """What is not over, the rank went on behind."""
        return self.call if self.over else replace(self.call, waited_for=False)

    def is_at(self, group: str | None, number: int | None) -> bool:
        return not self.over and any((e.group, number_of(e)) == (group, number) for e in self.entries)


class _Reader:
    def __init__(self, facts: Facts, extent: Extent) -> None:
        self._facts = facts
        self._calls = recorded(facts, extent)
        self._roots = _Roots(facts, self._calls)
        self._notes: dict[str, None] = {}
        every = (one.entry for calls in self._calls.values() for one in calls)
        self._sizes_of_objects = {(one.group, one.seq): one.input_sizes for one in every if _passes_objects(one)}
        self._default = {name for name in facts.alignment.groups() if self._is_default(name)} | {WORLD, ""}

    def program(self) -> Program:
        ranks = {rank: self._rank(rank) for rank in range(self._world)}
        waited_for, keys = ranks, {rank: self._keys(rank, one) for rank, one in ranks.items()}
        ranks = passable(waited_for, keys)
        if ranks != waited_for:
            self._note("Some calls that are over are not waited for: made one after the other, they would hang.")
        used = {call.group for one in ranks.values() for call in one.all_calls} - {WORLD}
        groups = {name: tuple(sorted(self._facts.alignment.ranks_of(name))) for name in sorted(used)}
        self._say_what_is_missing()
        return Program(ranks, groups, (*self._notes, *self._roots.notes()))

    def _keys(self, rank: int, one: RankProgram) -> list[list[Meeting]]:
        met = {each.entry.record_id: each.key for each in self._calls.get(rank, ())}
        return [[met[entry.record_id] for entry in entries if entry.record_id in met] for entries in one.entries]

    @property
    def _world(self) -> int:
        return max([self._facts.evidence.world_size, *(rank + 1 for rank in self._facts.ranks)])

    def _is_default(self, group: str) -> bool:
        """It is everybody's: under the name of the default group, or of the same ranks in the same order."""
        return group in ("0", "") or any(
            entry.entry.description == "default_pg" and entry.entry.group == group
            for calls in self._calls.values()
            for entry in calls
        )

    def _note(self, words: str) -> None:
        self._notes[words] = None

    def _say_what_is_missing(self) -> None:
        unseen = self._facts.unseen
        if unseen:
            self._note(f"Not seen: {ranks_word(unseen)}. There, the script makes the calls that the peers completed.")
        without = set(self._facts.ranks) - set(self._facts.alignment.records)
        if without:
            self._note(
                f"No recorded calls: {ranks_word(without)}. There, the script makes the calls that the peers completed."
            )

    # --- a rank -------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankProgram:
        one = self._facts.ranks.get(rank)
        made = self._made(rank, self._calls[rank]) if rank in self._calls else self._borrowed(rank)
        return replace(self._program_of(rank, one, made), entries=tuple(call.entries for call in made))

    def _program_of(self, rank: int, one: RankFacts | None, made: list[_Made]) -> RankProgram:
        if one is None:
            return RankProgram(_left(made), End("stands", "missing-from-collective", "it was not seen"))
        threads = threads_of(one, [(call.thread, call.call.group, call.over) for call in made])
        if threads:
            return self._with_threads(one, made, threads)
        if one.wait is not None:
            return self._waiting(one, made)
        end = _end_of(one)
        before = end.kind == "stands" and not made and not self._facts.alignment.joined(rank) and self._some_in_init
        return RankProgram(_left(made), end, before=before)

    def _with_threads(self, one: RankFacts, made: list[_Made], threads: Sequence[SideThread]) -> RankProgram:
        idents = {thread.ident for thread in threads}
        if _share_a_group(made, idents):
            return self._in_one_group(one, made, idents)
        mine = [call for call in made if call.thread not in idents]
        main = self._main_of(one, mine, threads)
        sides = []
        for thread in threads:
            its = [call for call in made if call.thread == thread.ident]
            after = (
                sum(call.over for call in mine)
                if not its
                else sum(c.thread not in idents for c in made[: made.index(its[0])])
            )
            end = _end_of(one) if thread.stands else End("waits")
            sides.append(Side(_left(its[:-1]) + tuple(call.call for call in its[-1:]), end, after, name=thread.name))
        return replace(main, sides=tuple(sides))

    def _in_one_group(self, one: RankFacts, made: list[_Made], idents: set[int]) -> RankProgram:
        """Threads that call in one group: what matters is who came first. What is over the main one calls, in order."""
        self._note("Threads call in one group: the calls that are over are made by the main thread, as recorded.")
        over = [call for call in made if call.over]
        pending = [call for call in made if not call.over]
        mine = next((call for call in pending if call.thread not in idents), None)
        sides, is_second = [], False
        for ident in sorted(idents, key=[call.thread for call in made].index):
            its = next((call for call in pending if call.thread == ident), None)
            if its is None:
                continue
            first = mine is not None and pending.index(its) < pending.index(mine)
            is_second |= mine is not None and not first
            after = len(over) + (mine is not None and not first)
            calls, end = ((its.as_left,), End("enters")) if first else ((its.call,), End("waits"))
            sides.append(Side(calls, end, after, first))
        done = _left(over)
        if mine is None:
            return RankProgram(done, End("joins", site=one.frame), tuple(sides))
        if is_second:
            return RankProgram((*done, mine.as_left), End("waits for work", site=one.frame), tuple(sides))
        return RankProgram((*done, mine.call), End("waits"), tuple(sides))

    def _main_of(self, one: RankFacts, mine: list[_Made], threads: Sequence[SideThread]) -> RankProgram:
        if one.wait is not None and one.wait.thread is None:
            return self._waiting(one, mine)
        if mine and not mine[-1].over:
            return RankProgram((*_left(mine[:-1]), mine[-1].call), End("waits"))
        stands = one.condition is not None and not any(thread.stands for thread in threads)
        return RankProgram(_left(mine), _end_of(one) if stands else End("joins", site=one.frame))

    def _waiting(self, one: RankFacts, made: Sequence[_Made]) -> RankProgram:
        """Its own thread waits in the newest of its calls, in an earlier one, or in one that is not recorded."""
        assert one.wait is not None
        wait = one.wait
        at = next((n for n, call in enumerate(made) if call.is_at(wait.group, wait.seq)), None)
        if at is None:
            return RankProgram((*_left(made), *self._call_of_wait(one)), End("waits"))
        if at == len(made) - 1:
            return RankProgram((*_left(made[:at]), made[at].call), End("waits"))
        behind = sum(not call.over for call in made[at + 1 :])
        return RankProgram(_left(made), End("waits for work", site=wait.frame, work=behind))

    @property
    def _some_in_init(self) -> bool:
        return any(one.wait is not None and one.wait.kind == "init" for one in self._facts.ranks.values())

    def _made(self, rank: int, calls: Sequence[Recorded]) -> list[_Made]:
        """In the order of the record. A batch of sends and receives is one call."""
        found: list[_Made] = []
        for (is_p2p, _), same in groupby(calls, key=_launch_of):
            together = list(same)
            made = [self._call(rank, one) for one in together]
            if is_p2p and len(made) > 1:
                parts = tuple(replace(part, site=None) for part in made)
                batch = Call("batch", made[0].group, site=made[0].site, parts=parts)
                found.append(_Made(batch, tuple(one.entry for one in together)))
            else:
                found += [_Made(call, (one.entry,)) for call, one in zip(made, together, strict=True)]
        return self._with_objects(found)

    def _with_objects(self, made: Sequence[_Made]) -> list[_Made]:
        """``broadcast_object_list`` calls a broadcast of the sizes, and one of the objects: as one call."""
        found: list[_Made] = []
        is_second = False
        for one in made:
            passes = one.call.op == "broadcast" and _passes_objects(one.entries[0])
            if passes and is_second:
                first = found.pop()
                found.append(_Made(first.call, (*first.entries, *one.entries)))
            elif passes:
                sizes = (
                    *one.call.sizes,
                    *self._sizes_of_objects.get((one.entries[0].group, one.entries[0].seq + 1), ()),
                )
                found.append(_Made(replace(one.call, op=OBJECTS, sizes=sizes, dtypes=()), one.entries))
            else:
                found.append(one)
            is_second = passes and not is_second
        return found

    def _borrowed(self, rank: int) -> list[_Made]:
        """Of a rank without a record: what its peers cannot have completed without it, as one of them called it."""
        over = {one.key for calls in self._calls.values() for one in calls if one.entry.completed}
        of_mine = {
            peer: [one for one in calls if one.transfer is None and one.key in over and self._takes_part(rank, one)]
            for peer, calls in self._calls.items()
        }
        peer = max(of_mine, key=lambda one: len(of_mine[one]), default=None)
        return [_Made(self._call(peer, one), ()) for one in of_mine[peer]] if peer is not None else []

    def _takes_part(self, rank: int, one: Recorded) -> bool:
        return rank in self._facts.alignment.members(one.entry.group)[0]

    # --- a call -------------------------------------------------------------------------------------------------------

    def _call(self, rank: int, one: Recorded) -> Call:
        entry = one.entry
        functions = _functions_of(entry)
        op = min(functions, default="all_reduce")
        if len(functions) != 1:
            self._note(f"{op_name(entry)[:80]!r} is replayed as {op}.")
        call = Call(
            op,
            group=WORLD if entry.group in self._default else entry.group,
            sizes=self._sizes(op, entry),
            dtypes=(_dtype(entry),) if op != "barrier" else (),
            gets=self._known(entry.output_sizes) if op == "all_to_all" else (),
            site=self._facts.alignment.stack(rank, entry).user_frame,
        )
        if op in ROOTED:
            root, others = self._roots.of_all(one)
            call = replace(call, root=root, other_roots=others)
        if one.transfer is not None:
            call = replace(call, peer=self._place_in_group(entry.group, one.transfer.peer))
        return call

    def _sizes(self, op: str, entry: Collective) -> tuple[tuple[int, ...], ...]:
        if op == "barrier":
            return ()
        given = self._known(entry.output_sizes if op == "scatter" else entry.input_sizes)
        if op in ("all_reduce", "all_to_all") or len(given) == 1:
            return given
        return ((elements(given) or 0,),)

    def _known(self, sizes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if elements(sizes) is None or sizes == UNKNOWN_SIZES:
            self._note("Some sizes are not recorded: one element each.")
            return _SCALAR
        return sizes

    def _place_in_group(self, group: str, rank: int) -> int:
        ranks = sorted(self._facts.alignment.ranks_of(group))
        return ranks.index(rank) if rank in ranks else rank

    def _call_of_wait(self, one: RankFacts) -> Iterator[Call]:
        """A call that only the rank's stack tells of: gloo records no send, and some torch nothing at all."""
        wait = one.wait
        assert wait is not None
        if wait.kind == "init":
            return
        word = _OP_OF_WAIT.get(wait.op, wait.op)
        op = "new_group" if word == "new_group" else FUNCTIONS.get(word, "")
        posted = one.evidence.gil.posted if word not in TRANSFERS else ()
        if wait.kind == "p2p" and len(one.evidence.gil.posted) > 1:
            posted = one.evidence.gil.posted
        if posted:
            parts = [Call("send" if p.sends else "recv", WORLD, _SCALAR, peer=p.peer, tag=p.tag) for p in posted]
            self._note("Sends and receives of gloo are not recorded: those under way are read from the processes.")
            yield Call("batch", site=wait.frame, parts=tuple(parts))
        elif op in TRANSFERS:
            self._note("Sends and receives of gloo are not recorded: those under way are read from the stacks.")
            if wait.peer is None:
                self._note(f"Rank {one.rank}: the peer of its {op} is not known.")
            peer = wait.peer if wait.peer is not None else (one.rank + 1) % self._world
            yield Call(op, WORLD, _SCALAR, peer=peer, tag=wait.tag or 0, site=wait.frame)
        elif op:
            self._note(f"{op} of rank {one.rank} is not recorded: its group and sizes are not known.")
            root = wait.source if wait.source is not None else wait.target
            yield Call(op, WORLD, () if op in ("barrier", "new_group") else _SCALAR, root=root, site=wait.frame)
        else:
            self._note(f"Rank {one.rank} waits in {wait.op}, which is not recorded: a barrier stands for it.")
            yield Call("barrier", site=wait.frame)


def _share_a_group(made: Sequence[_Made], idents: set[int]) -> bool:
    threads: dict[str, set[int]] = {}
    for call in made:
        threads.setdefault(call.call.group, set()).add(call.thread if call.thread in idents else 0)
    return any(len(callers) > 1 for callers in threads.values())


def _functions_of(entry: Collective) -> set[str]:
    """What it stands for in torch.distributed; several for a block of several kinds, none where that is not known."""
    names = entry.ops if isinstance(entry, Block) else (op_name(entry).split(" ")[0],)
    return {FUNCTIONS[name] for name in names if name in FUNCTIONS}


def _passes_objects(entry: Collective) -> bool:
    return any(frame.function == OBJECTS for frame in entry.frames)


def _left(made: Iterable[_Made]) -> tuple[Call, ...]:
    return tuple(one.as_left for one in made)


def _launch_of(one: Recorded) -> tuple[bool, object]:
    """Sends and receives that were launched together have one number."""
    entry = one.entry
    return (True, (entry.group, entry.p2p_seq)) if entry.is_p2p else (False, 0)


def _dtype(entry: Collective) -> str:
    return next((name for name in (*entry.input_dtypes, *entry.output_dtypes) if name), "")


def _end_of(one: RankFacts) -> End:
    """What a rank does that waits for no peer."""
    condition, evidence = one.condition, one.evidence
    if condition is None:
        return End("stands", "missing-from-collective", "it was ended before it was looked at", one.frame)
    site = condition.frame or one.frame
    if condition.cause == "rank-killed" and evidence.exit is not None:
        return End("is killed", condition.cause, condition.reason, site, -evidence.exit.returncode)
    if condition.cause == "rank-exception":
        return End("raises", condition.cause, condition.reason, site)
    if condition.cause == "rank-exited":
        return End("exits", condition.cause, condition.reason, site, evidence.exit.returncode if evidence.exit else 0)
    if condition.cause == "uneven-batches":
        return End("leaves", condition.cause, condition.reason, site)
    return End("stands", condition.cause, condition.reason, site)


# --- roots ------------------------------------------------------------------------------------------------------------


class _Roots:
    """The root of each rooted collective, as a rank of its group: as the ranks' stacks name it, as the sizes of a
    gather or scatter tell, else one under which those that wait have to wait.
    """

    def __init__(self, facts: Facts, calls: Mapping[int, Sequence[Recorded]]) -> None:
        self._facts = facts
        self._there: dict[object, dict[int, Collective]] = {}
        for rank, made in calls.items():
            for one in made:
                if _functions_of(one.entry) & ROOTED:
                    self._there.setdefault(one.key, {})[rank] = one.entry
        self._assumed = self._deduced = 0
        self._found: dict[object, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._usual: dict[object, int] = {}  # the place of the root, by the line of a call that is not over
        for rank, made in calls.items():
            for one in made:
                if one.key in self._there and not one.entry.completed:
                    self._usual.setdefault(one.entry.frames, self.of(rank, one))

    def notes(self) -> Iterator[str]:
        if self._assumed:
            yield "Roots are not recorded: of calls that are over, one is assumed."
        if self._deduced:
            yield "The root of a call that hangs is one that those who wait in it can wait for."

    def of_all(self, one: Recorded) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The root that most of those name who are in the call, and the others that are named, with who does."""
        if one.key not in self._found:
            roots = {rank: self.of(rank, one) for rank in self._there[one.key]}
            usual, _ = Counter(roots.values()).most_common(1)[0]
            others = tuple((rank, root) for rank, root in sorted(roots.items()) if root != usual)
            self._found[one.key] = (usual, others)
        return self._found[one.key]

    def of(self, rank: int, one: Recorded) -> int:
        ranks = sorted(self._facts.alignment.ranks_of(one.entry.group))
        root = self._root(rank, one, ranks)
        return ranks.index(root) if root in ranks else 0

    def _root(self, rank: int, one: Recorded, ranks: Sequence[int]) -> int:
        there = self._there[one.key]
        named = {r: root for r in there if (root := self._named(r, there[r])) is not None}
        roots = [r for r, entry in there.items() if is_root(entry)]
        if rank in named:
            return named[rank]
        if rank in roots:
            return rank
        if named or roots:
            votes = Counter([*named.values(), *roots])
            return max(votes, key=lambda one: (one in there and there[one].completed, votes[one], -one))
        if set(there) >= set(ranks) and all(entry.completed for entry in there.values()):
            self._assumed += 1
            usual = self._usual.get(one.entry.frames, 0)
            return ranks[usual if usual < len(ranks) else 0]
        self._deduced += 1
        pending = {r for r, entry in there.items() if not entry.completed}
        if op_name(one.entry) in ("reduce", "_reduce_oop", "gather"):
            return min(pending, default=ranks[0])
        done = [r for r in ranks if r in there and r not in pending]
        absent = [r for r in ranks if r not in there]
        return next(iter([*done, *absent]), ranks[0])

    def _named(self, rank: int, entry: Collective) -> int | None:
        wait = self._facts.ranks[rank].wait
        if wait is None or (wait.group, wait.seq) != (entry.group, entry.seq) or entry.completed:
            return None
        return wait.source if wait.source is not None else wait.target
