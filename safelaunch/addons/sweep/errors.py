from __future__ import annotations

from safelaunch.system.errors import UsageError


class SpecError(UsageError):
    """A sweep is invalid. The message names the file and line, or quotes the word of the command line."""
