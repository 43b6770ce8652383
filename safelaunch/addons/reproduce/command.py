"""Implements ``safelaunch reproduce PATH``: writes a script that hangs as the job did, from recorded calls."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

from safelaunch.addons.reproduce import Extent, Reproduction, ScriptOptions, compare_run, reproduction_of
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.cli import program
from safelaunch.cli.parsing import Parser
from safelaunch.job.paths import working_directory
from safelaunch.system.console import redact, say, show
from safelaunch.system.errors import SafelaunchError, UsageError
from safelaunch.system.printable import clean

WRITTEN, DIFFERS = 0, 1
_MOST_RANKS = 16  # of a script that is run here
_TRIES = 2  # on a busy machine, a rank might not deliver its record in time
_PATIENCE_S = 240


def main(argv: list[str]) -> int:
    """Writes the script and runs it.

    Returns 0; 1 if nothing in PATH can be replayed, or if the script doesn't hang as the job did; 2 if PATH contains no
    evidence.
    """
    words = parser().parse_args(argv)
    options = ScriptOptions(
        Extent(words.all, words.last), fewest=words.ranks, shrink=words.shrink, name=_name(words.output)
    )
    reproduction = _from(words.path, options)
    if not reproduction.replays:
        raise SafelaunchError(
            f"reproduce: {clean(words.path)} contains no torch.distributed calls that can be replayed."
        )
    if words.output is None:
        show(reproduction.text.removesuffix("\n"))
        return WRITTEN
    _write(working_directory() / words.output, reproduction.text)
    for note in reproduction.notes:
        say(clean(note))
    say(f"wrote {clean(words.output)}; run it with: {reproduction.command}")
    return _tried(reproduction, working_directory() / words.output)


def parser() -> Parser:
    made = Parser(
        "reproduce",
        description=(
            "Writes a small script, torch only, that makes the recorded calls of a hung job: the same groups, "
            "operations, sizes and types, in the same order on each rank. On a CPU with gloo it hangs in the same "
            "way. Its header lists what could not be replayed. PATH is read as diagnose reads it. With --output, "
            "reproduce runs the script, and compares that hang with the recorded one."
        ),
        epilog="Exit code: 0 with a script, 1 if there is nothing to replay or the script does not hang in the same "
        "way, 2 if PATH holds no evidence.",
    )
    made.add_argument("path", metavar="PATH", help="a bundle, its .tar.gz, or a folder of Flight Recorder dumps")
    made.add_argument("-o", "--output", metavar="FILE", help="where to write the script [standard output]")
    extent = made.add_mutually_exclusive_group()
    last = "make the last N calls of each rank [from a few rounds before they diverge]"
    extent.add_argument("--last", type=_count, metavar="N", help=last)
    extent.add_argument("--all", action="store_true", help="make all recorded calls")
    made.add_argument("--ranks", action="store_true", help="with the fewest ranks that lead to the same verdict")
    made.add_argument("--shrink", action="store_true", help="with small tensors; sizes that differ stay different")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls")
    return int(text)


def _name(output: str | None) -> str:
    return Path(output).name if output is not None else "repro.py"


def _from(called: str, options: ScriptOptions) -> Reproduction:
    # Imported before the fork; the child would import them again.
    from safelaunch.capture.user_source import text_for_stranger
    from safelaunch.cli.diagnose import read_in_child

    def work(evidence: EvidenceSource) -> Reproduction:
        return reproduction_of(evidence.evidence, options, text_for_stranger)

    return read_in_child([working_directory() / called], called, "reproduce", work)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(redact(text))
    except OSError as error:
        raise UsageError(f"reproduce: {clean(str(path))} cannot be written: {error.strerror}.") from error


def _tried(made: Reproduction, script: Path) -> int:
    if importlib.util.find_spec("torch") is None:
        say("not run: torch is not installed here")
        return WRITTEN
    if made.world_size > _MOST_RANKS:
        say(f"not run: {made.world_size} ranks are too many for one machine; --ranks reduces them")
        return WRITTEN
    say("running it, to compare...")
    for _ in range(_TRIES):
        otherwise = run(made, script)
        if not otherwise:
            crashes = made.hang.outcome == "crash"
            how = "crashes, with" if crashes else "hangs in the same way: the same ranks in the same calls, and"
            say(f"it {how} the same ranks at fault")
            return WRITTEN
    say(f"the script does NOT hang in the same way: {clean('; '.join(otherwise))}")
    return DIFFERS


def run(made: Reproduction, script: Path) -> list[str]:
    from safelaunch.bundle.reading import locate
    from safelaunch.capture import user_source

    with tempfile.TemporaryDirectory(prefix="safelaunch-") as scratch:
        command = [*program(), "--stall-timeout=3", "--startup-timeout=4", f"--bundle-dir={scratch}/bundles"]
        # A rank that spins never counts as still.
        command += ["--gpus=none", f"--max-stall={6 if 'busy-loop' in made.text else 60}"]
        command += [f"--nproc-per-node={made.world_size}", os.fspath(script)]
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("SAFELAUNCH_", "PET_"))}
        try:
            done = subprocess.run(
                command, cwd=scratch, env={**environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=_PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [f"it was still running after {_PATIENCE_S} s"]
        latest = Path(scratch, "bundles", "latest")
        if not latest.exists():
            return [f"it ended with exit code {done.returncode}, without a bundle"]
        return compare_run(made.hang, locate.read(latest).evidence, user_source.text)[0]
