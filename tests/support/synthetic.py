"""Generates jobs: ranks in a grid (data x tensor x pipeline), a schedule of collectives, and one fault.

A collective completes once all members of its group have entered it under the same number with the same operation and
size; a send once its receive of the same size is there. A mismatch waits forever, as NCCL's does. The evidence is what
a Flight Recorder and the stacks would show when everything has come to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, partial

from msgspec import structs

from safelaunch.model import Collective, Evidence, FlightRecord, Frame, RankEvidence
from tests.support.evidence import C10D, LOGGER, STDLIB, at, in_c10d, in_user, job, rank

MODULE_LINE = 100


@dataclass(frozen=True)
class Call:
    """One collective, send or receive in a rank's program.

    Attributes:
        line: Line of the user's script.
        peer: Rank in the group.
    """

    group: str
    op: str
    size: int
    line: int
    peer: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.peer >= 0


@dataclass(frozen=True)
class Layout:
    """``data`` x ``tensor`` x ``pipeline`` ranks. Ranks of one tensor group are neighbours."""

    data: int
    tensor: int
    pipeline: int

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    @cache  # noqa: B019 - a layout is a few numbers
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Returns the groups of more than one member by name; ``0`` has all ranks."""
        found: dict[str, list[int]] = {"0": list(range(self.world))}
        for number in range(self.world):
            tensor, rest = number % self.tensor, number // self.tensor
            data, stage = rest % self.data, rest // self.data
            found.setdefault(f"t{data}-{stage}", []).append(number)
            found.setdefault(f"d{tensor}-{stage}", []).append(number)
            found.setdefault(f"p{data}-{tensor}", []).append(number)
        return {name: tuple(members) for name, members in found.items() if len(members) > 1}

    def of_rank(self, number: int) -> dict[str, str]:
        """Returns this rank's group, if any, by kind: tensor, data, pipeline."""
        tensor, rest = number % self.tensor, number // self.tensor
        data, stage = rest % self.data, rest // self.data
        names = {"tensor": f"t{data}-{stage}", "data": f"d{tensor}-{stage}", "pipeline": f"p{data}-{tensor}"}
        return {kind: name for kind, name in names.items() if name in self.groups()}


def schedule(layout: Layout, steps: int, layers: int, *, sends: bool = False) -> dict[int, list[Call]]:
    """Returns each rank's calls.

    Each step has an all_reduce per layer in the tensor group, and gradients in the data group; every second step has a
    check in the pipeline group, every third step one of all ranks. A barrier is at the end.

    Args:
        sends: Stages pass on a batch, forward before the layers and backward after them.
    """
    programs: dict[int, list[Call]] = {}
    for number in range(layout.world):
        mine = layout.of_rank(number)
        stage = number // (layout.data * layout.tensor)
        ends = [peer if 0 <= peer < layout.pipeline and sends else None for peer in (stage - 1, stage + 1)]
        calls: list[Call] = []
        for step in range(steps):
            calls += _passed(mine, ends[0], "recv", 60) + _passed(mine, ends[1], "send", 61)
            if "tensor" in mine:
                calls += [Call(mine["tensor"], "all_reduce", 16, 10 + layer) for layer in range(layers)]
            calls += _passed(mine, ends[1], "recv", 62) + _passed(mine, ends[0], "send", 63)
            if "data" in mine:
                calls.append(Call(mine["data"], "all_reduce", 64, 30))
            if "pipeline" in mine and step % 2:
                calls.append(Call(mine["pipeline"], "broadcast", 4, 35))
            if step % 3 == 2:
                calls.append(Call("0", "all_reduce", 1, 40))
        programs[number] = [*calls, Call("0", "barrier", 0, 50)]
    return programs


def _passed(mine: dict[str, str], peer: int | None, op: str, line: int) -> list[Call]:
    return [Call(mine["pipeline"], op, 32, line, peer)] if peer is not None else []


@dataclass(frozen=True)
class Fault:
    """A fault of this kind (stop, skip, extra, swap, shape, op, group) at call number ``index`` of ``rank``."""

    kind: str
    rank: int
    index: int


