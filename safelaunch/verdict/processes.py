"""Follows waits among the threads and children of one process to the condition that ends the chain.

Each thread is followed to the single one that it waits for. If the chain returns to a process already on it, they wait
for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from msgspec import structs

from safelaunch.model import Claim, ProcessEvidence
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.kernel import wait_words
from safelaunch.stacks.locks import LockHeld
from safelaunch.verdict import causes, suggestions
from safelaunch.verdict.conditions import Condition, thread_condition
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exits import signal_name
from safelaunch.verdict.graph import Actor, Edge, Graph, Node, NodeKind
from safelaunch.verdict.suggestions import Advice
from safelaunch.verdict.thread_view import View

_HELPERS = ("resource tracker", "forkserver")  # roles that capture/proc.py assigns
_CANNOT_RUN = ("stopped", "dead", "disk")
_FORK_NOTE = (
    "; it is never released there if another thread held it when the process was forked, or if an earlier call returned"
    " without releasing it"
)
_SHARED_NOTE = "; processes share it, and one that ends while it holds it never releases it"


class ProcessView:
    """One process and its children as a part of the graph of waits.

    ``callers`` are idents of threads whose c10d calls are pending.
    """

    def __init__(self, main: View, children: Sequence[View] = (), callers: Collection[int] = ()) -> None:
        self.main = main
        self._callers = callers
        self._children = children
        self._views: dict[Node, View] = {}
        self._conditions: dict[Actor, Condition] = {}
        self._child_conditions: dict[int, Condition] = {}
        self._visited: set[Actor] = set()
        self.graph = Graph(self._edges())

    @cached_property
    def path(self) -> tuple[Edge, ...]:
        """Edges from the main thread to the end of its waits."""
        return self.graph.path(self._node(self.main))

    @property
    def end(self) -> View:
        return self._views[self.path[-1].on[0]] if self.path else self.main

    @property
    def lock_held(self) -> tuple[LockHeld, View] | None:
        """The lock that the thread at the end holds, and the thread that waits for it."""
        edge = self.path[-1] if self.path else None
        waiter = self._views[edge.of] if edge is not None and edge.kind == "lock" else None
        lock = self.end.holds(waiter) if waiter is not None else None
        return (lock, waiter) if lock is not None and waiter is not None else None

    @cached_property
    def cycle(self) -> tuple[Edge, ...]:
        """The part of the path in which processes wait for each other."""
        nodes = [edge.of for edge in self.path]
        back_at = self.path[-1].on[0] if self.path else None
        return self.path[nodes.index(back_at) :] if back_at in nodes else ()

    def condition(self) -> Condition:
        """The condition at the end of the path, described from the main thread."""
        at_end = self._cycle_condition() if self.cycle else self._end_condition(self.end)
        for edge in reversed(self.path[: len(self.path) - len(self.cycle)]):
            at_end = self._condition_along(edge, at_end)
        return at_end

    def _node(self, view: View) -> Actor:
        self._views.setdefault(view.actor, view)
        return view.actor

    def _condition(self, view: View) -> Condition:
        node = self._node(view)
        if node not in self._conditions:
            self._conditions[node] = thread_condition(view)
        return self._conditions[node]

    # --- edges --------------------------------------------------------------------------------------------------------

    def _edges(self) -> Iterator[Edge]:
        queue: list[Node] = [self._node(self.main)]
        visited: set[Node] = set()
        for node in queue:  # grows during the loop
            if node in visited:
                continue
            visited.add(node)
            edge = self._edge_of(self._views[node])
            if edge is not None:
                yield edge
                queue += edge.on

    def _edge_of(self, view: View) -> Edge | None:
        children = self._children if view.process is self.main.process else ()
        if view.awaited.processes == "workers" and view.process is self.main.process:
            return self._to(view, "workers", self._owing_workers(children))
        own = self._condition(view)
        holder = self._holder(view, own.lock) if own.lock is not None else None
        if holder is not None:
            return self._to(view, "lock", [holder])
        if own.lock is not None and view.other is None:
            return self._to_thread(view, own.lock, children)
        if own.state == "at rest" and view.awaited.processes == "child":
            return self._to(view, "child", self._to_end(view, children))
        if own.ends and (edge := self._to_other_end(view, own)) is not None:
            return edge
        if own.state == "io" and view.awaited.processes == "message":
            return self._to(view, "message", self._to_send(children))
        return None

    def _to_end(self, view: View, children: Sequence[View]) -> Sequence[View]:
        """Returns the child whose exit is awaited, or children that run user code.

        A child without user code (a shell, an encoder) counts if it waits for another process.
        """
        pid = view.wait.thread.child
        if pid is not None:
            own = [child for child in self._children if child.process.pid == pid]
        else:
            own = _running_users_code(children) or [c for c in self._children if _parent(c) == view.process.pid]
        return [child for child in own if child.user_frame is not None or self._waits_for_other(child)]

    def _waits_for_other(self, view: View) -> bool:
        node = self._node(view)
        if node in self._visited:  # doesn't happen in a real process tree
            return False
        self._visited.add(node)
        try:
            return self._edge_of(view) is not None
        finally:
            self._visited.discard(node)

    @property
    def _family(self) -> tuple[View, ...]:
        return (self.main, *self._children)

    def _to_other_end(self, view: View, own: Condition) -> Edge | None:
        """Returns an edge to the process of this rank that should use the pipe's other end.

        Forked children inherit all open ends. So a process at rest doesn't count, and the rank's own process counts
        last.
        """
        pids = {end.pid for end in own.ends}
        if view is self.main and any(child.wait.kind == "dead" for child in self._children):
            return None  # it might be the end of the one that died
        if calls.LOADER_WORKER.on(view.frames):
            return None  # its rank waits for it, whatever it waits for
        users = (self.main, *_running_users_code(self._children))
        may = [user for user in users if user.process.pid in pids and not user.beside()]
        at_work = [candidate for candidate in may if candidate is not self.main and not self._rests(candidate)]
        among = may if len(may) == 1 else at_work or [candidate for candidate in may if candidate is self.main]
        return self._to(view, "pipe", among, may_end=len(pids) > 1)

    def _rests(self, view: View) -> bool:
        return view.awaited.processes == "message" or self._condition(view).lock is not None

    def _to(self, view: View, kind: NodeKind, targets: Sequence[View], *, may_end: bool = False) -> Edge | None:
        if not targets or (len(targets) > 1 and kind != "workers"):
            return None
        claims = self._condition(view).claims
        nodes = tuple(self._node(other) for other in targets)
        return Edge(self._node(view), nodes, kind, claims, may_end=may_end or kind in ("signal", "message"))

    def _holder(self, view: View, lock: calls.LockWait) -> View | None:
        if lock.on != "lock" or lock.own:
            return None
        holders = [other for other in view.beside() if other.holds(view) is not None]
        return holders[0] if len(holders) == 1 else None

    def _to_thread(self, view: View, lock: calls.LockWait, children: Sequence[View]) -> Edge | None:
        """Returns an edge to the thread that could end the wait.

        For a joined thread or a future (``work``), that is the only thread or child that still runs user code or is
        busy; for a future, it can also be a pool's or an event loop's thread. For a queue or an event (``signal``), it
        is a blocked thread, because a sleeping one is more likely a timer. The holder of a plain lock is unknown.
        """
        other_views, among_peers = view.beside(), self._waiting_for_peers(view)
        if lock.of_pool:  # the pool's workers end it, not other threads
            workers = _running_users_code(children)
            return self._to(
                view, "work", workers[:1] if len({worker.user_frame for worker in workers}) == 1 else workers
            )
        if lock.on == "work":
            may = [candidate for candidate in other_views if candidate.serves_futures == lock.of_future] or other_views
            at_work = [
                candidate for candidate in may if self._condition(candidate).lock is None and not candidate.wait.again
            ]
            if len(may) > 1 and len(at_work) == 1:
                return self._to(view, "work", at_work, may_end=True)
            edge = self._to(view, "work", may or among_peers or _queue_feeders(view))
            return edge or (self._to(view, "work", _running_users_code(children)) if not other_views else None)
        if lock.on == "signal":
            blocked = [o for o in other_views if self._condition(o).state in ("io", "disk")]
            if lock.of_items and lock.by_processes:
                blocked = [child for child in _running_users_code(children) if not _takes_items(child)]
            return self._to(view, "signal", blocked or among_peers)
        return self._to(view, "lock", among_peers) if other_views == among_peers else None

    def _waiting_for_peers(self, view: View) -> list[View]:
        return [other for other in view.others if other.awaited.peers is not None or self.has_called(other)]

    def has_called(self, view: View) -> bool:
        """Returns whether a c10d call of the thread is pending, even without a c10d frame."""
        return view.thread is not None and view.thread.ident in self._callers

    def _to_send(self, children: Sequence[View]) -> list[View]:
        """Returns the blocked children, which should send the message.

        A child asleep is likelier a timer, and one that waits for a message might have nothing to do.
        """
        senders = _running_users_code(children)
        return [
            sender
            for sender in (senders if len(senders) == 1 else ())
            if self._child_condition(sender).state != "at rest" and sender.awaited.processes != "message"
        ]

    def _owing_workers(self, children: Sequence[View]) -> list[View]:
        owing = [v for v in _workers(children) if not calls.worker_idle(v.frames) or v.wait.kind in _CANNOT_RUN]
        visible = [v for v in owing if v.frames or v.wait.kind in _CANNOT_RUN]
        return sorted(visible, key=lambda v: (-causes.CAUSES[self._child_condition(v).cause].worker, v.process.pid))

    def _child_condition(self, child: View) -> Condition:
        if child.process.pid not in self._child_conditions:
            self._child_conditions[child.process.pid] = ProcessView(child).condition()
        return self._child_conditions[child.process.pid]

    # --- conditions at the end ----------------------------------------------------------------------------------------

    def _end_condition(self, view: View) -> Condition:
        own = self._condition(view)
        children = self._children if view is self.main else ()
        if view is self.main and view.awaited.processes == "workers":
            return _no_worker_to_blame(view, _workers(children))
        if own.lock is not None and view.other is None:
            return self._lock_condition(view, own, own.lock)
        kept = self._open_end(view) if own.state == "io" else None
        dead = [child for child in children if child.wait.kind == "dead"]
        if own.state == "io" and dead and (kept is not None or view.awaited.processes == "message"):
            own = _with_dead_children(view, own, dead)
        if kept is None or calls.TAKES_ITEM.on(view.stack.called):  # a queue's consumer has both its ends
            return own
        advice, words = kept
        return own.with_clause(words, view.kernel_claim(words), advice=[advice])

    def _open_end(self, view: View) -> tuple[Advice, str] | None:
        """Returns which processes of this rank keep the pipe's other end open without using it."""
        ends, wait = view.wait.ends or (), view.wait
        target = wait.thread.fd_target
        if not (is_pipe := target.startswith("pipe:")) and "unnamed" not in target:
            return None
        end = "other" if not is_pipe else "read" if wait.writes else "write"
        pid, family = view.process.pid, {member.process.pid for member in self._family}
        other_ends = [end for end in ends if end.pid != pid and end.pid in family]
        if ends and all(end.pid == pid for end in ends):
            alone = f"only process {pid} itself has"
            sure = alone if wait.thread.ends_closed else f"of the processes safelaunch can see, only {pid} has"
            return suggestions.OWN_END, f"{sure} the {end} end open"
        if not other_ends or wait.writes:
            return None
        who = ", ".join(f"{end.pid} ({end.name})" if end.name else f"{end.pid}" for end in other_ends[:3])
        return suggestions.INHERITED_END, f"the {end} end is still open in process{'es' * (len(other_ends) > 1)} {who}"

    def _lock_condition(self, view: View, own: Condition, lock: calls.LockWait) -> Condition:
        """Returns the wait, with the other threads as evidence, because any of them might hold the lock."""
        other_conditions = [(other, self._condition(other)) for other in view.beside()]
        held_locks = {
            o.name: f", which {view.words} has held since line {lock_held.line}"
            for o, _ in other_conditions
            if (lock_held := view.holds(o))
        }
        waiting = [
            f"thread {o.name} {c.reason}{held_locks.get(o.name, '')}"
            for o, c in other_conditions
            if c.lock is not None and o.wait.left_s is None
        ]
        busy = [f"thread {o.name} {c.reason}" for o, c in other_conditions if c.state == "computes"]
        claims = own.claims + tuple(view.stack_claim(f"thread {o.name} {c.reason}") for o, c in other_conditions)
        for_good = own.for_good and all(c.for_good for _, c in other_conditions)
        own = replace(
            own, claims=claims, for_good=for_good, advice=own.advice | ({suggestions.HELD} if held_locks else set())
        )
        takers = (
            [candidate for candidate in (*view.beside(), *self._children) if _takes_items(candidate)]
            if lock.of_items
            else []
        )
        if takers:
            who = "its worker waits" if len(takers) == 1 else f"each of its {len(takers)} workers waits"
            return own.with_clause(f"{who} for the next item at {takers[0].place}", advice=[suggestions.TASK_DONE])
        if lock.of_pool:
            return self._pool_condition(own)
        if lock.on == "work" and other_conditions:
            return _condition_of_several(own, other_conditions)
        if busy and not waiting and lock.on != "work":
            return replace(own, reason=f"{own.reason} while {', '.join(busy[:4])}", doubts=(Doubt.MAY_END,))
        if waiting:
            return replace(own, reason=f"{own.reason} while {', '.join(waiting[:4])}", doubts=())
        return own

    def _pool_condition(self, own: Condition) -> Condition:
        """Returns the condition if a worker replaced a dead one, whose result will never come."""
        workers = [child for child in self._children if _parent(child) == self.main.process.pid]
        late = [worker.process.pid for worker in workers if any(calls.REPLACED.on(t.frames) for t in worker.threads)]
        if not late:
            return own
        words = f"process {late[0]} has replaced a dead worker, whose task a pool never returns"
        log = f"node/{self.main.rank.host}/kernel_log.txt"
        deaths = (Claim(f"the kernel log: {line}", log) for line in self.main.rank.deaths)
        forked = self.main.stack_claim(f"processes forked by Pool._maintain_pool: {', '.join(map(str, late[:3]))}")
        return own.with_clause(words, forked, *deaths)

    def _condition_along(self, edge: Edge, condition: Condition) -> Condition:
        waiter, other = self._views[edge.of], self._views[edge.on[0]]
        if edge.kind == "workers":
            return self._worker_condition(waiter, other, [self._views[node] for node in edge.on[1:]], condition)
        own, is_thread = self._condition(waiter), other.process is waiter.process
        who = other.words if is_thread else f"child process {other.process.pid}"
        process = condition.process if is_thread else f"{other.process.role} (pid {other.process.pid})"
        lock_held = other.holds(waiter) if edge.kind == "lock" else None
        if lock_held is not None:
            who = f"{who} has held it since line {lock_held.line} and"
            condition = replace(condition, advice=condition.advice | {suggestions.HELD})
        reason = f"{own.reason}; {who} {condition.reason}" if own.frame is not None else condition.reason
        changed = replace(condition, reason=reason, process=process, claims=own.claims + condition.claims)
        if not is_thread and edge.kind in ("work", "child"):
            changed = _with_lock_note(changed)
        if edge.kind == "child" and other.wait.writes and other.wait.ends is None:  # usually the waiter's pipe
            changed = replace(changed, advice=changed.advice | {suggestions.FULL_PIPE})
        if own.frame is not None and (condition.frame is None or fr.is_pseudo(condition.frame.file)):
            changed = replace(changed, frame=own.frame, process=own.process, pid=own.pid)  # the nearest line in a file
        if edge.may_end:
            return replace(changed, doubts=(Doubt.MAY_END,), for_good=False)
        # Any other thread in user code might be the one that is waited for.
        other_views = waiter.beside() if own.lock is not None else ()
        return replace(changed, for_good=condition.for_good and all(self._condition(o).for_good for o in other_views))

    def _cycle_condition(self) -> Condition:
        """Describes processes that wait for each other to read or send."""
        if {edge.kind for edge in self.cycle} <= {"lock", "work"}:
            return self._lock_cycle_condition()
        first, last = self._views[self.cycle[0].of], self._views[self.cycle[-1].of]
        own, last_condition = self._condition(first), self._condition(last)
        whose = "this process" if first.process is self.main.process else f"process {first.process.pid}"
        where = "" if last.user_frame is None or fr.is_pseudo(last.user_frame.file) else f" at {last.place}"
        if last.wait.writes:
            how = f"is blocked writing{where}: the pipe is full, and {whose} should read it"
        else:
            how = f"waits{where} for data that {whose} should send"
        ends = f"{last.process.pid}'s {wait_words(last.wait)}: the other end is process {first.process.pid}'s"
        claims = (c for edge in self.cycle for c in edge.claims)
        return replace(
            own,
            reason=f"{own.reason}; child process {last.process.pid} {how}",
            doubts=(*own.doubts, *doubts_if({Doubt.MAY_END: any(edge.may_end for edge in self.cycle)})),
            claims=(*claims, *last_condition.claims, last.kernel_claim(ends)),
            advice=own.advice | {suggestions.FULL_PIPE if last.wait.writes else suggestions.WAITS_IN_TURN},
            for_good=False,
        )

    def _lock_cycle_condition(self) -> Condition:
        """Describes threads of one process that wait for each other to release a lock or to end."""
        first = self._views[self.cycle[0].of]
        own, words, claims = self._condition(first), [], []
        for edge in self.cycle:
            waiter, other = self._views[edge.of], self._views[edge.on[0]]
            lock_held, does = other.holds(waiter), "" if other is first else self._condition(other).reason
            since = (
                f"has held it since {fr.place(structs.replace(lock_held.frame, line=lock_held.line))}"
                if lock_held
                else ""
            )
            words += [f"{other.words} {' and '.join(filter(None, (since, does)))}"] if since or does else []
            claims += [*edge.claims, *([other.stack_claim(f"{other.words} {since}")] if since else [])]
        for_good = all(self._condition(self._views[edge.of]).for_good for edge in self.cycle)
        reason = "; ".join([own.reason, *words])
        advice = suggestions.LOCK if all(edge.kind == "lock" for edge in self.cycle) else frozenset({suggestions.HELD})
        return replace(
            own, cause="lock-deadlock", reason=reason, doubts=(), claims=tuple(claims), advice=advice, for_good=for_good
        )

    def _worker_condition(self, view: View, worker: View, further: Sequence[View], condition: Condition) -> Condition:
        worker_conditions = [(other, self._child_condition(other)) for other in further]
        reason = f"waits for its DataLoader; worker {worker.process.pid} {condition.reason}"
        claims = [*condition.claims, _waits_for_loader(view)]
        claims += [v.stack_claim(f"DataLoader worker {v.process.pid} {c.reason}") for v, c in worker_conditions[:3]]
        idle = len(_workers(self._children)) - len(further) - 1
        if idle:
            claims.append(view.stack_claim(f"{idle} other worker{'s' * (idle > 1)} wait for the next index"))
        changed = replace(
            condition,
            cause="data-loading",
            state="loader",
            reason=reason,
            frame=condition.frame or view.user_frame,
            process=f"dataloader worker (pid {worker.process.pid})",
            pid=worker.process.pid,
            doubts=(Doubt.MAY_BE_SLOW,) if condition.state == "computes" else (),
            claims=tuple(claims),
            for_good=condition.for_good and all(c.for_good for _, c in worker_conditions),
        )
        return _with_lock_note(changed)


