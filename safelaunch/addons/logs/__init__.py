"""Reads logs and saved stacks of a job, from any launcher, as evidence for a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Reader


def readers() -> tuple[Reader, ...]:
    from safelaunch.addons.logs.files import Texts

    return (Texts(),)
