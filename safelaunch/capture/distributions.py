"""Which installed packages can use torch, by what their distributions require (importlib.metadata)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from msgspec import structs

from safelaunch.capture.result import within_or
from safelaunch.model import GilTest, LibraryThread

DEADLINE_S = 2.0  # their folder may be on a file system that does not answer
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TORCH = "torch"


def without_callers(told: GilTest) -> GilTest:
    """The same without the library threads whose packages use torch, or belong to no known distribution."""
    if not told.library_threads:
        return told
    none: tuple[LibraryThread, ...] = ()
    known = within_or(none, DEADLINE_S, "the installed packages", lambda: _of_libraries(told))
    return structs.replace(told, library_threads=known)


def _of_libraries(told: GilTest) -> tuple[LibraryThread, ...]:
    return tuple(one for one in told.library_threads if one.packages and not any(map(uses_torch, one.packages)))


@lru_cache(1024)
def uses_torch(package: str) -> bool:
    """Whether a package, a path such as ``/venv/lib/python3.11/site-packages/tqdm``, can use torch.

    True if one of its distributions requires torch, by whatever other installed distributions and for whatever extra,
    or if it belongs to none.
    """
    path = Path(package)
    root = _installed(str(path.parent))
    name = _normal(path.name.partition(".")[0])
    owners = [name] if name in root.distributions else root.owners(path.name)
    return not owners or any(_TORCH in root.required_by(owner) for owner in owners)


@lru_cache(8)
def _installed(root: str) -> _Installed:
    return _Installed(Path(root))


class _Installed:
    """The distributions in one ``site-packages``: normalized name → its metadata."""

    def __init__(self, root: Path) -> None:
        self.distributions: dict[str, Distribution] = {
            _normal(path.name.partition("-")[0]): PathDistribution(path) for path in root.glob("*.dist-info")
        }
        self._required: dict[str, frozenset[str]] = {}
        self._top_levels: dict[str, frozenset[str]] = {}

    def owners(self, package: str) -> list[str]:
        """Distributions that have installed a top-level package or module: several, if it is a namespace."""
        return [name for name in self.distributions if package in self._top_level(name)]

    def _top_level(self, name: str) -> frozenset[str]:
        if name not in self._top_levels:
            lines = (self.distributions[name].read_text("RECORD") or "").splitlines()
            self._top_levels[name] = frozenset(line.partition(",")[0].partition("/")[0] for line in lines)
        return self._top_levels[name]

    def required_by(self, name: str) -> frozenset[str]:
        """All installed distributions that a distribution requires, and those that these require."""
        if name not in self._required:
            found: set[str] = set()
            queue = [name]
            while queue:
                one = self.distributions.get(queue.pop())
                required = set(_names(one.requires)) - found if one is not None else set()
                found |= required
                queue += required
            self._required[name] = frozenset(found)
        return self._required[name]


def _names(requires: Collection[str] | None) -> Iterator[str]:
    for line in requires or ():
        if (match := _NAME.match(line)) is not None:
            yield _normal(match[0])


def _normal(name: str) -> str:
    """As in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
