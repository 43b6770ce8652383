"""Calls a function once after a named module has been imported, and offers ``import safelaunch``.

A process that never imports the module only pays for one dictionary lookup per import. The hook restores the module's
loader before the module runs, so that ``inspect`` and ``linecache`` see the original loader.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

    Callback = Callable[[ModuleType], object]


class _Loader:
    def __init__(self, original: Any, callbacks: Iterable[Callback]) -> None:
        self._original = original
        self._callbacks = callbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: Any) -> Any:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        for callback in self._callbacks:
            callback(module)


class _Finder:
    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        callbacks = self._callbacks.pop(name, None)
        if callbacks is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    wrapped: Any = _Loader(spec.loader, callbacks)
                    spec.loader = wrapped
                return spec
        return None

    def invalidate_caches(self) -> None:
        """Does nothing: this finder caches nothing."""


_finder = _Finder()


def after_import(name: str, callback: Callback) -> None:
    """Calls ``callback(module)`` after the import of ``name``, or now if it is already imported.

    ``callback`` must not raise.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder._callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _OwnPackage:
    """Finds safelaunch if the script's environment lacks it, because it is installed as a tool in another one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "safelaunch":
            return None
        from importlib.machinery import PathFinder

        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return PathFinder.find_spec(name, [os.path.dirname(package)], target)

    def invalidate_caches(self) -> None:
        """Does nothing: this finder caches nothing."""


def offer_safelaunch() -> None:
    """Lets the script import safelaunch (``step``, ``phase``, ``pause``, ``probes``) in any environment."""
    sys.meta_path.append(_OwnPackage())