def _condition_of_several(own: Condition, other_conditions: Sequence[tuple[View, Condition]]) -> Condition:
    """Describes a thread that waits for the end of one of several others.

    It is a deadlock only if all of these wait for locks.
    """
    clauses = [f"thread {other.name} {does.reason}" for other, does in other_conditions]
    for_good = all(does.for_good for _, does in other_conditions)
    if all(does.lock is not None and does.lock.on == "lock" for _, does in other_conditions):
        reason = "has threads that wait for each other's locks: " + ", ".join(clauses[:4])
        return replace(other_conditions[0][1], reason=reason, claims=own.claims, for_good=for_good)
    reason = f"{own.reason} while {', '.join(clauses[:4])}"
    own = replace(own, cause="stuck-in-user-code", state="at rest", reason=reason, doubts=(Doubt.STATE_INFERRED,))
    alike = len({does.cause for _, does in other_conditions}) == 1
    first = other_conditions[0][1]
    return replace(own, cause=first.cause, state=first.state) if alike else own


def _with_dead_children(view: View, own: Condition, dead: Sequence[View]) -> Condition:
    process = dead[0].process
    if len(dead) == 1:
        words = f"its child process {process.pid} has ended{_how_ended(process)} and has not been reaped"
    else:
        words = f"{len(dead)} of its child processes are zombies"
        words += f", {process.pid}{_how_ended(process)}" if _how_ended(process) else ""
    claims = (view.kernel_claim(f"child process {v.process.pid}: state Z{_how_ended(v.process)}") for v in dead[:4])
    return own.with_clause(
        words, *claims, advice=[suggestions.DEAD_CHILD] if view.awaited.processes == "message" else []
    )


