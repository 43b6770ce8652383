"""Reads a run directory that nobody removed (everything was killed at once, the machine was reset) as evidence.

It has only what the ranks recorded themselves: pages, last exceptions, output, and the dumps of torch and NCCL.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec

from safelaunch.beacon import layout
from safelaunch.bundle.reading.dumps import read_dumps
from safelaunch.bundle.reading.guard import Found, Unreadable, read_limited, within
from safelaunch.capture import collect
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.pages import AgentEvent, Roster, read_meta
from safelaunch.capture.result import Sink
from safelaunch.job.paths import RunPaths
from safelaunch.model import Evidence, RankExit
from safelaunch.system.files import is_dir, lexists
from safelaunch.system.redaction.redactor import Redactor

MAX_FILES = 8 * 4096  # a page and its companions, for each rank
MAX_FILE_BYTES = 2 << 20
_MAX_BYTES = 1 << 30


def read_run(root: Path, scratch: Path) -> Found:
    """The evidence left by a run's newest attempt; ``scratch``: an empty directory.

    The readers trust a live run's files, map them and open them for writing. So a stranger's files are copied first.
    """
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
    host, nowhere = platform.node(), Sink(Redactor())  # the files stay where they are
    ranks = []
    for number in sorted({*pages, *(worker for worker in roster.workers if 0 <= worker < MAX_RANKS), *records}):
        page = pages.get(number)
        if page is None:
            pid = roster.workers[number].pid if number in roster.workers else 0
            known = collect.Known(pid=pid, exit=exits.get(number))
        else:
            meta = read_meta(roster.companion(page, layout.META_SUFFIX))
            known = collect.Known(page.read(), page.pid, page.name, exits.get(number), meta.code_roots, meta.gpu)
        rank = collect.of_ended(number, known, run.pages, host, nowhere)
        ranks.append(msgspec.structs.replace(rank, flight_record=records.get(number) or rank.flight_record))
    worlds = [rank.progress.world_size for rank in ranks if rank.progress is not None]
    world = max([0, *(size for size in worlds if size <= MAX_RANKS), *(rank.rank + 1 for rank in ranks)])
    evidence = Evidence(
        outcome="crash" if any(code.returncode for code in exits.values()) else "hang",
        world_size=world,
        ranks=tuple(ranks),
        missing_ranks=tuple(sorted(set(range(world)) - {rank.rank for rank in ranks})),
    )
    files = {f"ranks/{number}/progress.json": f"pages/{page.name}" for number, page in pages.items()} | {
        f"ranks/{number}/exception.json": f"pages/{page.name}{layout.EXCEPTION_SUFFIX}"
        for number, page in pages.items()
    }
    if dumps is not None:
        files |= {name: f"flight_recorder/{file}" for name, file in dumps.files.items()}
    return Found("a run directory", evidence, tuple(problems), files)


def _copy(there: RunPaths, here: RunPaths) -> Iterator[str]:
    """Copies pages, their companions and the agent's events; yields what it left out."""
    here.pages.mkdir(parents=True)
    within(there.root, there.pages)
    names = [there.agent_events, there.agent_page, *sorted(there.pages.iterdir())]
    left = _MAX_BYTES
    for number, source in enumerate(names):
        if number > MAX_FILES or left < 0:
            yield f"{len(names) - number} more files of pages/: ignored, because no run leaves so many"
            return
        if not lexists(source) or source.name.endswith(layout.SERVER_SUFFIX):
            continue
        try:
            data = read_limited(source, MAX_FILE_BYTES)
        except Unreadable as error:
            yield f"{source.relative_to(there.root)}: {error.message}"
            continue
        left -= len(data)
        (here.root / source.relative_to(there.root)).write_bytes(data)


def _exits(events: list[AgentEvent]) -> dict[int, RankExit]:
    """The ranks' exits according to the agent; those in its first note ended before it stopped the others."""
    found: dict[int, RankExit] = {}
    attempt = max((event.attempt for event in events), default=0)
    for event in events:
        if event.attempt == attempt and event.exits:
            first = not found
            for rank, code in event.exits.items():
                found.setdefault(rank, RankExit(code, event.time_unix_s, before_close=first))
    return found
