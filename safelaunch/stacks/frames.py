"""Attributes a frame to the user's code, a library, the interpreter or safelaunch.

Frames are innermost first. Function names come in two spellings: py-spy on Python 3.11 and newer prints the qualified
name (``Thread.join``), older versions and the Flight Recorder the bare one; :func:`short` makes them comparable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePosixPath

from safelaunch.model import Frame, RankEvidence, Thread

_LIBRARY_DIR = re.compile(r"/(?:site-packages|dist-packages)/|/lib(?:64)?/python3(?:\.\d+)?t?/|/lib/python3\d*\.zip/")
_INTERPRETER = re.compile(r"python[\d.]*[td]*")  # its C frames, if it has no debug information
_PSEUDO_FILE = re.compile(r"^<[^>]*>")
# Written by torch while it runs: by inductor below the hash of the compiled code, and by `torch.distributed.nn`.
_GENERATED = re.compile(
    r"/([a-z2-7]{2})/c\1[a-z2-7]{49}\.py$|/torchinductor_[^/]*/|/_remote_module_(?:non_)?scriptable\.py$"
)
# Libraries that people also run from source: torch, and frameworks that call their users' code. Parts of paths that no
# project of a user has.
_FROM_SOURCE = re.compile(
    r"/torch/(?:_[a-z]\w*[/.]|(?:amp|autograd|fx|optim|multiprocessing|nn/(?:modules|parallel|utils)|utils/data)/"
    r"|distributed/(?:_\w+|algorithms|checkpoint|elastic|fsdp|nn|optim|pipelining|rpc|tensor)/"
    r"|distributed/(?:distributed_c10d|c10d_logger|device_mesh|rendezvous|utils)\.py$)"
    r"|/src/(?:transformers|accelerate|lightning|lightning_fabric|pytorch_lightning|torchmetrics)/"
    r"|/deepspeed/(?:runtime|comm|moe|pipe)/|/(?:trl|composer)/trainer/|/ignite/engine/"
)
_OUR_DEMOS = "safelaunch/cli/demos/"
_OURS_IN_RANKS = ("_safelaunch_beacon", "safelaunch/beacon/", "safelaunch/addons/")
_BOOTSTRAP = ("/runpy.py", "/torch/distributed/run.py", "/multiprocessing/spawn.py", "/multiprocessing/process.py")


def short(function: str) -> str:
    """Returns ``join`` for ``Thread.join``, ``wrapper`` for ``_log.<locals>.wrapper``; ``<module>`` stays."""
    return function if function.startswith("<") else function.rsplit(".", 1)[-1]


Spot = tuple[str, str, int]


def spot(frame: Frame) -> Spot:
    """Returns file, function and line, equal for stacks and for exceptions and records, which have no class names."""
    return frame.file, short(frame.function), frame.line


def normal(path: str) -> str:
    return path.replace("\\", "/")


@lru_cache(1024)
def basename(path: str) -> str:
    return PurePosixPath(normal(path)).name or path


def same_line(first: Frame | None, other: Frame | None) -> bool:
    # Function names can differ: recorded frames have no class names.
    return first is not None and other is not None and (first.file, first.line) == (other.file, other.line)


def place(frame: Frame | None) -> str:
    """Returns ``train.py:41 (log_metric)``, as sentences write a frame."""
    if frame is None:
        return "a place that was not seen"
    if is_pseudo(frame.file):
        return f"line {frame.line} of code that is in no file"
    where = f"{basename(frame.file)}:{frame.line}"
    return where if frame.function in ("", "<module>") else f"{where} ({frame.function})"


def at(frame: Frame | None) -> str:
    """Returns `` at train.py:41 (log_metric)``, to follow other words; empty without a frame."""
    return f" at {place(frame)}" if frame is not None else ""


# --- whose code ---------------------------------------------------------------------------------------------------


def is_demo(path: str) -> bool:
    """Returns whether it is a demo script, which is part of the package but counts as the user's program."""
    return _OUR_DEMOS in normal(path)


def is_pseudo(path: str) -> bool:
    return bool(_PSEUDO_FILE.match(path)) or not path


@lru_cache(1024)
def is_ours(path: str) -> bool:
    return any(part in normal(path) for part in _OURS_IN_RANKS)


