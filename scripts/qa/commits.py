"""The commit whose product a qualification runs: results of another one are not continued."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("safelaunch", "configs", "pyproject.toml")


def product_commit(*inputs: str) -> str:
    """Returns the last commit that changed the product or ``inputs``, plus ``+changes`` if any is uncommitted."""
    paths = (*PRODUCT, *inputs)
    commit = _git("log", "-1", "--format=%h", "--abbrev=9", "--", *paths)
    return f"{commit}+changes" if _git("status", "--porcelain", "--", *paths) else commit


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
