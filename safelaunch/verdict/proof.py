"""Proof that a job is dead: a closed set of waits that no thread, process or rank can end (:func:`.graph.stuck`).

Missing evidence never proves anything: a thread counts as able to end a wait if it moved between two looks, sleeps, has
a time limit, waits for something outside the job, or isn't understood. So do processes that a timer can end, and native
threads of unknown libraries.

The job is dead if the main thread of every living rank is stuck.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import (
    Claim,
    Collective,
    ProofEdge,
    rank_words,
)
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.c10d import call_words, match, signature
from safelaunch.verdict.graph import UNKNOWN_THREADS, Actor, Need, Node, stuck
from safelaunch.verdict.peers import PeerWait, calls_at, peer_wait
from safelaunch.verdict.proof_calls import OpenCall, OpenTransfer, names_transfer, open_call_of
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

MOST_EDGES = 24
GLOO_S = 1800.0  # default time limit of gloo's calls
_USER_LIMIT_S = GLOO_S - 120  # a shorter limit was set by the user
_STORE_LIMITS_S = (300.0, 600.0)  # default time limits of a store, and of the store of NCCL groups


@dataclass(frozen=True)
class ProofResult:
    """A proof, or what is missing for one."""

    proof: tuple[ProofEdge, ...] = ()  # closed set of waits that holds every rank; empty without a proof
    free: Claim | None = None  # what could still release the ranks, or why a main thread's wait can end


def examine(case: Case) -> ProofResult:
    if case.unseen or case.evidence.outcome == "crash" or not case.ranks:
        return ProofResult()
    ended = {rank: facts.evidence.exit for rank, facts in case.ranks.items() if facts.evidence.exit is not None}
    living = [rank for rank in case.ranks if rank not in ended]
    if not living or any(exit_.returncode for exit_ in ended.values()):
        return ProofResult()  # a failed rank makes the launcher end or restart the others
    mains = [rank.evidence.main for rank in case.ranks.values() if rank.evidence.main is not None]
    if any(state.leads for main in mains for state in main.states):
        return ProofResult()  # the first thread belongs to a framework, which might end any wait
    return _Prover(case, living).result()


class _Prover:
    def __init__(self, case: Case, living: list[int]) -> None:
        self._case = case
        self._living = frozenset(living)
        self._processes: dict[tuple[str, int], ProofProcess] = {}
        self._rank_processes: dict[int, ProofProcess] = {}
        self._roots: dict[OpenCall, set[tuple[int | None, int | None]]] = {}  # roots named by the threads in a call
        for rank in living:
            facts = case.ranks[rank]
            evidence = facts.evidence
            for view in (facts.view, *facts.children):
                if view is not None and not is_gone(view.process):
                    self._processes[evidence.host, view.process.pid] = ProofProcess(view)
            if (main := self._processes.get((evidence.host, evidence.pid))) is not None and main.runs_python:
                self._rank_processes[rank] = main

    def result(self) -> ProofResult:
        if self._rank_processes.keys() != self._living:
            return ProofResult()
        needs: dict[Node, tuple[Need, ...]] = {}
        for process in self._processes.values():
            for actor, view in process.views.items():
                needs[actor] = self._needs(view, process)
            needs.update(self._needs_of_native_threads(process))
        self._add_calls(needs)
        stuck_nodes = stuck({node: each for node, each in needs.items() if each})
        if stuck_nodes.keys() >= set(self._mains):
            return ProofResult(self._edges(stuck_nodes))
        return ProofResult((), self._what_is_free(needs, stuck_nodes))

    def _needs_of_native_threads(self, process: ProofProcess) -> dict[Node, tuple[Need, ...]]:
        """Returns what wakes resting native threads: a thread of the process, or the end of a call."""
        if not process.unknown_nodes or not process.unknown_threads_rest or self._handles(process):
            return {}
        if process.newest.handles_child_ends:
            return {}
        calls_of = {open_call_of(entry, process.rank) for entry in self._case.alignment.open_calls(process.rank)}
        need = Need(frozenset(process.views) | calls_of, "another thread of the process to wake it")
        return dict.fromkeys(process.unknown_nodes, (need,))

    def _what_is_free(self, needs: Mapping[Node, Sequence[Need]], stuck_nodes: Mapping[Node, Need]) -> Claim | None:
        """Follows the waits from a main thread that isn't stuck to a node that acts by itself."""
        for node in sorted(self._mains.keys() - stuck_nodes.keys(), key=repr):
            visited = {node}
            while needs.get(node):
                givers = (giver for need in needs[node] for giver in sorted(need.givers, key=repr))
                following = next((giver for giver in givers if giver not in stuck_nodes and giver not in visited), None)
                if following is None:
                    break
                node = following
                visited.add(node)
            if isinstance(node, Actor) and not needs.get(node):
                free = self._why_it_ends(node) if node in self._mains else self._place_of(node)
                if free:
                    could = "" if node in self._mains else " could still release the ranks"
                    return Claim(f"{free}{could}", f"ranks/{node.rank}/stack.txt")
        return None

    def _why_it_ends(self, main: Actor) -> str:
        """Returns why the wait of a main thread can end by itself, unless that is evident."""
        process = self._rank_processes[main.rank]
        view = process.views[main]
        waits = view.wait.kind in ("lock", "child", "io", "poll")
        if not waits or not is_steady(view, spins=False):
            return ""
        where = f"the wait of rank {main.rank} at {view.place}"
        if view.wait.left_s is not None and view.wait.left_s < _USER_LIMIT_S:
            return f"{where} has a time limit"
        if self._may_be_interrupted(view, process):
            return f"a signal can end {where}: the script handles one"
        if view.wait.kind == "child":
            return f"the child process for which rank {main.rank} waits at {view.place} can end"
        return f"{where} can end from outside the job" if view.wait.kind in ("io", "poll") else ""

    def _place_of(self, node: Actor) -> str:
        host = self._case.ranks[node.rank].evidence.host
        process = self._processes[host, node.pid]
        whose = f"rank {node.rank}" if self._is_rank(process) else f"process {node.pid} of rank {node.rank}"
        if node.tid == UNKNOWN_THREADS:
            files = {path.rpartition("/")[2] for thread in process.unknown_threads for path in thread.libraries} - {"?"}
            return f"a native thread of {whose}" + (f" ({', '.join(sorted(files)[:3])})" if files else "")
        view = process.views[node]
        which = f"thread {view.name} of {whose}" if view.other is not None else whose
        return f"{which} ({fr.place(view.user_frame)})" if view.user_frame is not None else which

    @cached_property
    def _mains(self) -> dict[Node, int]:
        return {process.main: rank for rank, process in self._rank_processes.items()}

    # --- needs of one thread ------------------------------------------------------------------------------------------

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
        if view.wait.left_s is not None or self._may_be_interrupted(view, process):
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
        family = self._processes.items()
        return self._threads_of(owner for owner, process in family if parents.get(process.newest.ppid) == process.rank)

    def _c10d_needs(self, view: View, process: ProofProcess) -> tuple[Need, ...]:
        awaited = view.awaited.peers
        if process is not self._rank_processes[view.rank.rank] or view.rank.gil.foreign_backend:
            return ()  # its groups aren't the rank's; or it isn't known what ends the backend's calls
        if awaited is not None and not is_in_torch(view, process.torch):
            return ()
        if awaited is None:
            return self._device_needs(view) or self._open_call_needs(view, process)
        wait = peer_wait(view.rank, view, self._case.alignment)
        claim = wait.claims[0] if wait is not None and wait.claims else None
        is_usual = awaited.kind == "init" or awaited.op == "new_group" or (wait is not None and wait.kind == "p2p")
        if self._has_own_limit(view, is_usual=is_usual):
            return ()
        if awaited.kind == "init":
            late = [rank for rank in sorted(self._case.world) if not self._has_joined(rank)]
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

    @staticmethod
    def _has_own_limit(view: View, *, is_usual: bool) -> bool:
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
        if left_s + rested_s >= _USER_LIMIT_S:
            return False
        return view.wait.kind == "lock" or not any(-15 <= left_s - limit <= 1 for limit in _STORE_LIMITS_S)

    def _transfer_needs(self, view: View, wait: PeerWait) -> tuple[Need, ...]:
        """Returns the needs of an unrecorded transfer: any of the peer's threads with user code can match it."""
        transfer, rank = OpenTransfer.of(wait), view.rank.rank
        if not self._case.alignment.is_in_closed_groups(rank) or not all(
            map(self._has_one_store, view.rank.gil.stores)
        ):
            return ()
        peers = [wait.peer] if wait.peer is not None else sorted(self._case.world - {rank})
        if any(transfer.may_meet(rank, other, peer) for peer in peers for other in self._transfers.get(peer, ())):
            return ()  # it might be under way
        givers = NO_GIVERS.union(*map(self._callers, peers))
        return (Need(givers, wait.words, wait.claims[0] if wait.claims else None),)

    @cached_property
    def _transfers(self) -> dict[int, list[OpenTransfer]]:
        transfers: dict[int, list[OpenTransfer]] = {}
        for process in self._processes.values():
            of_rank = transfers.setdefault(process.rank, [])
            for view in process.views.values():
                wait = peer_wait(view.rank, view, self._case.alignment)
                of_rank += [OpenTransfer.of(wait)] if wait is not None and wait.kind == "p2p" else []
        for rank, of_rank in transfers.items():
            posted = self._case.ranks[rank].evidence.gil.posted
            of_rank += [
                OpenTransfer(posted_transfer.sends, posted_transfer.peer, posted_transfer.tag)
                for posted_transfer in posted
            ]
        return transfers

    def _has_joined(self, rank: int) -> bool:
        wait = self._case.ranks[rank].wait if rank in self._case.ranks else None
        return self._case.alignment.has_joined(rank) or (wait is not None and wait.kind == "init")

    def _new_group_needs(self, view: View, claim: Claim | None) -> tuple[Need, ...]:
        """Returns a need for each rank that created fewer groups, because all ranks must create each one."""
        made = view.rank.gil.groups_made
        counts = {rank: facts.evidence.gil.groups_made for rank, facts in self._case.ranks.items()}
        if made is None or None in counts.values() or len(counts) < len(self._case.world):
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
        if self._has_own_limit(view, is_usual=not self._pending(view)):
            return ()
        rests_in = rests_in_of(view)
        if rests_in in ("lock", "gil") or not (calls.in_torch(view.stack) or is_on_user_line(view)):
            return ()
        if calls.RPC.on(view.stack.called) or (calls.FUTURE.on(view.stack.called) and process.unknown_threads):
            return ()  # another rank might reply, through a native thread
        pending = [entry for entry in self._pending(view) if entry.thread in (0, ident_of(view))]
        of_torch = TORCH_LIBRARY.fullmatch(rests_in) is not None
        if not pending:
            wait = self._case.ranks[view.rank.rank].wait if view.other is None else None
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
            if self._may_be_interrupted(view, process):
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
        if shared and (is_public(target) or not sharers or not self._processes.keys() >= set(sharers)):
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
                for sibling in self._processes.values()
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
        if not children or any(child not in self._processes for child in children):
            return ()  # the child wasn't seen, or has ended and is about to be reaped
        if not all(self._never_ends(self._processes[child]) for child in children):
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
        if not pids or not owners <= self._processes.keys():
            return ()
        keeping = [self._processes[host, pid] for pid in keepers]
        if not any(map(self._never_ends, keeping)):
            return ()  # the wait ends with the last of them
        if not any(map(self._is_rank, keeping)):
            owners |= self._family(process.rank)
        processes = [self._processes[owner] for owner in owners]
        if any(self._handles(owner_process) or owner_process.serves_a_store for owner_process in processes):
            return ()  # a handler might write or unlock; any process can set a key
        givers = (self._threads_of(owners) | self._watched_children(processes)) - {view.actor}
        return (Need(givers, f"an answer to {wait.call} on {thread.fd_target} at {view.place}", stack_claim_of(view)),)

    def _threads_of(self, owners: Iterable[tuple[str, int]]) -> frozenset[Node]:
        processes = [self._processes[owner] for owner in owners]
        return NO_GIVERS.union(
            *(process.unknown_nodes for process in processes), *(process.views for process in processes)
        )

    def _family(self, rank: int) -> set[tuple[str, int]]:
        return {owner for owner, process in self._processes.items() if process.rank == rank}

    def _is_rank(self, process: ProofProcess) -> bool:
        return process is self._rank_processes.get(process.rank)

    def _never_ends(self, process: ProofProcess) -> bool:
        if self._is_rank(process):
            return True
        progress = self._case.ranks[process.rank].evidence.progress
        return process.newest.is_fork and progress is not None and not progress.sets_timers

    def _handles(self, process: ProofProcess) -> bool:
        """Returns whether a signal handler of the script can run in the process.

        The beacon and torch handle SIGTERM themselves. Only ranks report Python's handlers.
        """
        state, handlers = process.newest, None
        if self._is_rank(process):
            handlers = self._case.ranks[process.rank].evidence.gil.handlers
        is_loader = process.evidence.role == "dataloader worker"
        unknown = state.handles_termination and handlers is None and not is_loader
        return state.handles_signals or unknown or bool(set(handlers or ()) - {signal.SIGCHLD})

    def _may_be_interrupted(self, view: View, process: ProofProcess) -> bool:
        return view.os_tid == view.process.pid and self._handles(process)

    def _sharing(self, host: str, pid: int) -> list[int]:
        holder = self._processes.get((host, pid))
        if holder is None:
            return [pid]
        return [sharer for _, sharer in self._family(holder.rank)]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _pending(self, view: View) -> list[Collective]:
        return self._case.alignment.open_calls(view.rank.rank)

    def _uses_device(self, view: View) -> bool:
        return bool(view.device) or any(not entry.by_gloo for entry in self._pending(view))

    def _add_calls(self, needs: dict[Node, tuple[Need, ...]]) -> None:
        for rank in self._case.alignment.records:
            last_in_group: dict[str, Node] = {}  # NCCL works in order: group → the call before
            for entry in self._case.alignment.open_calls(rank):
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
                needs[call] = (*needs[call], Need(NO_GIVERS, f"ranks name different roots in {self._name(call)}"))

    def _call_needs(self, entry: Collective, rank: int) -> tuple[Need, ...]:
        """Returns what members still have to do for this call."""
        claim = Claim(f"pending: {call_words(entry)}", f"ranks/{rank}/flight_recorder.json")
        if entry.by_gloo and 0 < entry.timeout_ms < GLOO_S * 1000:
            return ()  # it will raise an error, and the user's code can continue
        if entry.is_p2p:
            peers = self._case.transfers.peers_missing(rank, entry.group)
            missing = sorted(peers or ())
            return tuple(Need(self._callers(peer), f"{call_words(entry)} on rank {peer}", claim) for peer in missing)
        if not self._case.alignment.is_closed(entry.group):
            return ()
        if not self._has_one_store(entry.group):
            return ()
        members, _ = self._case.alignment.members(entry.group)
        needs = []
        for member in sorted(members - {rank}):
            if member in self._living and member not in self._case.alignment.records:
                return ()  # it might have entered the call
            other = self._case.alignment.entry(member, entry.group, entry.seq)
            if other is not None and match(signature(entry), signature(other)) == "no":
                why = f"{call_words(entry)} on rank {rank} and {call_words(other)} on rank {member} do not match"
                needs.append(Need(NO_GIVERS, why, claim))
            elif other is not None and other.started is False:
                continue  # its device reaches the call later
            elif other is None and self._case.alignment.last(member, entry.group) < entry.seq:
                needs.append(Need(self._callers(member), f"rank {member} to enter {call_words(entry)}", claim))
        return tuple(needs)

    def _has_one_store(self, group: str) -> bool:
        states = [self._case.ranks[rank].evidence.gil for rank in self._living]
        return len({gil.stores.get(group) for gil in states if gil.python and group in gil.groups}) <= 1

    def _callers(self, rank: int) -> frozenset[Node]:
        """Returns the threads of ``rank`` that might make a call, without threads that only run library code."""
        if rank not in self._living:
            return NO_GIVERS
        process = self._rank_processes[rank]
        roots = self._case.ranks[rank].evidence.code_roots
        threads = {
            actor
            for actor, view in process.views.items()
            if not (is_torch_thread(view, process.torch) or is_reporter_thread(view, roots))
        }
        return frozenset(threads | {process.main}) | process.unknown_nodes

    # --- edges of the proof -------------------------------------------------------------------------------------------

    def _edges(self, stuck_nodes: Mapping[Node, Need]) -> tuple[ProofEdge, ...]:
        """Follows the needs from the main threads, and merges ranks that need the same."""
        together: dict[tuple[str, tuple[str, ...], str], list[Node]] = {}
        queue: list[Node] = sorted(self._mains, key=repr)
        visited = set(queue)
        for node in queue:  # grows during the loop
            need = stuck_nodes[node]
            file = need.claim.file if need.claim is not None else ""
            key = (need.why, self._names(need.givers), file.partition("/")[2].partition("/")[2])
            together.setdefault(key, []).append(node)
            for giver in sorted(need.givers - visited, key=repr):
                visited.add(giver)
                queue.append(giver)
        edges = []
        for (why, names, _), nodes in list(together.items())[:MOST_EDGES]:
            claim = stuck_nodes[nodes[0]].claim
            edges.append(ProofEdge(", ".join(self._names(nodes)), names, why, claim.file if claim is not None else ""))
        return tuple(edges)

    def _names(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        nodes = set(nodes)
        mains = [rank for main, rank in self._mains.items() if main in nodes]
        ranks = rank_words(mains) if mains else ""
        rest = {self._name(node) for node in nodes - self._mains.keys()}
        return tuple(filter(None, (ranks, *sorted(rest))))

    @staticmethod
    def _name(node: Node) -> str:
        if isinstance(node, OpenCall):
            whose = f" of rank {node.rank}" if node.rank >= 0 else ""
            return f"{node.signature[0]} #{node.number} of group {node.group!r}{whose}"
        assert isinstance(node, Actor)
        what = "a native thread of " if node.tid == UNKNOWN_THREADS else f"thread {node.tid} of "
        return f"{what if node.tid != node.pid else ''}process {node.pid} of rank {node.rank}"
