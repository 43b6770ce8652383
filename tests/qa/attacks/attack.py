"""One attack on safelaunch. The modules of the areas yield many; ``scripts/qa/attacks.py`` runs and counts them.

An area is a module ``attacks_<area>.py`` of this directory with a function ``attacks(count, random)``.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

AREAS = ("dumps", "bundles", "secrets", "strangers", "nodes", "kills")


@dataclass(frozen=True)
class Attack:
    """``run`` gets an empty private directory. It returns "" if the product withstood, else one line on what failed.

    ``needs`` returns why the attack cannot run here ("root only"), or an empty string.
    """

    name: str
    run: Callable[[Path], str]
    needs: Callable[[], str] = field(default=lambda: "")


def attacks(area: str, count: int, seed: int) -> Iterator[Attack]:
    """Returns the attacks of one area, about ``count`` if they are random. The same seed gives the same attacks."""
    module = importlib.import_module(f"tests.qa.attacks.attacks_{area}")
    found: Iterator[Attack] = module.attacks(count, random.Random(seed))
    return found
