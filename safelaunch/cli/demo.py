"""``safelaunch demo [NAME]``: a bundled script that hangs, under the watchdog; checks its verdict."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from safelaunch.bundle.publishing import check_directory
from safelaunch.console import say
from safelaunch.errors import UsageError
from safelaunch.model import Verdict


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


def main(argv: list[str]) -> int:
    """Runs one demo; 0 when its verdict is the expected one, 1 when not, 2 for an error in the options."""
    parser = argparse.ArgumentParser(
        prog="safelaunch demo",
        description="Runs a small training script that hangs, and shows what safelaunch makes of it. Needs no GPU.",
        epilog="demos:\n" + "\n".join(f"  {demo.name:<12}{demo.about}" for demo in DEMOS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="collective", metavar="NAME", help="which one [collective]")
    parser.add_argument("--bundle-dir", default="safelaunch-bundles", metavar="DIR", help="where the bundle goes")
    parser.add_argument("--preset", action="append", default=[], metavar="NAME|FILE", help="a preset to run it under")
    words = parser.parse_args(argv)
    demo = DEMOS.get(words.name)
    if demo is None:
        raise UsageError(f"there is no demo {words.name!r}.", f"There are: {', '.join(DEMOS)}.")
    problem = check_directory(Path(words.bundle_dir).absolute())
    if problem:
        raise UsageError(f"--bundle-dir {words.bundle_dir}: {problem}.", "Name a directory that you can write.")
    return _run(demo, words.bundle_dir, words.preset)


def _run(demo: Demo, bundle_dir: str, presets: list[str]) -> int:
    script = Path(__file__).parents[1] / "demos" / f"{demo.name}.py"
    command = [sys.executable, "-m", "safelaunch", f"--stall-timeout={STALL_TIMEOUT_S}", f"--bundle-dir={bundle_dir}"]
    command += [f"--run-name=demo-{demo.name}", "--gpus=none"]
    command += [word for preset in presets for word in ("--preset", preset)]
    command += [f"--nproc-per-node={demo.ranks}", os.fspath(script)]
    say(f"demo {demo.name}: {demo.about}")
    say(f"running {script} on {demo.ranks} ranks; it will hang after a few steps")
    begin = time.monotonic()
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ}, stderr=subprocess.PIPE)
    bundle = _follow(process)
    code = process.wait()
    return _judge(demo, code, bundle, time.monotonic() - begin)


def _follow(process: subprocess.Popen[bytes]) -> Path | None:
    """Shows the run's stderr as it comes; returns the bundle that its last lines name."""
    assert process.stderr is not None
    bundle = None
    for line in process.stderr:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        for word in line.decode("utf-8", "replace").split():
            path = Path(word)
            if path.is_absolute() and (path / "verdict.json").is_file():
                bundle = path
    return bundle


def _judge(demo: Demo, code: int, bundle: Path | None, seconds: float) -> int:
    """Compares the verdict with what this demo must get."""
    if bundle is None:
        say(f"FAILED: no bundle was written (exit code {code} after {seconds:.0f} s)")
        return 1
    verdict = msgspec.json.decode((bundle / "verdict.json").read_bytes(), type=Verdict)
    first = verdict.culprits[0] if verdict.culprits else None
    function = first.frame.function.rpartition(".")[2] if first is not None and first.frame is not None else ""
    found = (verdict.cause, [culprit.rank for culprit in verdict.culprits], function, code)
    expected = (demo.cause, [demo.culprit], demo.function, 124)
    if found != expected or first is None or not first.process.startswith(demo.process):
        say(f"FAILED: expected {expected}, the verdict is {found}")
        return 1
    say(f"the verdict is the right one, {seconds:.0f} s after the start; exit code {code} as in a real run")
    return 0
