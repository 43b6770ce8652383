"""``safelaunch reproduce PATH``: a small script that hangs as the job did, from its recorded calls."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from safelaunch.cli.parsing import Parser
from safelaunch.errors import SafelaunchError, UsageError
from safelaunch.launch.paths import working_directory
from safelaunch.postmortem.found import Unreadable
from safelaunch.reproduce import Extent, Reproduction, Wish, reproduction_of
from safelaunch.system.console import redact, say, show
from safelaunch.system.printable import clean

WRITTEN, NOTHING = 0, 1


def main(argv: list[str]) -> int:
    """Writes the script; returns 0, 1 if nothing in PATH can be replayed, 2 if PATH holds no evidence."""
    words = parser().parse_args(argv)
    wish = Wish(Extent(words.all, words.last), fewest=words.ranks, shrink=words.shrink, name=_name(words.output))
    found = _from(working_directory() / words.path, words.path, wish)
    if not found.replays:
        raise SafelaunchError(
            f"reproduce: {clean(words.path)} holds no calls of torch.distributed that could be made again."
        )
    if words.output is None:
        show(found.text.removesuffix("\n"))
        return WRITTEN
    _write(working_directory() / words.output, found.text)
    for note in found.notes:
        say(clean(note))
    say(f"wrote {clean(words.output)}; run it with: {found.command}")
    return WRITTEN


def parser() -> Parser:
    """The command line of ``safelaunch reproduce``."""
    made = Parser(
        "reproduce",
        description="Writes a small script, torch only, that makes the recorded calls of a hung job: the same groups, "
        "operations, sizes and types, in the same order on each rank. On a CPU with gloo it hangs in the same way. Its "
        "head says what could not be replayed. PATH is read as diagnose reads it.",
        epilog="Exit code: 0 with a script, 1 if there is nothing to replay, 2 if PATH holds no evidence.",
    )
    made.add_argument("path", metavar="PATH", help="a bundle, its .tar.gz, or a folder of Flight Recorder dumps")
    made.add_argument("-o", "--output", metavar="FILE", help="where to write the script [standard output]")
    extent = made.add_mutually_exclusive_group()
    extent.add_argument("--last", type=_count, metavar="N", help="make the last N calls of each rank [from a few "
                        "rounds before the ranks part]")  # fmt: skip
    extent.add_argument("--all", action="store_true", help="make all recorded calls")
    made.add_argument("--ranks", action="store_true", help="with the fewest ranks that lead to the same verdict")
    made.add_argument("--shrink", action="store_true", help="with small tensors; sizes that differ stay different")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of calls")
    return int(text)


def _name(output: str | None) -> str:
    return Path(output).name if output is not None else "repro.py"


def _from(path: Path, called: str, wish: Wish) -> Reproduction:
    # Before the fork of the child, which would import them again.
    from safelaunch.capture import user_source
    from safelaunch.postmortem import locate
    from safelaunch.postmortem.guard import in_child

    try:
        with tempfile.TemporaryDirectory(prefix="safelaunch-") as scratch:
            folder = locate.folder_of(path, Path(scratch))

            def work() -> Reproduction:
                evidence = locate.read_folder(folder, Path(scratch)).evidence
                return reproduction_of(evidence, wish, user_source.text_for_stranger)

            return in_child(work, locate.bounds_of(folder))
    except Unreadable as error:
        why = clean(error.message)
        raise UsageError(f"cannot reproduce {clean(called)}. {why[:1].upper()}{why[1:]}.") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(redact(text))
    except OSError as error:
        raise UsageError(f"reproduce: {clean(str(path))} cannot be written: {error.strerror}.") from error
