"""Compares what the product prints with golden files in ``tests/data``.

``WRITE_GOLDEN=1`` in the environment writes the files. Read their diff.
"""

from __future__ import annotations

import os

from tests.support.paths import DATA


def compare(name: str, text: str) -> None:
    """Fails if ``text`` isn't what ``tests/data/NAME`` contains."""
    file = DATA / name
    if os.environ.get("WRITE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")
