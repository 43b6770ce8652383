"""Tests on paths that another user may have chosen. They return False where ``pathlib`` would raise.

``pathlib`` raises for a name that is too long and for a directory without search permission. ``os.path`` returns False.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_dir(path: Path) -> bool:
    return os.path.isdir(path)


def is_file(path: Path) -> bool:
    return os.path.isfile(path)


def exists(path: Path) -> bool:
    return os.path.exists(path)


def lexists(path: Path) -> bool:
    """Whether the name exists, even as a broken link."""
    return os.path.lexists(path)
