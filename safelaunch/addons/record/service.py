"""Samples the ranks of a live run for ``safelaunch record``.

Each supervisor samples its own ranks and keeps only counts per stack, a few hundred kilobytes. The client computes the
verdict and the page.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from safelaunch.addons.record import recording, sampling
from safelaunch.addons.record.recording import ProcessRecord, RankRecord, Recording, Sampling, StackNumbering
from safelaunch.addons.record.sampling import SampleTarget
from safelaunch.beacon import layout
from safelaunch.capture.look import Target
from safelaunch.capture.pages import read_meta
from safelaunch.job.process import process_table
from safelaunch.leases.inventory import has_driver
from safelaunch.model.words import ranks_in
from safelaunch.supervise.cluster.messages import MOST_RANKS
from safelaunch.supervise.respond import JobView


class Recorder:
    """Implements ``addons.protocols.Service``."""

    name = "record"
    noun = "recording"
    ask = Sampling
    part = Recording

    def here(self, ask: Sampling, job: JobView, stop: threading.Event) -> Recording:
        wanted = set(ranks_in(ask.ranks))
        targets = [target for target in job.watch.targets() if not wanted or target.rank in wanted]
        table = process_table()
        children = {target.rank: sampling.children_of(target.pid, table) if ask.children else [] for target in targets}
        processes = _choose(targets, children)
        passes = sum(len(process.passes) for process in processes)
        rate_hz = sampling.rate_for(passes, len(os.sched_getaffinity(0)), ask.share)
        numbers, at_unix_s = StackNumbering(), time.time()
        before, begin_s = _steps(job), time.monotonic()
        records = sampling.sample(
            processes,
            numbers,
            job.context.run_dir,
            duration_s=ask.duration_s,
            rate_hz=rate_hz,
            stop=stop,
        )
        after, elapsed_s = _steps(job), time.monotonic() - begin_s
        by_pid = {record.pid: record for record in records}
        counts = {rank: after[rank] - step for rank, step in before.items() if rank in after and after[rank] >= step}
        samples = Recording(
            run=job.context.run_dir.name,
            name=job.context.run_name,
            at_unix_s=round(at_unix_s, 3),
            duration_s=ask.duration_s,
            rate_hz=rate_hz,
            world_size=job.watch.world_size,
            frames=list(numbers.frames),
            stacks=list(numbers.stacks),
            ranks=[_rank(job, target, by_pid, children[target.rank], counts.get(target.rank)) for target in targets],
            code_roots=_code_roots(job),
            command=job.context.redactor.argv(job.context.script),
            elapsed_s=round(elapsed_s, 2),
            on_gpu=has_driver(os.environ),
        )
        return job.context.cleaned(samples)

    def check(self, part: Recording) -> None:
        recording.check(part)
        if not all(0 <= rank.rank < MOST_RANKS for rank in part.ranks):
            raise msgspec.ValidationError("samples of impossible ranks")

    def merged(self, ask: Sampling, parts: Sequence[Recording], notes: Sequence[str]) -> Recording:
        whole = recording.merge([*parts]) if len(parts) > 1 else parts[0]
        whole = msgspec.structs.replace(whole, notes=[*whole.notes, *notes])
        return _add_unseen(whole, ranks_in(ask.ranks))

    def bounded(self, part: Recording, fits: Callable[[Recording], bool]) -> Recording:
        return recording.shrink(part, fits)


def _rank(
    job: JobView, target: Target, by_pid: Mapping[int, ProcessRecord], children: list[SampleTarget], steps: int | None
) -> RankRecord:
    main = by_pid.get(target.pid)
    has_stacks = main is not None and any(thread.stacks for thread in main.threads)
    problem = main.problem if main is not None else "it was not sampled"
    missing = problem if problem == sampling.STOPPED or not has_stacks else ""
    missing = missing or ("" if has_stacks else "py-spy saw no Python thread")
    workers = [by_pid[child.pid] for child in children if child.pid in by_pid and by_pid[child.pid].threads]
    return RankRecord(target.rank, job.context.host, main, workers, steps, missing)


def _steps(job: JobView) -> dict[int, int]:
    read = {rank: page.read().step for rank, page in job.watch.roster.pages().items()}
    return {rank: step for rank, step in read.items() if step is not None}


def _code_roots(job: JobView) -> tuple[str, ...]:
    roster = job.watch.roster
    roots_of_ranks = (
        read_meta(roster.companion(page, layout.META_SUFFIX)).code_roots for page in roster.pages().values()
    )
    return next((roots for roots in roots_of_ranks if roots), ())


def _choose(targets: list[Target], children: Mapping[int, list[SampleTarget]]) -> list[SampleTarget]:
    # Child processes fill the rest of the node's share, one of each rank in turn.
    mains = [SampleTarget(target.pid, target.start_ticks) for target in targets]
    rounds = [
        rank_children[at]
        for at in range(sampling.MOST_CHILDREN)
        for rank_children in children.values()
        if at < len(rank_children)
    ]
    return [*mains, *rounds[: max(0, sampling.MOST_PROCESSES - len(mains))]]


def _add_unseen(recording: Recording, wanted: tuple[int, ...]) -> Recording:
    sampled = {rank.rank for rank in recording.ranks}
    everybody = [rank for rank in wanted or range(recording.world_size) if rank not in sampled]
    unseen = [RankRecord(rank, missing="no reachable supervisor has this rank") for rank in everybody]
    ranks = sorted([*recording.ranks, *unseen], key=lambda rank: rank.rank)
    return msgspec.structs.replace(recording, ranks=ranks)
