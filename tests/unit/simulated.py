"""Small jobs that are executed on paper: a simulator of ranks, threads and calls, and what a look at it would show.

A collective is numbered where a thread enters it, and may end once all members have entered that number with the same
operation, size and root; others wait for good. Sends and receives end when the other side is there. They are gloo's,
which no Flight Recorder holds. Locks, queues, events and joins are Python's. The end of a call is a move of its own: in
between the call is under way, and its threads wait although nothing is wrong.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from evidence import C10D, STDLIB, WRAPPER, at, job
from msgspec import structs

from safelaunch.model import (
    CallArguments,
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    OtherEnd,
    ProcessEvidence,
    ProcessState,
    RankEvidence,
    RankExit,
    StackSample,
    Thread,
    ThreadState,
)

CAPACITY = 1  # of a queue


@dataclass(frozen=True)
class Op:
    """``kind``: call | start | wait | send | recv | lock | unlock | put | get | event | set | join | sleep | exit.

    ``name``: of the group, lock, queue or event. ``to``: the peer of a send or receive, the thread to be joined, or the
    root of a broadcast. ``start`` makes a call and does not wait for it, ``wait`` waits for the newest such call of the
    thread. ``limited``: the wait has a time limit.
    """

    kind: str
    name: str = ""
    op: str = "all_reduce"
    size: int = 4
    to: int = -1
    limited: bool = False


@dataclass(frozen=True)
class Program:
    """``threads``: the operations of each thread, the main one first. ``daemons``: threads that do not outlive it."""

    threads: tuple[tuple[Op, ...], ...]
    daemons: frozenset[int] = frozenset()


@dataclass
class Entry:
    group: str
    seq: int
    op: Op
    thread: int
    line: int
    done: bool = False


@dataclass
class Actor:
    """A thread. ``status``: ready (it will run) | blocked (in its operation) | asleep | done."""

    rank: int
    index: int
    at: int = 0
    status: str = "ready"
    entry: Entry | None = None  # of the call that it is in
    started: Entry | None = None


Move = tuple[str, object]


@dataclass
class Job:
    programs: dict[int, Program]
    groups: dict[str, tuple[int, ...]]
    actors: dict[tuple[int, int], Actor] = field(default_factory=dict)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    numbers: Counter[tuple[int, str]] = field(default_factory=Counter)
    locked: set[tuple[int, str]] = field(default_factory=set)
    items: Counter[tuple[int, str]] = field(default_factory=Counter)
    set_events: set[tuple[int, str]] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, programs: dict[int, Program], groups: dict[str, tuple[int, ...]]) -> Job:
        new = cls(programs, groups)
        for rank, program in programs.items():
            new.entries[rank] = []
            for index, _ in enumerate(program.threads):
                new.actors[rank, index] = Actor(rank, index)
        return new

    def copy(self) -> Job:
        new = copy.copy(self)
        memo: dict[int, object] = {id(self.programs): self.programs, id(self.groups): self.groups}
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def op(self, actor: Actor) -> Op | None:
        ops = self.programs[actor.rank].threads[actor.index]
        return ops[actor.at] if actor.at < len(ops) else None

    def living(self) -> Iterator[Actor]:
        return (one for one in self.actors.values() if one.status != "done" and one.rank not in self.gone)

    # --- moves --------------------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for actor in self.living():
            op = self.op(actor)
            may = actor.status in ("ready", "asleep") or (op is not None and op.limited) or self.may_go_on(actor)
            found += [("run", (actor.rank, actor.index))] if may else []
        return [*found, *self.under_way()]

    def under_way(self) -> list[Move]:
        """Calls that have all that they need."""
        found: list[Move] = []
        entered: dict[tuple[str, int], dict[int, Entry]] = {}
        for rank, entries in self.entries.items():
            for entry in entries:
                if not entry.done and rank not in self.gone:
                    entered.setdefault((entry.group, entry.seq), {})[rank] = entry
        for (group, seq), members in entered.items():
            if members.keys() == set(self.groups[group]) and len({_what(e.op) for e in members.values()}) == 1:
                found.append(("end", (group, seq)))
        waiting = [(one, op) for one in self.living() if one.status == "blocked" and (op := self.op(one)) is not None]
        for sender, sent in waiting:
            for receiver, received in waiting:
                if (sent.kind, received.kind) == ("send", "recv") and (sent.to, received.to) == (
                    receiver.rank,
                    sender.rank,
                ):
                    found.append(("pass", ((sender.rank, sender.index), (receiver.rank, receiver.index))))
        return found

    def may_go_on(self, actor: Actor) -> bool:
        """Whether a thread that is blocked, in anything but a call, would find now what it waits for."""
        op = self.op(actor)
        if op is None:  # the end of the main thread, which waits for the others
            return actor.index > 0 or all(self._is_over(actor.rank, n) for n in self._outliving(actor.rank))
        here = (actor.rank, op.name)
        if op.kind == "lock":
            return here not in self.locked
        if op.kind == "put":
            return self.items[here] < CAPACITY
        if op.kind == "get":
            return self.items[here] > 0
        if op.kind == "event":
            return here in self.set_events
        if op.kind == "join":
            return self._is_over(actor.rank, op.to)
        if op.kind == "wait":
            return actor.started is None or actor.started.done
        return op.kind not in ("call", "send", "recv")

    def _outliving(self, rank: int) -> list[int]:
        return [n for n in range(1, len(self.programs[rank].threads)) if n not in self.programs[rank].daemons]

    def _is_over(self, rank: int, index: int) -> bool:
        return self.actors[rank, index].status == "done"

    def make(self, move: Move) -> None:
        what, which = move
        if what == "end":
            for rank in self.groups[which[0]]:  # type: ignore[index]
                for entry in self.entries[rank]:
                    entry.done |= (entry.group, entry.seq) == which
            for actor in self.actors.values():
                if actor.entry is not None and actor.entry.done:
                    actor.entry = None
                    self._next(actor)
        elif what == "pass":
            for key in which:  # type: ignore[attr-defined]
                self._next(self.actors[key])
        else:
            self._run(self.actors[which])  # type: ignore[index]

    def _next(self, actor: Actor) -> None:
        actor.at += 1
        actor.status = "ready"

    def _run(self, actor: Actor) -> None:
        op = self.op(actor)
        if actor.status == "asleep" or (actor.status == "blocked" and op is not None and op.limited):
            self._next(actor)  # the sleep, or the time limit, is over
        elif op is None:
            if actor.index > 0:
                actor.status = "done"
            elif self.may_go_on(actor):
                self._end(actor.rank)
            else:
                actor.status = "blocked"
        elif op.kind in ("call", "start"):
            self._enter(actor, op)
        elif op.kind == "sleep":
            actor.status = "asleep"
        elif op.kind == "exit":
            self._end(actor.rank)
        elif self.may_go_on(actor):
            self._do(actor, op)
            self._next(actor)
        else:
            actor.status = "blocked"

    def _enter(self, actor: Actor, op: Op) -> None:
        self.numbers[actor.rank, op.name] += 1
        entry = Entry(op.name, self.numbers[actor.rank, op.name], op, actor.index, line_of(actor))
        self.entries[actor.rank].append(entry)
        if op.kind == "call":
            actor.entry, actor.status = entry, "blocked"
        else:
            actor.started = entry
            self._next(actor)

    def _do(self, actor: Actor, op: Op) -> None:
        here = (actor.rank, op.name)
        if op.kind == "lock":
            self.locked.add(here)
        elif op.kind == "unlock":
            self.locked.discard(here)
        elif op.kind in ("put", "get"):
            self.items[here] += 1 if op.kind == "put" else -1
        elif op.kind == "set":
            self.set_events.add(here)

    def _end(self, rank: int) -> None:
        self.gone.add(rank)
        for actor in self.actors.values():
            if actor.rank == rank:
                actor.status = "done"

    def play(self, rng: random.Random, steps: int = 1000, slow: frozenset[str] = frozenset()) -> Job:
        """Makes so many random moves, at most. ``slow``: what ends last: calls (``end``, ``pass``), sleeps (``wake``);
        where nothing else is left, the job is left so as often as not."""
        for _ in range(steps):
            moves = self.moves()
            quick = [move for move in moves if self._kind(move) not in slow]
            if not moves or (not quick and rng.random() < 0.3):
                break
            self.make(rng.choice(quick or moves))
        return self

    def _kind(self, move: Move) -> str:
        actor = self.actors[move[1]] if move[0] == "run" else None  # type: ignore[index]
        return move[0] if actor is None else "wake" if actor.status != "ready" else "run"

    @property
    def is_at_rest(self) -> bool:
        return not self.moves()

    def places(self) -> dict[tuple[int, int], tuple[int, str]]:
        """Of each living thread, where it is: a thread that has moved is elsewhere, or has ended."""
        return {(one.rank, one.index): (one.at, one.status) for one in self.living()}


def _what(op: Op) -> tuple[str, int, int]:
    return (op.op, op.size, op.to)


def line_of(actor: Actor) -> int:
    return 100 * (actor.index + 1) + actor.at


# --- what a look shows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """What the look sees. ``unrecorded``: ranks without a Flight Recorder. ``arguments``: ranks whose calls show whom
    they name. ``futexes``: ranks on which it is seen whose futex a thread rests in, if that isn't a lock of Python's.
    ``lines``: entries have frames."""

    unrecorded: frozenset[int] = frozenset()
    arguments: frozenset[int] = frozenset(range(99))
    futexes: frozenset[int] = frozenset(range(99))
    lines: bool = True

    def is_whole(self, ranks: int) -> bool:
        every = set(range(ranks))
        return not self.unrecorded and every <= self.arguments and every <= self.futexes


def pid_of(rank: int) -> int:
    return 1000 + 10 * rank


def evidence_of(job_: Job, rng: random.Random, sight: Sight | None = None) -> Evidence:
    ranks = [_rank(job_, rank, rng, sight or Sight()) for rank in job_.programs]
    return job(*ranks)


def _rank(job_: Job, rank: int, rng: random.Random, sight: Sight) -> RankEvidence:
    pid = pid_of(rank)
    mine = {name: members for name, members in job_.groups.items() if rank in members}
    entries = _warm(job_, rank) + [_recorded(n, e, sight) for n, e in enumerate(job_.entries[rank], 50)]
    flight = None if rank in sight.unrecorded else FlightRecord("2.10", tuple(entries), mine)
    one = RankEvidence(rank=rank, host="node1", pid=pid, flight_record=flight)
    if rank in job_.gone:
        return structs.replace(one, exit=RankExit(0, 1e9))
    threads = [actor for actor in job_.living() if actor.rank == rank]
    seen = [_thread(job_, actor, rng, sight) for actor in threads]
    states, stacks = [], []
    for number in range(2):
        kernel = tuple(pair[number][1] for pair in seen)
        states.append(ProcessState(pid, 1, 5, 2.0 * number, "python", ("python",), kernel[0].state, kernel))
        stacks.append(StackSample(pid, 2.0 * number, "py-spy dump --json", tuple(pair[number][0] for pair in seen)))
    return structs.replace(one, main=ProcessEvidence("main", tuple(states), tuple(stacks)))


def _warm(job_: Job, rank: int) -> list[Collective]:
    """Each thread that makes calls has made one in a group of its own: the record shows who does."""
    calling = [
        index
        for index, ops in enumerate(job_.programs[rank].threads)
        if any(op.kind in ("call", "start") for op in ops)
    ]
    entries = [Entry(f"alone {rank}", n, Op("call", size=1), index, 1, done=True) for n, index in enumerate(calling, 1)]
    return [_recorded(number, entry, Sight()) for number, entry in enumerate(entries)]


def _recorded(number: int, entry: Entry, sight: Sight) -> Collective:
    return Collective(
        group=entry.group,
        seq=entry.seq,
        op=f"gloo:{entry.op.op}",
        completed=entry.done,
        state="completed" if entry.done else "scheduled",
        description="undefined",
        record_id=number,
        input_sizes=((entry.op.size,),),
        input_dtypes=("Float",),
        frames=(Frame(C10D, 3245, entry.op.op), WRAPPER, at(entry.line)) if sight.lines else (),
        thread=entry.thread + 1,
    )


_FUTEX = {"state": "S", "wchan": "futex_do_wait", "syscall": 202, "syscall_name": "futex"}
_ASLEEP = (
    {"state": "S", "wchan": "hrtimer_nanosleep", "syscall": 230, "syscall_name": "clock_nanosleep", "ends_s": 500.0},
    {"state": "S", "wchan": "wait_woken", "syscall": 0, "syscall_name": "read", "fd": 7, "fd_target": "tcp 1.2.3.4:80"},
    {"state": "S", "wchan": "pipe_read", "syscall": 0, "syscall_name": "read", "fd": 7, "ends": (OtherEnd(77),)},
    {"state": "S", "wchan": "poll_schedule_timeout", "syscall": 7, "syscall_name": "poll"},
    {"state": "S", "wchan": "do_wait", "syscall": 61, "syscall_name": "wait4", "child": 78},
    {"state": "D", "wchan": "rpc_wait_bit_killable"},
)
_LIBRARY = {
    "put": (("threading.py", "Condition.wait"), ("queue.py", "Queue.put")),
    "get": (("threading.py", "Condition.wait"), ("queue.py", "Queue.get")),
    "event": (("threading.py", "Condition.wait"), ("threading.py", "Event.wait")),
    "join": (("threading.py", "Thread._wait_for_tstate_lock"), ("threading.py", "Thread.join")),
    "end": (("threading.py", "Thread._wait_for_tstate_lock"), ("threading.py", "_shutdown")),
}


def _thread(job_: Job, actor: Actor, rng: random.Random, sight: Sight) -> list[tuple[Thread, ThreadState]]:
    """The thread as two looks see it."""
    op, pid = job_.op(actor), pid_of(actor.rank)
    kind = op.kind if op is not None else "end"
    tid, ident = pid + actor.index, actor.index + 1
    own = at(line_of(actor), "train" if actor.index == 0 else "report")
    base = at(9, "<module>") if actor.index == 0 else Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
    thread = Thread((own, base), "MainThread" if actor.index == 0 else f"side {actor.index}", tid, ident=ident)
    if actor.status == "asleep":
        state = ThreadState(tid=tid, name="python", slices=5, **rng.choice(_ASLEEP))  # type: ignore[arg-type]
        return [(thread, state), (thread, state)]
    if actor.status != "blocked" or job_.may_go_on(actor):
        return _running(thread, rng)
    inner: tuple[Frame, ...] = tuple(
        Frame(f"{STDLIB}/{file}", 1, function) for file, function in _LIBRARY.get(kind, ())
    )
    rests_in = "lock"
    call = None
    if kind in ("call", "send", "recv"):
        assert op is not None
        inner = (Frame(C10D, 3252, op.op if kind == "call" else kind), WRAPPER)
        call = CallArguments(dst=op.to) if kind == "send" else CallArguments(src=op.to) if op.to >= 0 else None
        rests_in = "libtorch_cpu.so"
    elif kind == "wait":
        rests_in = "libtorch_cpu.so"
    if actor.rank not in sight.futexes and kind != "lock":
        rests_in = ""
    frames = (*inner, base) if kind == "end" else (*inner, own, base)
    thread = structs.replace(thread, frames=frames, call=call if actor.rank in sight.arguments else None)
    ends_s = 300.0 if op is not None and op.limited else None
    state = ThreadState(tid=tid, name="python", slices=5, rests_in=rests_in, ends_s=ends_s, **_FUTEX)  # type: ignore[arg-type]
    return [(thread, state), (thread, state)]


def _running(thread: Thread, rng: random.Random) -> list[tuple[Thread, ThreadState]]:
    """It runs between the looks, however that shows: in its state, its frames, or how often it was given a core."""
    tid = thread.os_tid or 0
    how = rng.choice(("R", "frames", "torn", "slices", "stopped"))
    futex = ThreadState(tid=tid, name="python", slices=5, rests_in="lock", **_FUTEX)  # type: ignore[arg-type]
    if how == "R":
        states = [ThreadState(tid, "python", "R", wchan="0", cpu_ms=2000 * n, slices=5 + n) for n in range(2)]
        return [(structs.replace(thread, active=True), state) for state in states]
    if how == "stopped":
        stopped = ThreadState(tid, "python", "T", wchan="do_signal_stop")
        return [(thread, stopped), (thread, stopped)]
    if how == "slices":
        return [(thread, futex), (thread, structs.replace(futex, slices=6))]
    if how == "torn":
        return [(thread, futex), (structs.replace(thread, torn=True), futex)]
    return [(thread, futex), (structs.replace(thread, frames=(at(7, "other"), *thread.frames)), futex)]
