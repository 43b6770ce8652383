"""Reads a run directory that was left because all processes were killed at once, or the machine was reset."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from safelaunch.beacon import layout
from safelaunch.bundle.reading.dumps import read_dumps
from safelaunch.bundle.reading.evidence import EvidenceSource, evidence_on
from safelaunch.bundle.reading.files import Unreadable, read_limited, within
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.sink import Sink
from safelaunch.job.paths import RunPaths
from safelaunch.model import Outcome, RankExit
from safelaunch.system.files import is_dir, is_file, lexists
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.capture.pages import AgentEvent


def is_run_directory(path: Path) -> bool:
    return is_dir(path / "pages") and is_file(path / "owner")


MAX_PAGES = 8 * 4096  # pages and their companions
MOST_OF_A_PAGE = 2 << 20
MAX_PAGES_BYTES = 1 << 30


def read_run(root: Path, scratch: Path) -> EvidenceSource:
    """Returns the evidence that a run's latest attempt left: pages, exceptions, output, and dumps of torch and NCCL.

    The readers are made for live runs: they trust the files, map them, and open them for writing. So the files are
    first copied to the empty directory ``scratch``.
    """
    from safelaunch.capture import collect  # deferred: slow to import
    from safelaunch.capture.pages import Roster, read_meta

    found_there = RunPaths(root)
    run = RunPaths(scratch / "run")
    problems = list(_copy(found_there, run))
    roster = Roster(run)
    exits = _exits(roster.refresh())
    pages = {number: page for number, page in roster.pages().items() if number < MAX_RANKS}
    dumps = None
    if is_dir(found_there.flight_recorder):
        dumps = read_dumps(within(root, found_there.flight_recorder), root)
        problems += dumps.problems if dumps is not None else ()
    records = {rank.rank: rank.flight_record for rank in dumps.evidence.ranks} if dumps is not None else {}
    host, nowhere = platform.node(), Sink(Redactor())
    ranks = []
    for number in sorted({*pages, *(worker for worker in roster.workers if 0 <= worker < MAX_RANKS), *records}):
        page = pages.get(number)
        if page is None:
            pid = roster.workers[number].pid if number in roster.workers else 0
            basics = collect.RankBasics(pid=pid, exit=exits.get(number))
        else:
            meta = read_meta(roster.companion(page, layout.META_SUFFIX))
            basics = collect.RankBasics(page.read(), page.pid, page.name, exits.get(number), meta.code_roots, meta.gpu)
        rank = collect.of_ended(number, basics, run.pages, host, nowhere)
        ranks.append(structs.replace(rank, flight_record=records.get(number) or rank.flight_record))
    worlds = [rank.progress.world_size for rank in ranks if rank.progress is not None]
    outcome: Outcome = "crash" if any(code.returncode for code in exits.values()) else "hang"
    evidence = evidence_on(outcome, ranks, max([0, *(size for size in worlds if size <= MAX_RANKS)]))
    files = {f"ranks/{number}/progress.json": f"pages/{page.name}" for number, page in pages.items()} | {
        f"ranks/{number}/exception.json": f"pages/{page.name}{layout.EXCEPTION_SUFFIX}"
        for number, page in pages.items()
    }
    if dumps is not None:
        files |= {name: f"flight_recorder/{file}" for name, file in dumps.files.items()}
    return EvidenceSource("a run directory", evidence, tuple(problems), files)


def _copy(source_run: RunPaths, copied_run: RunPaths) -> Iterator[str]:
    copied_run.pages.mkdir(parents=True)
    within(source_run.root, source_run.pages)
    names = [source_run.agent_events, source_run.agent_page, *sorted(source_run.pages.iterdir())]
    remaining = MAX_PAGES_BYTES
    for number, source in enumerate(names):
        if number > MAX_PAGES or remaining < 0:
            yield f"{len(names) - number} more files of pages/: ignored, because no run leaves so many"
            return
        if not lexists(source) or source.name.endswith(layout.SERVER_SUFFIX):
            continue
        try:
            data = read_limited(source, MOST_OF_A_PAGE)
        except Unreadable as error:
            yield f"{source.relative_to(source_run.root)}: {error.message}"
            continue
        remaining -= len(data)
        (copied_run.root / source.relative_to(source_run.root)).write_bytes(data)


def _exits(events: list[AgentEvent]) -> dict[int, RankExit]:
    """Returns each rank's exit.

    Ranks in the agent's first report ended before the agent stopped the remaining ranks.
    """
    exits: dict[int, RankExit] = {}
    attempt = max((event.attempt for event in events), default=0)
    for event in events:
        if event.attempt == attempt and event.exits:
            first = not exits
            for rank, code in event.exits.items():
                exits.setdefault(rank, RankExit(code, event.time_unix_s, before_close=first))
    return exits
