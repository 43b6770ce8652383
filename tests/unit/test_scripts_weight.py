"""What counts as a line of code."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from weight import code_lines  # type: ignore[import-not-found]

MODULE = '''"""A module.

Of two paragraphs.
"""

# why
X = """text
of the program
"""


def f(
    one: int,  # a remark
) -> int:
    """What it does."""
    return one
'''


def test_docstrings_comments_and_blanks_are_no_code() -> None:
    assert code_lines(MODULE) == {7, 8, 9, 12, 13, 14, 16}
