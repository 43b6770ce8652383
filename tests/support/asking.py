"""Commands that ask about a running job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.jobs import Job


def asked(job: Job, *words: str, patience_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs ``safelaunch WORDS`` as the job's user, with its XDG_RUNTIME_DIR."""
    with asking(job, *words) as process:
        out, err = process.communicate(timeout=patience_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def asking(job: Job, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The same, while it runs; it is ended with the block."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SAFELAUNCH_")}
    with subprocess.Popen(
        [sys.executable, "-m", "safelaunch", *words],
        env={**environ, "XDG_RUNTIME_DIR": os.fspath(job.runtime)},
        cwd=job.scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def status(job: Job) -> dict[str, Any] | None:
    """The job as ``status --json`` tells it; None while it is not there."""
    done = asked(job, "status", "--json")
    assert done.returncode == 0, done.stderr
    return next((run for run in json.loads(done.stdout) if run["supervisor_pid"] == job.process.pid), None)