def inject(programs: dict[int, list[Call]], fault: Fault) -> dict[int, list[Call]] | None:
    """Returns the programs with the fault; None if it makes no difference there."""
    calls = list(programs[fault.rank])
    here = calls[fault.index]
    if fault.kind == "stop":
        calls = calls[: fault.index]
    elif fault.kind == "skip":
        del calls[fault.index]
    elif fault.kind == "extra":
        calls.insert(fault.index, replace(here, line=77))
    elif fault.kind == "swap":
        following = calls[fault.index + 1] if fault.index + 1 < len(calls) else here
        if (following.group, following.op, following.size) == (here.group, here.op, here.size):
            return None
        calls[fault.index : fault.index + 2] = [following, here]
    elif fault.kind == "shape":
        calls[fault.index] = replace(here, size=here.size + 1, line=78)
    elif fault.kind == "op":
        op = {"send": "recv", "recv": "send"}.get(here.op, "all_gather")
        calls[fault.index] = replace(here, op=op, line=79)
    elif fault.kind == "group":
        other = next((call.group for call in reversed(calls) if call.group != here.group), None)
        if other is None or here.is_p2p:
            return None
        calls[fault.index] = replace(here, group=other, line=80)
    return {**programs, fault.rank: calls}


MORE_KINDS = ("retry", "members", "random")


def plant(
    layout: Layout, programs: dict[int, list[Call]], fault: Fault, dice: random.Random
) -> tuple[dict[int, list[Call]], frozenset[int]] | None:
    """Returns the programs with a fault of ``MORE_KINDS``, and the ranks at fault; None if it makes no difference.

    Kind ``retry``: the rank makes the calls of a whole round twice. Kind ``members``: it and the others of one of its
    groups leave out the next call of all ranks. Kind ``random``: each rank chooses at random if it makes one more call
    of all ranks, so no particular rank is at fault.
    """
    calls = programs[fault.rank]
    if fault.kind == "retry":
        here = calls[fault.index]
        again = next((n for n in range(fault.index + 1, len(calls)) if calls[n] == here), None)
        if again is None:
            return None
        changed = [*calls[:again], *calls[fault.index : again], *calls[again:]]
        return {**programs, fault.rank: changed}, frozenset([fault.rank])
    groups = layout.groups()
    mine = [groups[name] for name in layout.of_rank(fault.rank).values() if 2 * len(groups[name]) < layout.world]
    common = [n for n in range(len(calls)) if calls[n].group == "0" and n >= fault.index]
    if not common or (fault.kind == "members" and not mine) or (fault.kind == "random" and layout.world in (1, 3)):
        return None
    nth = sum(call.group == "0" for call in calls[: common[0]])
    most = max(1, layout.world - 2)
    drawn = dice.sample(range(layout.world), dice.randint(min(2, most), most)) if fault.kind == "random" else None
    changed_of = {}
    for number in drawn if drawn is not None else dice.choice(mine):
        theirs = list(programs[number])
        at = [n for n in range(len(theirs)) if theirs[n].group == "0"][nth]
        if drawn is None:
            del theirs[at]
        else:
            theirs.insert(at, Call("0", "all_reduce", 8, 91))
        changed_of[number] = theirs
    return {**programs, **changed_of}, frozenset(changed_of if drawn is None else ())


SIDE_LINE, JOIN_LINE = 70, 95
SIDE_KINDS = ("side thread", "main thread", "race")


def threaded(layout: Layout, kind: str, dice: random.Random) -> tuple[frozenset[int], Evidence]:
    """Returns a job with calls from a second thread, in a separate group or, for a ``race``, in the group of all ranks.

    Kind ``side thread``: one doesn't make its next call, and all main threads wait for theirs to end. Kind ``main
    thread``: one rank's main thread doesn't. Kind ``race``: on some ranks, the threads came in another order; no rank
    is at fault.
    """
    world, steps = layout.world, dice.randint(3, 9)
    odd = dice.randrange(world)
    swapped = set(dice.sample(range(world), dice.randint(1, world - 1))) if kind == "race" else set()
    group = "0" if kind == "race" else "side"
    ranks = []
    for number in range(world):
        made: list[tuple[str, str, int, int]] = []  # group, operation, line, thread
        for _ in range(steps):
            made += [("0", "all_reduce", 10, 1), ("0", "all_reduce", 11, 1)]
            at = len(made) if kind == "race" else dice.randint(max(0, len(made) - 3), len(made))
            made.insert(at, (group, "all_gather", SIDE_LINE, 2))
        last = [("0", "all_reduce", 10, 1), (group, "all_gather", SIDE_LINE, 2)]
        if number in swapped:
            last.reverse()
        if kind == "side thread":
            last = last[1:] if number != odd else []
        elif kind == "main thread":
            last = last[:1] if number != odd else []
        ranks.append(_threaded_rank(number, made, last, kind, group, world))
    return frozenset() if kind == "race" else frozenset([odd]), job(*ranks)


