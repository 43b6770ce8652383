"""Small simulated jobs: a simulator of ranks, threads and calls, and of what a look at it would show.

A collective gets its number when a thread enters it, and can end once all members have entered that number with the
same operation, size and root; others wait forever. Sends and receives end when the other side is there. They are
gloo's, so no Flight Recorder has them. Locks, queues, events and joins are Python's. The end of a call is a separate
move: until then, the call is in progress, and its threads wait although nothing is wrong.

A rank can have helpers: processes that share semaphores and pipes with it, and that a timer can end. A signal can run a
handler of its main thread, a stranger can open a named semaphore, and a library has its own threads.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from safelaunch.model import (
    CallArguments,
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    GilTest,
    OtherEnd,
    ProcessEvidence,
    ProcessState,
    Progress,
    RankEvidence,
    RankExit,
    StackSample,
    Thread,
    ThreadState,
)
from tests.support.evidence import C10D, STDLIB, WRAPPER, at, job

CAPACITY = 1  # of a queue
HELPER = 100  # index of a rank's first helper
NAMED = "n"  # a semaphore that can be opened by its name; any other one is inherited


@dataclass(frozen=True)
class Op:
    """One operation of a thread.

    ``start`` makes a call and doesn't wait for it; ``wait`` waits for the thread's latest call of this kind.

    Attributes:
        kind: call | start | wait | send | recv | lock | unlock | put | get | event | set | join | sleep | exit; with
            helpers: shared-wait | shared-set | child (its end) | read (a helper's output) | tell | hear.
        name: Name of the group, lock, queue or event.
        to: Peer of a send or receive, thread to be joined, root of a broadcast, or helper.
        limited: The wait has a time limit.
    """

    kind: str
    name: str = ""
    op: str = "all_reduce"
    size: int = 4
    to: int = -1
    limited: bool = False


@dataclass(frozen=True)
class Helper:
    """A helper process.

    Attributes:
        forked: It runs no other program than its rank.
        timer: It ends at some time, whatever it waits for.
    """

    ops: tuple[Op, ...]
    forked: bool = True
    timer: bool = False


@dataclass(frozen=True)
class Program:
    """A rank's program.

    Attributes:
        threads: Operations of each thread, the main thread first.
        daemons: Threads that end with the main thread.
        libraries: Threads of a library, which only sleep.
        handler: SIGTERM sets its event.
    """

    threads: tuple[tuple[Op, ...], ...]
    daemons: frozenset[int] = frozenset()
    helpers: tuple[Helper, ...] = ()
    libraries: frozenset[int] = frozenset()
    handler: bool = False

    @property
    def is_plain(self) -> bool:
        """Returns whether a look shows everything about it: no unseen timer, no public name, no handler."""
        ops = [op for thread in self.threads for op in thread]
        named = any(op.kind == "shared-wait" and op.name == NAMED for op in ops)
        return not self.handler and not named and all(helper.forked and not helper.timer for helper in self.helpers)


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
    """A thread. Its status is ready (it will run), blocked (in its operation), asleep or done."""

    rank: int
    index: int
    at: int = 0
    status: str = "ready"
    entry: Entry | None = None  # of the call that it is in
    started: Entry | None = None

    @property
    def is_helper(self) -> bool:
        return self.index >= HELPER


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
            for index in (*range(len(program.threads)), *(HELPER + n for n in range(len(program.helpers)))):
                new.actors[rank, index] = Actor(rank, index)
        return new

    def copy(self) -> Job:
        new = copy.copy(self)
        memo: dict[int, object] = {id(self.programs): self.programs, id(self.groups): self.groups}
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def op(self, actor: Actor) -> Op | None:
        program = self.programs[actor.rank]
        ops = program.helpers[actor.index - HELPER].ops if actor.is_helper else program.threads[actor.index]
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
        return [*found, *self.under_way(), *self._from_outside()]

    def _from_outside(self) -> Iterator[Move]:
        """Timers, signals, and strangers."""
        for actor in self.living():
            program = self.programs[actor.rank]
            if actor.is_helper and program.helpers[actor.index - HELPER].timer:
                yield "alarm", (actor.rank, actor.index)
            in_call = actor.entry is not None or getattr(self.op(actor), "kind", "") in ("send", "recv", "wait")
            if actor.index == 0 and program.handler and not in_call and (actor.rank, "e") not in self.set_events:
                yield "signal", actor.rank
            op = self.op(actor)
            waits = op is not None and op.kind == "shared-wait" and op.name == NAMED and actor.status == "blocked"
            if waits and (actor.rank, NAMED) not in self.set_events:
                yield "stranger", actor.rank

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
        """Returns whether a blocked thread, unless it is in a call, would now find what it waits for."""
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
        if op.kind == "shared-wait":
            return here in self.set_events
        if op.kind == "child":
            return self._is_over(actor.rank, HELPER + op.to)
        if op.kind in ("hear", "read"):
            is_over = op.kind == "read" and self._is_over(actor.rank, HELPER + op.to)
            return is_over or self.items[actor.rank, f"{op.kind} {op.to}"] > 0
        if op.kind == "wait":
            return actor.started is None or actor.started.done
        return op.kind not in ("call", "send", "recv")

    def _outliving(self, rank: int) -> list[int]:
        return [n for n in range(1, len(self.programs[rank].threads)) if n not in self.programs[rank].daemons]

    def _is_over(self, rank: int, index: int) -> bool:
        return self.actors[rank, index].status == "done"

    def make(self, move: Move) -> None:
        what, which = move
        if what == "alarm":
            self.actors[which].status = "done"  # type: ignore[index]
        elif what in ("signal", "stranger"):
            self.set_events.add((which, "e" if what == "signal" else NAMED))  # type: ignore[arg-type]
        elif what == "end":
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
        elif op.kind in ("set", "shared-set"):
            self.set_events.add(here)
        elif op.kind in ("tell", "write"):
            self.items[actor.rank, f"{'hear' if op.kind == 'tell' else 'read'} {op.to}"] += 1
        elif op.kind in ("hear", "read"):
            self.items[actor.rank, f"{op.kind} {op.to}"] -= 1

    def _end(self, rank: int) -> None:
        self.gone.add(rank)
        for actor in self.actors.values():
            if actor.rank == rank:
                actor.status = "done"

    def play(self, rng: random.Random, steps: int = 1000, slow: frozenset[str] = frozenset()) -> Job:
        """Makes at most ``steps`` random moves; calls (``end``, ``pass``) and sleeps (``wake``) end last if ``slow``.

        If only slow moves are left, it sometimes stops.
        """
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
        """Returns the place of each living thread, which changes when it moves."""
        return {(one.rank, one.index): (one.at, one.status) for one in self.living()}


def _what(op: Op) -> tuple[str, int, int]:
    return (op.op, op.size, op.to)


def line_of(actor: Actor) -> int:
    return 100 * (actor.index + 1) + actor.at


# --- what a look shows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """The facts that a look sees.

    Attributes:
        unrecorded: Ranks without a Flight Recorder.
        arguments: Ranks whose calls show their arguments.
        futexes: Ranks on which the futex of a waiting thread is seen, if it isn't a lock of Python's.
        lines: Entries have frames.
        silent: Ranks whose beacon doesn't answer.
    """

    unrecorded: frozenset[int] = frozenset()
    arguments: frozenset[int] = frozenset(range(99))
    futexes: frozenset[int] = frozenset(range(99))
    lines: bool = True
    silent: frozenset[int] = frozenset()

    def is_whole(self, ranks: int) -> bool:
        every = set(range(ranks))
        return not self.unrecorded and not self.silent and every <= self.arguments and every <= self.futexes


LIBRARY = "/venv/lib/python3.11/site-packages/tqdm"


def pid_of(rank: int) -> int:
    return 1000 + 10 * rank


def evidence_of(job_: Job, rng: random.Random, sight: Sight | None = None) -> Evidence:
    ranks = [_rank(job_, rank, rng, sight or Sight()) for rank in job_.programs]
    return job(*ranks)


def _rank(job_: Job, rank: int, rng: random.Random, sight: Sight) -> RankEvidence:
    pid = pid_of(rank)
    mine = {name: members for name, members in job_.groups.items() if rank in members}
    entries = [_recorded(n, e, sight) for n, e in enumerate(job_.entries[rank], 50)]
    flight = None if rank in sight.unrecorded else FlightRecord("2.10", tuple(entries), mine)
    program = job_.programs[rank]
    progress = Progress(rank, rank, len(job_.programs), 0, pid, 5, "torch", sets_timers=_sets_timers(program))
    told = GilTest(ping=True, python=True, handlers=(15,) if program.handler else ())
    gil = GilTest() if rank in sight.silent else told
    one = RankEvidence(rank=rank, host="node1", pid=pid, flight_record=flight, progress=progress, gil=gil)
    if rank in job_.gone:
        return structs.replace(one, exit=RankExit(0, 1e9))
    threads = [actor for actor in job_.living() if actor.rank == rank]
    main = _process(job_, [actor for actor in threads if not actor.is_helper], rng, sight, "main")
    children = tuple(_process(job_, [actor], rng, sight, "child") for actor in threads if actor.is_helper)
    return structs.replace(one, main=main, children=children)


def _sets_timers(program: Program) -> bool:
    # On the rank's page: a helper that runs another program sets its timer unseen.
    return any(helper.timer and helper.forked for helper in program.helpers)


def _process(job_: Job, actors: list[Actor], rng: random.Random, sight: Sight, role: str) -> ProcessEvidence:
    seen = [_thread(job_, actor, rng, sight) for actor in actors]
    first, program = actors[0], job_.programs[actors[0].rank]
    pid = _tid(first)
    facts = {"handles_termination": role == "main"}  # by the beacon, if by nothing else
    if first.is_helper:
        facts = {"is_fork": program.helpers[first.index - HELPER].forked}
    states, stacks = [], []
    for number in range(2):
        kernel = tuple(pair[number][1] for pair in seen)
        parent = 1 if role == "main" else pid_of(first.rank)
        states.append(
            ProcessState(pid, parent, 5, 2.0 * number, "python", ("python",), kernel[0].state, kernel, **facts)
        )
        stacks.append(StackSample(pid, 2.0 * number, "py-spy dump --json", tuple(pair[number][0] for pair in seen)))
    return ProcessEvidence(role, tuple(states), tuple(stacks))


def _tid(actor: Actor) -> int:
    return 5000 + 10 * actor.rank + actor.index - HELPER if actor.is_helper else pid_of(actor.rank) + actor.index


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
    "shared-wait": tuple(("multiprocessing/synchronize.py", f"{one}.wait") for one in ("Condition", "Event")),
    "end": (("threading.py", "Thread._wait_for_tstate_lock"), ("threading.py", "_shutdown")),
}


def _thread(job_: Job, actor: Actor, rng: random.Random, sight: Sight) -> list[tuple[Thread, ThreadState]]:
    """The thread as two looks see it."""
    op = job_.op(actor)
    kind = op.kind if op is not None else "end"
    tid, ident = _tid(actor), actor.index + 1
    is_main = actor.index in (0, *range(HELPER, HELPER + 9))
    own = at(line_of(actor), "train" if is_main else "report")
    if actor.index in job_.programs[actor.rank].libraries:
        own = Frame(f"{LIBRARY}/_monitor.py", 9, "run")
    base = at(9, "<module>") if is_main else Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
    thread = Thread((own, base), "MainThread" if is_main else f"side {actor.index}", tid, ident=ident)
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
    if op is not None and kind in ("shared-wait", "child", "hear", "read"):
        thread = structs.replace(thread, frames=(*inner, own, base))
        state = ThreadState(tid=tid, name="python", slices=5, **_with_helpers(job_, actor, op))  # type: ignore[arg-type]
        return [(thread, state), (thread, state)]
    if actor.rank not in sight.futexes and kind != "lock":
        rests_in = ""
    frames = (*inner, base) if kind == "end" else (*inner, own, base)
    thread = structs.replace(thread, frames=frames, call=call if actor.rank in sight.arguments else None)
    ends_s = 300.0 if op is not None and op.limited else None
    state = ThreadState(tid=tid, name="python", slices=5, rests_in=rests_in, ends_s=ends_s, **_FUTEX)  # type: ignore[arg-type]
    return [(thread, state), (thread, state)]


def _with_helpers(job_: Job, actor: Actor, op: Op) -> dict[str, object]:
    """Returns what the kernel shows of a thread that waits for a helper, or of a helper that waits."""
    rank, helpers = pid_of(actor.rank), job_.programs[actor.rank].helpers
    living = [n for n in range(len(helpers)) if not job_._is_over(actor.rank, HELPER + n)]
    if op.kind == "child":
        return {"state": "S", "wchan": "do_wait", "syscall_name": "wait4", "child": 5000 + 10 * actor.rank + op.to}
    if op.kind == "shared-wait":
        sharers = [rank, *(5000 + 10 * actor.rank + n for n in living if helpers[n].forked)]
        path = "/dev/shm/sem.mp-1" if op.name == NAMED else "/dev/shm/sem.x (deleted)"
        ends = tuple(map(OtherEnd, sharers))
        return {**_FUTEX, "rests_in": "_multiprocessing.so", "fd_target": path, "futex_file": "00:1 7", "ends": ends}
    writer = rank if op.kind == "hear" else 5000 + 10 * actor.rank + op.to
    ends = (OtherEnd(writer),) if op.kind == "hear" or op.to in living else ()
    pipe = {"state": "S", "wchan": "pipe_read", "syscall": 0, "syscall_name": "read", "fd": 7, "inode": 9}
    return {**pipe, "fd_target": "pipe:[9]", "ends": ends, "ends_closed": True}


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
