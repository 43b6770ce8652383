"""``safelaunch diagnose PATH``: a verdict from files, later and elsewhere. With ``--json``, the document alone."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from pathlib import Path

import msgspec

from safelaunch.bundle import report
from safelaunch.console import PREFIX, say
from safelaunch.errors import UsageError
from safelaunch.launch.paths import working_directory
from safelaunch.model import Claim, Verdict
from safelaunch.postmortem.found import Found, Unreadable

REACHED, NOT_ENOUGH = 0, 1
_SHOWN_PROBLEMS = 5


def main(argv: list[str]) -> int:
    """Prints the verdict; 0 when one was reached, 1 when the evidence does not suffice, 2 when PATH holds none."""
    parser = argparse.ArgumentParser(
        prog="safelaunch diagnose",
        description="Reads a bundle (or its .tar.gz), a folder of bundles from several nodes, a run directory, or a "
        "plain folder of Flight Recorder dumps of any job, and says which rank and line hung it. Needs no GPU.",
        epilog="Exit code: 0 with a verdict, 1 where the evidence does not suffice, 2 where PATH holds none.",
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
    from safelaunch.diagnose import diagnose
    from safelaunch.postmortem import locate
    from safelaunch.session import sources

    try:
        found = locate.read(path)
    except Unreadable as error:
        raise UsageError(f"diagnose: {report.clean(called)}: {error.message}.") from error
    verdict = diagnose(found.evidence, read_source=sources.text)
    verdict = _pointing_at(verdict, found)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(verdict), indent=1).decode())
    else:
        _show(verdict, found, path)
    return REACHED if was_reached(verdict) else NOT_ENOUGH


def was_reached(verdict: Verdict) -> bool:
    """Somebody or something is named; "all have arrived" is a verdict too, where all were seen to have."""
    return bool(verdict.culprits) or verdict.confidence != "low"


def _pointing_at(verdict: Verdict, found: Found) -> Verdict:
    """With the names that the files have where they lie, and what could not be read among what is missing."""
    claims = tuple(Claim(claim.claim, _real_name(claim.file, found.files)) for claim in verdict.evidence)
    return msgspec.structs.replace(verdict, evidence=claims, missing=(*verdict.missing, *found.problems))


def _real_name(name: str, files: Mapping[str, str]) -> str:
    if name in files:
        return files[name]
    longest = max((start for start in files if name.startswith(start)), key=len, default=None)
    return files[longest] + name[len(longest) :] if longest is not None and _is_folder(longest) else name


def _is_folder(name: str) -> bool:
    return name == "" or name.endswith("/")


def _show(verdict: Verdict, found: Found, path: Path) -> None:
    from safelaunch.session import sources

    say(f"{report.clean(found.what)}: {len(found.evidence.ranks)} of {found.evidence.world_size} ranks")
    for problem in found.problems[:_SHOWN_PROBLEMS]:
        say(f"not read: {report.clean(problem)}")
    if len(found.problems) > _SHOWN_PROBLEMS:
        say(f"and {len(found.problems) - _SHOWN_PROBLEMS} more files that could not be read")
    shown = report.screen(verdict, bundle_path=str(path), place="read from", read_line=sources.line)
    print("".join(line.removeprefix(PREFIX) for line in shown.splitlines(keepends=True)), end="")
