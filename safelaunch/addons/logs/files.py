"""Reads logs and saved stacks for ``diagnose PATH``, together with Flight Recorder dumps in the same folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from safelaunch.addons.logs.foreign_texts import reject_foreign_texts
from safelaunch.addons.logs.lines import is_log, logs_in
from safelaunch.addons.logs.reader import read_logs
from safelaunch.addons.logs.stacks import SavedStacks
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.guard import ReadLimits
from safelaunch.model import RankEvidence

_LOG_BYTES = 512 << 20


class Texts:
    """Implements ``addons.protocols.Reader`` for logs and saved stacks."""

    def claims(self, path: Path) -> bool:
        return is_log(path)

    def bounds(self, paths: Sequence[Path]) -> ReadLimits:
        """Allows files of any size, because little evidence is kept from each."""
        size = sum(path.stat().st_size for path in paths)
        return ReadLimits(_LOG_BYTES, cpu_s=30 + (size >> 22))

    def read(self, paths: Sequence[Path]) -> EvidenceSource:
        return _read_texts(paths)

    def read_folder(self, folder: Path, dumps: EvidenceSource | None) -> EvidenceSource | None:
        texts = logs_in(folder)
        if dumps is None:
            return _read_texts(texts, folder) if texts else None
        printed = read_logs(texts, folder)
        result = dumps
        if printed.evidence.ranks:
            result = _join(printed, dumps, lambda rank, dump: structs.replace(rank, flight_record=dump.flight_record))
        stacks = SavedStacks.of(texts, folder).evidence(only_named=True)
        return result if stacks is None else _with_stacks(result, stacks)


def _read_texts(paths: Sequence[Path], root: Path | None = None) -> EvidenceSource:
    saved = SavedStacks.of(paths, root)
    logs = [path for path in paths if path not in saved.whole]
    if not logs and (stacks_only := saved.evidence()) is not None:
        return stacks_only
    printed = read_logs(logs, root)
    stacks = saved.evidence(only_named=bool(printed.evidence.ranks))
    if stacks is None and not (printed.evidence.ranks or printed.remarks):
        reject_foreign_texts(paths, root, printed)
    if stacks is None or printed.evidence.ranks:
        return printed if stacks is None else _with_stacks(printed, stacks)
    return replace(stacks, remarks=(*stacks.remarks, *printed.remarks))


def _join(
    first: EvidenceSource, second: EvidenceSource, merge_rank: Callable[[RankEvidence, RankEvidence], RankEvidence]
) -> EvidenceSource:
    """Merges two sources of evidence about the same job. ``merge_rank`` merges a rank that both contain."""
    ranks = {rank.rank: rank for rank in first.evidence.ranks if rank.rank not in first.evidence.labels}
    for rank in second.evidence.ranks:
        ranks[rank.rank] = merge_rank(ranks[rank.rank], rank) if rank.rank in ranks else rank
    world = max(first.evidence.world_size, second.evidence.world_size)
    labels, files = {}, {**first.files, **second.files}
    for rank in (rank for rank in first.evidence.ranks if rank.rank in first.evidence.labels):
        number = rank.rank if rank.rank not in ranks else max(world, *(rank + 1 for rank in ranks))
        ranks[number], labels[number] = structs.replace(rank, rank=number), first.evidence.labels[rank.rank]
        old = f"ranks/{rank.rank}/"
        rank_files = {name: file for name, file in first.files.items() if name.startswith(old)}
        files |= {f"ranks/{number}/{name.removeprefix(old)}": file for name, file in rank_files.items()}
    world = max(world, *(number + 1 for number in ranks)) if ranks else world
    evidence = structs.replace(
        first.evidence,
        labels=labels,
        world_size=world,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        missing_ranks=tuple(rank for rank in range(world) if rank not in ranks),
        printed=None,
        world_guessed=first.evidence.world_guessed and second.evidence.world_guessed,
    )
    what, problems = f"{first.what}, {second.what}", (*first.problems, *second.problems)
    return replace(first, what=what, evidence=evidence, problems=problems, files=files)


def _with_stacks(logs: EvidenceSource, stacks: EvidenceSource) -> EvidenceSource:
    return _join(logs, stacks, lambda rank, stack: structs.replace(rank, main=stack.main, pid=rank.pid or stack.pid))
