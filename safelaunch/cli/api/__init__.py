"""The Python API: what ``safelaunch.launch`` and ``safelaunch.diagnose`` are, and the types of their results.

Import these names from ``safelaunch``, which loads this package when one of them is first used.
"""

from __future__ import annotations

from safelaunch.addons.embed.launching import HangError, Launch, diagnose, launch
from safelaunch.model import BundlePlace, Claim, Culprit, Frame, NodeAtFault, Verdict
from safelaunch.system.errors import SafelaunchError, UsageError

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
]
