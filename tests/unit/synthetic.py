"""Jobs made on paper: ranks in a grid (data x tensor x pipeline), a schedule of collectives, one fault, and where
everything comes to rest.

A collective completes once all members of its group have entered it under the same number with the same operation and
size; a send once its receive of the same size is there; a wrong pair waits for ever, as NCCL's does. What a Flight
Recorder and the stacks would show of that is the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache

from evidence import C10D, LOGGER, at, in_c10d, in_user, job, rank

from safelaunch.model import Collective, Evidence, FlightRecord, Frame

MODULE_LINE = 100


@dataclass(frozen=True)
class Call:
    """One collective as a rank's program makes it, or a send or receive (``peer``: rank in the group); ``line`` of the
    user's script."""

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
        """Name → members, of more than one member; ``0`` is everybody."""
        found: dict[str, list[int]] = {"0": list(range(self.world))}
        for number in range(self.world):
            tensor, rest = number % self.tensor, number // self.tensor
            data, stage = rest % self.data, rest // self.data
            found.setdefault(f"t{data}-{stage}", []).append(number)
            found.setdefault(f"d{tensor}-{stage}", []).append(number)
            found.setdefault(f"p{data}-{tensor}", []).append(number)
        return {name: tuple(members) for name, members in found.items() if len(members) > 1}

    def of_rank(self, number: int) -> dict[str, str]:
        """tensor, data, pipeline → this rank's group, where it has one."""
        tensor, rest = number % self.tensor, number // self.tensor
        data, stage = rest % self.data, rest // self.data
        names = {"tensor": f"t{data}-{stage}", "data": f"d{tensor}-{stage}", "pipeline": f"p{data}-{tensor}"}
        return {kind: name for kind, name in names.items() if name in self.groups()}


def schedule(layout: Layout, steps: int, layers: int, *, sends: bool = False) -> dict[int, list[Call]]:
    """Each rank's calls: per step an all_reduce for each layer in its tensor group, gradients in its data group, every
    second step a check in its pipeline group, every third one of everybody; and a barrier at the end.

    ``sends``: stages pass a batch on, forward before the layers and backward behind them.
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
    """``kind``: stop, skip, extra, swap, shape, op, group; at call number ``index`` of ``rank``."""

    kind: str
    rank: int
    index: int


def inject(programs: dict[int, list[Call]], fault: Fault) -> dict[int, list[Call]] | None:
    """The programs with the fault in them; None where it makes no difference there."""
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
) -> Evidence:
    """What would be captured: stacks, unless the dumps are all there is, and the last ``window(rank)`` entries.

    ``frames`` False: as in JSON dumps, entries without them. ``ahead``: how many calls behind the one in which it waits
    each rank's CPU has queued; nothing tells which of them the device has begun.
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
                    op=f"nccl:{call.op}{arrow if call.is_p2p else ''}",
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
            ranks.append(rank(number, in_c10d(call.op, call.line), flight=flight, step=None, seen=stacks))
        else:
            ranks.append(rank(number, in_user(7), "sleep", flight=flight, step=None, seen=stacks))
    return job(*ranks)
