"""Loads add-ons' probes, the part of their code that runs inside a rank (see ``addons.protocols.Probe``).

Module ``addons/NAME/probe.py`` is loaded by its path, as ``_safelaunch_beacon.addons.NAME.probe``, because this
interpreter might not have safelaunch. The ``__init__`` files above it aren't run, so nothing else of the add-on runs
here, and ``from ...beacon import marks`` imports this rank's beacon.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ADDONS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "addons")


def load(name: str) -> Any:
    """Returns the probe of the add-on ``name``. Raises ImportError if it has none."""
    if not name.isidentifier():
        raise ImportError(f"{name!r} is no add-on")
    beacon = str(__package__)
    sys.modules[f"{beacon}.beacon"] = sys.modules[beacon]
    _add_package(f"{beacon}.addons", _ADDONS)
    _add_package(f"{beacon}.addons.{name}", os.path.join(_ADDONS, name))
    return __import__(f"{beacon}.addons.{name}.probe", fromlist=["install"])


def _add_package(name: str, path: str) -> None:
    if name not in sys.modules:
        package = type(sys)(name)
        package.__path__ = [path]
        sys.modules[name] = package
