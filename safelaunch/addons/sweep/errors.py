from __future__ import annotations

from safelaunch.system.errors import UsageError


class SpecError(UsageError):
    """A sweep is invalid. The message contains the file and line, or the word."""
