"""What a page says many times, once: frames and stacks by number; names of files and hosts as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from safelaunch.model import Evidence, Frame, format_ranks
from safelaunch.system.printable import clean
from safelaunch.verdict.reading.frames import is_library, is_ours, is_pseudo, normal

_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages)/(?=[^/])")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_STANDARD = re.compile(r".*/lib(?:64)?/(?=python3(?:\.\d+)?t?/)")


@dataclass(frozen=True)
class Paths:
    """Shortens file names. ``projects``: the directories of the user's code."""

    projects: tuple[str, ...] = ()

    @classmethod
    def of(cls, evidence: Evidence, cwd: str, frames: Iterable[Frame | None]) -> Paths:
        """The directory in which the job runs, and those of the scripts that it runs."""
        scripts = {str(PurePosixPath(normal(one.file)).parent) for one in frames if one is not None}
        places = {place for place in (cwd, *scripts) if place.startswith("/") and len(place) > 1}
        return cls(tuple(sorted(places, key=len)))

    def short(self, path: str) -> str:
        """``model/layers.py`` below a project, ``torch/nn/modules/module.py`` of an installed package."""
        text = normal(path)
        for pattern in (_INSTALLED, _STANDARD):
            if found := pattern.match(text):
                return text[found.end() :]
        for project in self.projects:
            if text.startswith(f"{project}/"):
                return text[len(project) + 1 :]
        return path


@dataclass
class Frames:
    """All frames of a page, and all stacks as lists of their numbers."""

    paths: Paths
    rows: list[list[Any]] = field(default_factory=list)
    stacks: list[list[int]] = field(default_factory=list)
    _frames: dict[tuple[Frame, bool], int] = field(default_factory=dict)
    _stacks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, frame: Frame, code_roots: Sequence[str] = ()) -> int:
        """Of the row ``[short name, line, function, is it a library's, whole name]``."""
        library = is_pseudo(frame.file) or is_ours(frame.file) or is_library(frame.file, code_roots)
        key = (frame, library)
        if key not in self._frames:
            self._frames[key] = len(self.rows)
            short = self.paths.short(frame.file)
            self.rows.append(
                [short, frame.line, frame.function, int(library), "" if short == frame.file else frame.file]
            )
        return self._frames[key]

    def stack(self, frames: Sequence[Frame], code_roots: Sequence[str] = ()) -> int:
        """The number of the stack, whose frames are innermost first."""
        key = tuple(self.number(frame, code_roots) for frame in frames)
        if key not in self._stacks:
            self._stacks[key] = len(self.stacks)
            self.stacks.append(list(key))
        return self._stacks[key]


def hosts_word(hosts: Sequence[str]) -> str:
    """``node[2-512]``, as Slurm writes lists of hosts."""
    runs: dict[tuple[str, str, int], list[int]] = {}
    whole = []
    for host in hosts:
        found = _NUMBERED.fullmatch(clean(host))
        if found is None or len(found[2]) > 12:
            whole.append(clean(host))
            continue
        width = len(found[2]) if found[2].startswith("0") else 0
        runs.setdefault((found[1], found[3], width), []).append(int(found[2]))
    for (begin, end, width), numbers in runs.items():
        padded = re.sub(r"\d+", lambda one, width=width: one[0].zfill(width), format_ranks(numbers))  # type: ignore[misc]
        whole.append(f"{begin}[{padded}]{end}" if len(numbers) > 1 else f"{begin}{padded}{end}")
    return ", ".join(whole[:6]) + (f" and {len(whole) - 6} more" if len(whole) > 6 else "")
