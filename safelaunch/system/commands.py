"""Commands that a message asks the user to run. Each works in any directory, and with any PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from safelaunch.system.console import COMMAND


def line(words: Sequence[str]) -> str:
    return COMMAND + shlex.join(words)


def own(words: Sequence[str]) -> list[str]:
    script = Path(sys.executable).parent / "safelaunch"
    return [*([os.fspath(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", "safelaunch"]), *words]


def as_root(words: Sequence[str]) -> list[str]:
    """Returns the command that starts this installation as root. ``sudo`` keeps only the working directory."""
    base, packages = site.getuserbase(), site.getusersitepackages()
    home = ["env", f"PYTHONUSERBASE={base}"] if Path(packages) in Path(__file__).parents else []
    return [*(["sudo"] if shutil.which("sudo") else []), *home, *own(words)]


def pip_install(package: str) -> list[str]:
    """Returns the command that installs a package for this Python. Environments made by uv have no pip."""
    if find_spec("pip") is None:
        return ["uv", "pip", "install", "--python", sys.executable, package]
    return [sys.executable, "-m", "pip", "install", package]
