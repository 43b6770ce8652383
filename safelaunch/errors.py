"""Errors that a user can fix.

SafelaunchError                 anything below; the command line prints it and exits
 ├── InterruptedWait            somebody gave up waiting for GPUs; nothing has been started (exit 130)
 ├── UsageError                 our own options, presets, configuration, resources, bundle directory (exit 2)
 │    ├── PresetError           a preset or configuration file: unknown name or key, wrong type
 │    ├── SpecError             a sweep of colaunch: its file, grid, placeholders, names or needs
 │    └── ResourceError         GPUs or ports that are not to be had
 │         └── StoreError       the directory of leases cannot be used
 └── CaptureError               a source of evidence failed; costs that artifact only

Code raises; only ``safelaunch.cli`` prints and exits.
"""

from __future__ import annotations


class SafelaunchError(Exception):
    """Base of the errors that are shown as one message, never as a traceback.

    ``message`` says what happened and why it matters, ``fix`` what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


class UsageError(SafelaunchError):
    """An error in what safelaunch was asked to do; nothing has been started."""

    exit_code = 2


class InterruptedWait(SafelaunchError):
    """Ctrl-C while waiting for GPUs."""

    exit_code = 130


class PresetError(UsageError):
    """A preset or configuration file that cannot be used; the message names file and line."""


class SpecError(UsageError):
    """A sweep that cannot be run as it is written; the message names file and line, or the word."""


class ResourceError(UsageError):
    """GPUs or ports that were asked for and are not to be had."""


class StoreError(ResourceError):
    """No lease can be taken, whatever is free."""


class CaptureError(SafelaunchError):
    """One source of evidence failed; ``message`` is what the manifest says of it."""
