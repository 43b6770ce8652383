"""Reads logs and saved stacks for ``diagnose PATH``, together with the dumps in the same folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from msgspec import structs

from safelaunch.addons.logs.lines import is_log, logs_in, looks_like_output, read_lines
from safelaunch.addons.logs.reader import read_logs
from safelaunch.addons.logs.stacks import SavedStacks
from safelaunch.bundle.reading.guard import STDIN, FoundEvidence, ReadLimits, Unreadable
from safelaunch.bundle.reading.locate import GIVE, holds_nothing
from safelaunch.model import RankEvidence

_LOG_BYTES = 512 << 20
_NO_OUTPUT = (
    "it is neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log of a job: no line of it looks like the"
    " output of a launcher, torch, Python or a training script"
)


class Texts:
    """A ``Reader`` (see ``addons.protocols``) of logs and saved stacks."""

    def claims(self, path: Path) -> bool:
        return is_log(path)

    def bounds(self, paths: Sequence[Path]) -> ReadLimits:
        """What counts in the files is kept, of whatever size they are."""
        size = sum(path.stat().st_size for path in paths)
        return ReadLimits(_LOG_BYTES, cpu_s=30 + (size >> 22))

    def read(self, paths: Sequence[Path]) -> FoundEvidence:
        return _read_texts(paths)

    def read_folder(self, folder: Path, dumps: FoundEvidence | None) -> FoundEvidence | None:
        texts = logs_in(folder)
        if dumps is None:
            return _read_texts(texts, folder) if texts else None
        printed = read_logs(texts, folder)
        result = dumps
        if printed.evidence.ranks:
            result = _join(printed, dumps, lambda rank, dump: structs.replace(rank, flight_record=dump.flight_record))
        stacks = SavedStacks.of(texts, folder).evidence(only_named=True)
        return result if stacks is None else _with_stacks(result, stacks)


def _read_texts(paths: Sequence[Path], root: Path | None = None) -> FoundEvidence:
    """What logs and saved stacks tell together."""
    saved = SavedStacks.of(paths, root)
    rest = [path for path in paths if path not in saved.whole]
    if not rest and (alone := saved.evidence()) is not None:
        return alone
    printed = read_logs(rest, root)
    stacks = saved.evidence(only_named=bool(printed.evidence.ranks))
    if stacks is None and not (printed.evidence.ranks or printed.remarks):
        _reject_other_texts(paths, root, printed)
    if stacks is None or printed.evidence.ranks:
        return printed if stacks is None else _with_stacks(printed, stacks)
    return replace(stacks, remarks=(*stacks.remarks, *printed.remarks))


def _join(
    first: FoundEvidence, second: FoundEvidence, both: Callable[[RankEvidence, RankEvidence], RankEvidence]
) -> FoundEvidence:
    """What ``one`` tells, and beside it what ``other`` tells of the same job. ``both``: of a rank that is in both."""
    ranks = {rank.rank: rank for rank in first.evidence.ranks if rank.rank not in first.evidence.labels}
    for rank in second.evidence.ranks:
        ranks[rank.rank] = both(ranks[rank.rank], rank) if rank.rank in ranks else rank
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


def _with_stacks(logs: FoundEvidence, stacks: FoundEvidence) -> FoundEvidence:
    return _join(logs, stacks, lambda rank, stack: structs.replace(rank, main=stack.main, pid=rank.pid or stack.pid))


# --- texts that no job has printed ------------------------------------------------------------------------------------

_LINES_LOOKED_AT, _COLUMNS_LOOKED_AT = 400, 400
_EMPTY = "an empty file"
_KINDS = {
    ".md": "Markdown", ".rst": "reStructuredText", ".html": "HTML", ".csv": "a table", ".json": "JSON", ".toml": "TOML",
    ".yaml": "YAML", ".yml": "YAML", ".py": "Python source", ".ipynb": "a notebook", ".sh": "a shell script",
    ".sbatch": "a shell script", ".slurm": "a shell script",
}  # fmt: skip
# At least five words without numbers, paths or assignments, as a person writes them.
_PROSE = re.compile(r"[-*#>\s]*(?:[^\W\d_][\w'’-]*[.,;:!?)]* +\(?){4,}[^\W\d_][\w'’-]*[.,;:!?)]*")


def _reject_other_texts(paths: Sequence[Path], root: Path | None, printed: FoundEvidence) -> None:
    """Raises Unreadable for texts that no job has printed."""
    kinds = dict.fromkeys(map(_kind_of, paths))
    they_are = "it is" if len(paths) == 1 and root is None else "they are" if root is None else "its logs are"
    if [*kinds] == [_EMPTY]:
        raise Unreadable(f"{they_are} empty", GIVE)
    if root is not None and ("" not in kinds or not printed.is_output):
        raise holds_nothing(root)
    if "" not in kinds:
        raise Unreadable(f"{they_are} {' and '.join(kinds)}, not the output of a job", GIVE)
    if not printed.is_output:
        raise Unreadable(_NO_OUTPUT, GIVE)


def _kind_of(path: Path) -> str:
    """Returns the kind of a text that no job has printed; empty if a job might have printed it."""
    if path == STDIN:
        return ""
    read = islice(read_lines(path, path.name), _LINES_LOOKED_AT)
    lines = [line.text[:_COLUMNS_LOOKED_AT] for line in read if line is not None and line.text.strip()]
    if not lines:
        return _EMPTY
    if kind := _KINDS.get(path.suffix.lower()):
        return kind
    if lines[0].startswith("#!"):
        return "a script"
    prose, of_a_job = sum(map(bool, map(_PROSE.fullmatch, lines))), sum(map(looks_like_output, lines))
    return "prose" if 2 * prose > len(lines) >= 4 * of_a_job else ""
