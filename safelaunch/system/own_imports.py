"""Imports safelaunch's dependencies from its own installation, whatever PYTHONPATH holds under their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

DEPENDENCIES = frozenset({"msgspec", "yaml", "_yaml", "pynvml", "rich", "pygments", "markdown_it", "mdurl", "tomli"})


class OwnImports:
    """A finder for ``sys.meta_path``. What isn't in ``directories`` is found as usual."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = list(directories)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name not in DEPENDENCIES:
            return None
        return PathFinder.find_spec(name, self._directories, target)


def install() -> None:
    """Does nothing without PYTHONPATH, which is what can shadow an installation. The job's own imports don't change."""
    if not os.environ.get("PYTHONPATH"):
        return
    site = sys.modules.get("site")
    installed = [*site.getsitepackages(), site.getusersitepackages()] if site is not None else []
    beside = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    sys.meta_path.insert(0, OwnImports([beside, *(path for path in installed if path in sys.path)]))
