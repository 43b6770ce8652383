"""The Python API: ``safelaunch.diagnose``, and the types of its result.

The package ``safelaunch`` loads this module only when one of its names is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from safelaunch.model import BundlePlace, Claim, Culprit, Frame, NodeAtFault, Verdict
from safelaunch.system.console import PREFIX
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import SafelaunchError, UsageError

__all__ = [
    "BundlePlace",
    "Claim",
    "Culprit",
    "Frame",
    "NodeAtFault",
    "SafelaunchError",
    "UsageError",
    "Verdict",
    "diagnose",
]


def diagnose(path: str | os.PathLike[str]) -> Verdict:
    """Reads evidence and returns the verdict: which rank and line hung the job, and why.

    ``path`` is a bundle or its ``.tar.gz``, a folder of bundles from several nodes, a run directory, or a folder of
    Flight Recorder dumps of any job. It can be untrusted: nothing in it is executed, and a separate process with
    limited memory and time reads it. Does the same as ``safelaunch diagnose PATH --json``.

    If the evidence is insufficient, the verdict has confidence ``low`` and no ``culprits``. Raises UsageError if there
    is no evidence at ``path``.
    """
    words = [*interpreter("safelaunch.cli", "entry"), "diagnose", "--json", "--", os.fspath(path)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        return from_json(done.stdout, Verdict)
    except msgspec.DecodeError:
        message = done.stderr.decode("utf-8", "replace").strip()
        lines = [line.removeprefix(PREFIX) for line in message.splitlines()]
        raise UsageError("\n".join(lines) or f"diagnosing {os.fspath(path)} ended with {done.returncode}") from None


def interpreter(module: str, function: str = "main") -> list[str]:
    """Returns the command that calls ``function`` of ``module`` in a new interpreter; it reads ``sys.argv``.

    The new interpreter imports this safelaunch. Its directory comes last on the module path, so that it hides no other
    modules. The working directory, which might hold any user's modules, isn't on the path.
    """
    root = os.fspath(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[:1] = []; sys.path.append({root!r}); from {module} import {function} as f; f()"
    return [sys.executable, "-c", code]
