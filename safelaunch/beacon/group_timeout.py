"""Applies ``--pg-timeout`` to the process groups that this rank makes."""

from __future__ import annotations

import functools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

# What a group without a timeout of its own takes: the names that c10d looks up when it makes one.
_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
_MAKERS = ("init_process_group", "new_group", "split_group")


def apply(c10d: ModuleType, given: str) -> None:
    """``given``: seconds, empty for none; with a ``!`` for groups to which the script gives a timeout, too.

    ``c10d``: the module ``distributed_c10d``, best before anything else has imported a name from it.
    """
    if not given:
        return
    from datetime import timedelta

    timeout = timedelta(seconds=float(given.rstrip("!")))
    for name in _DEFAULTS:
        if isinstance(getattr(c10d, name, None), timedelta):  # without NCCL, torch has none for it
            setattr(c10d, name, timeout)
    if given.endswith("!"):
        package = sys.modules.get("torch.distributed")  # has the names already where this rank was forked
        for name in _MAKERS:
            maker = getattr(c10d, name, None)
            if maker is not None:
                making = _with_timeout(maker, timeout)
                for module in (c10d, package):
                    if module is not None and vars(module).get(name) is maker:
                        setattr(module, name, making)


def _with_timeout(maker: Callable[..., Any], timeout: object) -> Callable[..., Any]:
    from inspect import signature

    parameters = signature(maker)

    @functools.wraps(maker)
    def making(*args: Any, **kwargs: Any) -> Any:
        try:
            given = parameters.bind(*args, **kwargs)
        except TypeError:  # torch's own message is better
            return maker(*args, **kwargs)
        given.arguments["timeout"] = timeout
        return maker(*given.args, **given.kwargs)

    return making