def _threaded_rank(
    number: int,
    made: list[tuple[str, str, int, int]],
    last: list[tuple[str, str, int, int]],
    kind: str,
    group: str,
    world: int,
) -> RankEvidence:
    seqs: Counter[str] = Counter()
    entries = []
    for place, (of, op, line, thread) in enumerate([*made, *last]):
        seqs[of] += 1
        frames = (Frame(C10D, 3245, op), Frame(LOGGER, 83, "wrapper"), *_begin(thread, line))
        entries.append(
            Collective(
                group=of,
                seq=seqs[of],
                op=f"gloo:{op}",
                completed=place < len(made),
                state="scheduled",
                description="default_pg" if of == "0" else "undefined",
                record_id=place,
                input_sizes=((16 * thread,),),
                input_dtypes=("Float",),
                frames=frames,
                thread=thread,
            )
        )
    pending = {thread: (op, line) for _, op, line, thread in last}
    lib = (
        Frame(f"{STDLIB}/threading.py", 1, "Thread._wait_for_tstate_lock"),
        Frame(f"{STDLIB}/threading.py", 1, "Thread.join"),
    )
    queue = (Frame(f"{STDLIB}/threading.py", 1, "Condition.wait"), Frame(f"{STDLIB}/queue.py", 1, "Queue.get"))
    if 1 in pending:
        main, kernel = (
            (Frame(C10D, 3252, pending[1][0]), Frame(LOGGER, 83, "wrapper"), *_begin(1, pending[1][1])),
            "futex",
        )
    elif kind == "side thread":
        main, kernel = (*lib, *_begin(1, JOIN_LINE)), "futex"
    else:
        main, kernel = _begin(1, 7), "sleep"
    if 2 in pending:
        side = ((Frame(C10D, 3252, pending[2][0]), Frame(LOGGER, 83, "wrapper"), *_begin(2, pending[2][1])), "futex")
    elif kind == "side thread":
        side = (_begin(2, 8), "sleep")
    else:
        side = ((*queue, *_begin(2, 69)), "futex")
    flight = FlightRecord("2.10", tuple(entries), {"0": tuple(range(world)), group: tuple(range(world))})
    made_of = rank(number, main, kernel, flight=flight, step=None, threads=[("metrics", *side)])
    assert made_of.main is not None
    stacks = tuple(
        structs.replace(sample, threads=tuple(structs.replace(one, ident=n) for n, one in enumerate(sample.threads, 1)))
        for sample in made_of.main.stacks
    )
    return structs.replace(made_of, main=structs.replace(made_of.main, stacks=stacks))


def _begin(thread: int, line: int) -> tuple[Frame, ...]:
    if thread == 1:
        return (at(line), at(MODULE_LINE, "<module>"))
    return (at(line, "report"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))


@dataclass
class _Rank:
    position: int = 0
    entered: bool = False


def play(layout: Layout, programs: dict[int, list[Call]]) -> dict[int, tuple[int, bool]]:
    """rank → (calls completed, does it wait in the next one): the state in which nothing moves any more."""
    groups = layout.groups()
    numbers: dict[int, dict[Hashable, int]] = {r: {} for r in programs}
    ranks = {r: _Rank() for r in programs}
    there: dict[Hashable, dict[int, Call]] = {}
    ready = list(programs)
    while ready:
        number = ready.pop()
        state = ranks[number]
        if state.position >= len(programs[number]):
            continue
        call = programs[number][state.position]
        members = groups[call.group]
        place: tuple[Hashable, ...] = (call.group,)
        if call.is_p2p:
            ends = (members.index(number), call.peer)
            place = (call.group, *(ends if call.op == "send" else ends[::-1]))
            members = (number, members[call.peer])
        side = (*place, call.op if call.is_p2p else "")
        seq = numbers[number][side] = numbers[number].get(side, 0) + 1
        state.entered = True
        met = there.setdefault((*place, seq), {})
        met[number] = call
        if len(met) == len(members) and len({("p2p" if c.is_p2p else c.op, c.size) for c in met.values()}) == 1:
            for member in met:
                ranks[member].position += 1
                ranks[member].entered = False
            ready += met
    return {r: (state.position, state.entered) for r, state in ranks.items()}


