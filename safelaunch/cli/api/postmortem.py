"""``safelaunch.diagnose(path)``: a verdict from files."""

from __future__ import annotations

import os
import subprocess

import msgspec

from safelaunch.cli.api.interpreter import command
from safelaunch.model import Verdict
from safelaunch.system.console import PREFIX
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import UsageError


def diagnose(path: str | os.PathLike[str]) -> Verdict:
    """Reads evidence and returns the verdict: which rank and line hung the job, and why.

    ``path``: a bundle or its ``.tar.gz``, a folder of bundles from several nodes, a run directory, or a folder of
    Flight Recorder dumps of any job. It may be untrusted: nothing in it is run, and a process of its own reads it,
    with bounded memory and time. This is ``safelaunch diagnose PATH --json``.

    A verdict of confidence ``low`` without ``culprits`` means that the evidence does not suffice. Raises UsageError if
    there is no evidence at ``path``.
    """
    words = [*command("safelaunch.cli", "entry"), "diagnose", "--json", "--", os.fspath(path)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        return from_json(done.stdout, Verdict)
    except msgspec.DecodeError:
        said = done.stderr.decode("utf-8", "replace").strip()
        lines = [line.removeprefix(PREFIX) for line in said.splitlines()]
        raise UsageError("\n".join(lines) or f"diagnosing {os.fspath(path)} ended with {done.returncode}") from None
