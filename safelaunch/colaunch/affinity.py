"""How many threads each rank of a job may use on the cores that it was given. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANKS = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")


def threads(words: Sequence[str], cores: int) -> int:
    """OMP_NUM_THREADS for a job of ``words`` on ``cores`` cores: an equal part for each rank, at least one."""
    return max(1, cores // ranks(words))


def ranks(words: Sequence[str]) -> int:
    """What ``--nproc-per-node`` says; 1 where it says none, or no number (``auto``, ``gpu``)."""
    found = 1
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = _RANKS.fullmatch(word)
        if match:
            text = match[1] if match[1] is not None else following
            found = int(text) if text.isdecimal() and int(text) else 1
        elif not word.startswith("-") and word.endswith(".py"):
            break  # what follows is the script's
    return found
