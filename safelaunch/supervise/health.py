"""Notes problems that slow a healthy job down, and keeps readings of GPUs and links for an incident."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from safelaunch.capture.gpu import gpus
from safelaunch.capture.node import Links, network_within
from safelaunch.leases.inventory import has_driver
from safelaunch.model import Gpu
from safelaunch.model.words import size
from safelaunch.supervise.pollers import QUIET_TIMES, Poller
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.console import say

HEALTH_AFTER_S, HEALTH_AGAIN_S = 60.0, 600.0  # after the first step, because the first steps are slow
LINKS_AFTER_S = 5.0
MIB = 1 << 20
NOTICEABLE_BYTES = 256 * MIB  # a CUDA context alone uses that much


@dataclass(frozen=True, slots=True)
class Note:
    subject: Hashable
    """identity of the note, as the figures in ``words`` change"""
    words: str


class HealthPoller(Poller[tuple[Gpu, ...]]):
    """Reads the node's GPUs for the watch, notes problems, and prints each new one."""

    name, again_s = "health", HEALTH_AGAIN_S

    def __init__(self, watch: Watch, own_pids: Callable[[], Collection[int]]) -> None:
        super().__init__(watch)
        self._own_pids = own_pids
        self._subjects: frozenset[Hashable] = frozenset()

    def reset(self) -> None:
        self._watch.note(self.name, ())
        self._subjects = frozenset()

    def is_due(self, now: float) -> bool:
        return self.has_stepped_for(HEALTH_AFTER_S, now)

    def question(self) -> Callable[[], tuple[Gpu, ...]]:
        return read_gpus

    def take(self, answer: tuple[Gpu, ...], now: float) -> None:
        self._watch.keep_gpus(answer, now)
        ranks = {target.rank: target.pid for target in self._watch.targets()}
        notes = notes_on_gpus(answer, ranks, frozenset(self._own_pids())) if answer else []
        for note in notes:
            if note.subject not in self._subjects:
                say(f"{note.words} (the job continues)")
        self._subjects = frozenset(note.subject for note in notes)
        self._watch.note(self.name, tuple(note.words for note in notes))


def read_gpus() -> tuple[Gpu, ...]:
    driver = gpus().value if has_driver(os.environ) else None
    return driver.gpus if driver is not None else ()


class LinkPoller(Poller[Links]):
    """Reads the error counters of the node's links once the job is quiet."""

    name, again_s = "links", 1.0

    def is_due(self, now: float) -> bool:
        spell = self._watch.spell(now)
        return (
            spell is not None
            and now - spell.since_s > max(LINKS_AFTER_S, QUIET_TIMES * spell.longest_s)
            and self._watch.quiet_links is None
        )

    def question(self) -> Callable[[], Links]:
        return partial(network_within, 1.0)

    def take(self, answer: Links, now: float) -> None:
        self._watch.keep_links(answer)


def notes_on_gpus(gpus: Sequence[Gpu], ranks: Mapping[int, int], own: Collection[int]) -> list[Note]:
    """Returns notes on GPUs that several ranks or other programs use; empty in a container with its own pids.

    Args:
        ranks: rank → pid.
        own: The job's pids.
    """
    by_pid = {pid: rank for rank, pid in ranks.items()}
    notes: list[Note] = []
    for gpu in gpus:
        processes = gpu.processes or ()
        here = sorted({by_pid[process.pid] for process in processes if process.pid in by_pid})
        if not here:
            continue
        name = f"GPU {gpu.index}"
        if len(here) > 1:
            both = f"ranks {', '.join(map(str, here))}"
            words = f"{both} are on the same {name}: does each call torch.cuda.set_device(LOCAL_RANK)?"
            notes.append(Note(("shared", gpu.index, *here), words))
        for use in processes:
            if use.pid not in own and (use.size or 0) >= NOTICEABLE_BYTES:
                much = f"{size(use.size or 0)} of {name}"
                words = f"pid {use.pid}, not of this job, holds {much}, which rank {here[0]} uses"
                notes.append(Note(("stranger", gpu.index, use.pid), words))
    return notes
