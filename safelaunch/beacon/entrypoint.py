"""Runs a rank's function under ``safelaunch.launch``, with the beacon around it.

A spawned worker is a new interpreter, so ``sitecustomize`` has started the beacon. In a forked worker, the beacon
starts when the function is called. This is the only hook that torch's launcher offers for every start method.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
INJECT = os.path.join(_HERE, "inject")


def module(name: str) -> Any:
    if "_safelaunch_beacon" not in sys.modules:
        package = type(sys)("_safelaunch_beacon")
        package.__path__ = [_HERE]
        sys.modules["_safelaunch_beacon"] = package
    return __import__("_safelaunch_beacon." + name, fromlist=["_"])


class WatchedFunction:
    """Calls ``function`` in a rank, and records how the call ends. Has the function's name, which torch shows.

    ``env`` has the variables of this launch, because a fork server started for an earlier launch has that launch's.
    """

    def __init__(self, function: Callable[..., Any], env: Mapping[str, str]) -> None:
        self._function = function
        self._env = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        functools.update_wrapper(self, function, updated=())
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedFunction, (self._function, self._env)

    def __call__(self, *args: Any) -> Any:
        _start_beacon(self._env)
        try:
            result = self._function(*args)
        except Exception as error:
            module("faults").raised(error)
            raise
        module("marks").set_returned()
        return result


def _start_beacon(launch: Mapping[str, str]) -> None:
    run_dir = launch.get("SAFELAUNCH_RUN_DIR", "")
    if not os.path.isdir(run_dir) or module("rank").is_claimed():
        return
    env = os.environ
    env.update(launch)
    own = env.pop("SAFELAUNCH_PYTHONPATH", None)
    if own is not None:
        env["PYTHONPATH"] = own
    elif env.get("PYTHONPATH") == INJECT:
        del env["PYTHONPATH"]
    module("log").run_dir = run_dir
    module("rank").claim(run_dir, env)
