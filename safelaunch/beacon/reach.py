"""Finds the threads that can reach library code alone: a progress bar's monitor, a logger's writer.

Such a thread never makes a call of the script's: nothing of the user's, and nothing of ``torch.distributed``, can be
reached from its object, its local variables, and the modules of the packages on its stack. Weak references don't count.
Which of these libraries use torch is checked by whoever asks (``capture/distributions.py``).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MOST_OBJECTS = 40_000  # of all threads together; some 5 µs each
MOST_THREADS = 64
MOST_FRAMES = 64
_PLAIN = frozenset(
    (str, bytes, int, float, complex, bool, type(None), type(Ellipsis), CodeType, range, slice, memoryview)
)
_CALLING = ("torch.distributed", "torch._C._distributed", "torch.nn.parallel", "torch.futures")
# Not followed: tensors and data types, and loggers, which lead to all other loggers of the program.
_LEAVES = ("torch", "logging")
_SUSPENDED = {"generator": "gi_code", "coroutine": "cr_code", "async_generator": "ag_code"}
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = os.path.dirname(os.__file__) + "/"


def library_threads(main: int) -> list[dict[str, object]]:
    """Returns the threads besides ``main`` that can reach library code alone, each with the packages it reaches.

    ``thread`` is ``Thread.ident``. Packages are paths: ``/venv/lib/python3.11/site-packages/tqdm``.
    """
    objects = {one.ident: one for one in threading.enumerate()}
    found: list[dict[str, object]] = []
    shared = _Walked()
    for ident, frame in list(sys._current_frames().items())[:MOST_THREADS]:
        if ident in (main, threading.get_ident()):
            continue
        packages = _Walk(objects.get(ident), frame, shared).packages()
        if packages:
            found.append({"thread": ident, "packages": sorted(packages)})
    return found


class _Walked:
    """What earlier walks, which came to their end, have led to. The objects are kept, so that no other gets their id.

    ``left``: how many more objects are visited.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.packages: set[str] = set()
        self.left = MOST_OBJECTS


class _Walk:
    """Follows references from one thread. It reads objects and runs no code of their classes."""

    def __init__(self, thread: Any, frame: Any, shared: _Walked) -> None:
        self._thread = thread
        self._frame = frame
        self._shared = shared
        self._seen: dict[int, Any] = {}
        self._packages: set[str] = set()
        self._on_stack: set[str] = set()

    def packages(self) -> set[str]:
        """What it reaches; empty if that is the user's code or torch's, too much, or the standard library alone."""
        queue: list[Any] = [self._thread]
        for frame in _upwards(self._frame):
            if not self._is_library(frame.f_code.co_filename) or (sys.version_info < (3, 13) and frame.f_trace):
                return set()
            if place := _place(frame.f_code.co_filename):
                self._on_stack.add(place)
                queue += list(frame.f_globals.values())
            queue += _locals(frame)
        while queue and self._on_stack:
            one = queue.pop()
            if type(one) in _PLAIN or id(one) in self._seen:
                continue
            if id(one) in self._shared.objects and type(one) is not ModuleType:  # which the stack decides on
                self._packages |= self._shared.packages
                continue
            self._seen[id(one)] = one
            self._shared.left -= 1
            if self._shared.left < 0 or not self._follow(one, queue):
                return set()
        if self._on_stack:
            self._shared.objects |= self._seen
            self._shared.packages |= self._packages
        return self._packages if self._on_stack else set()

    def _follow(self, one: Any, queue: list[Any]) -> bool:
        """Returns False for what is the user's, or torch's."""
        kind = type(one)
        if kind is ModuleType:
            return self._follow_module(one, queue)
        is_class = type in kind.__mro__
        if not self._is_library_class(one if is_class else kind):
            return False
        if is_class:
            queue += () if _is_leaf(one) else (*type.__dict__["__dict__"].__get__(one).values(), *one.__mro__)
            return True
        if kind is FunctionType:
            queue += (one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__)
            return self._is_library(_file_of(one))
        if kind is FrameType:
            return self._is_library(one.f_code.co_filename)
        if kind.__name__ in _SUSPENDED and kind.__module__ == "builtins":
            queue += gc.get_referents(one)
            return self._is_library(getattr(one, _SUSPENDED[kind.__name__]).co_filename)
        if kind is BuiltinFunctionType and type(one.__self__) is ModuleType:
            return True
        other_thread = threading.Thread in kind.__mro__ and one is not self._thread  # which has a walk of its own
        if not other_thread and not _is_leaf(kind) and weakref.ref not in kind.__mro__:
            queue += gc.get_referents(one)
        return True

    def _follow_module(self, module: ModuleType, queue: list[Any]) -> bool:
        variables = module.__dict__
        file = variables.get("__file__")
        if variables.get("__name__") == "__main__" or not self._is_library(file if type(file) is str else ""):
            return False
        if type(file) is str and _place(file) in self._on_stack:
            queue += variables.values()
        return True

    def _is_library_class(self, kind: type) -> bool:
        name = _module_of(kind)
        if name == "__main__" or name.startswith(_CALLING):
            return False
        if _is_leaf(kind):
            return True
        module = sys.modules.get(name)
        if type(module) is not ModuleType:
            return name in sys.builtin_module_names
        file = module.__dict__.get("__file__")
        return self._is_library(file if type(file) is str else "")

    def _is_library(self, file: str) -> bool:
        place = _place(file)
        if place:
            self._packages.add(place)
        return place is not None


def _place(file: str) -> str | None:
    """Installed package that a file belongs to; empty for the standard library, None for the user's and torch's."""
    for part in _INSTALLED:
        head, found, tail = file.rpartition(f"/{part}/")
        if found:
            top = tail.split("/", 1)[0]
            return None if top == "torch" else f"{head}/{part}/{top}"
    return "" if not file or file.startswith(("<frozen ", _STANDARD)) else None


def _module_of(kind: type) -> str:
    name = type.__dict__["__module__"].__get__(kind) if kind is not type else "builtins"
    return name if type(name) is str else "__main__"


def _is_leaf(kind: type) -> bool:
    return _module_of(kind).partition(".")[0] in _LEAVES


def _file_of(function: Any) -> str:
    """File of a function; of its module if it is compiled from text, as in data classes and named tuples."""
    file, variables = function.__code__.co_filename, function.__globals__
    if file != "<string>":
        return str(file)
    isolated = variables.get("__builtins__") == {}  # a named tuple's
    return "" if isolated else str(variables.get("__file__", file))


def _upwards(frame: Any) -> Iterator[Any]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _locals(frame: Any) -> list[Any]:
    variables = frame.f_locals
    found = list(variables.values())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & 0x1:  # a copy that would keep its objects alive
        variables.clear()
    return found
