"""The possible reading of the graph of waits: every node that might end the wait of a thread or a call.

Missing evidence never narrows it: a thread counts as able to continue by itself if it moved between two looks, sleeps,
has a time limit, waits for something outside the job, or isn't understood. So do processes that a timer can end, and
native threads of unknown libraries.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import Claim, Collective
from safelaunch.stacks import calls
from safelaunch.stacks.receivers import is_result_of
from safelaunch.verdict.c10d import call_words, match, number_of, signature
from safelaunch.verdict.graph import Need, Node
from safelaunch.verdict.peers import PeerWait, calls_at, line_before_c10d, peer_wait
from safelaunch.verdict.proof_threads import (
    NO_GIVERS,
    TORCH_LIBRARY,
    ProofProcess,
    ident_of,
    is_gone,
    is_in_lock,
    is_in_torch,
    is_on_user_line,
    is_public,
    is_reporter_thread,
    is_steady,
    is_torch_thread,
    rests_in_of,
    stack_claim_of,
)
from safelaunch.verdict.thread_view import View
from safelaunch.verdict.waits import Case

GLOO_S = 1800.0  # default time limit of gloo's calls
USER_LIMIT_S = GLOO_S - 120  # a shorter limit was set by the user
_STORE_LIMITS_S = (300.0, 600.0)  # default time limits of a store, and of the store of NCCL groups
_TRANSFERS = frozenset({"isend", "irecv", "batch_isend_irecv"})


@dataclass(frozen=True)
class OpenCall:
    """A c10d call under way, on all ranks that entered the same one."""

    group: str
    number: int
    is_p2p: bool
    signature: tuple[object, ...]
    rank: int = -1  # the rank that made it, if it is a send or receive

    @property
    def words(self) -> str:
        whose = f" of rank {self.rank}" if self.rank >= 0 else ""
        return f"{self.signature[0]} #{self.number} of group {self.group!r}{whose}"


@dataclass(frozen=True)
class OpenTransfer:
    """A send or receive that a thread is in; None stands for unknown."""

    sends: bool | None
    peer: int | None  # rank of the world
    tag: int | None

    @classmethod
    def of(cls, wait: PeerWait) -> OpenTransfer:
        named = {word for word in ("send", "recv") if word in wait.op}
        sends = (wait.target is not None) if wait.peer is not None else ("send" in named) if len(named) == 1 else None
        return cls(sends, wait.peer, wait.tag)

    def may_meet(self, rank: int, other: OpenTransfer, other_rank: int) -> bool:
        """Returns whether this transfer of ``rank`` and ``other`` might be two ends of the same one."""
        directions = self.sends is None or other.sends is None or self.sends is not other.sends
        tags = self.tag is None or other.tag is None or self.tag == other.tag
        return directions and tags and self.peer in (None, other_rank) and other.peer in (None, rank)


def open_call_of(entry: Collective, rank: int) -> OpenCall:
    named = signature(entry)
    whose = rank if entry.is_p2p else -1
    return OpenCall(entry.group, number_of(entry), entry.is_p2p, (named[0] or "", *named[1:]), whose)


def names_transfer(view: View) -> bool:
    """Returns whether the thread waits for the result of a ``torch.distributed`` function, not of a group's method."""
    inner = line_before_c10d(view)
    return inner is not None and view.read_source is not None and is_result_of(inner, _TRANSFERS, view.read_source)


def has_own_limit(view: View, *, is_usual: bool) -> bool:
    """Returns whether the wait has a limit other than torch's default, after which the user's code can continue.

    Args:
        is_usual: torch has a limit in this wait. (For gloo's collectives it counts elsewhere. The limit of a call
            restarts with each look.)
    """
    left_s = view.wait.left_s
    if left_s is None or not is_usual:
        return left_s is not None
    thread = next((thread for thread in view.process.states[-1].threads if thread.tid == view.os_tid), None)
    rested_s = (thread.rested_s if thread is not None else None) or 0.0  # lower bound of the time waited
    if left_s + rested_s >= USER_LIMIT_S:
        return False
    return view.wait.kind == "lock" or not any(-15 <= left_s - limit <= 1 for limit in _STORE_LIMITS_S)


