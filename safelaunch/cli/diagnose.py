"""``safelaunch diagnose PATH``: reads evidence from files and prints the verdict."""

from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.cli.parsing import Parser
from safelaunch.job.paths import seen_from_here, working_directory
from safelaunch.model import Claim, Evidence, NextStep, ProofEdge, Verdict, format_ranks
from safelaunch.report import HTML, PERFETTO
from safelaunch.settings.config import bundle_dir_of
from safelaunch.settings.options import parse_count
from safelaunch.system.console import PREFIX, Display, display, folded, json_text, put, room, say, terminal_safe
from safelaunch.system.errors import SafelaunchError, UsageError
from safelaunch.system.printable import clean

if TYPE_CHECKING:  # imported on demand, because --json needs none
    from safelaunch.report.calls import Selection

REACHED, NOT_ENOUGH = 0, 1
VERDICT = "verdict.json"
FILES = (HTML, PERFETTO, VERDICT)
LAST = 50
MAX_RANKS = 1 << 20
_ANY_LAUNCH = ("safelaunch", "--nproc-per-node=N", "train.py")
_DUMP = NextStep("If the job still hangs, on its node", "safelaunch dump --all")
_MAY_HANG = "A log cannot show where ranks wait. If the job still runs, `safelaunch dump --all` on its node can."
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WITH_VARIABLES = re.compile(r"[\w@%+=:,./-]*(?:\$(?:\w+|\{\w+\})[\w@%+=:,./-]*)+")
_SHOWN_PROBLEMS = 5
_MOST_OTHERS = 2
_LISTED_PROBLEMS = 1000
T = TypeVar("T")
_Cited = TypeVar("_Cited", Claim, ProofEdge)


@dataclass(frozen=True)
class _ChildOutput:
    code: int
    out: str
    notes: tuple[str, ...] = ()  # for stderr
    files: Mapping[str, str] = field(default_factory=dict)  # wanted files' contents


