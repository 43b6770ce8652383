"""Recognizes text files that aren't the output of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from safelaunch.addons.logs.lines import looks_like_output, read_lines
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import STDIN, Unreadable
from safelaunch.bundle.reading.rejection import GIVE, holds_nothing

_NO_OUTPUT = (
    "it is neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log of a job: no line of it looks like the"
    " output of a launcher, torch, Python or a training script"
)
_LINES_LOOKED_AT, _COLUMNS_LOOKED_AT = 400, 400
_EMPTY = "an empty file"
_KINDS = {
    ".md": "Markdown", ".rst": "reStructuredText", ".html": "HTML", ".csv": "a table", ".json": "JSON", ".toml": "TOML",
    ".yaml": "YAML", ".yml": "YAML", ".py": "Python source", ".ipynb": "a notebook", ".sh": "a shell script",
    ".sbatch": "a shell script", ".slurm": "a shell script",
}  # fmt: skip


# At least five words without numbers, paths or assignments.
_PROSE = re.compile(r"[-*#>\s]*(?:[^\W\d_][\w'’-]*[.,;:!?)]* +\(?){4,}[^\W\d_][\w'’-]*[.,;:!?)]*")


def reject_foreign_texts(paths: Sequence[Path], root: Path | None, printed: EvidenceSource) -> None:
    """Raises Unreadable if none of these text files is the output of a job."""
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
