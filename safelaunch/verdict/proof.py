"""Is the job proved dead? Its waits as needs that threads, processes or ranks have to meet (:func:`.graph.stuck`).

Whatever is not shown to be unable to release a wait can release it: a thread that moved between two looks, sleeps,
waits for something outside the job or for a time limit, or whose wait is not understood; a process that a timer can
end; a native thread of an unknown library. So missing evidence never proves anything.

The job is dead if the main thread of every rank that has not ended can never continue.
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
from safelaunch.verdict.c10d import described
from safelaunch.verdict.conditions import View
from safelaunch.verdict.graph import Need, Node, stuck
from safelaunch.verdict.peers import PeerWait, peer_wait
from safelaunch.verdict.proof_calls import OpenCall, OpenTransfer, can_meet, names_transfer, open_call_of
from safelaunch.verdict.proof_threads import (
    NO_GIVERS,
    OTHERS,
    TORCH_LIBRARY,
    Actor,
    ProvedProcess,
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
from safelaunch.verdict.waits import Case

MOST_EDGES = 24
GLOO_S = 1800.0  # the time limit of gloo's calls, unless the user has set another
_OWN_S = GLOO_S - 120  # a limit below this is the user's
_OF_STORES_S = (300.0, 600.0)  # those of a store's: its own, or that of NCCL's groups


@dataclass(frozen=True)
class Examined:
    """``proof``: the closed set of waits that keeps every rank where it is; empty if nothing proves that.

    ``free``: then, what could still release the ranks: another thread or process, or why a main thread's wait can end.
    """

    proof: tuple[ProofEdge, ...] = ()
    free: Claim | None = None


def examine(case: Case) -> Examined:
    """Looks for a proof that the job is dead, or else for what could still release it."""
    if case.unseen or case.evidence.outcome == "crash" or not case.ranks:
        return Examined()
    ended = {rank: one.evidence.exit for rank, one in case.ranks.items() if one.evidence.exit is not None}
    living = [rank for rank in case.ranks if rank not in ended]
    if not living or any(exit_.returncode for exit_ in ended.values()):
        return Examined()  # a rank that failed ends the others, or has them started again
    mains = [rank.evidence.main for rank in case.ranks.values() if rank.evidence.main is not None]
    if any(state.leads for main in mains for state in main.states):
        return Examined()  # its first thread is a framework's, which may end any wait
    return _Prover(case, living).examined()


class _Prover:
    def __init__(self, case: Case, living: list[int]) -> None:
        self._case = case
        self._living = frozenset(living)
        self._processes: dict[tuple[str, int], ProvedProcess] = {}
        self._of_ranks: dict[int, ProvedProcess] = {}  # those of the ranks themselves
        self._roots: dict[OpenCall, set[tuple[int | None, int | None]]] = {}  # that those who wait in a call have named
        for rank in living:
            one = case.ranks[rank].evidence
            for process in (one.main, *one.children):
                if process is not None and not is_gone(process):
                    self._processes[one.host, process.pid] = ProvedProcess.of(process, one, case.read_source)
            if (main := self._processes.get((one.host, one.pid))) is not None and main.runs_python:
                self._of_ranks[rank] = main

    def examined(self) -> Examined:
        if self._of_ranks.keys() != self._living:
            return Examined()
        needs: dict[Node, tuple[Need, ...]] = {}
        for process in self._processes.values():
            for actor, view in process.views.items():
                needs[actor] = self._needs(view, process)
            needs.update(self._needs_of_others(process))
        self._add_calls(needs)
        found = stuck({node: each for node, each in needs.items() if each})
        if found.keys() >= set(self._mains):
            return Examined(self._edges(found))
        return Examined((), self._what_is_free(needs, found))

    def _needs_of_others(self, process: ProvedProcess) -> dict[Node, tuple[Need, ...]]:
        """Native threads that rest go on only if a thread of their process, or the end of a call, wakes one of them."""
        if not process.others or not process.others_rest or self._handles(process):
            return {}
        if process.newest.handles_child_ends:
            return {}
        calls_of = {open_call_of(entry, process.rank) for entry in self._open_calls.get(process.rank, ())}
        need = Need(frozenset(process.views) | calls_of, "another thread of the process to wake it")
        return dict.fromkeys(process.others, (need,))

    def _what_is_free(self, needs: Mapping[Node, Sequence[Need]], found: Mapping[Node, Need]) -> Claim | None:
        """From a main thread that can be released along what could release it, to what acts by itself."""
        for node in sorted(self._mains.keys() - found.keys(), key=repr):
            seen = {node}
            while needs.get(node):
                givers = (giver for need in needs[node] for giver in sorted(need.givers, key=repr))
                following = next((giver for giver in givers if giver not in found and giver not in seen), None)
                if following is None:
                    break
                node = following
                seen.add(node)
            if isinstance(node, Actor) and not needs.get(node):
                free = self._why_it_ends(node) if node in self._mains else self._described(node)
                if free:
                    could = "" if node in self._mains else " could still release the ranks"
                    return Claim(f"{free}{could}", f"ranks/{node.rank}/stack.txt")
        return None

    def _why_it_ends(self, main: Actor) -> str:
        """Why the wait of a main thread can end by itself, if that is not evident."""
        process = self._of_ranks[main.rank]
        view = process.views[main]
        waits = view.wait.kind in ("lock", "child", "io", "poll")
        if not waits or not is_steady(view, spins=False):
            return ""
        where = f"the wait of rank {main.rank} at {view.place}"
        if view.wait.left_s is not None and view.wait.left_s < _OWN_S:
            return f"{where} has a time limit"
        if self._may_be_interrupted(view, process):
            return f"a signal can end {where}: the script handles one"
        if view.wait.kind == "child":
            return f"the child process for which rank {main.rank} waits at {view.place} can end"
        return f"{where} can end from outside the job" if view.wait.kind in ("io", "poll") else ""

    def _described(self, node: Actor) -> str:
        """A thread or process, and where it is."""
        host = self._case.ranks[node.rank].evidence.host
        process = self._processes[host, node.pid]
        whose = f"rank {node.rank}" if self._is_rank(process) else f"process {node.pid} of rank {node.rank}"
        if node.tid == OTHERS:
            files = {path.rpartition("/")[2] for one in process.unknown for path in one.libraries} - {"?"}
            return f"a native thread of {whose}" + (f" ({', '.join(sorted(files)[:3])})" if files else "")
        view = process.views[node]
        which = f"thread {view.name} of {whose}" if view.other is not None else whose
        return f"{which} ({fr.place(view.user_frame)})" if view.user_frame is not None else which

    @cached_property
    def _mains(self) -> dict[Node, int]:
        """The main thread of each rank."""
        return {one.main: rank for rank, one in self._of_ranks.items()}

    # --- what one thread needs ----------------------------------------------------------------------------------------

    def _needs(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
        """Nothing: it may go on."""
        if not is_steady(view, spins=self._uses_device(view) and not is_in_lock(view)):
            return ()
        if view.wait.kind in ("running", "stopped", "disk", "sleep", "select", "dead"):
            return self._on_device(view) if view.wait.kind == "running" else ()
        if found := self._of_c10d(view, process):
            # A thread beside it can abort the group, as libraries for fault tolerance do.
            aborting = self._callers(view.rank.rank) - {process.actor(view), process.main}
            return tuple(replace(need, givers=need.givers | aborting) for need in found)
        if view.wait.left_s is not None or self._may_be_interrupted(view, process):
            return ()  # a time limit ends it, or a timer
        of_kind = {
            "lock": self._of_lock,
            "child": self._of_child,
            "io": self._of_descriptor,
            "poll": self._of_descriptor,
        }
        needs = of_kind[view.wait.kind](view, process) if view.wait.kind in of_kind else ()
        handled = self._ends_handled(view, process)
        return tuple(replace(need, givers=need.givers | handled) for need in needs)

    def _ends_handled(self, view: View, process: ProvedProcess) -> frozenset[Node]:
        """The threads of children, where a handler of the main thread hears of their ends: it may release that."""
        return self._children_heard([process]) if view.os_tid == view.process.pid else NO_GIVERS

    def _children_heard(self, processes: Iterable[ProvedProcess]) -> frozenset[Node]:
        """The threads of the children of whose ends a handler of these processes hears."""
        parents = {process.evidence.pid: process.rank for process in processes if process.newest.handles_child_ends}
        family = self._processes.items()
        return self._threads_of(owner for owner, one in family if parents.get(one.newest.ppid) == one.rank)

    def _of_c10d(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
        seen = view.awaited.peers
        if process is not self._of_ranks[view.rank.rank] or view.rank.gil.foreign_backend:
            return ()  # its groups are its own, and no rank's; or nobody knows what ends their calls
        if seen is not None and not is_in_torch(view, process.torch):
            return ()
        if seen is None:
            return self._on_device(view) or self._of_open_calls(view, process)
        wait = peer_wait(view.rank, view, self._case.alignment)
        claim = wait.claims[0] if wait is not None and wait.claims else None
        is_usual = seen.kind == "init" or seen.op == "new_group" or (wait is not None and wait.kind == "p2p")
        if self._has_own_limit(view, is_usual=is_usual):
            return ()
        if seen.kind == "init":
            late = [rank for rank in sorted(self._case.world) if not self._has_come(rank)]
            return tuple(Need(self._callers(rank), f"rank {rank} to join", claim) for rank in late)
        if seen.op == "new_group":
            return self._of_new_group(view, claim)
        if wait is None or (wait.group is None and wait.kind != "p2p"):
            return ()
        entries = self._entries(view, is_p2p=wait.kind == "p2p") if wait.group is not None else []
        if entries:
            possible = [open_call_of(entry, view.rank.rank) for entry in entries]
            if len(possible) == 1 and (wait.source, wait.target) != (None, None):
                self._roots.setdefault(possible[0], set()).add((wait.source, wait.target))
            return (Need(frozenset(possible), " or ".join(map(described, entries[-3:])), claim),)
        return self._of_transfer(view, wait) if wait.kind == "p2p" else ()

    @staticmethod
    def _has_own_limit(view: View, *, is_usual: bool) -> bool:
        """Whether the wait ends sooner than by torch's own limit, and the user may go on then. ``is_usual``: torch has
        one there; in gloo's collectives it counts elsewhere. A limit of the call itself begins anew with each look.
        """
        left_s = view.wait.left_s
        if left_s is None or not is_usual:
            return left_s is not None
        thread = next((thread for thread in view.process.states[-1].threads if thread.tid == view.os_tid), None)
        rested_s = (thread.rested_s if thread is not None else None) or 0.0  # it has waited for as long at least
        if left_s + rested_s >= _OWN_S:
            return False
        return view.wait.kind == "lock" or not any(-15 <= left_s - one <= 1 for one in _OF_STORES_S)

    def _of_transfer(self, view: View, wait: PeerWait) -> tuple[Need, ...]:
        """One that is not recorded: any thread of the peer that runs the user's code may be the one to meet it."""
        mine, rank = OpenTransfer.of(wait), view.rank.rank
        if not self._case.alignment.is_in_closed_groups(rank) or not all(map(self._is_one, view.rank.gil.stores)):
            return ()
        peers = [wait.peer] if wait.peer is not None else sorted(self._case.world - {rank})
        if any(mine.may_meet(rank, other, peer) for peer in peers for other in self._transfers.get(peer, ())):
            return ()  # it may be under way
        givers = NO_GIVERS.union(*map(self._callers, peers))
        return (Need(givers, wait.words, wait.claims[0] if wait.claims else None),)

    @cached_property
    def _transfers(self) -> dict[int, list[OpenTransfer]]:
        """Rank → the sends and receives that its threads are in, with all of their batches."""
        found: dict[int, list[OpenTransfer]] = {}
        for process in self._processes.values():
            mine = found.setdefault(process.rank, [])
            for view in process.views.values():
                wait = peer_wait(view.rank, view, self._case.alignment)
                mine += [OpenTransfer.of(wait)] if wait is not None and wait.kind == "p2p" else []
        for rank, mine in found.items():
            posted = self._case.ranks[rank].evidence.gil.posted
            mine += [OpenTransfer(one.sends, one.peer, one.tag) for one in posted]
        return found

    def _has_come(self, rank: int) -> bool:
        """It is in ``init_process_group``, or past it."""
        wait = self._case.ranks[rank].wait if rank in self._case.ranks else None
        return self._case.alignment.joined(rank) or (wait is not None and wait.kind == "init")

    def _of_new_group(self, view: View, claim: Claim | None) -> tuple[Need, ...]:
        """All ranks of the world take part in it, and torch counts the groups on each."""
        made = view.rank.gil.groups_made
        others = {rank: one.evidence.gil.groups_made for rank, one in self._case.ranks.items()}
        if made is None or None in others.values() or len(others) < len(self._case.world):
            return ()
        late = [rank for rank, count in others.items() if (count or 0) < made]
        return tuple(Need(self._callers(rank), f"rank {rank} to make that group as well", claim) for rank in late)

    def _on_device(self, view: View) -> tuple[Need, ...]:
        """A synchronize ends after all that the device is in. What it has not begun may stand behind a kernel."""
        if not view.device:
            return ()
        pending = [entry for entry in self._pending(view) if not entry.by_gloo]
        begun = [entry for entry in pending if entry.started is not False]
        rank, claim = view.rank.rank, stack_claim_of(view)
        return tuple(Need(frozenset({open_call_of(one, rank)}), described(one), claim) for one in begun)

    def _of_open_calls(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
        """``work.wait()`` and a backward pass show no frame of c10d: it may be any of the calls that are under way."""
        if view.wait.kind != "lock" and view.native() != "peers":
            return ()
        if self._has_own_limit(view, is_usual=not self._pending(view)):
            return ()
        rests_in = rests_in_of(view)
        if rests_in in ("lock", "gil") or not (calls.in_torch(view.stack) or is_on_user_line(view)):
            return ()
        if calls.RPC.on(view.stack.called) or (calls.FUTURE.on(view.stack.called) and process.unknown):
            return ()  # another rank may answer, through a native thread
        pending = [entry for entry in self._pending(view) if entry.thread in (0, ident_of(view))]
        of_torch = TORCH_LIBRARY.fullmatch(rests_in) is not None
        if not pending:
            wait = self._case.ranks[view.rank.rank].wait if view.other is None else None
            if not of_torch or wait is None or wait.kind != "p2p" or not names_transfer(view):
                return ()  # nothing tells the group, which may be one with processes of other jobs
            return self._of_transfer(view, wait)
        if not of_torch and rests_in:
            return ()  # a library of its own
        # A thread of the user's can end it, too: by the Future of a communication hook, say.
        givers: set[Node] = (
            {open_call_of(entry, view.rank.rank) for entry in pending} | process.beside(view) | process.others
        )
        if not of_torch and not calls.in_torch(view.stack):
            if self._may_be_interrupted(view, process):
                return ()  # or it is a lock, after all
            givers |= self._ends_handled(view, process)
        return (Need(frozenset(givers), " or ".join(described(one) for one in pending[:3]), stack_claim_of(view)),)

    def _of_lock(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
        """Whoever holds a lock, or fills a queue, is a thread that runs Python: any other one of the process."""
        lock, rests_in = calls.lock_wait(view.stack.called), rests_in_of(view)
        shared = rests_in.startswith("_multiprocessing")
        if shared and (lock is None or not lock.shared):
            lock = calls.LockWait("a multiprocessing lock", shared=True)
        sharers, target = [(view.rank.host, end.pid) for end in view.wait.ends or ()], view.wait.thread.fd_target
        if shared and (is_public(target) or not sharers or not self._processes.keys() >= set(sharers)):
            return ()
        if rests_in not in ("lock", "gil") and not shared and (lock is None or rests_in):
            return ()  # what others have built with the same frames may be ended by somebody else
        what = lock.what if lock is not None else "a lock"
        givers = process.beside(view) | process.others  # any thread may release a lock, not only the one that holds it
        if shared:
            givers |= self._threads_of(sharers) - {process.actor(view)}
        elif lock is not None and lock.by_processes:
            others = (one for one in self._processes.values() if one.rank == process.rank and one is not process)
            givers = givers.union(*(other.views for other in others))
        givers |= {
            open_call_of(entry, view.rank.rank) for entry in self._pending(view)
        }  # what is called back at its end
        why = f"another thread to end the wait for {what} at {view.place}"
        return (Need(givers, why, stack_claim_of(view)),)

    def _of_child(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
        pid, host = view.wait.thread.child, view.rank.host
        children = [
            (host, child.pid)
            for child in view.rank.children
            if (child.pid == pid if pid is not None else child.states and child.states[-1].ppid == process.evidence.pid)
        ]
        if not children or any(child not in self._processes for child in children):
            return ()  # one that was not seen, or has ended and is about to be reaped
        if not all(self._never_ends(self._processes[child]) for child in children):
            return ()
        givers = self._threads_of(self._family(process.rank)) - {process.actor(view)}
        return (Need(givers, f"a child process to end ({view.place})", stack_claim_of(view)),)

    def _of_descriptor(self, view: View, process: ProvedProcess) -> tuple[Need, ...]:
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
        others = [self._processes[owner] for owner in owners]
        if any(self._handles(one) or one.serves_a_store for one in others):
            return ()  # a handler may write, or unlock; anybody may set a key
        givers = (self._threads_of(owners) | self._children_heard(others)) - {process.actor(view)}
        return (Need(givers, f"an answer to {wait.call} on {thread.fd_target} at {view.place}", stack_claim_of(view)),)

    def _threads_of(self, owners: Iterable[tuple[str, int]]) -> frozenset[Node]:
        """All threads of these processes, native ones, too: they may write, close, or end their process."""
        processes = [self._processes[owner] for owner in owners]
        return NO_GIVERS.union(*(process.others for process in processes), *(process.views for process in processes))

    def _family(self, rank: int) -> set[tuple[str, int]]:
        """The processes of a rank: any of them can kill another one."""
        return {owner for owner, one in self._processes.items() if one.rank == rank}

    def _is_rank(self, process: ProvedProcess) -> bool:
        return process is self._of_ranks.get(process.rank)

    def _never_ends(self, process: ProvedProcess) -> bool:
        """Whether no timer can end it: a rank, whose end is the job's; or a fork of a rank that sets no timers."""
        if self._is_rank(process):
            return True
        progress = self._case.ranks[process.rank].evidence.progress
        return process.newest.is_fork and progress is not None and not progress.sets_timers

    def _handles(self, process: ProvedProcess) -> bool:
        """Whether a signal's handler of the script's can run in it, whoever sends the signal.

        The beacon and torch handle SIGTERM themselves, and only a rank reports the handlers that Python has.
        """
        state, told = process.newest, None
        if self._is_rank(process):
            told = self._case.ranks[process.rank].evidence.gil.handlers
        is_loader = process.evidence.role == "dataloader worker"
        unknown = state.handles_termination and told is None and not is_loader
        return state.handles_signals or unknown or bool(set(told or ()) - {signal.SIGCHLD})

    def _may_be_interrupted(self, view: View, process: ProvedProcess) -> bool:
        """A signal's handler runs in the main thread, and may raise there. Calls of c10d don't return for it."""
        return view.os_tid == view.process.pid and self._handles(process)

    def _sharing(self, host: str, pid: int) -> list[int]:
        """The process and all others of its rank: a lock on a file is inherited."""
        holder = self._processes.get((host, pid))
        if holder is None:
            return [pid]
        return [sharer for _, sharer in self._family(holder.rank)]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _pending(self, view: View) -> list[Collective]:
        return self._open_calls.get(view.rank.rank, [])

    @cached_property
    def _open_calls(self) -> dict[int, list[Collective]]:
        """Rank → its calls that are not completed, oldest first."""
        ring_of = self._case.alignment.ring
        return {
            rank: ring_of(rank).matching(lambda kind: not kind.completed and bool(kind.op))
            for rank in self._case.alignment.records
        }

    def _entries(self, view: View, *, is_p2p: bool) -> list[Collective]:
        """The calls in one of which the thread waits: those of its line, else all that no other Python thread made."""
        threads = view.sample.threads if view.sample is not None else ()
        others = {thread.ident for thread in threads if thread is not view.thread} - {0}
        mine = [one for one in self._pending(view) if one.is_p2p == is_p2p and one.thread not in others]
        here = [one for one in mine if fr.same_line(fr.stack_of(view.rank, one.frames).user_frame, view.user_frame)]
        return here or mine

    def _uses_device(self, view: View) -> bool:
        return bool(view.device) or any(not entry.by_gloo for entry in self._pending(view))

    def _add_calls(self, needs: dict[Node, tuple[Need, ...]]) -> None:
        for rank, entries in self._open_calls.items():
            seen: dict[str, Node] = {}  # of NCCL, which works in order: group → the call before
            for entry in entries:
                node = open_call_of(entry, rank)
                behind = seen.get(entry.group) if not entry.by_gloo else None
                if node not in needs:
                    needs[node] = self._of_call(entry, rank)
                if behind is not None and behind != node and entry.started is not True:
                    why = f"the calls before {described(entry)} to end"
                    needs[node] = (*needs[node], Need(frozenset({behind}), why))
                seen[entry.group] = node
        for call, roots in self._roots.items():
            if len(roots) > 1 and not call.is_p2p and call in needs:
                needs[call] = (*needs[call], Need(NO_GIVERS, f"ranks name different roots in {self._name(call)}"))

    def _of_call(self, entry: Collective, rank: int) -> tuple[Need, ...]:
        """What the members have yet to do; empty where they are all there, or are not known."""
        claim = Claim(f"pending: {described(entry)}", f"ranks/{rank}/flight_recorder.json")
        if entry.by_gloo and 0 < entry.timeout_ms < GLOO_S * 1000:
            return ()  # it raises an error then, and the user may go on
        if entry.is_p2p:
            peers = self._case.transfers.peers_missing(rank, entry.group)
            missing = sorted(peers or ())
            return tuple(Need(self._callers(peer), f"{described(entry)} on rank {peer}", claim) for peer in missing)
        if not self._case.alignment.is_closed(entry.group):
            return ()
        if not self._is_one(entry.group):
            return ()
        members, _ = self._case.alignment.members(entry.group)
        needs = []
        for member in sorted(members - {rank}):
            if member in self._living and member not in self._case.alignment.records:
                return ()  # it may have entered the call
            other = self._case.alignment.entry(member, entry.group, entry.seq)
            if other is not None and not can_meet(entry, other):
                why = f"{described(entry)} on rank {rank} and {described(other)} on rank {member} do not match"
                needs.append(Need(NO_GIVERS, why, claim))
            elif other is not None and other.started is False:
                continue  # its device comes to it later
            elif other is None and self._case.alignment.last(member, entry.group) < entry.seq:
                needs.append(Need(self._callers(member), f"rank {member} to enter {described(entry)}", claim))
        return tuple(needs)

    def _is_one(self, group: str) -> bool:
        """Whether a group is the same on all ranks that list it: they have found each other by one store."""
        told = [self._case.ranks[rank].evidence.gil for rank in self._living]
        return len({gil.stores.get(group) for gil in told if gil.python and group in gil.groups}) <= 1

    def _callers(self, rank: int) -> frozenset[Node]:
        """The threads of ``rank`` that could make a call, whatever they have done so far; none once it has ended.

        All but torch's own, and those of libraries that are known to run nothing but their own code.
        """
        if rank not in self._living:
            return NO_GIVERS
        process = self._of_ranks[rank]
        roots = self._case.ranks[rank].evidence.code_roots
        threads = {
            actor
            for actor, view in process.views.items()
            if not (is_torch_thread(view, process.torch) or is_reporter_thread(view, roots))
        }
        return frozenset(threads | {process.main}) | process.others

    # --- in words -----------------------------------------------------------------------------------------------------

    def _edges(self, found: Mapping[Node, Need]) -> tuple[ProofEdge, ...]:
        """From the main threads along what they need, and what that needs; ranks that need the same stand together."""
        together: dict[tuple[str, tuple[str, ...], str], list[Node]] = {}
        queue: list[Node] = sorted(self._mains, key=repr)
        seen = set(queue)
        for node in queue:  # grows while it is walked
            need = found[node]
            file = need.claim.file if need.claim is not None else ""
            key = (need.why, self._names(need.givers), file.partition("/")[2].partition("/")[2])
            together.setdefault(key, []).append(node)
            for giver in sorted(need.givers - seen, key=repr):
                seen.add(giver)
                queue.append(giver)
        edges = []
        for (why, names, _), nodes in list(together.items())[:MOST_EDGES]:
            claim = found[nodes[0]].claim
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
        what = f"thread {node.tid} of " if node.tid > 0 else "" if node.tid == 0 else "a native thread of "
        return f"{what if node.tid != node.pid else ''}process {node.pid} of rank {node.rank}"
