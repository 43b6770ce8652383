"""Post-import hooks: a function called once, right after a named module has been executed.

A process that never imports the module pays for one dictionary look-up per import. The module's loader is put back
before it is executed, so that ``inspect`` and ``linecache`` see the real one.
"""

import sys


class _Loader:
    def __init__(self, original, callback):
        self._original = original
        self._callback = callback

    def __getattr__(self, name):
        return getattr(self._original, name)

    def create_module(self, spec):
        return self._original.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._callback(module)


class _Finder:
    def __init__(self):
        self._callbacks = {}

    def find_spec(self, name, path=None, target=None):
        callback = self._callbacks.pop(name, None)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, callback)
                return spec
        return None

    def invalidate_caches(self):
        """Called by ``importlib.invalidate_caches``; there is nothing to forget."""


_finder = _Finder()


def after_import(name, callback):
    """Calls ``callback(module)`` after ``name`` was imported; at once when it already is. It must not raise."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _finder._callbacks[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
