"""Applies ``--pg-timeout`` to the process groups of this rank."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

# Names that c10d looks up when a group is created without a timeout.
_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")
_MAKERS = ("init_process_group", "new_group", "split_group")


def apply(c10d: ModuleType, setting: str) -> None:
    """Makes a timeout the default of the process groups that this rank creates.

    Args:
        c10d: Module ``distributed_c10d``, if possible before another module has imported names from it.
        setting: Seconds; empty to change nothing. With a ``!``, also replaces timeouts that the script sets.
    """
    if not setting:
        return
    from datetime import timedelta

    timeout = timedelta(seconds=float(setting.rstrip("!")))
    for name in _DEFAULTS:
        if isinstance(getattr(c10d, name, None), timedelta):  # a torch without NCCL has no timeout for it
            setattr(c10d, name, timeout)
    if setting.endswith("!"):
        package = sys.modules.get("torch.distributed")  # it has the names already if this rank was forked
        for name in _MAKERS:
            maker = getattr(c10d, name, None)
            if maker is not None:
                making = _with_timeout(maker, timeout)
                for module in (c10d, package):
                    if module is not None and vars(module).get(name) is maker:
                        setattr(module, name, making)


def _with_timeout(maker: Callable[..., Any], timeout: object) -> Callable[..., Any]:
    from functools import wraps
    from inspect import signature

    parameters = signature(maker)

    @wraps(maker)
    def making(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = parameters.bind(*args, **kwargs)
        except TypeError:  # torch's own message is better
            return maker(*args, **kwargs)
        arguments.arguments["timeout"] = timeout
        return maker(*arguments.args, **arguments.kwargs)

    return making
