"""Runs ``safelaunch diagnose PATH`` in its own process, and checks for effects that no input must cause."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safelaunch import cli

MOST_MB, MOST_S = 512, 10
_RAW = {chr(code) for code in (*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F))}
_FIX = re.compile("safelaunch:   ")


@dataclass(frozen=True)
class Told:
    """The result of one ``diagnose``: exit code (negative for a signal), output, and files left in TMPDIR.

    ``cpu_s`` is the CPU time: a limit on clock time would depend on the machine's load. ``peak_mb`` excludes the memory
    that the fork inherits, which grows with the number of tests that its process has run.
    """

    code: int
    out: str
    err: str
    peak_mb: float
    cpu_s: float
    left: tuple[str, ...] = ()

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def accuses(self) -> bool:
        return self.code == 0 and self.verdict["confidence"] == "high" and bool(self.verdict["culprits"])

    def wrong(self, codes: tuple[int, ...] = (0, 1, 2)) -> str:
        """Returns a forbidden effect that it had, or an empty string."""
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name}) after {self.cpu_s:.1f} s of CPU"
        if "Traceback" in self.err or self.code not in codes:
            return f"exit code {self.code}: {self.err.strip().splitlines()[-1:]}"
        if self.peak_mb > MOST_MB or self.cpu_s > MOST_S:
            return f"took {self.peak_mb:.0f} MB and {self.cpu_s:.1f} s of CPU"
        if self.left:
            return f"left {self.left}"
        problem, *fix = self.err.splitlines() or [""]
        if self.code == 2 and (not problem or len(fix) > 1 or not all(_FIX.match(line) for line in fix) or self.out):
            return f"not one clear line, with or without its fix: {self.err!r} {self.out[:50]!r}"
        if raw := _RAW & {*self.out, *self.err}:
            return f"control characters reach the terminal: {sorted(raw)!r}"
        try:
            json.loads(self.out or "{}")
        except ValueError as error:
            return f"what it prints is no JSON: {error}"
        return ""


def diagnosed(path: Path, scratch: Path, *words: str) -> Told:
    """Runs it in a fork of this process, limited to another 0.5 GB of memory and a deadline.

    Args:
        words: Options instead of ``--json``.
    """
    out, err = scratch / "out", scratch / "err"
    temporary = scratch / "tmp"
    temporary.mkdir()
    inherited_mb = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)
    child = os.fork()
    if not child:
        _run(["diagnose", str(path), *(words or ("--json",))], out, err, temporary)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    texts = (file.read_bytes().decode("utf-8", "replace") if file.exists() else "" for file in (out, err))
    left = tuple(path.name for path in temporary.iterdir())
    return Told(code, *texts, used.ru_maxrss / 1024 - inherited_mb, used.ru_utime + used.ru_stime, left)


def _run(argv: list[str], out: Path, err: Path, temporary: Path) -> None:
    """Runs in the fork and never returns."""
    try:
        for path, target in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), target)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        tempfile.tempdir = str(temporary)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGESIZE") + (2 * MOST_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.alarm(120)  # a FIFO would block it forever
        code = cli.main(argv)
    except BaseException:  # as the interpreter would
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
