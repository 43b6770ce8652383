"""Runs a reproduction with stand-ins for torch and for all blocking calls, and reports each rank's calls.

Every call returns at once, so a rank that would be stuck continues: its real calls are the first ones reported.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Called:
    """One call. ``ranks`` are the group's; ``tensors`` are all tensors passed, in lists or alone."""

    op: str
    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...] = ()
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    waited_for: bool = True


class Stopped(BaseException):
    """The rank stands outside of calls."""


@dataclass
class Rank:
    number: int
    world: int
    calls: list[Called] = field(default_factory=list)
    ended: str = ""

    def stop(self, how: str) -> Callable[..., Any]:
        def stopped(*_: object, **__: object) -> None:
            self.ended = how
            raise Stopped

        return stopped


def replayed(text: str, world: int) -> dict[int, Rank]:
    """Rank → its calls, and how it ended: ``sleep``, ``read``, ... or empty."""
    code = compile(text, "repro.py", "exec")
    found = {}
    for number in range(world):
        rank = found[number] = Rank(number, world)
        modules = _modules(rank)
        scope = {"__builtins__": {**vars(builtins), "__import__": lambda name, *_, m=modules: m[name]}}
        try:
            exec(code, scope)
        except (Stopped, SystemExit):  # the script's last line: all calls have returned here
            pass
    return found


def _modules(rank: Rank) -> dict[str, Any]:
    dist = _Dist(rank)
    torch = _Torch(dist)
    kernel = SimpleNamespace(
        environ={"RANK": str(rank.number)}, pipe=lambda: (0, 1), read=rank.stop("read"), kill=rank.stop("kill"),
        getpid=lambda: 1, _exit=rank.stop("exit"),
    )  # fmt: skip
    return {
        "torch": torch,
        "torch.distributed": torch,
        "os": kernel,
        "sys": SimpleNamespace(exit=rank.stop("leave")),
        "time": SimpleNamespace(sleep=rank.stop("sleep")),
        "signal": SimpleNamespace(SIGSTOP=19),
        "threading": SimpleNamespace(Thread=_Thread, Lock=lambda: _Lock(rank), Event=_Event),
    }


class _Torch:
    def __init__(self, dist: _Dist) -> None:
        self.distributed = dist

    def zeros(self, *shape: Any, dtype: str = "float32") -> Tensor:
        return Tensor(shape[0] if shape and isinstance(shape[0], tuple) else shape, dtype)

    def __getattr__(self, name: str) -> str:
        return name


@dataclass(frozen=True)
class _Work:
    def wait(self) -> None:
        pass


class _Thread:
    """Runs its function at once, in place of another thread."""

    def __init__(self, target: Callable[..., object], args: Sequence[object] = ()) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        try:
            self._target(*self._args)
        except Stopped:
            pass

    def join(self) -> None:
        pass


class _Event:
    def set(self) -> None:
        pass

    wait = set


class _Lock:
    def __init__(self, rank: Rank) -> None:
        self._rank, self._held = rank, False

    def acquire(self) -> None:
        if self._held:
            self._rank.stop("lock")()
        self._held = True


class _Dist:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.isend, self.irecv = "send", "recv"

    def init_process_group(self, backend: str) -> None:
        assert backend == "gloo"

    def get_rank(self, group: tuple[int, ...] | None = None) -> int:
        return self._rank.number if group is None else group.index(self._rank.number)

    def get_global_rank(self, group: tuple[int, ...], place: int) -> int:
        return group[place] if group is not None else -1

    def new_group(self, ranks: Sequence[int] = ()) -> tuple[int, ...]:
        return tuple(ranks) or tuple(range(self._rank.world))

    def new_subgroups_by_enumeration(self, lists: Sequence[Sequence[int]]) -> tuple[Any, None]:
        seen = [rank for ranks in lists for rank in ranks]
        assert len(seen) == len(set(seen)), "torch refuses a rank in two of them"
        return next((tuple(ranks) for ranks in lists if self._rank.number in ranks), None), None

    def P2POp(self, op: str, tensor: Tensor, peer: int, group: Any = None, **more: Any) -> Called:
        return self._called(op, (tensor,), {"src": peer, "group": group, **more})

    def batch_isend_irecv(self, ops: Sequence[Called]) -> list[_Work]:
        self._rank.calls += ops
        return [_Work() for _ in ops]

    def __getattr__(self, name: str) -> Callable[..., _Work]:
        def call(*given: Any, **more: Any) -> _Work:
            self._rank.calls.append(self._called(name, given, more))
            return _Work()

        return call

    def _called(self, name: str, given: Sequence[Any], more: dict[str, Any]) -> Called:
        ranks = more.get("group") or tuple(range(self._rank.world))
        if self._rank.number not in ranks or -1 in more.values():
            self._rank.stop("beyond")()  # it would be stuck in an earlier call
        tensors = [one for each in given for one in (each if isinstance(each, list) else [each]) if one is not None]
        ends = [value for key, value in more.items() if key in ("src", "dst", "group_src", "group_dst")]
        is_transfer = name in ("send", "recv", "isend", "irecv")
        return Called(
            op=name.removeprefix("i") if is_transfer else name,
            ranks=ranks,
            tensors=tuple(tensors),
            root=ends[0] if ends and not is_transfer else None,
            peer=ranks.index(ends[0]) if ends and is_transfer else None,
            tag=more.get("tag", 0),
            waited_for=not more.get("async_op") and name not in ("isend", "irecv"),
        )