@dataclass(frozen=True)
class _ShownParts:
    as_json: bool
    table: Selection | None
    files: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Prints the verdict; returns 0, or 1 if the evidence is insufficient, 2 if PATH contains none."""
    words = parser().parse_args(argv)
    called = words.path or [_newest()]
    paths = [Path("/dev/stdin") if argument == "-" else working_directory() / argument for argument in called]
    targets = _targets(words.html, words.output)
    for path in paths:
        check_targets(path, targets.values())
    wanted = _ShownParts(words.json, _selection(words), tuple(targets))
    collects = gc.isenabled()
    gc.disable()  # hundreds of dumps are millions of lasting objects: collecting would double the time
    try:
        shown = " ".join(called)
        path = str(paths[0]) if len(paths) == 1 else shown
        output = read_in_child(paths, shown, "diagnose", lambda output: _tell(output, path, wanted))
    finally:
        if collects:
            gc.enable()
    for note in output.notes:
        say(note)
    if output.out:
        put(output.out)
    for name, text in output.files.items():
        for target in targets[name]:
            _write(target, text)
            say(f"written: {clean(os.fspath(target))}")
    return output.code


def parser() -> Parser:
    command_line = Parser(
        "diagnose",
        description="Reads a bundle (or its .tar.gz), a folder of bundles of several nodes, a run directory, a plain "
        "folder of Flight Recorder dumps of any job, or any job's logs or stacks, as printed by py-spy, faulthandler, "
        "gdb or pystack (files, folders, .gz, or - for standard input), and names the rank and line where the job hung "
        "or ended. Needs no GPU. PATH may be untrusted: safelaunch runs nothing in it, follows no link out of it, "
        "writes nothing into it, and limits the memory and time of the process that reads it.",
        epilog="Exit code: 0 with a verdict, 1 if the evidence is not sufficient, 2 if PATH holds none.",
    )
    add = command_line.add_argument
    place = "a directory, a bundle's .tar.gz, or logs or stacks of one job [safelaunch-bundles/latest]"
    add("path", nargs="*", metavar="PATH", help=place)
    add("--json", action="store_true", help="print the document of verdict.json on stdout; with --calls, the calls")
    add("--html", metavar="FILE", help="write the report as one HTML file")
    add("-o", "--output", metavar="DIR", help=f"write {', '.join(FILES[:-1])} and {FILES[-1]} into DIR")
    calls = command_line.add_argument_group("the recorded calls")
    add = calls.add_argument
    add("-j", "--calls", action="store_true", help="print the Flight Recorders' calls as a table, not the verdict")
    add("--ranks", type=_ranks, metavar="RANKS", help="only these ranks: 0,4-7 (implies --calls)")
    add("--groups", metavar="NAMES", help="only these process groups, by name or description: 0,tp (implies --calls)")
    add("--last", type=_count, metavar="N", help=f"the last N calls of each rank [{LAST}]; 0: all (implies --calls)")
    return command_line


def _newest() -> str:
    """Returns the newest bundle of runs started in this directory. Raises UsageError if there is none."""
    latest = bundle_dir_of((), os.environ, working_directory()) / "latest"
    if not latest.exists():
        place = seen_from_here(os.fspath(latest))
        raise UsageError(f"diagnose: there is no {clean(place)} here.", "Name a bundle, or a folder of dumps.")
    seen_path = seen_from_here(os.path.realpath(latest))
    say(f"diagnosing {clean(seen_path)}")
    return seen_path


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part.strip(), re.ASCII)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not numbers or numbers[-1] >= MAX_RANKS:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,4-7")
        ranks |= set(numbers)
    return frozenset(ranks)


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls (0: all)") from None


def _selection(words: argparse.Namespace) -> Selection | None:
    filters = (words.ranks, words.groups, words.last)
    if not words.calls and all(value is None for value in filters):
        return None
    from safelaunch.report.calls import Selection

    groups = frozenset(name.strip() for name in (words.groups or "").split(",") if name.strip())
    return Selection(words.ranks, groups, LAST if words.last is None else words.last)


# --- files ------------------------------------------------------------------------------------------------------------


def _targets(html: str | None, output: str | None) -> dict[str, list[Path]]:
    """Returns the names of the requested files, each with the paths to write it to."""
    here = working_directory()
    files_by_name: dict[str, list[Path]] = {}
    if output is not None:
        files_by_name = {name: [here / output / name] for name in FILES}
    if html is not None:
        files_by_name.setdefault(HTML, []).append(here / html)
    return files_by_name


def check_targets(path: Path, targets: Iterable[Sequence[Path]]) -> None:
    """Raises UsageError if a target is inside the evidence or a bundle, or is a directory."""
    from safelaunch.bundle.reading.bundles import is_bundle

    evidence = Path(os.path.realpath(path))
    for target in (target for several in targets for target in several):
        real = Path(os.path.realpath(target))
        inside = next((parent for parent in (real, *real.parents) if parent == evidence or is_bundle(parent)), None)
        if inside is not None:
            raise UsageError(
                f"diagnose: {clean(os.fspath(target))} is within {clean(os.fspath(inside))}.",
                "Name a place outside: evidence stays as it was collected.",
            )
        if target.is_dir():
            raise UsageError(f"diagnose: {clean(os.fspath(target))} is a directory.", "Name a file, or use -o DIR.")


def _write(target: Path, text: str) -> None:
    """Writes a file that only this user can read; replaces it completely or not at all."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(prefix=f".{target.name[:64]}-", dir=target.parent)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            os.replace(made, target)  # noqa: PTH105 - text, as mkstemp gives it
        except BaseException:
            os.unlink(made)  # noqa: PTH108
            raise
    except OSError as error:
        why = error.strerror or error
        raise SafelaunchError(f"diagnose: {clean(os.fspath(target))} could not be written: {why}") from error


def read_in_child(paths: Sequence[Path], called: str, command: str, work: Callable[[EvidenceSource], T]) -> T:
    """Returns the result of ``work`` for the evidence at ``paths``, from a child with limited memory and time.

    The caller must already have imported what ``work`` needs. Raises UsageError if there is nothing to read.
    """
    from safelaunch.bundle.reading import locate
    from safelaunch.bundle.reading.guard import in_child

    try:
        with tempfile.TemporaryDirectory(prefix="safelaunch-") as scratch:
            paths = [locate.save_stdin(path, Path(scratch)) for path in paths]
            if len(paths) > 1:
                return in_child(lambda: work(locate.read_files(paths)), locate.bounds_of(paths))
            folder = locate.folder_of(paths[0], Path(scratch))
            return in_child(lambda: work(locate.read_folder(folder, Path(scratch))), locate.bounds_of([folder]))
    except Unreadable as error:
        why = clean(error.message)
        # After a colon, redaction would take the reason for a setting's value.
        raise UsageError(f"cannot {command} {clean(called)}. {why[:1].upper()}{why[1:]}.", error.fix) from error


