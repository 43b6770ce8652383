"""Implements ``safelaunch record [RUN]``: samples all ranks of a live run and reports where their time goes."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from safelaunch.addons.record.recording import LONGEST_S, Recording, Sampling, decode
from safelaunch.cli.dump import answer_of, choose
from safelaunch.cli.parsing import Parser
from safelaunch.job.paths import working_directory
from safelaunch.model.words import ranks_in
from safelaunch.settings.options import parse_seconds
from safelaunch.supervise.control.discover import Run, look, our_roots
from safelaunch.supervise.control.protocol import ControlRequest, ServiceAnswer
from safelaunch.system.console import display, say, show, show_json
from safelaunch.system.errors import SafelaunchError, UsageError
from safelaunch.system.printable import clean

ANSWER_S = 60.0  # extra time for py-spy to finish on a busy node, and for other nodes to answer
LARGEST_RECORDING = 64 << 20


def main(argv: list[str]) -> int:
    """Prints the verdict and the folder. Returns 0, or 1 if there are no samples, 2 if RUN doesn't exist."""
    args = parser().parse_args(argv)
    earlier = _earlier(args.compare) if args.compare else None
    run = choose(look(our_roots()), args.run, "record")
    answer = _record(run, args.duration, args.ranks)
    if answer.part is None:
        raise SafelaunchError(f"record: no samples of {run.id}: {answer.problem or 'its supervisor gave no reason'}.")
    directory = working_directory() / (args.bundle_dir or answer.bundle_dir)
    return _report(run, answer.part, earlier, args.compare or "", directory, as_json=args.json)


def parser() -> Parser:
    line = Parser(
        "record",
        description=(
            "Samples all ranks of a running job for a while, and reports what slows it down: ranks that the others "
            "wait for, data loading, the GIL, communication, by line. The job continues. Writes a flame graph of "
            "all ranks (record.html), and a file for speedscope."
        ),
        epilog="Exit code: 0 with samples, 1 if no rank could be sampled, 2 if RUN names no live run.",
    )
    line.add_argument("run", nargs="?", metavar="RUN", help="run id (r4711), name or pid [the run started here]")
    line.add_argument("--duration", type=_duration, default=10.0, metavar="SECONDS", help="how long to sample [10]")
    line.add_argument("--ranks", type=_ranks, default="", metavar="LIST", help="only these, like 0-3,8 [all]")
    line.add_argument("--compare", metavar="EARLIER", help="an earlier recording, or its folder: what grew, by line")
    line.add_argument("--bundle-dir", metavar="DIR", help="where to write the folder [the run's own bundle directory]")
    line.add_argument("--json", action="store_true", help="print the verdict, the shares and the folder as JSON")
    return line


def _duration(text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration from 1 to {LONGEST_S:g} seconds")
    return seconds


def _ranks(text: str) -> str:
    try:
        ranks_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _earlier(path: str) -> Recording:
    file = working_directory() / path
    file = file / "recording.json" if file.is_dir() else file
    try:
        if file.stat().st_size > LARGEST_RECORDING:
            raise UsageError(f"record: {clean(path)} is too large for a recording.")
        return decode(file.read_bytes())
    except OSError as error:
        raise UsageError(f"record: {clean(str(file))} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"record: {clean(path)} is not a recording: {clean(str(error))}.") from error


def _record(run: Run, duration_s: float, ranks: str) -> ServiceAnswer[Recording]:
    say(f"sampling {run.label} for {duration_s:g} s; the job continues")
    request = ControlRequest("record", ask=msgspec.Raw(msgspec.json.encode(Sampling(duration_s, ranks))))
    return answer_of(run, request, ServiceAnswer[Recording], duration_s + ANSWER_S, "the samples are dropped")


def _report(
    run: Run, recording: Recording, earlier: Recording | None, called: str, place: Path, *, as_json: bool
) -> int:
    # Imported late: the samples are complete by now.
    from safelaunch.addons.record.comparison import compare
    from safelaunch.addons.record.document import document
    from safelaunch.addons.record.files import files_of
    from safelaunch.addons.record.rows import RecordingReport
    from safelaunch.addons.record.screen import screen
    from safelaunch.addons.record.slowness import verdict_of

    slowness = verdict_of(recording)
    compared = compare(earlier, recording) if earlier is not None else None
    recorded = RecordingReport(recording, slowness, compared, called)
    if not slowness.times:
        why = "; ".join(slowness.missing) or "it has no ranks yet"
        raise SafelaunchError(f"record: no rank of {run.id} could be sampled: {clean(why)}.")
    folder = _write(place, recording.name, recording.at_unix_s, files_of(recorded))
    if as_json:
        show_json(msgspec.to_builtins(document(recorded, run.id, str(folder))))
        return 0
    width = max(40, display(2, os.environ).width - len("safelaunch: "))
    say(screen(recorded, width), laid_out=True)
    say("recording (start with record.html):")
    sys.stderr.flush()
    show(str(folder))
    return 0


def _write(directory: Path, run_name: str, at_unix_s: float, files: Mapping[str, str]) -> Path:
    """Writes the folder completely or not at all, readable only by this user. Raises SafelaunchError."""
    from safelaunch.bundle.publication import name_of

    target = directory / name_of(run_name, at_unix_s, "record")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".record-", dir=directory))  # mode 0700
    except OSError as error:
        raise SafelaunchError(f"record: {directory} cannot be written: {error.strerror or error}.") from error
    try:
        for name, text in files.items():
            (staged / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        return _publish(staged, target)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise SafelaunchError(f"record: {target} cannot be written: {error.strerror or error}.") from error


def _publish(staged: Path, target: Path) -> Path:
    """Renames the folder; returns its final path, which differs from ``target`` if another client took that name."""
    for number in range(1, 100):
        name = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            return staged.rename(name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise FileExistsError(errno.EEXIST, "there are too many folders with this name")