def _how_ended(process: ProcessEvidence) -> str:
    status = process.states[-1].wait_status if process.states else 0
    number, code = status & 0x7F, status >> 8 & 0xFF
    return f" by {signal_name(-number)}" if number else f" with code {code}" if code else ""


def _no_worker_to_blame(view: View, workers: Sequence[View]) -> Condition:
    count = f"{len(workers)} worker{'s' * (len(workers) != 1)}"
    if not workers:
        clause = "none of its workers could be observed"
    elif any(worker.frames for worker in workers):
        clause = f"none of its {len(workers)} observed workers has work"
    else:
        clause = f"the stacks of its {count} could not be read"
    text = f"waits for its DataLoader at {view.place}; {clause}"
    doubts, claims = (Doubt.STATE_INFERRED,), (_waits_for_loader(view),)
    return Condition(
        "data-loading", text, view.user_frame, view.process.pid, state="loader", doubts=doubts, claims=claims
    )


def _with_lock_note(condition: Condition) -> Condition:
    lock = condition.lock
    if lock is None or lock.own or lock.on != "lock":
        return condition
    if lock.by_processes:
        return replace(condition, reason=condition.reason + _SHARED_NOTE)
    return replace(condition, reason=condition.reason + _FORK_NOTE, advice=condition.advice | {suggestions.FORKED_LOCK})