def number_of(calls: list[Call], index: int) -> int:
    """The sequence number of call ``index`` in its group; sends and receives count for themselves."""
    here = calls[index]
    return sum((call.group, call.is_p2p) == (here.group, here.is_p2p) for call in calls[: index + 1])


def evidence_of(
    layout: Layout,
    programs: dict[int, list[Call]],
    rest: dict[int, tuple[int, bool]],
    *,
    window: Callable[[int], int] = lambda rank: 2000,
    stacks: bool = True,
    frames: bool = True,
    ahead: int = 0,
    polled: bool = False,
    backend: str = "nccl",
) -> Evidence:
    """Returns what would be captured: stacks, unless there are only dumps, and the last ``window(rank)`` entries.

    Args:
        frames: False for entries without frames, as in JSON dumps.
        ahead: Each rank's CPU has queued this many calls after the one in which it waits; nothing shows how many of
            them the device has begun.
        polled: Ranks poll their call (``is_completed``) and sleep between polls.
    """
    groups = layout.groups()
    known: dict[tuple[Call, bool], tuple[Frame, ...]] = {}
    ranks = []
    for number, (done, waits) in rest.items():
        entries: list[Collective] = []
        seqs: dict[tuple[str, bool], int] = {}
        queued = ahead if waits else 0
        for place, call in enumerate(programs[number][: done + waits + queued]):
            seqs[call.group, call.is_p2p] = seqs.get((call.group, call.is_p2p), 0) + 1
            arrow = f" {groups[call.group].index(number)}{'->' if call.op == 'send' else '<-'}{call.peer}"
            lines = known.setdefault(
                (call, True),
                (Frame(C10D, 3245, call.op), Frame(LOGGER, 83, "wrapper"), at(call.line), at(MODULE_LINE, "<module>")),
            )
            entries.append(
                Collective(
                    group=call.group,
                    seq=seqs.get((call.group, False), 0),
                    op=f"{backend}:{call.op}{arrow if call.is_p2p else ''}",
                    is_p2p=call.is_p2p,
                    p2p_seq=seqs.get((call.group, True), 0),
                    completed=place < done,
                    state="completed" if place < done else "scheduled",
                    description="default_pg" if call.group == "0" else "undefined",
                    record_id=place,
                    input_sizes=((call.size,),) if call.size else (),
                    input_dtypes=("Float",) if call.size else (),
                    frames=lines if frames else (),
                )
            )
        mine = {n: groups[n] for n in ("0", *layout.of_rank(number).values()) if n in groups}
        flight = FlightRecord("2.10", tuple(entries[-window(number) :]), mine)
        if waits:
            call = programs[number][done]
            if polled:
                nap = rank(number, in_user(call.line), "nap", flight=flight, step=None, seen=stacks)
                ranks.append(nap)
                continue
            ranks.append(rank(number, in_c10d(call.op, call.line), flight=flight, step=None, seen=stacks))
        else:
            ranks.append(rank(number, in_user(7), "sleep", flight=flight, step=None, seen=stacks))
    return job(*ranks)


KINDS = ("stop", "skip", "extra", "swap", "shape", "op", "group")


def window_of(least: int, rank: int) -> int:
    return least + rank % 3


def generated(kind: str, variant: str, layout: tuple[int, int, int], seed: int) -> Evidence | None:
    dice, grid = random.Random(f"{kind} {variant} {layout} {seed}"), Layout(*layout)
    for _ in range(20):
        programs = schedule(grid, dice.randint(4, 9), dice.randint(1, 3), sends="sends" in variant)
        rank = dice.randrange(grid.world)
        fault = Fault(kind, rank, dice.randrange(len(programs[rank]) - 1))
        planted = inject(programs, fault)
        rest = play(grid, planted) if planted else {}
        if planted and any(waits for _, waits in rest.values()):
            least = dice.randint(3, 12) if "window" in variant else 2000
            window = partial(window_of, least)
            found: Evidence = evidence_of(grid, planted, rest, window=window, stacks="no stacks" not in variant)
            return found
    return None
