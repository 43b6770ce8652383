"""Runs pages of the documentation and pastes the verdicts: ``scripts/build/docs_output.py docs/errors.md ...``.

A block marked ``<!-- verdict -->`` gets the screen of the verdict down to its evidence, and the advice. Pids, hosts and
paths are replaced by examples. Look at the difference before you commit it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.docs import shell as shells
from tests.docs.pages import PAGES, Block

ROOT = Path(__file__).parents[2]


class Pasting(shells.Shell):
    """Keeps what the last block printed."""

    screen = ""

    def _run(self, text: str, place: Path, environ: dict[str, str]) -> tuple[int, str]:
        code, output = super()._run(text, place, environ)
        self.screen = shorten(output.replace(str(place), "/home/me"))
        print(f"exit {code}\n{output}\n--", file=sys.stderr)
        return code, output


LEFT_OUT = ("  evidence:", "  held up", "  missing:", "  confidence", "  more:", "  details:", "bundle:")


def shorten(output: str) -> str:
    """The verdict's lines down to its evidence, and the steps to take."""
    lines = [line.removeprefix("safelaunch: ") for line in output.splitlines() if line.startswith("safelaunch: ")]
    first = next((number for number, line in enumerate(lines) if re.match("the job (hangs|crashed)", line)), 0)
    kept: list[str] = []
    shown = True
    for line in lines[first:]:
        if not line.startswith("    "):  # not the rest of the line before
            shown = not line.startswith(LEFT_OUT)
        if shown:
            kept.append(f"safelaunch: {line}")
    text = re.sub(r" at\nsafelaunch: +(?=/home/me/)", " at ", "\n".join(kept))
    text = re.sub(r"(/home/me/\S+)\nsafelaunch: +in ", r"\1 in ", text)
    return re.sub(r"\(pid \d+", "(pid 4711", re.sub(r", on [\w.-]+\)", ", on node1)", text))


def paste(page: str, shell: Pasting) -> None:
    found: list[tuple[Block, str]] = []
    shells.check_shown = lambda block, said: found.append((block, shell.screen))
    shell.page(page)
    for block, screen in reversed(found):  # a block that grows moves those below it
        if block.comment == "verdict" and block.page == page:
            replace(page, block, screen)


def replace(page: str, block: Block, text: str) -> None:
    lines = PAGES[page].read_text().splitlines()
    lines[block.line : block.line + len(block.text.splitlines())] = text.splitlines()
    PAGES[page].write_text("\n".join(lines) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shell = Pasting(Path(scratch))
        try:
            for page in sys.argv[1:]:
                paste(page, shell)
        finally:
            shell.clean_up()


if __name__ == "__main__":
    main()
