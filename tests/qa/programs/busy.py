"""One rank computes forever between two steps, in Python or in C code called from it."""

import re
from functools import partial

from training import parser, train_until

options = parser.parse_args()


def wait_for_flag(flags: dict) -> int:
    turns = 0
    while not flags.get("ready"):  # HANGS: python
        turns += 1  # HANGS: python
    return turns


def clean(text: str) -> bool:
    return re.match(r"(\w+\s?)+$", text) is not None  # HANGS: regex


TEXT = "the quick brown fox jumps over the lazy dog again and again and again!"  # english: ok

if __name__ == "__main__":
    train_until(options, {"python": partial(wait_for_flag, {}), "regex": partial(clean, TEXT)})
