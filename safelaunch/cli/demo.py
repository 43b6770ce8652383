"""``safelaunch demo [NAME]``: runs a bundled script that hangs, and checks the verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from safelaunch.bundle.publication import check_directory
from safelaunch.cli import program
from safelaunch.cli.parsing import Parser
from safelaunch.model import Verdict
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.console import say
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import UsageError


@dataclass(frozen=True, slots=True)
class Demo:
    name: str
    ranks: int
    cause: str
    culprit: int
    function: str
    process: str  # start of the culprit's name
    about: str


DEMOS = {
    demo.name: demo
    for demo in (
        Demo("collective", 3, "collective-mismatch", 0, "log_metric", "main", "only rank 0 calls a collective"),
        Demo("dataloader", 2, "data-loading", 1, "__getitem__", "dataloader worker", "a DataLoader worker is stuck"),
        Demo("lock", 2, "lock-deadlock", 1, "enqueue", "main", "two threads take two locks in opposite orders"),
    )
}
STALL_TIMEOUT_S = "3"
INTERRUPTED = 130
NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"  # a warning of torch's in each rank


def main(argv: list[str]) -> int:
    """Runs a demo; returns 0 if the verdict is as expected, 1 if it isn't, 2 for wrong options."""
    words = parser().parse_args(argv)
    demo = DEMOS.get(words.name)
    if demo is None:
        near = did_you_mean(words.name, DEMOS)
        raise UsageError(f"unknown demo {words.name!r}{near or '.'}", f"The demos are: {', '.join(DEMOS)}.")
    problem = check_directory(Path(words.bundle_dir).absolute())
    if problem:
        raise UsageError(
            f"--bundle-dir {words.bundle_dir} cannot hold bundles: {problem}.",
            "Name a directory that you can write to.",
        )
    return _run(demo, words.bundle_dir, words.preset)


def parser() -> Parser:
    command_line = Parser(
        "demo",
        description="Runs a small script that hangs, under the watchdog, and checks the verdict. Needs no GPU.",
        epilog="demos:\n" + "\n".join(f"  {demo.name:<12}{demo.about}" for demo in DEMOS.values()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    command_line.add_argument(
        "name", nargs="?", default="collective", metavar="NAME", help="the demo to run [collective]"
    )
    command_line.add_argument("--bundle-dir", default="safelaunch-bundles", metavar="DIR", help="where the bundle goes")
    command_line.add_argument(
        "--preset", action="append", default=[], metavar="NAME|FILE", help="run it under a preset"
    )
    return command_line


def _run(demo: Demo, bundle_dir: str, presets: list[str]) -> int:
    script = Path(__file__).parent / "demos" / f"{demo.name}.py"
    command = [*program(), f"--stall-timeout={STALL_TIMEOUT_S}", f"--bundle-dir={bundle_dir}"]
    command += [f"--run-name=demo-{demo.name}", "--gpus=none"]
    command += [word for preset in presets for word in ("--preset", preset)]
    command += [f"--nproc-per-node={demo.ranks}", os.fspath(script)]
    say(f"demo {demo.name}: {demo.about}")
    say(f"running {script} on {demo.ranks} ranks; it hangs after a few steps")
    begin, before = time.monotonic(), _bundles(demo, bundle_dir)
    code, stopped = _run_to_its_end(command)
    if stopped:
        say(f"the demo was stopped after {time.monotonic() - begin:.0f} s")
        return INTERRUPTED
    new = sorted(_bundles(demo, bundle_dir) - before)
    return _judge(demo, code, new[-1] if new else None, time.monotonic() - begin)


def _bundles(demo: Demo, bundle_dir: str) -> set[Path]:
    return {path.parent for path in Path(bundle_dir).glob(f"demo-{demo.name}-*/verdict.json")}


def _run_to_its_end(command: list[str]) -> tuple[int, bool]:
    """Runs the command; returns its exit code, and whether the user stopped it.

    SIGINT isn't forwarded: Ctrl-C in the terminal reaches the child, too.
    """
    child = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": NO_NUMPY, **os.environ})
    stops: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stops.append(signum)
        if signum != signal.SIGINT:
            child.send_signal(signum)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGQUIT, lambda *_: None)  # after Ctrl-\ the run continues
    return child.wait(), bool(stops)


def _judge(demo: Demo, code: int, bundle: Path | None, seconds: float) -> int:
    """Compares the verdict with the expected one and prints the result; returns the exit code."""
    if bundle is None:
        say(f"FAILED: no bundle was written (exit code {code} after {seconds:.0f} s)")
        return 1
    verdict = from_json((bundle / "verdict.json").read_bytes(), Verdict)
    first = verdict.culprits[0] if verdict.culprits else None
    function = first.frame.function.rpartition(".")[2] if first is not None and first.frame is not None else ""
    result = (verdict.cause, [culprit.rank for culprit in verdict.culprits], function, code)
    expected = (demo.cause, [demo.culprit], demo.function, 124)
    if result != expected or first is None or not first.process.startswith(demo.process):
        say(f"FAILED: expected {expected}, the verdict is {result}")
        return 1
    say(f"the verdict is right, {seconds:.0f} s after the start; exit code {code}, as in a real run")
    say("next, your own script: put safelaunch where you would put torchrun")
    return 0
