"""safelaunch: torchrun that watches the job, finds out which rank and line hung it, and keeps the evidence.

A training script can call ``step``, ``phase`` and ``pause`` to help the watchdog; outside a safelaunch run they do
nothing. A program that starts ranks itself calls ``launch``, and one that reads evidence calls ``diagnose``. These two,
and the types that they use, are loaded at their first use.
"""

from __future__ import annotations

import sys as _sys
from contextlib import contextmanager as _contextmanager

_TYPE_CHECKING = False  # importing typing would cost a training script a few milliseconds
if _TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from typing import Any as _Any

    from safelaunch.addons.embed.launching import HangError, Launch, launch
    from safelaunch.beacon import probes
    from safelaunch.cli.api import (
        BundlePlace,
        Claim,
        Culprit,
        Frame,
        NodeAtFault,
        SafelaunchError,
        UsageError,
        Verdict,
        diagnose,
    )
    from safelaunch.model import schemas

__version__ = "0.1.0"
__all__ = [
    "BundlePlace",
    "Claim",
    "Culprit",
    "Frame",
    "HangError",
    "Launch",
    "NodeAtFault",
    "SafelaunchError",
    "UsageError",
    "Verdict",
    "diagnose",
    "launch",
    "pause",
    "phase",
    "probes",
    "schemas",
    "step",
]
_MODULES = {"probes": "safelaunch.beacon.probes", "schemas": "safelaunch.model.schemas"}


def __getattr__(name: str) -> _Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    addons = import_module("safelaunch.addons")
    return addons.public(name) if name in addons.PUBLIC else getattr(import_module("safelaunch.cli.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _marks() -> _Any:
    # The beacon, if any, is loaded before the script, never by it.
    return _sys.modules.get("_safelaunch_beacon.marks")


def step(*, loss: _Any = None) -> None:
    """Marks one step of progress, for loops without a torch optimizer. Costs well under a microsecond.

    Args:
        loss: Loss of this step, a number or a scalar tensor, which is compared between ranks if the run asks for that.
            A tensor's value isn't waited for.
    """
    marks = _marks()
    if marks is not None:
        marks.user_stepped(loss)


def phase(name: str, timeout: float | str | timedelta | None = None) -> AbstractContextManager[None]:
    """Names what this rank does in the block (``with safelaunch.phase("eval", timeout="30m"): ...``).

    Args:
        name: Name of the phase, for messages.
        timeout: Time after which the phase counts as stalled: seconds, ``"90s"``, ``"10m"``, ``"2h"`` or a
            ``timedelta``. If it is None or 0, the surrounding phase's timeout applies, or else the watchdog's own
            threshold. After the block, the surrounding phase continues as it began.

    Raises:
        ValueError: ``timeout`` is anything else. Outside a run, too.
    """
    if timeout is None or (timeout == 0 and not isinstance(timeout, bool)):
        return _phase(name, 0.0)
    from safelaunch.beacon.durations import seconds_of

    return _phase(name, seconds_of(timeout))


@_contextmanager
def _phase(name: str, timeout: float) -> Iterator[None]:
    marks = _marks()
    if marks is None:
        yield
        return
    before = marks.enter_phase(name, timeout)
    try:
        yield
    finally:
        marks.leave_phase(before)


@_contextmanager
def pause() -> Iterator[None]:
    """Pauses the watch of this rank in the block (``with safelaunch.pause(): input()``)."""
    marks = _marks()
    if marks is None:
        yield
        return
    marks.pause(+1)
    try:
        yield
    finally:
        marks.pause(-1)
