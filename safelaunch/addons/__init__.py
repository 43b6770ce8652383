"""The interface between the core and its add-ons.

An add-on is a directory of this package. It may import the core; the core imports only this module, which loads an
add-on by its name when a command, a bundle or a job asks for it. Deleting an add-on's directory removes its commands
and leaves everything else working. The tables are closed: an installed package can't change what ``safelaunch WORD``
means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

# Subcommand -> add-on whose module ``command`` has its ``main`` and ``parser`` (see ``protocols.Command``).
COMMANDS: Mapping[str, str] = {"colaunch": "sweep", "record": "record", "reproduce": "reproduce"}
# Hook -> add-ons that implement it, in the order in which they are asked: a function of that name in their package.
HOOKS: Mapping[str, tuple[str, ...]] = {}


def is_present(addon: str) -> bool:
    return os.path.isdir(os.path.join(os.path.dirname(__file__), addon))  # noqa: PTH112, PTH118, PTH120


def command(name: str) -> ModuleType:
    """Returns the module of the subcommand ``name``, which must be in ``COMMANDS``."""
    return import_module(f"{__name__}.{COMMANDS[name]}.command")


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    """Yields what the present add-ons implement of the hook ``name``."""
    for addon in HOOKS[name]:
        if is_present(addon):
            yield getattr(import_module(f"{__name__}.{addon}"), name)