def _waits_for_loader(view: View) -> Claim:
    return view.stack_claim(f"{view.words} waits for a DataLoader at {view.place}")


def _parent(view: View) -> int:
    return view.process.states[-1].ppid if view.process.states else 0


def _workers(children: Sequence[View]) -> list[View]:
    return [v for v in children if v.process.role == "dataloader worker" or calls.LOADER_WORKER.on(v.frames)]


def _running_users_code(children: Sequence[View]) -> list[View]:
    return [
        v
        for v in children
        if v.user_frame is not None and v.process.role not in _HELPERS and not calls.LOADER_WORKER.on(v.frames)
    ]


def _queue_feeders(view: View) -> list[View]:
    threads = (view, *view.others)
    feeders = [thread for thread in threads if thread.thread and calls.FEEDS_QUEUE.on(thread.thread.frames)]
    return [feeder for feeder in feeders if feeder.wait.kind == "io"]


def _takes_items(view: View) -> bool:
    return view.user_frame is not None and calls.TAKES_ITEM.on(view.stack.called)


_TRAINING = tuple(f"/torch/{part}" for part in ("distributed/", "autograd/", "nn/", "optim/", "_tensor.py"))


def may_train_elsewhere(view: View) -> bool:
    """Returns whether another thread than the main one might train."""
    other_frames = (frame for thread in view.threads if thread is not view.thread for frame in fr.python_frames(thread))
    if any(part in fr.normal(frame.file) for frame in other_frames for part in _TRAINING):
        return True
    return any(thread_condition(other).state == "computes" for other in view.beside())
