"""What the written script does: the groups it makes, and what each rank calls in them. The same hang with fewer ranks,
and with smaller tensors; where gloo would not hang, with larger ones.

All ranks are counted from 0 without a gap. ``Call.root`` and ``Call.peer`` are ranks of the call's group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from safelaunch.model import Collective, Frame

ElementCounts = tuple[tuple[int, ...], ...]

WORLD = "0"  # the default group
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
TRANSFERS = frozenset({"send", "recv"})


@dataclass(frozen=True)
class ScriptCall:
    """One call of torch.distributed. ``op``: the function's name; ``batch`` for ``batch_isend_irecv`` of ``parts``.

    - ``sizes``: of the tensors that the rank gives, or, where only the root gives some (scatter), gets
    - ``other_roots``: ranks of the world that name another root, and which
    - ``peer``: None in a ``recv`` from any rank; ``named`` False: another one may have been meant
    - ``waited_for`` False: the rank went on before the call was over
    - ``site``: the user's line
    """

    op: str
    group: str = WORLD
    sizes: ElementCounts = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    other_roots: tuple[tuple[int, int], ...] = ()
    peer: int | None = None
    named: bool = True
    tag: int = 0
    waited_for: bool = True
    site: Frame | None = None
    parts: tuple[ScriptCall, ...] = ()


# What a rank does behind its last call. ``waits``: it does not come back from it.
Ending = Literal["waits", "waits for work", "stalls", "leaves", "raises", "exits", "is killed"]


@dataclass(frozen=True)
class ScriptEnd:
    """``cause``: the catalogue's name of what it stands in. ``words``: the same for people. ``work``: which of its
    calls that nobody has waited for is waited for at last, counted from the end (0: the last one).
    """

    kind: Ending
    cause: str = ""
    words: str = ""
    site: Frame | None = None
    code: int = 0
    work: int = 0


@dataclass(frozen=True)
class RankProgram:
    """``entries``: what each call has left in the record, as far as it has. ``before``: it stands before it joins
    the job.
    """

    calls: tuple[ScriptCall, ...]
    end: ScriptEnd
    before: bool = False
    entries: tuple[tuple[Collective, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """``groups``: name → ranks, without the default one, in the order in which they are made. ``makers``: of those that
    not every rank has made, who has. ``notes``: what is not as it was recorded, a sentence each.
    """

    ranks: Mapping[int, RankProgram]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    makers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def members(self, group: str) -> tuple[int, ...]:
        return self.groups.get(group) or tuple(range(self.world_size))
