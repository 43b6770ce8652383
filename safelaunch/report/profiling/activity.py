"""What a sampled main thread is about: it computes, waits for its peers, waits for data.

Recognised by the files and functions of torch, never by anything of the user's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.model import Frame
from safelaunch.verdict.reading.calls import leaving, loader_on_stack, loader_wait, torch_wait, under_c10d
from safelaunch.verdict.reading.frames import Stack, normal, short

Kind = Literal[
    "collective",
    "send or receive",
    "data loading",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "device",
    "script",
]
KINDS: tuple[Kind, ...] = (
    "forward", "backward", "optimizer", "collective", "send or receive", "data loading", "checkpoint", "device",
    "script",
)  # fmt: skip
WAITS: tuple[Kind, ...] = ("collective", "send or receive")

# By the file (its end, or a directory in its path) and the functions of a frame; no functions: any. The first row that
# fits a frame of the stack counts: a checkpointed forward in a backward is part of the backward.
_BY_FRAME: tuple[tuple[Kind, str, frozenset[str]], ...] = (
    ("checkpoint", "torch/serialization.py", frozenset({"save", "load"})),
    ("checkpoint", "torch/distributed/checkpoint/", frozenset()),
    ("backward", "torch/autograd/graph.py", frozenset({"_engine_run_backward"})),
    ("backward", "torch/autograd/__init__.py", frozenset({"backward", "grad"})),
    ("device", "torch/cuda/__init__.py", frozenset({"synchronize"})),
    ("device", "torch/cuda/streams.py", frozenset({"synchronize"})),
    ("optimizer", "torch/optim/lr_scheduler.py", frozenset()),
    ("optimizer", "torch/optim/", frozenset()),
    ("forward", "torch/nn/modules/module.py", frozenset({"_call_impl", "_wrapped_call_impl"})),
)


@dataclass(frozen=True, slots=True)
class Activity:
    """``what``: the collective's name, say; ``frame``: the innermost of the user's own code."""

    kind: Kind
    what: str
    frame: Frame | None


def activity_of(frames: Sequence[Frame], code_roots: tuple[str, ...] = ()) -> Activity:
    """Of a main thread; ``frames`` innermost first."""
    stack = Stack(tuple(frames), code_roots)
    kind, what = _kind(stack)
    return Activity(kind, what, stack.user_frame)


def _kind(stack: Stack) -> tuple[Kind, str]:
    wait = torch_wait(stack)
    if wait is not None:
        return ("send or receive" if wait.kind == "p2p" else "collective"), wait.op
    if loader_wait(stack):
        return "data loading", "DataLoader"
    found = _by_frame(stack.frames)
    if found is None and under_c10d(stack):
        return "collective", ""
    if found is None and loader_on_stack(stack.frames):
        return "data loading", "dataset"
    if found is None and leaving(stack.frames):
        return "script", "exit"
    return (found, "") if found is not None else ("script", "")


def _by_frame(frames: Sequence[Frame]) -> Kind | None:
    inner = [(normal(frame.file), short(frame.function)) for frame in frames if "/torch/" in normal(frame.file)]
    for kind, part, functions in _BY_FRAME:
        for file, function in inner:
            in_it = part in file if part.endswith("/") else file.endswith(part)
            if in_it and (not functions or function in functions):
                return kind
    return None
