"""A run directory that nobody removed (everything was killed at once, the machine was reset) → evidence.

What the ranks wrote down themselves is all there is: pages, last exceptions, output, and what torch and NCCL dumped.
"""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec

from safelaunch.beacon import layout
from safelaunch.capture import collect
from safelaunch.launch.paths import RunPaths
from safelaunch.model import Artifact, Evidence, RankExit
from safelaunch.postmortem.dumps import read_dumps
from safelaunch.postmortem.found import Found
from safelaunch.watch.progress import AgentEvent, Roster, read_meta


class _Nowhere:
    """Nothing is copied: the files lie where they are."""

    def add(self, artifact: Artifact, data: bytes | str | None) -> None: ...

    def add_json(self, artifact: Artifact, value: object) -> None: ...


def is_run_directory(path: Path) -> bool:
    return (path / "pages").is_dir() and (path / "owner").is_file()


def read_run(root: Path) -> Found:
    """What is left of a run, newest attempt."""
    run = RunPaths(root)
    roster = Roster(run)
    exits = _exits(roster.refresh())
    pages = roster.pages()
    dumps = read_dumps(run.flight_recorder) if run.flight_recorder.is_dir() else None
    records = {rank.rank: rank.flight_record for rank in dumps.evidence.ranks} if dumps is not None else {}
    host = platform.node()
    ranks = []
    for number in sorted({*pages, *roster.workers, *records}):
        page = pages.get(number)
        if page is None:
            pid = roster.workers[number].pid if number in roster.workers else 0
            known = collect.Known(pid=pid, exit=exits.get(number))
        else:
            meta = read_meta(roster.companion(page, layout.META_SUFFIX))
            known = collect.Known(page.read(), page.pid, page.name, exits.get(number), meta.code_roots)
        rank = collect.of_ended(number, known, run.pages, host, _Nowhere())
        ranks.append(msgspec.structs.replace(rank, flight_record=records.get(number)))
    world = max((rank.progress.world_size for rank in ranks if rank.progress is not None), default=0)
    world = max([world, *(rank.rank + 1 for rank in ranks)])
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
    return Found("a run directory", evidence, dumps.problems if dumps is not None else (), files)


def _exits(events: list[AgentEvent]) -> dict[int, RankExit]:
    """How the ranks ended, as the agent noted; those of the first such note ended before it stopped the others."""
    found: dict[int, RankExit] = {}
    attempt = max((event.attempt for event in events), default=0)
    for event in events:
        if event.attempt == attempt and event.exits:
            first = not found
            for rank, code in event.exits.items():
                found.setdefault(int(rank), RankExit(code, event.time_unix_s, before_close=first))
    return found
