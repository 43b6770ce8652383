"""Describes a script's program: its process groups, and the calls that each rank makes in them.

Ranks are numbered from 0 without gaps. ``ScriptCall.root`` and ``ScriptCall.peer`` are ranks within the call's group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from safelaunch.model import Collective, Frame

ElementCounts = tuple[tuple[int, ...], ...]

WORLD = "0"
TRANSFERS = frozenset({"send", "recv"})


@dataclass(frozen=True)
class ScriptCall:
    op: str  # function, or ``batch`` for ``batch_isend_irecv`` of ``parts``
    group: str = WORLD
    sizes: ElementCounts = ()  # of the rank's input tensors, or of its outputs if only the root has inputs (scatter)
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    other_roots: tuple[tuple[int, int], ...] = ()  # (global rank, root that it names instead)
    peer: int | None = None  # None in a ``recv`` from any rank
    named: bool = True  # False if another peer might have been meant
    tag: int = 0
    waited_for: bool = True  # False if the rank continued before the call had finished
    site: Frame | None = None
    parts: tuple[ScriptCall, ...] = ()


# What a rank does after its last call. "waits": it doesn't return from that call.
Ending = Literal["waits", "waits for work", "stalls", "leaves", "raises", "exits", "is killed"]


@dataclass(frozen=True)
class ScriptEnd:
    kind: Ending
    cause: str = ""  # name in the catalog of causes
    words: str = ""
    site: Frame | None = None
    code: int = 0
    work: int = 0  # index, from the end, of the async call for which the rank finally waits


@dataclass(frozen=True)
class RankProgram:
    calls: tuple[ScriptCall, ...]
    end: ScriptEnd
    before: bool = False  # it stalls before it joins the job
    entries: tuple[tuple[Collective, ...], ...] = ()  # record entries of each call


@dataclass(frozen=True)
class Program:
    ranks: Mapping[int, RankProgram]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # without the default group, in creation order
    makers: Mapping[str, frozenset[int]] = field(default_factory=dict)  # creators of groups that not all ranks created
    notes: tuple[str, ...] = ()  # differences from the recording, one sentence each

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def members(self, group: str) -> tuple[int, ...]:
        return self.groups.get(group) or tuple(range(self.world_size))
