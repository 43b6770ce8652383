"""Whom earlier verdicts of this run's name have blamed, for this one; and this one, for those to come."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from safelaunch.blame import memory
from safelaunch.model import Evidence, Incident, Remembered, Verdict
from safelaunch.redaction.evidence import without_secrets
from safelaunch.system.console import say
from safelaunch.system.decoding import from_json

if TYPE_CHECKING:
    from safelaunch.supervise.incident import Circumstances

_MOST_GPUS_BYTES = 4 << 20


class _Gpu(msgspec.Struct):
    index: int
    uuid: str | None = None
    name: str | None = None


class _Gpus(msgspec.Struct):
    gpus: tuple[_Gpu, ...] = ()


def recalled(evidence: Evidence, about: Circumstances, staged: Path | None = None) -> Evidence:
    """The evidence with what the bundle directory remembers; as it is, if it has that already.

    ``staged``: the bundle so far, which has this node's GPUs.
    """
    if evidence.remembered is not None or evidence.outcome in ("dump", "suspect"):
        return evidence
    now = time.time()
    known: tuple[Incident, ...] = memory.within(lambda: memory.read(about.bundle_dir, now), ())
    remembered = Remembered(
        run_name=about.run_name,
        unix_s=now,
        host=about.host,
        incidents=tuple(one for one in known if one.run_name == about.run_name),
        uuids=_uuids(staged / "node" / about.host / "gpus.json") if staged is not None else {},
    )
    return msgspec.structs.replace(evidence, remembered=remembered)


def remember(verdict: Verdict, evidence: Evidence, about: Circumstances, incident_id: str, bundle: Path) -> None:
    """Writes down whom the verdict blames. A disk that does not take it costs only that."""
    from safelaunch.diagnose.repeats import incident_of  # late: a run that never stalls does not pay for it

    one = incident_of(verdict, evidence)
    if one is None:
        return
    told = msgspec.structs.replace(one, id=incident_id, bundle=os.fspath(bundle), written_on=about.host)
    told = without_secrets(told, about.redactor)
    silent = "whom this verdict blames could not be remembered: the disk does not answer"
    problem = memory.within(lambda: _add(about.bundle_dir, told), silent)
    if problem:
        say(problem)


def _add(directory: Path, incident: Incident) -> str:
    return memory.add(directory, incident, time.time())


def _uuids(path: Path) -> dict[str, str]:
    """NVML's number → UUID. CUDA numbers GPUs of different models by their speed, so theirs may be other numbers."""
    try:
        data = path.read_bytes()
        gpus = from_json(data, _Gpus).gpus if len(data) <= _MOST_GPUS_BYTES else ()
    except (OSError, msgspec.DecodeError):
        return {}
    alike = len({one.name for one in gpus}) == 1
    return {str(one.index): one.uuid for one in gpus if one.uuid} if alike else {}
