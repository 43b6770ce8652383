"""Reads the stack of a child as it would read a rank's, and looks up the kernel settings that allow it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safelaunch.capture import command, stacks
from safelaunch.capture import tracing as kernel
from safelaunch.capture.result import within
from safelaunch.system.errors import CaptureError

from .tracing import Place, Rights, Trial

FUNCTION = "a_rank_that_waits"
START_DEADLINE_S = 20.0
NATIVE_DEADLINE_S = 15.0

# Like the beacon, the child names the process whose descendants may trace it (0: none). It exits when its stdin closes.
PROGRAM = f"""
import ctypes, sys
tracer = int(sys.argv[1])
if tracer:
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(tracer), 0, 0, 0)
def {FUNCTION}():
    print("ready", flush=True)
    sys.stdin.read()
{FUNCTION}()
"""


@contextmanager
def child(python: str, tracer: int) -> Iterator[int]:
    """Starts a process that waits, and gives its pid. Raises CaptureError if it does not start."""
    process = subprocess.Popen(
        [str(Path(python).absolute()), "-c", PROGRAM, str(tracer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",  # with -c the working directory comes first on the module path
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if within(START_DEADLINE_S, python, process.stdout.readline) != b"ready\n":
            raise CaptureError(f"{python} does not start")
        yield process.pid
    finally:
        process.stdin.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()  # the child may never have reached its wait
            process.wait()
        process.stdout.close()


def attempt(pid: int, *, native: bool = False) -> Trial:
    """Reads the child's stack once; never raises."""
    result = stacks.dump(
        pid, nonblocking=not native, native=native, deadline_s=NATIVE_DEADLINE_S if native else stacks.DEADLINE_S
    )
    if result.value is None:
        return Trial(result.missing, result.duration_s, result.kind)
    if not any(frame.function == FUNCTION for thread in result.value.threads for frame in thread.frames):
        return Trial("py-spy read a stack, but not the child's", result.duration_s)
    return Trial("", result.duration_s)


def trials(python: str) -> tuple[Trial, Trial, Trial]:
    """Three trials: a child that allows tracing as a rank does, one that doesn't, and C frames of the first."""
    try:
        with child(python, os.getpid()) as pid:
            like_a_rank = attempt(pid)
            native = attempt(pid, native=True) if not like_a_rank.problem else like_a_rank
        with child(python, 0) as pid:
            return like_a_rank, attempt(pid), native
    except (CaptureError, OSError) as error:
        nothing = Trial(f"no child process to try it on: {error}")
        return nothing, nothing, nothing


def py_spy() -> tuple[str, str]:
    """py-spy's path and version; both empty if it is not installed."""
    try:
        path = stacks.find_py_spy()
        output = command.run([path, "--version"], deadline_s=5.0)
    except CaptureError:
        return "", ""
    found = re.search(rb"\d+\.\d+\.\d+", output.stdout)
    return path, found[0].decode() if found else ""


def python_of(python: str) -> tuple[int, int]:
    """The interpreter's version, from the name of its real file; else this interpreter's version."""
    found = re.fullmatch(r"python(\d+)\.(\d+)\w?", Path(python).resolve().name)
    return (int(found[1]), int(found[2])) if found else sys.version_info[:2]


def rights(environ: Mapping[str, str]) -> Rights:
    """The kernel's settings for this process."""
    facts = kernel.look(os.getpid())
    seccomp = re.search(r"^Seccomp:\s*(\d)", _text("/proc/self/status"), re.MULTILINE)
    return Rights(
        yama=facts.yama,
        capable=facts.capable,
        seccomp=int(seccomp[1]) if seccomp else 0,
        place=place(environ, facts.container),
        root=os.geteuid() == 0,
    )


def place(environ: Mapping[str, str], container: bool) -> Place:
    """The kind of container: each needs a different fix."""
    if "KUBERNETES_SERVICE_HOST" in environ or Path("/var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if container else "host"


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