def is_native(frame: Frame) -> bool:
    """Returns whether it is a C or C++ frame of a ``--native`` sample, or of a Flight Recorder with C++ stacks.

    Its file is a shared object, a C source, the interpreter itself, or nothing.
    """
    name = basename(frame.file)
    if name == "??" or _INTERPRETER.fullmatch(name):
        return True
    return ".so" in name or name.endswith((".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".S", ".rs"))


def is_library(path: str, code_roots: Sequence[str] = ()) -> bool:
    """Returns whether it is library code: the standard library, an installed package, torch or a framework from source.

    Decides by the path's components and by the roots that the rank reported. A checkout inside
    ``.../lib/python3.11/site-packages`` counts as installed; an editable install of any other package doesn't, because
    its files lie where the user works. Code that torch has generated counts as a library, too.
    """
    path = normal(path)
    if is_demo(path):
        return False
    if _LIBRARY_DIR.search(path) or _GENERATED.search(path) or _FROM_SOURCE.search(path):
        return True
    return any(root and path.startswith(normal(root).rstrip("/") + "/") for root in code_roots)


def is_of_framework(path: str) -> bool:
    """Returns whether it is a package that calls torch or user code, but not torch or the standard library itself."""
    path = normal(path)
    return "/torch/" not in path and ("-packages/" in path or _FROM_SOURCE.search(path) is not None)


@lru_cache(maxsize=4096)  # the ranks of a job share most frames
def is_user(frame: Frame, code_roots: tuple[str, ...] = ()) -> bool:
    path = frame.file
    return not (is_pseudo(path) or is_ours(path) or is_native(frame) or is_library(path, code_roots))


def own_part(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Returns the frames of a forked child that are its own.

    A forked worker's stack continues into the frames that its parent had at the fork. Everything outside
    ``multiprocessing``'s bootstrap belongs to the parent's past, not to what this process does.
    """
    for index, frame in enumerate(frames):
        if short(frame.function) == "_bootstrap" and normal(frame.file).endswith("multiprocessing/process.py"):
            return tuple(frames[: index + 1])
    return tuple(frames)


@dataclass(frozen=True)
class Stack:
    """The frames of a thread or of a recorded call, and the user's code in them."""

    frames: tuple[Frame, ...]  # innermost first
    code_roots: tuple[
        str, ...
    ] = ()  # directories of the standard library and installed packages, as the rank names them

    @cached_property
    def _own(self) -> tuple[Frame, ...]:
        return own_part(self.frames)

    @cached_property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code.

        If no file of the stack is the user's, two things can be: code from the command line (``python -c``,
        ``<string>``), and an installed module started with ``-m``, the package of the outermost frame that isn't a
        launcher's.
        """
        typed = (frame for frame in self._own if frame.file in ("<string>", "<stdin>"))
        return next(self._users(), None) or next(typed, None) or _installed_main(self._own)

    @cached_property
    def user_frames(self) -> tuple[Frame, ...]:
        return tuple(self._users()) or ((self.user_frame,) if self.user_frame is not None else ())

    @cached_property
    def called(self) -> tuple[Frame, ...]:
        """The library frames inside the user's innermost frame; all frames without a user frame."""
        return self._own if self.user_frame is None else self._own[: self._own.index(self.user_frame)]

    def _users(self) -> Iterator[Frame]:
        return (frame for frame in self._own if is_user(frame, self.code_roots))


def stack_of(rank: RankEvidence, frames: Sequence[Frame]) -> Stack:
    """Returns ``frames`` of a process of ``rank``, or of a call that it recorded, as a stack."""
    return Stack(tuple(frames), rank.code_roots)


def program_of(stack: Stack) -> str:
    """Returns the installed program that runs, by its name or with ``-m``; empty if user code runs in it."""
    outer = [f for f in stack.frames if not is_pseudo(f.file) and not normal(f.file).endswith(_BOOTSTRAP)]
    if len(outer) < 2 or outer[-1].function != "<module>":
        return ""
    file = normal(outer[-1].file)
    by_name = re.search(r"/bin/([^/.]+)$", file)  # the script that pip writes
    if any(is_user(frame, stack.code_roots) for frame in outer[: -1 if by_name else None]):
        return ""
    return by_name[1] if by_name else basename(_package_root(file) or file)


def _installed_main(frames: Sequence[Frame]) -> Frame | None:
    real = [f for f in frames if not is_pseudo(f.file) and not is_ours(f.file) and not is_native(f)]
    outer = [f for f in real if not normal(f.file).endswith(_BOOTSTRAP)]
    if not outer or outer[-1].function != "<module>":
        return None
    package = _package_root(outer[-1].file)
    if package is None:
        return None
    return next((f for f in real if normal(f.file).startswith(package)), None)


def _package_root(path: str) -> str | None:
    # ``/x/site-packages/tool/cli.py`` -> ``/x/site-packages/tool/``; a single module -> its file
    match = re.match(r"(.*/(?:site-packages|dist-packages)/[^/]+/?)", normal(path))
    return match.group(1) if match else None


def python_frames(thread: Thread) -> tuple[Frame, ...]:
    return own_part([f for f in thread.frames if not is_native(f)])
