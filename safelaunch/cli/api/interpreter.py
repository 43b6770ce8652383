"""Starts safelaunch's own code in a new interpreter, wherever this one has imported safelaunch from."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str, function: str = "main") -> list[str]:
    """The command that calls ``function`` of ``module``, which reads its arguments from ``sys.argv``.

    safelaunch's directory comes last on the module path, so that nothing in it shadows the standard library; the
    working directory, which may hold anybody's modules, is not on it.
    """
    root = os.fspath(Path(__file__).resolve().parents[3])
    code = f"import sys; sys.path[:1] = []; sys.path.append({root!r}); from {module} import {function} as f; f()"
    return [sys.executable, "-c", code]
