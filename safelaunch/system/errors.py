"""Errors that a user can fix.

    SafelaunchError                 base class; the command line prints it and exits
     ├── InterruptedWait            the user stopped waiting for GPUs; nothing was started (exit 130)
     ├── UsageError                 safelaunch's options, presets, configuration, resources, bundle directory (exit 2)
     │    ├── PresetError           a preset or configuration file: unknown name or key, wrong type
     │    ├── DurationError         a keyword of ``safelaunch.launch`` that isn't a duration (a ValueError, too)
     │    └── ResourceError         GPUs or ports are not available
     │         └── StoreError       the lease directory is unusable
     ├── AccessDenied               the kernel lets this user read neither a job's stacks nor its variables
     └── CaptureError               a source of evidence failed; only that artifact is lost

Code raises; only ``safelaunch.cli`` prints and exits.
"""

from __future__ import annotations

from typing import Literal

Failure = Literal["", "absent", "broken", "denied", "no handler", "not installed", "outdated", "timeout"]


class SafelaunchError(Exception):
    """Base of the errors that the command line shows as one message, never as a traceback.

    ``message`` says what happened and why it matters. ``fix`` says what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


class UsageError(SafelaunchError):
    """An error in the user's request. Nothing was started."""

    exit_code = 2


class AccessDenied(SafelaunchError):
    """Access to a process is denied. The command line adds which command to run instead."""


class InterruptedWait(SafelaunchError):
    """The user pressed Ctrl-C while waiting for GPUs."""

    exit_code = 130


class PresetError(UsageError):
    """A preset or a configuration file is invalid. The message names the file and line."""


class DurationError(UsageError, ValueError):
    """A value isn't a duration. Raised by the call to which it was passed."""


class ResourceError(UsageError):
    """The requested GPUs or ports are not available."""


class StoreError(ResourceError):
    """The lease directory is unusable, so not even free GPUs and ports can be leased."""


class CaptureError(SafelaunchError):
    """A source of evidence failed. ``message`` goes into the manifest; code depends only on ``kind``.

    ``absent``: no process listens. ``timeout``: the deadline passed. ``denied``: no permission. ``not installed``: the
    tool is missing. ``outdated``: the tool doesn't support its input. ``no handler``: the worker server lacks the
    handler. ``broken``: no usable answer.
    """

    def __init__(self, message: str, fix: str = "", kind: Failure = "") -> None:
        super().__init__(message, fix)
        self.kind: Failure = kind


def internal_error(error: Exception, ended: str, then: str) -> str:
    """Returns the message for an internal error that stopped ``ended``; ``then`` says what continues without it."""
    return f"an internal error ended {ended} ({type(error).__name__}: {error}). {then}"
