"""Builds the tables of a page, in which frames and other items are numbered and file names are short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from safelaunch.model import Evidence, Frame, format_ranks
from safelaunch.stacks.frames import is_library, is_ours, is_pseudo, normal
from safelaunch.system.printable import clean

_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages)/(?=[^/])")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_STANDARD = re.compile(r".*/lib(?:64)?/(?=python3(?:\.\d+)?t?/)")
T = TypeVar("T")


class ItemNumbers(dict[T, int]):
    """Numbers items in the order in which they are first looked up."""

    def __missing__(self, item: T) -> int:
        return self.setdefault(item, len(self))


@dataclass(frozen=True)
class Paths:
    projects: tuple[str, ...] = ()  # directories of the user's code

    @classmethod
    def of(cls, evidence: Evidence, cwd: str, frames: Iterable[Frame | None]) -> Paths:
        scripts = {str(PurePosixPath(normal(frame.file)).parent) for frame in frames if frame is not None}
        places = {place for place in (cwd, *scripts) if place.startswith("/") and len(place) > 1}
        return cls(tuple(sorted(places, key=len)))

    def short(self, path: str) -> str:
        """Shortens a path: ``model/layers.py`` in a project, ``torch/nn/modules/module.py`` in an installed package."""
        text = normal(path)
        for pattern in (_INSTALLED, _STANDARD):
            if match := pattern.match(text):
                return text[match.end() :]
        for project in self.projects:
            if text.startswith(f"{project}/"):
                return text[len(project) + 1 :]
        return path


@dataclass
class Frames:
    """All frames on a page, and all stacks as lists of frame numbers."""

    paths: Paths
    stacks: ItemNumbers[tuple[int, ...]] = field(default_factory=ItemNumbers)
    _frames: ItemNumbers[tuple[Frame, bool]] = field(default_factory=ItemNumbers)

    def number(self, frame: Frame | None, code_roots: Sequence[str] = ()) -> int:
        """Returns the frame's number; -1 for None."""
        if frame is None:
            return -1
        return self._frames[frame, is_pseudo(frame.file) or is_ours(frame.file) or is_library(frame.file, code_roots)]

    def stack(self, frames: Sequence[Frame], code_roots: Sequence[str] = ()) -> int:
        return self.stacks[tuple(self.number(frame, code_roots) for frame in frames)]

    @property
    def rows(self) -> list[list[Any]]:
        """One row per frame: ``[short name, line, function, 1 if in a library else 0, full name if different]``."""
        return [self._row(*frame) for frame in self._frames]

    def _row(self, frame: Frame, library: bool) -> list[Any]:
        short = self.paths.short(frame.file)
        return [short, frame.line, frame.function, int(library), "" if short == frame.file else frame.file]


def hosts_word(hosts: Sequence[str]) -> str:
    """Abbreviates host names as Slurm does: ``node[2-512]``."""
    runs: dict[tuple[str, str, int], list[int]] = {}
    whole = []
    for host in hosts:
        match = _NUMBERED.fullmatch(clean(host))
        if match is None or len(match[2]) > 12:
            whole.append(clean(host))
            continue
        width = len(match[2]) if match[2].startswith("0") else 0
        runs.setdefault((match[1], match[3], width), []).append(int(match[2]))
    for (begin, end, width), numbers in runs.items():
        padded = re.sub(r"\d+", lambda one, width=width: one[0].zfill(width), format_ranks(numbers))  # type: ignore[misc]
        whole.append(f"{begin}[{padded}]{end}" if len(numbers) > 1 else f"{begin}{padded}{end}")
    return ", ".join(whole[:6]) + (f" and {len(whole) - 6} more" if len(whole) > 6 else "")
