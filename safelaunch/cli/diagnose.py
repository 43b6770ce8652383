"""``safelaunch diagnose PATH``: a verdict from files, at any time and on any machine."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from safelaunch.errors import UsageError
from safelaunch.launch.paths import working_directory
from safelaunch.model import Claim, Verdict
from safelaunch.postmortem.found import Found, Unreadable
from safelaunch.report import report
from safelaunch.system.console import PREFIX, Display, display, json_text, say, terminal_safe
from safelaunch.system.printable import clean

REACHED, NOT_ENOUGH = 0, 1
_SHOWN_PROBLEMS = 5
_LISTED_PROBLEMS = 1000


@dataclass(frozen=True)
class _Told:
    """The output and exit code; ``notes`` go to stderr."""

    code: int
    out: str
    notes: tuple[str, ...] = ()


def main(argv: list[str]) -> int:
    """Prints the verdict; returns 0 if it reached one, 1 if the evidence does not suffice, 2 if PATH holds none."""
    parser = argparse.ArgumentParser(
        prog="safelaunch diagnose",
        description="Reads a bundle (or its .tar.gz), a folder of bundles from several nodes, a run directory, or a "
        "plain folder of Flight Recorder dumps of any job, and names the rank and line that hung it. Needs no GPU. "
        "PATH may be untrusted: safelaunch runs nothing in it, follows no link out of it, and limits the memory and "
        "time of the process that reads it.",
        epilog="Exit code: 0 with a verdict, 1 if the evidence does not suffice, 2 if PATH holds none.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a directory, or a bundle's .tar.gz")
    parser.add_argument("--json", action="store_true", help="print the document of verdict.json on stdout")
    words = parser.parse_args(argv)
    path = working_directory() / words.path
    collects = gc.isenabled()
    gc.disable()  # hundreds of dumps are millions of objects that live to the end: collecting would double the time
    try:
        return _diagnose(path, words.path, as_json=words.json)
    finally:
        if collects:
            gc.enable()


def _diagnose(path: Path, called: str, *, as_json: bool) -> int:
    # Before the fork of the child, which would import them again for each archive.
    from safelaunch.postmortem import locate
    from safelaunch.postmortem.guard import in_child

    try:
        with tempfile.TemporaryDirectory(prefix="safelaunch-") as scratch:
            folder = locate.folder_of(path, Path(scratch))
            work = lambda: _read(folder, Path(scratch), path, as_json=as_json)  # noqa: E731 - what the child does
            told = in_child(work, locate.bounds_of(folder))
    except Unreadable as error:
        why = clean(error.message)
        # With a colon between them, redaction would take path and reason for the name and the value of a setting.
        raise UsageError(f"cannot diagnose {clean(called)}. {why[:1].upper()}{why[1:]}.") from error
    for note in told.notes:
        say(note)
    print(told.out)
    return told.code


def _read(folder: Path, scratch: Path, path: Path, *, as_json: bool) -> _Told:
    """Reads PATH, in the child."""
    from safelaunch.capture import user_source
    from safelaunch.diagnose import diagnose
    from safelaunch.postmortem import locate

    found = locate.read_folder(folder, scratch)
    verdict = diagnose(found.evidence, read_source=user_source.text_for_stranger)
    verdict = _pointing_at(verdict, found)
    code = REACHED if was_reached(verdict) else NOT_ENOUGH
    if as_json:
        return _Told(code, json_text(msgspec.to_builtins(verdict)))
    on = display(1, os.environ)
    return _Told(code, terminal_safe(_screen(verdict, path, on), color=on.color), tuple(_notes(found)))


def was_reached(verdict: Verdict) -> bool:
    """Whether the verdict names a rank or a node, or is certain that none is at fault: that is a verdict too."""
    return bool(verdict.culprits or verdict.nodes_at_fault) or verdict.confidence != "low"


def _pointing_at(verdict: Verdict, found: Found) -> Verdict:
    """The verdict with the files' present paths, and with the unreadable files in ``missing``."""
    claims = tuple(Claim(claim.claim, _utf8(_real_name(claim.file, found.files))) for claim in verdict.evidence)
    problems = [_utf8(problem) for problem in found.problems[:_LISTED_PROBLEMS]]
    problems += _more(len(found.problems) - _LISTED_PROBLEMS)
    return msgspec.structs.replace(verdict, evidence=claims, missing=(*verdict.missing, *problems))


def _utf8(name: str) -> str:
    """Text without undecodable bytes: a file name may contain any."""
    return name.encode("utf-8", "replace").decode()


def _more(count: int) -> list[str]:
    return [f"and {count} more unreadable files"] if count > 0 else []


def _real_name(name: str, files: Mapping[str, str]) -> str:
    if name in files:
        return files[name]
    longest = max((start for start in files if name.startswith(start)), key=len, default=None)
    return files[longest] + name[len(longest) :] if longest is not None and _is_folder(longest) else name


def _is_folder(name: str) -> bool:
    return name == "" or name.endswith("/")


def _notes(found: Found) -> list[str]:
    read = f"{clean(found.what)}: {len(found.evidence.ranks)} of {found.evidence.world_size} ranks"
    problems = [f"not read: {clean(problem)}" for problem in found.problems[:_SHOWN_PROBLEMS]]
    return [read, *problems, *_more(len(found.problems) - _SHOWN_PROBLEMS)]


def _screen(verdict: Verdict, path: Path, on: Display) -> str:
    from safelaunch.capture import user_source

    text = report.screen(
        verdict,
        bundle_path=str(path),
        place="read from",
        width=on.width + len(PREFIX),
        color=on.color,
        read_line=user_source.line_for_stranger,
    )
    return "\n".join(line.removeprefix(PREFIX) for line in text.splitlines())
