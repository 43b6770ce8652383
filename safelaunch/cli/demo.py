"""``safelaunch demo [NAME]``: a bundled script that hangs, under the watchdog; checks its verdict."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.staging import check_directory
from safelaunch.cli import program
from safelaunch.cli.parsing import Parser
from safelaunch.job import process
from safelaunch.job.job import Forwarder
from safelaunch.model import Verdict
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.console import PREFIX, say
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import UsageError
from safelaunch.system.task import Task


@dataclass(frozen=True, slots=True)
class Demo:
    """A bundled script and the verdict that it must get. ``process``: how the culprit's process name begins."""

    name: str
    ranks: int
    cause: str
    culprit: int
    function: str
    process: str
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
FOLLOW_S = 0.5
PATIENCE_S = 12.0  # after Ctrl-C: torchrun waits half a minute for ranks that hang, and nobody needs these
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Runs one demo; returns 0 if its verdict is the expected one, 1 if not, 2 for an error in the options."""
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
    """The command line of ``safelaunch demo``."""
    found = Parser(
        "demo",
        description="Runs a small script that hangs, under the watchdog, and checks the verdict. Needs no GPU.",
        epilog="demos:\n" + "\n".join(f"  {demo.name:<12}{demo.about}" for demo in DEMOS.values()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    found.add_argument("name", nargs="?", default="collective", metavar="NAME", help="the demo to run [collective]")
    found.add_argument("--bundle-dir", default="safelaunch-bundles", metavar="DIR", help="where the bundle goes")
    found.add_argument("--preset", action="append", default=[], metavar="NAME|FILE", help="run it under a preset")
    return found


def _run(demo: Demo, bundle_dir: str, presets: list[str]) -> int:
    script = Path(__file__).parent / "demos" / f"{demo.name}.py"
    command = [*program(), f"--stall-timeout={STALL_TIMEOUT_S}", f"--bundle-dir={bundle_dir}"]
    command += [f"--run-name=demo-{demo.name}", "--gpus=none"]
    command += [word for preset in presets for word in ("--preset", preset)]
    command += [f"--nproc-per-node={demo.ranks}", os.fspath(script)]
    say(f"demo {demo.name}: {demo.about}")
    say(f"running {script} on {demo.ranks} ranks; it hangs after a few steps")
    begin = time.monotonic()
    run = _run_to_its_end(command)
    if run.stopped:
        say(f"the demo was stopped after {time.monotonic() - begin:.0f} s")
        return INTERRUPTED
    return _judge(demo, run.code, run.bundle, time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class _Run:
    """How the run has ended. ``stopped``: somebody asked it to."""

    code: int
    bundle: Path | None
    stopped: bool


def _run_to_its_end(command: list[str]) -> _Run:
    """Runs it and shows its stderr; passes signals on. Once it is asked to stop, only safelaunch has a say."""
    mask = process.block_signals()
    ours, theirs = _channel()

    def become() -> None:
        os.setpgid(0, 0)  # so that a key reaches it through us, after we know
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    child = subprocess.Popen(command, env=environ, stderr=theirs, preexec_fn=become)
    os.close(theirs)
    forwarder = Forwarder(child.pid, on_quit=lambda: say("a run outside the demo writes a bundle here and continues"))
    following = Task("demo", lambda: _follow(_lines(ours), lambda: forwarder.stop_requested))
    stop_s = 0.0
    while child.poll() is None:
        forwarder.wait(FOLLOW_S)
        if forwarder.stop_requested and not stop_s:
            stop_s = time.monotonic()
            say("stopping the demo; Ctrl-C again stops it at once")
        elif forwarder.stops == 1 and time.monotonic() - stop_s > PATIENCE_S:
            forwarder.take(signal.SIGINT, by_terminal=True)
    bundle = following.joined()
    return _Run(child.returncode, bundle, forwarder.stop_requested)


def _channel() -> tuple[int, int]:
    """Our end and the run's for its stderr: a terminal like ours where ours is one. A demo looks as a run does."""
    try:
        size = os.get_terminal_size(2)
    except OSError:
        return os.pipe()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # our own terminal does that
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    return ours, theirs


def _lines(descriptor: int) -> Iterator[bytes]:
    """Lines from the descriptor as they arrive; closes it at its end, which a terminal tells by an error."""
    with open(descriptor, "rb", buffering=0) as file:
        rest = b""
        while True:
            try:
                data = file.read(65536)
            except OSError:
                data = b""
            if not data:
                break
            *whole, rest = (rest + data).splitlines(keepends=True)
            if rest.endswith(b"\n"):
                whole, rest = [*whole, rest], b""
            yield from whole
        if rest:
            yield rest


def _follow(lines: Iterable[bytes], stopped: Callable[[], bool]) -> Path | None:
    """Shows the run's stderr as it arrives; returns the bundle that its last lines name."""
    bundle = None
    for line in lines:
        if stopped() and not line.startswith(PREFIX.encode()):
            continue
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        for word in line.decode("utf-8", "replace").split():
            if "/" in word and (Path(word) / "verdict.json").is_file():
                bundle = Path(word)
    return bundle


def _judge(demo: Demo, code: int, bundle: Path | None, seconds: float) -> int:
    """Compares the verdict with the expected one; returns the exit code."""
    if bundle is None:
        say(f"FAILED: no bundle was written (exit code {code} after {seconds:.0f} s)")
        return 1
    verdict = from_json((bundle / "verdict.json").read_bytes(), Verdict)
    first = verdict.culprits[0] if verdict.culprits else None
    function = first.frame.function.rpartition(".")[2] if first is not None and first.frame is not None else ""
    found = (verdict.cause, [culprit.rank for culprit in verdict.culprits], function, code)
    expected = (demo.cause, [demo.culprit], demo.function, 124)
    if found != expected or first is None or not first.process.startswith(demo.process):
        say(f"FAILED: expected {expected}, the verdict is {found}")
        return 1
    say(f"the verdict is right, {seconds:.0f} s after the start; exit code {code}, as in a real run")
    say("next, your own script: put safelaunch where you would put torchrun")
    return 0
