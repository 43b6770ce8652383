"""One rank computes forever between two steps, in Python or in C code called from it."""

import re

from training import Training, parser

options = parser.parse_args()


def wait_for_flag(flags: dict) -> int:
    turns = 0
    while not flags.get("ready"):  # HANGS: python
        turns += 1  # HANGS: python
    return turns


def clean(text: str) -> bool:
    return re.match(r"(\w+\s?)+$", text) is not None  # HANGS: regex


def main() -> None:
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if job.misbehaves(step) and options.how == "python":
                wait_for_flag({})
            if job.misbehaves(step) and options.how == "regex":
                clean("the quick brown fox jumps over the lazy dog again and again and again!")


if __name__ == "__main__":
    main()