class PossibleWaits:
    """Needs of each thread of the living ranks and of each open call."""

    def __init__(self, case: Case, living: list[int]) -> None:
        self.case = case
        self._living = frozenset(living)
        self.processes: dict[tuple[str, int], ProofProcess] = {}
        self.rank_processes: dict[int, ProofProcess] = {}
        self._roots: dict[OpenCall, set[tuple[int | None, int | None]]] = {}  # roots named by the threads in a call
        for rank in living:
            facts = case.ranks[rank]
            evidence = facts.evidence
            for view in (facts.view, *facts.children):
                if view is not None and not is_gone(view.process):
                    self.processes[evidence.host, view.process.pid] = ProofProcess(view)
            if (main := self.processes.get((evidence.host, evidence.pid))) is not None and main.runs_python:
                self.rank_processes[rank] = main

    @property
    def has_every_rank(self) -> bool:
        """True if a Python process of each living rank was seen. Otherwise there are no needs."""
        return self.rank_processes.keys() == self._living

    @cached_property
    def needs(self) -> Mapping[Node, tuple[Need, ...]]:
        """Needs of each thread and each open call; empty for a node that can continue by itself."""
        if not self.has_every_rank:
            return {}
        needs: dict[Node, tuple[Need, ...]] = {}
        for process in self.processes.values():
            for actor, view in process.views.items():
                needs[actor] = self._needs(view, process)
            needs.update(self._needs_of_native_threads(process))
        self._add_calls(needs)
        return needs

    @cached_property
    def mains(self) -> dict[Node, int]:
        return {process.main: rank for rank, process in self.rank_processes.items()}

    def _needs_of_native_threads(self, process: ProofProcess) -> dict[Node, tuple[Need, ...]]:
        """Returns what wakes resting native threads: a thread of the process, or the end of a call."""
        if not process.unknown_nodes or not process.unknown_threads_rest or self._handles(process):
            return {}
        if process.newest.handles_child_ends:
            return {}
        calls_of = {open_call_of(entry, process.rank) for entry in self.case.alignment.open_calls(process.rank)}
        need = Need(frozenset(process.views) | calls_of, "another thread of the process to wake it")
        return dict.fromkeys(process.unknown_nodes, (need,))

    def _needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        """Returns what must happen before the thread can continue; empty if it might do so by itself."""
        if not is_steady(view, spins=self._uses_device(view) and not is_in_lock(view)):
            return ()
        if view.wait.kind in ("running", "stopped", "disk", "sleep", "select", "dead"):
            return self._device_needs(view) if view.wait.kind == "running" else ()
        if c10d_needs := self._c10d_needs(view, process):
            # Another thread can abort the group, as libraries for fault tolerance do.
            aborting = self._callers(view.rank.rank) - {view.actor, process.main}
            return tuple(replace(need, givers=need.givers | aborting) for need in c10d_needs)
        if view.wait.left_s is not None or self.may_be_interrupted(view, process):
            return ()  # a time limit or a timer ends it
        readers = {
            "lock": self._lock_needs,
            "child": self._child_needs,
            "io": self._descriptor_needs,
            "poll": self._descriptor_needs,
        }
        needs = readers[view.wait.kind](view, process) if view.wait.kind in readers else ()
        handled = self._woken_by_child_exit(view, process)
        return tuple(replace(need, givers=need.givers | handled) for need in needs)

    def _woken_by_child_exit(self, view: View, process: ProofProcess) -> frozenset[Node]:
        return self._watched_children([process]) if view.os_tid == view.process.pid else NO_GIVERS

    def _watched_children(self, processes: Iterable[ProofProcess]) -> frozenset[Node]:
        parents = {process.evidence.pid: process.rank for process in processes if process.newest.handles_child_ends}
        family = self.processes.items()
        return self._threads_of(owner for owner, process in family if parents.get(process.newest.ppid) == process.rank)

    def _c10d_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        awaited = view.awaited.peers
        if process is not self.rank_processes[view.rank.rank] or view.rank.gil.foreign_backend:
            return ()  # its groups aren't the rank's; or it isn't known what ends the backend's calls
        if awaited is not None and not is_in_torch(view, process.torch):
            return ()
        if awaited is None:
            return self._device_needs(view) or self._open_call_needs(view, process)
        wait = peer_wait(view.rank, view, self.case.alignment)
        claim = wait.claims[0] if wait is not None and wait.claims else None
        is_usual = awaited.kind == "init" or awaited.op == "new_group" or (wait is not None and wait.kind == "p2p")
        if has_own_limit(view, is_usual=is_usual):
            return ()
        if awaited.kind == "init":
            late = [rank for rank in sorted(self.case.world) if not self._has_joined(rank)]
            return tuple(Need(self._callers(rank), f"rank {rank} to join", claim) for rank in late)
        if awaited.op == "new_group":
            return self._new_group_needs(view, claim)
        if wait is None or (wait.group is None and wait.kind != "p2p"):
            return ()
        entries = calls_at(view, self._pending(view), is_p2p=wait.kind == "p2p") if wait.group is not None else []
        if entries:
            possible = [open_call_of(entry, view.rank.rank) for entry in entries]
            if len(possible) == 1 and (wait.source, wait.target) != (None, None):
                self._roots.setdefault(possible[0], set()).add((wait.source, wait.target))
            return (Need(frozenset(possible), " or ".join(map(call_words, entries[-3:])), claim),)
        return self._transfer_needs(view, wait) if wait.kind == "p2p" else ()

    def _transfer_needs(self, view: View, wait: PeerWait) -> tuple[Need, ...]:
        """Returns the needs of an unrecorded transfer: any of the peer's threads with user code can match it."""
        transfer, rank = OpenTransfer.of(wait), view.rank.rank
        if not self.case.alignment.is_in_closed_groups(rank) or not all(map(self._has_one_store, view.rank.gil.stores)):
            return ()
        peers = [wait.peer] if wait.peer is not None else sorted(self.case.world - {rank})
        if any(transfer.may_meet(rank, other, peer) for peer in peers for other in self._transfers.get(peer, ())):
            return ()  # it might be under way
        givers = NO_GIVERS.union(*map(self._callers, peers))
        return (Need(givers, wait.words, wait.claims[0] if wait.claims else None),)

    @cached_property
    def _transfers(self) -> dict[int, list[OpenTransfer]]:
        transfers: dict[int, list[OpenTransfer]] = {}
        for process in self.processes.values():
            of_rank = transfers.setdefault(process.rank, [])
            for view in process.views.values():
                wait = peer_wait(view.rank, view, self.case.alignment)
                of_rank += [OpenTransfer.of(wait)] if wait is not None and wait.kind == "p2p" else []
        for rank, of_rank in transfers.items():
            posted = self.case.ranks[rank].evidence.gil.posted
            of_rank += [
                OpenTransfer(posted_transfer.sends, posted_transfer.peer, posted_transfer.tag)
                for posted_transfer in posted
            ]
        return transfers

    def _has_joined(self, rank: int) -> bool:
        wait = self.case.ranks[rank].wait if rank in self.case.ranks else None
        return self.case.alignment.has_joined(rank) or (wait is not None and wait.kind == "init")

    def _new_group_needs(self, view: View, claim: Claim | None) -> tuple[Need, ...]:
        """Returns a need for each rank that created fewer groups, because all ranks must create each one."""
        made = view.rank.gil.groups_made
        counts = {rank: facts.evidence.gil.groups_made for rank, facts in self.case.ranks.items()}
        if made is None or None in counts.values() or len(counts) < len(self.case.world):
            return ()
        late = [rank for rank, count in counts.items() if (count or 0) < made]
        return tuple(Need(self._callers(rank), f"rank {rank} to create that group as well", claim) for rank in late)

    def _device_needs(self, view: View) -> tuple[Need, ...]:
        """Returns the calls that the device is in. Others might be queued after a kernel."""
        if not view.device:
            return ()
        pending = [entry for entry in self._pending(view) if not entry.by_gloo]
        begun = [entry for entry in pending if entry.started is not False]
        rank, claim = view.rank.rank, stack_claim_of(view)
        return tuple(Need(frozenset({open_call_of(entry, rank)}), call_words(entry), claim) for entry in begun)

    def _open_call_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        """Returns any of the pending calls: ``work.wait()`` and a backward pass show no c10d frame."""
        if view.wait.kind != "lock" and view.native() != "peers":
            return ()
        if has_own_limit(view, is_usual=not self._pending(view)):
            return ()
        rests_in = rests_in_of(view)
        if rests_in in ("lock", "gil") or not (calls.in_torch(view.stack) or is_on_user_line(view)):
            return ()
        if calls.RPC.on(view.stack.called) or (calls.FUTURE.on(view.stack.called) and process.unknown_threads):
            return ()  # another rank might reply, through a native thread
        pending = [entry for entry in self._pending(view) if entry.thread in (0, ident_of(view))]
        of_torch = TORCH_LIBRARY.fullmatch(rests_in) is not None
        if not pending:
            wait = self.case.ranks[view.rank.rank].wait if view.other is None else None
            if not of_torch or wait is None or wait.kind != "p2p" or not names_transfer(view):
                return ()  # the group is unknown, and might include processes of other jobs
            return self._transfer_needs(view, wait)
        if not of_torch and rests_in:
            return ()  # a library's own wait
        # A thread of the user's can end it as well, for example by the Future of a communication hook.
        givers: set[Node] = (
            {open_call_of(entry, view.rank.rank) for entry in pending}
            | process.other_threads(view)
            | process.unknown_nodes
        )
        if not of_torch and not calls.in_torch(view.stack):
            if self.may_be_interrupted(view, process):
                return ()  # or it is a lock after all
            givers |= self._woken_by_child_exit(view, process)
        return (Need(frozenset(givers), " or ".join(call_words(entry) for entry in pending[:3]), stack_claim_of(view)),)

    def _lock_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        """Returns the other Python threads: one of them holds the lock or fills the queue."""
        lock, rests_in = calls.lock_wait(view.stack.called), rests_in_of(view)
        shared = rests_in.startswith("_multiprocessing")
        if shared and (lock is None or not lock.shared):
            lock = calls.LockWait("a multiprocessing lock", shared=True)
        sharers, target = [(view.rank.host, end.pid) for end in view.wait.ends or ()], view.wait.thread.fd_target
        if shared and (is_public(target) or not sharers or not self.processes.keys() >= set(sharers)):
            return ()
        if rests_in not in ("lock", "gil") and not shared and (lock is None or rests_in):
            return ()  # another library might use the same frames, and end the wait differently
        what = lock.what if lock is not None else "a lock"
        givers = (
            process.other_threads(view) | process.unknown_nodes
        )  # any thread can release a lock, not only its holder
        if shared:
            givers |= self._threads_of(sharers) - {view.actor}
        elif lock is not None and lock.by_processes:
            siblings = (
                sibling
                for sibling in self.processes.values()
                if sibling.rank == process.rank and sibling is not process
            )
            givers = givers.union(*(other.views for other in siblings))
        givers |= {open_call_of(entry, view.rank.rank) for entry in self._pending(view)}  # for callbacks at their end
        why = f"another thread to end the wait for {what} at {view.place}"
        return (Need(givers, why, stack_claim_of(view)),)

    def _child_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        pid, host = view.wait.thread.child, view.rank.host
        children = [
            (host, child.pid)
            for child in view.rank.children
            if (child.pid == pid if pid is not None else child.states and child.states[-1].ppid == process.evidence.pid)
        ]
        if not children or any(child not in self.processes for child in children):
            return ()  # the child wasn't seen, or has ended and is about to be reaped
        if not all(self._never_ends(self.processes[child]) for child in children):
            return ()
        givers = self._threads_of(self._family(process.rank)) - {view.actor}
        return (Need(givers, f"a child process to end ({view.place})", stack_claim_of(view)),)

    def _descriptor_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        wait, thread, host = view.wait, view.wait.thread, view.rank.host
        if thread.locked_by is not None and thread.ends_closed:
            pids = [*self._sharing(host, thread.locked_by), *thread.lock_sharers]
            keepers = {thread.locked_by}
        elif wait.ends is not None and thread.ends_closed and wait.kind == "io" and not thread.times_out:
            pids = [*(end.pid for end in wait.ends), *thread.lock_sharers]
            keepers = {end.pid for end in wait.ends}
        else:
            return ()
        owners = {(host, pid) for pid in (*pids, process.evidence.pid)}
        if not pids or not owners <= self.processes.keys():
            return ()
        keeping = [self.processes[host, pid] for pid in keepers]
        if not any(map(self._never_ends, keeping)):
            return ()  # the wait ends with the last of them
        if not any(map(self.is_rank, keeping)):
            owners |= self._family(process.rank)
        processes = [self.processes[owner] for owner in owners]
        if any(self._handles(owner_process) or owner_process.serves_a_store for owner_process in processes):
            return ()  # a handler might write or unlock; any process can set a key
        givers = (self._threads_of(owners) | self._watched_children(processes)) - {view.actor}
        return (Need(givers, f"an answer to {wait.call} on {thread.fd_target} at {view.place}", stack_claim_of(view)),)

    def _threads_of(self, owners: Iterable[tuple[str, int]]) -> frozenset[Node]:
        processes = [self.processes[owner] for owner in owners]
        return NO_GIVERS.union(
            *(process.unknown_nodes for process in processes), *(process.views for process in processes)
        )

    def _family(self, rank: int) -> set[tuple[str, int]]:
        return {owner for owner, process in self.processes.items() if process.rank == rank}

    def is_rank(self, process: ProofProcess) -> bool:
        return process is self.rank_processes.get(process.rank)

    def _never_ends(self, process: ProofProcess) -> bool:
        if self.is_rank(process):
            return True
        progress = self.case.ranks[process.rank].evidence.progress
        return process.newest.is_fork and progress is not None and not progress.sets_timers

    def _handles(self, process: ProofProcess) -> bool:
        """Returns whether a signal handler of the script can run in the process.

        The beacon and torch handle SIGTERM themselves. Only ranks report Python's handlers.
        """
        state, handlers = process.newest, None
        if self.is_rank(process):
            handlers = self.case.ranks[process.rank].evidence.gil.handlers
        is_loader = process.evidence.role == "dataloader worker"
        unknown = state.handles_termination and handlers is None and not is_loader
        return state.handles_signals or unknown or bool(set(handlers or ()) - {signal.SIGCHLD})

    def may_be_interrupted(self, view: View, process: ProofProcess) -> bool:
        return view.os_tid == view.process.pid and self._handles(process)

    def _sharing(self, host: str, pid: int) -> list[int]:
        holder = self.processes.get((host, pid))
        if holder is None:
            return [pid]
        return [sharer for _, sharer in self._family(holder.rank)]

    def _pending(self, view: View) -> list[Collective]:
        return self.case.alignment.open_calls(view.rank.rank)

    def _uses_device(self, view: View) -> bool:
        return bool(view.device) or any(not entry.by_gloo for entry in self._pending(view))

    def _add_calls(self, needs: dict[Node, tuple[Need, ...]]) -> None:
        for rank in self.case.alignment.records:
            last_in_group: dict[str, Node] = {}  # NCCL works in order: group → the call before
            for entry in self.case.alignment.open_calls(rank):
                node = open_call_of(entry, rank)
                behind = last_in_group.get(entry.group) if not entry.by_gloo else None
                if node not in needs:
                    needs[node] = self._call_needs(entry, rank)
                if behind is not None and behind != node and entry.started is not True:
                    why = f"the calls before {call_words(entry)} to end"
                    needs[node] = (*needs[node], Need(frozenset({behind}), why))
                last_in_group[entry.group] = node
        for call, roots in self._roots.items():
            if len(roots) > 1 and not call.is_p2p and call in needs:
                needs[call] = (*needs[call], Need(NO_GIVERS, f"ranks name different roots in {call.words}"))

    def _call_needs(self, entry: Collective, rank: int) -> tuple[Need, ...]:
        """Returns what members still have to do for this call."""
        claim = Claim(f"pending: {call_words(entry)}", f"ranks/{rank}/flight_recorder.json")
        if entry.by_gloo and 0 < entry.timeout_ms < GLOO_S * 1000:
            return ()  # it will raise an error, and the user's code can continue
        if entry.is_p2p:
            peers = self.case.transfers.peers_missing(rank, entry.group)
            missing = sorted(peers or ())
            return tuple(Need(self._callers(peer), f"{call_words(entry)} on rank {peer}", claim) for peer in missing)
        if not self.case.alignment.is_closed(entry.group):
            return ()
        if not self._has_one_store(entry.group):
            return ()
        members, _ = self.case.alignment.members(entry.group)
        needs = []
        for member in sorted(members - {rank}):
            if member in self._living and member not in self.case.alignment.records:
                return ()  # it might have entered the call
            other = self.case.alignment.entry(member, entry.group, entry.seq)
            if other is not None and match(signature(entry), signature(other)) == "no":
                why = f"{call_words(entry)} on rank {rank} and {call_words(other)} on rank {member} do not match"
                needs.append(Need(NO_GIVERS, why, claim))
            elif other is not None and other.started is False:
                continue  # its device reaches the call later
            elif other is None and self.case.alignment.last(member, entry.group) < entry.seq:
                needs.append(Need(self._callers(member), f"rank {member} to enter {call_words(entry)}", claim))
        return tuple(needs)

    def _has_one_store(self, group: str) -> bool:
        states = [self.case.ranks[rank].evidence.gil for rank in self._living]
        return len({gil.stores.get(group) for gil in states if gil.python and group in gil.groups}) <= 1

    def _callers(self, rank: int) -> frozenset[Node]:
        """Returns the threads of ``rank`` that might make a call, without threads that only run library code."""
        if rank not in self._living:
            return NO_GIVERS
        process = self.rank_processes[rank]
        roots = self.case.ranks[rank].evidence.code_roots
        threads = {
            actor
            for actor, view in process.views.items()
            if not (is_torch_thread(view, process.torch) or is_reporter_thread(view, roots))
        }
        return frozenset(threads | {process.main}) | process.unknown_nodes
