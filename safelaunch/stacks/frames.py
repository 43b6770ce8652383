"""Whose code is a frame: the user's, a library's, the interpreter's, ours?

Frames are innermost first. Function names come in two spellings: py-spy on Python 3.11 and newer prints the qualified
name (``Thread.join``), older ones and the Flight Recorder the bare one; :func:`short` makes them comparable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePosixPath

from safelaunch.model import Frame, RankEvidence, Thread

_LIBRARY_DIR = re.compile(r"/(?:site-packages|dist-packages)/|/lib(?:64)?/python3(?:\.\d+)?t?/|/lib/python3\d*\.zip/")
_INTERPRETER = re.compile(r"python[\d.]*[td]*")  # its own C frames, where it has no debug information
_PSEUDO_FILE = re.compile(r"^<[^>]*>")
# Written by torch while it runs: by inductor below the hash of what it has compiled, by `torch.distributed.nn`.
_GENERATED = re.compile(
    r"/([a-z2-7]{2})/c\1[a-z2-7]{49}\.py$|/torchinductor_[^/]*/|/_remote_module_(?:non_)?scriptable\.py$"
)
# What people also run from its source: torch, and frameworks that call their users' code. By parts of a path that no
# project of the user's has.
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
    """``Thread.join`` → ``join``; ``_exception_logger.<locals>.wrapper`` → ``wrapper``; ``<module>`` stays."""
    return function if function.startswith("<") else function.rsplit(".", 1)[-1]


Spot = tuple[str, str, int]


def spot(frame: Frame) -> Spot:
    """File, function and line; alike for stacks, and for exceptions and records, whose frames have no class names."""
    return frame.file, short(frame.function), frame.line


def normal(path: str) -> str:
    return path.replace("\\", "/")


@lru_cache(1024)
def basename(path: str) -> str:
    return PurePosixPath(normal(path)).name or path


def same_line(one: Frame | None, other: Frame | None) -> bool:
    """Whatever the function is called: a recorded frame has its name without that of its class."""
    return one is not None and other is not None and (one.file, one.line) == (other.file, other.line)


def place(frame: Frame | None) -> str:
    """``train.py:41 (log_metric)``, the way a frame is written in sentences."""
    if frame is None:
        return "a place that was not seen"
    if is_pseudo(frame.file):
        return f"line {frame.line} of code that is in no file"
    where = f"{basename(frame.file)}:{frame.line}"
    return where if frame.function in ("", "<module>") else f"{where} ({frame.function})"


def at(frame: Frame | None) -> str:
    """`` at train.py:41 (log_metric)``, to stand behind other words; empty without a frame."""
    return f" at {place(frame)}" if frame is not None else ""


# --- whose code ---------------------------------------------------------------------------------------------------


def is_demo(path: str) -> bool:
    """The demo scripts ship inside the package but stand for the user's program."""
    return _OUR_DEMOS in normal(path)


def is_pseudo(path: str) -> bool:
    return bool(_PSEUDO_FILE.match(path)) or not path


@lru_cache(1024)
def is_ours(path: str) -> bool:
    return any(part in normal(path) for part in _OURS_IN_RANKS)


def is_native(frame: Frame) -> bool:
    """A C or C++ frame of a ``--native`` sample or of a Flight Recorder that keeps C++ stacks.

    Its file is a shared object, a C source, the interpreter itself, or nothing.
    """
    name = basename(frame.file)
    if name == "??" or _INTERPRETER.fullmatch(name):
        return True
    return ".so" in name or name.endswith((".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".S", ".rs"))


def is_library(path: str, code_roots: Sequence[str] = ()) -> bool:
    """Standard library, an installed package, torch or a framework run from its source, or code that torch has written.

    By the path's components and by the roots that the rank itself named. A checkout inside
    ``.../lib/python3.11/site-packages`` counts as installed; an editable install of any other package does not, because
    its files lie where the user works.
    """
    path = normal(path)
    if is_demo(path):
        return False
    if _LIBRARY_DIR.search(path) or _GENERATED.search(path) or _FROM_SOURCE.search(path):
        return True
    return any(root and path.startswith(normal(root).rstrip("/") + "/") for root in code_roots)


def is_of_framework(path: str) -> bool:
    """A package that calls torch or its user's code: neither torch itself, nor of the standard library."""
    path = normal(path)
    return "/torch/" not in path and ("-packages/" in path or _FROM_SOURCE.search(path) is not None)


@lru_cache(maxsize=4096)  # the ranks of a job share most frames
def is_user(frame: Frame, code_roots: tuple[str, ...] = ()) -> bool:
    path = frame.file
    return not (is_pseudo(path) or is_ours(path) or is_native(frame) or is_library(path, code_roots))


def own_part(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of a forked child that are its own.

    A forked worker's stack continues into the frames its parent had when it forked; everything outside
    ``multiprocessing``'s bootstrap belongs to the parent's past, not to what this process does.
    """
    for index, frame in enumerate(frames):
        if short(frame.function) == "_bootstrap" and normal(frame.file).endswith("multiprocessing/process.py"):
            return tuple(frames[: index + 1])
    return tuple(frames)


@dataclass(frozen=True)
class Stack:
    """The frames of a thread or of a recorded call, innermost first, and where in them the user's own code is.

    ``code_roots``: the directories of the standard library and of installed packages, as the rank itself names them.
    """

    frames: tuple[Frame, ...]
    code_roots: tuple[str, ...] = ()

    @cached_property
    def _own(self) -> tuple[Frame, ...]:
        return own_part(self.frames)

    @cached_property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code.

        Where no file of the stack is the user's, two things may be: code typed in (``python -c``, ``<string>``), and an
        installed module started with ``-m``, recognised as the package of the outermost frame that is not a launcher.
        """
        typed = (frame for frame in self._own if frame.file in ("<string>", "<stdin>"))
        return next(self._users(), None) or next(typed, None) or _installed_main(self._own)

    @cached_property
    def user_frames(self) -> tuple[Frame, ...]:
        """All frames of the user's own code."""
        return tuple(self._users()) or ((self.user_frame,) if self.user_frame is not None else ())

    @cached_property
    def called(self) -> tuple[Frame, ...]:
        """The library frames inside the user's innermost frame: what the user's line called. All, without one."""
        return self._own if self.user_frame is None else self._own[: self._own.index(self.user_frame)]

    def _users(self) -> Iterator[Frame]:
        return (frame for frame in self._own if is_user(frame, self.code_roots))


def stack_of(rank: RankEvidence, frames: Sequence[Frame]) -> Stack:
    """``frames`` of a process of ``rank``, or of a call that it recorded."""
    return Stack(tuple(frames), rank.code_roots)


def program_of(stack: Stack) -> str:
    """The installed program whose own code this is, be it started by name or with ``-m``; empty where any code of the
    user's runs.
    """
    outer = [f for f in stack.frames if not is_pseudo(f.file) and not normal(f.file).endswith(_BOOTSTRAP)]
    if len(outer) < 2 or outer[-1].function != "<module>":
        return ""
    file = normal(outer[-1].file)
    by_name = re.search(r"/bin/([^/.]+)$", file)  # the script that pip writes for it
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
    """``/x/site-packages/tool/cli.py`` → ``/x/site-packages/tool/``; a single module → its file."""
    match = re.match(r"(.*/(?:site-packages|dist-packages)/[^/]+/?)", normal(path))
    return match.group(1) if match else None


def python_frames(thread: Thread) -> tuple[Frame, ...]:
    return own_part([f for f in thread.frames if not is_native(f)])
