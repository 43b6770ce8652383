"""The records of who was blamed before, which travel from run to run in the bundle directory."""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["gpu", "host"]


class BlamedRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank that a verdict blamed. ``gpu``: a UUID, empty where it is not known. ``file``: the user's own."""

    rank: int
    host: str = ""
    gpu: str = ""
    file: str = ""
    line: int = 0


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom one verdict blamed.

    - ``id``: of the bundle; ``bundle``: its path on ``written_on``. Each node of a job writes down its own
    - ``units``: the kinds of hardware that may be behind this cause; empty where that can only be the script
    - ``line_tells``: the cause points at the line; else the line is only where the rank met its trouble
    - ``hosts``: the nodes that are blamed as a whole
    - ``of_gpus``, ``of_hosts``: how many of them the job had, and could so have been blamed; 0: not known
    - ``host_ranks``: those of the node that is blamed as a whole, as ranges; empty where not known, or of several
    """

    id: str
    run_name: str
    unix_s: float
    outcome: Literal["hang", "suspect", "crash", "dump"]
    cause: str
    confidence: Literal["high", "medium", "low"]
    ranks: tuple[BlamedRank, ...] = ()
    hosts: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    line_tells: bool = True
    of_gpus: int = 0
    of_hosts: int = 0
    bundle: str = ""
    written_on: str = ""
    host_ranks: str = ""


class Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the bundle directory remembers of this run's name, at the time of an incident (``unix_s``).

    ``uuids``: NVML's number → UUID, of the GPUs of ``host``, whose ranks may know their GPU by its number alone.
    """

    run_name: str
    unix_s: float
    host: str
    incidents: tuple[Incident, ...] = ()
    uuids: dict[str, str] = msgspec.field(default_factory=dict)