def _tell(reading: EvidenceSource, path: str, wanted: _ShownParts) -> _ChildOutput:
    """Returns what the child prints: its verdict on the evidence at ``path``."""
    from safelaunch.verdict.diagnose import diagnose

    if wanted.table is not None and not wanted.files:
        return _calls(reading, wanted.table, as_json=wanted.as_json)
    verdict = reading.stored or _with_next(
        _pointing_at(diagnose(reading.evidence, read_source=reading.read_source), reading), reading
    )
    files = _files(verdict, reading, wanted.files)
    document = json_text(msgspec.to_builtins(verdict))
    files |= {VERDICT: f"{document}\n"} if VERDICT in wanted.files else {}
    if wanted.table is not None:
        return replace(_calls(reading, wanted.table, as_json=wanted.as_json), files=files)
    code = REACHED if was_reached(verdict) else NOT_ENOUGH
    if wanted.as_json:
        return _ChildOutput(code, document, files=files)
    if reading.stored is None and not (reading.evidence.ranks or reading.evidence.rendezvous or reading.evidence.nodes):
        return _ChildOutput(REACHED if reading.remarks else NOT_ENOUGH, "", _closing(reading), files)
    on = display(1, os.environ)
    return _ChildOutput(
        code,
        terminal_safe(_screen(verdict, reading.evidence, path, on), color=on.color),
        (*_notes(reading), *_unexplained(reading, verdict)),
        files,
    )


def _unexplained(reading: EvidenceSource, verdict: Verdict) -> list[str]:
    cited = " ".join(claim.file for claim in verdict.evidence)
    uncited = [error for error in reading.errors if error.where not in cited]
    return [f"also in the log: {clean(error.words)}" for error in uncited[:_MOST_OTHERS]]


def _closing(reading: EvidenceSource) -> tuple[str, ...]:
    first, *rest = (*reading.remarks, *reading.summary) or ("nothing wrong seen",)
    step = _under_safelaunch(reading)
    may_hang = (_MAY_HANG,) if reading.is_quiet and not reading.remarks else ()
    return (*map(clean, (f"{reading.what}: {first}", *rest)), *may_hang, f"{step.why}: {clean(step.command)}")


def _with_next(verdict: Verdict, reading: EvidenceSource) -> Verdict:
    if verdict.next is not None or reading.bundles or any(rank.beacon for rank in reading.evidence.ranks):
        return verdict
    may_hang = reading.evidence.printed is None and reading.evidence.outcome == "hang"
    return msgspec.structs.replace(verdict, next=_DUMP if may_hang else _under_safelaunch(reading))


def _under_safelaunch(reading: EvidenceSource) -> NextStep:
    from safelaunch.system.redaction.redact import redact_argv

    words = redact_argv(reading.launch) or _ANY_LAUNCH
    return NextStep("To run the job under safelaunch", " ".join(map(_as_typed, words)))


def _as_typed(word: str) -> str:
    name = word[: word.find("=") + 1] if _ASSIGNMENT.match(word) else ""
    rest = word[len(name) :]
    return word if _WITH_VARIABLES.fullmatch(rest) or (name and not rest) else name + shlex.quote(rest)


def _calls(reading: EvidenceSource, chosen: Selection, *, as_json: bool) -> _ChildOutput:
    """Returns the table of calls, with exit code 0 if it contains any."""
    from safelaunch.report import calls
    from safelaunch.verdict.rank_state import CaseFacts

    shown = calls.table(CaseFacts.of(reading.evidence), chosen)
    code = REACHED if shown.rows else NOT_ENOUGH
    notes = _notes(reading)
    if shown.unrecorded:
        notes.append(f"no Flight Recorder of rank {format_ranks(shown.unrecorded)}")
    if not shown.rows:
        known_groups = f" (groups: {', '.join(clean(name) for name in shown.groups)})" if shown.groups else ""
        notes.append(f"no recorded call matches{known_groups}")
    if shown.more:
        text = f"only the newest calls of each rank are shown (--last {chosen.last})"
        notes.append(f"{text}: a line may lack ranks that made its call before these. --last 0 shows all")
    if as_json:
        return _ChildOutput(code, json_text(calls.document(shown)), tuple(notes))
    table = "\n".join(calls.lines(shown)) if shown.rows else ""
    return _ChildOutput(code, folded(terminal_safe(table), room()), tuple(notes))


def _files(verdict: Verdict, reading: EvidenceSource, names: Collection[str]) -> dict[str, str]:
    if not names:
        return {}
    from safelaunch.bundle.reading import report_header
    from safelaunch.capture import user_source
    from safelaunch.report import exports, page, template
    from safelaunch.system.redaction.redactor import Redactor
    from safelaunch.verdict.rank_state import CaseFacts

    about = report_header.about_all(reading.bundles)
    redactor = Redactor()
    facts = CaseFacts.of(reading.evidence, user_source.text_for_stranger)
    made: dict[str, str] = {}
    if HTML in names:
        elsewhere = replace(about, bundle="")  # without links to other files
        data = page.content(verdict, reading.evidence, facts=facts, redact=redactor.job_text, about=elsewhere)
        made[HTML] = template.render(redactor.tree(data))
    if PERFETTO in names:
        made[PERFETTO] = exports.as_json(redactor.tree(exports.perfetto(facts, about.bundle)))
    return {name: redactor.markup(text) for name, text in made.items()}


def was_reached(verdict: Verdict) -> bool:
    """Returns whether there is a useful verdict: one that names a rank or node, or is certain without naming any."""
    return bool(verdict.culprits or verdict.processes_at_fault or verdict.nodes_at_fault) or verdict.confidence != "low"


def _pointing_at(verdict: Verdict, reading: EvidenceSource) -> Verdict:
    claims = tuple(_citing(claim, reading) for claim in verdict.evidence)
    proof = tuple(_citing(edge, reading) for edge in verdict.proof)
    problems = [_utf8(problem) for problem in reading.problems[:_LISTED_PROBLEMS]]
    problems += _more(len(reading.problems) - _LISTED_PROBLEMS)
    return msgspec.structs.replace(verdict, evidence=claims, proof=proof, missing=(*verdict.missing, *problems))


def _citing(cited: _Cited, reading: EvidenceSource) -> _Cited:
    return msgspec.structs.replace(cited, file=_utf8(_real_name(cited.file, reading.files)))


def _utf8(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


def _more(count: int) -> list[str]:
    return [f"and {count} more unreadable files"] if count > 0 else []


def _real_name(name: str, files: Mapping[str, str]) -> str:
    if name in files:
        return files[name]
    longest = max((start for start in files if name.startswith(start)), key=len, default=None)
    is_folder = longest == "" or (longest is not None and longest.endswith("/"))
    return files[longest] + name[len(longest) :] if longest is not None and is_folder else name


def _notes(reading: EvidenceSource) -> list[str]:
    least = "at least " if reading.evidence.world_guessed else ""
    unnamed = len(reading.evidence.labels)
    named = len(reading.evidence.ranks) - unnamed
    parts = [f"{named} of {least}{reading.evidence.world_size} ranks"] if named and not unnamed else []
    parts += [f"{named} {'rank' if named == 1 else 'ranks'}"] if named and unnamed else []
    parts += [f"{unnamed} {'process whose rank is' if unnamed == 1 else 'processes whose ranks are'} not known"] * bool(
        unnamed
    )
    read = ": ".join(filter(None, (clean(reading.what), " and ".join(parts))))
    problems = [f"not read: {clean(problem)}" for problem in reading.problems[:_SHOWN_PROBLEMS]]
    return [read, *map(clean, reading.remarks), *problems, *_more(len(reading.problems) - _SHOWN_PROBLEMS)]


def _screen(verdict: Verdict, evidence: Evidence, path: str, on: Display) -> str:
    from safelaunch.capture import user_source
    from safelaunch.report import screen

    text = screen.screen(
        verdict,
        bundle_path=path,
        place="read from",
        width=on.width + len(PREFIX),
        color=on.color,
        read_line=user_source.line_for_stranger,
        cwd=os.fspath(working_directory()) if on.terminal else "",
        evidence=evidence,
    )
    return "\n".join(line.removeprefix(PREFIX) for line in text.splitlines())
