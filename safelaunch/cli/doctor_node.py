"""Collects the facts that ``doctor_rules`` judges: the node, whether stacks can be read, and the jobs' torch."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safelaunch import beacon
from safelaunch.beacon import layout
from safelaunch.capture import command, ptrace, stacks
from safelaunch.capture.result import within
from safelaunch.cli.doctor_rules import (
    Check,
    Container,
    Disk,
    Rights,
    TorchProbe,
    Trial,
    hostname_check,
    leftover_check,
    port_check,
    run_root_check,
)
from safelaunch.job.paths import RunPaths
from safelaunch.settings.config import INTERNAL_ENV
from safelaunch.supervise.control.discover import find
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import text_of

DISK_DEADLINE_S = 4.0
NAME_DEADLINE_S = 8.0


def disk(path: Path) -> Disk:

    def look() -> Disk:
        existing = path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        disk = os.statvfs(existing)
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return Disk(os.fspath(path), size, free, kind(existing.resolve(), Path("/proc/self/mounts").read_text()))

    try:
        return within(DISK_DEADLINE_S, os.fspath(path), look)
    except (OSError, CaptureError) as error:
        return Disk(os.fspath(path), problem=getattr(error, "strerror", None) or str(error))


def kind(path: Path, mounts: str) -> str:
    best, found = -1, ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), words[2]
    return found


def run_root(root: Path) -> Check:
    """Checks that a run directory can be created below ``root``."""
    problem = ""
    trial = root / f"doctor-{os.getpid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        info = root.lstat()
        if info.st_uid != os.getuid() or info.st_mode & 0o077:
            problem = f"not a private directory of yours (owner {info.st_uid}, mode {info.st_mode & 0o777:o})"
        trial.mkdir(mode=0o700)
        trial.rmdir()
    except OSError as error:
        problem = problem or error.strerror or str(error)
    return run_root_check(disk(root), problem)


def longest_socket(root: Path) -> int:
    """Returns the length in bytes of the longest possible socket path below ``root``.

    Assumes the greatest possible pid, 100 attempts, and tens of thousands of ranks.
    """
    most = text_of("/proc/sys/kernel/pid_max").strip() or "4194304"
    run = RunPaths(root / f"r{most}-99")
    page = layout.page_name(99, 99999, int(most))
    return len(os.fsencode(run.of_page(page, layout.SERVER_SUFFIX)))


def ports() -> Check:
    problem = ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError as error:
        problem = error.strerror or str(error)
    words = text_of("/proc/sys/net/ipv4/ip_local_port_range").split()
    low, high = (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)
    return port_check(problem, low, high)


def host_name() -> Check:
    host = socket.gethostname()
    begin = time.monotonic()
    addresses: list[str] = []
    problem = ""
    try:
        addresses = within(NAME_DEADLINE_S, "the name service", lambda: _addresses(host))
    except CaptureError:
        problem = f"no answer within {NAME_DEADLINE_S:g} s"
    except OSError as error:
        problem = error.strerror or str(error)
    return hostname_check(host, tuple(dict.fromkeys(addresses)), time.monotonic() - begin, problem)


def _addresses(host: str) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def left_behind(places: tuple[Path, ...]) -> Check:
    library = find(places)
    live = [item for item in library if item.alive]
    dead = [os.fspath(item.directory) for item in library if item not in live]
    kept = [os.fspath(bundle) for place in places for bundle in sorted((place / "bundles").glob("*-*Z-*"))]
    return leftover_check(tuple(dead), tuple(kept), len(live))


def has_gpu_devices() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


# --- reading a child's stack like a rank's, and the kernel settings that allow it -------------------------------------


FUNCTION = "a_rank_that_waits"
START_DEADLINE_S = 20.0
NATIVE_DEADLINE_S = 15.0

# Like the beacon, the child names the process whose descendants can trace it (0: none). It exits with stdin.
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
    """Yields the pid of a waiting child that allows process ``tracer`` to trace it. Raises CaptureError on failure."""
    process = subprocess.Popen(
        [str(Path(python).absolute()), "-c", PROGRAM, str(tracer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",  # for -c, which imports first from there
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
            process.kill()
            process.wait()
        process.stdout.close()


def attempt(pid: int, *, native: bool = False) -> Trial:
    """Tries to read a process's stack once. Never raises; a failure is part of the result."""
    result = stacks.dump(
        pid, nonblocking=not native, native=native, deadline_s=NATIVE_DEADLINE_S if native else stacks.DEADLINE_S
    )
    if result.value is None:
        return Trial(result.missing, result.duration_s, result.kind)
    if not any(frame.function == FUNCTION for thread in result.value.threads for frame in thread.frames):
        return Trial("py-spy read a stack, but not the child's", result.duration_s)
    return Trial("", result.duration_s)


def trials(python: str) -> tuple[Trial, Trial, Trial]:
    """Tries to read the stacks of two children: one that allows tracing, as ranks do, and one that doesn't.

    The third result is the attempt to read the C frames of the first child.
    """
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
    try:
        path = stacks.find_py_spy()
        output = command.run([path, "--version"], deadline_s=5.0)
    except CaptureError:
        return "", ""
    match = re.search(rb"\d+\.\d+\.\d+", output.stdout)
    return path, match[0].decode() if match else ""


def python_of(python: str) -> tuple[int, int]:
    """Returns the interpreter's version, taken from its file name, or else the version of this interpreter."""
    match = re.fullmatch(r"python(\d+)\.(\d+)\w?", Path(python).resolve().name)
    return (int(match[1]), int(match[2])) if match else sys.version_info[:2]


def rights(environ: Mapping[str, str]) -> Rights:
    facts = ptrace.tracing_facts(os.getpid())
    seccomp = re.search(r"^Seccomp:\s*(\d)", text_of("/proc/self/status"), re.MULTILINE)
    return Rights(
        yama=facts.yama,
        capable=facts.capable,
        seccomp=int(seccomp[1]) if seccomp else 0,
        place=place(environ, facts.container),
        root=os.geteuid() == 0,
    )


def place(environ: Mapping[str, str], container: bool) -> Container:
    """Returns the kind of container that this process runs in, because fixes depend on it."""
    if "KUBERNETES_SERVICE_HOST" in environ or Path("/var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if container else "host"


_ID = re.compile(r"containers/([0-9a-f]{12})[0-9a-f]{52}/(?:userdata/)?(?:hostname|hosts|resolv\.conf) /etc/")


def container(place: Container, mounts: str) -> str:
    """Returns the name of this container for commands outside it: an id found in ``mounts``, else the host name.

    The id comes first, because a container that uses its host's network has the host's name.

    Args:
        mounts: Content of ``/proc/self/mountinfo``.
    """
    match = _ID.search(mounts) if place != "kubernetes" else None
    return match[1] if match else socket.gethostname()


# --- the interpreter of the jobs: whether it imports torch, runs the beacon, and serves dumps -------------------------


TORCH_DEADLINE_S = 60.0
INJECT = Path(beacon.__file__).parent / "inject"

# Runs in torch's interpreter, which might lack safelaunch. The server must never be destroyed, so the process exits
# without cleaning up.
TORCH_PROGRAM = """
import json, os, shutil, socket, sys, tempfile, time
inject = sys.argv[1]
custom = getattr(sys.modules.get("sitecustomize"), "__file__", None) or ""
seen = {
    "python": sys.version.split()[0],
    "isolated": bool(sys.flags.ignore_environment),
    "beacon": bool(custom) and inject not in sys.path,
    "chained": "" if custom.startswith(inject) else custom,
}
begin = time.monotonic()
import torch
seen["import_s"] = time.monotonic() - begin
seen["cuda"] = torch.version.cuda or torch.version.hip or ""
try:
    from torch._C import _distributed_c10d as c10d
except ImportError:
    c10d = None
seen["distributed"] = c10d is not None and hasattr(c10d, "ProcessGroup")
seen["server"], seen["register"], seen["dump"] = (
    hasattr(c10d, name) for name in ("_WorkerServer", "_register_handler", "_dump_fr_trace")
)

def status(path, handler):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(path)
        head = f"POST /handler/{handler} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 0\\r\\nConnection: close"
        connection.sendall(head.encode() + b"\\r\\n\\r\\n")
        return int(connection.recv(4096).split()[1])

if seen["server"]:
    scratch = tempfile.mkdtemp(prefix="sl-", dir="/tmp")
    server = c10d._WorkerServer(scratch + "/s")
    seen["handlers"] = {}
    for handler in ("ping", "fr_trace_json", "dump_nccl_trace_json"):
        try:
            seen["handlers"][handler] = status(scratch + "/s", handler)
        except (OSError, IndexError, ValueError):
            seen["handlers"][handler] = 0
    shutil.rmtree(scratch)
print(json.dumps(seen), flush=True)
os._exit(0)
"""


def ask(python: str, environ: Mapping[str, str], *, deadline_s: float = TORCH_DEADLINE_S) -> TorchProbe:
    """Runs TORCH_PROGRAM in ``python`` with the beacon on its PYTHONPATH. Never raises."""
    own = environ.get("PYTHONPATH")
    entries = [str(Path(entry).absolute()) for entry in own.split(os.pathsep)] if own else []
    path = os.pathsep.join([os.fspath(INJECT), *entries])
    without = [word for name in sorted(INTERNAL_ENV) for word in ("-u", name)]
    argv = ["env", *without, f"PYTHONPATH={path}", str(Path(python).absolute()), "-c", TORCH_PROGRAM, os.fspath(INJECT)]
    try:
        # With -c, modules come first from the working directory, so it must not be writable by others.
        output = command.run(argv, deadline_s=deadline_s, cwd=Path("/"))
    except CaptureError as error:
        return TorchProbe(problem=error.message)
    if output.timed_out:
        return TorchProbe(problem=f"import torch did not finish within {deadline_s:g} s")
    return parse(output.stdout, output.stderr, output.returncode)


def parse(stdout: bytes, stderr: str, code: int | None) -> TorchProbe:
    """Parses the document on the last line of output; if there is none, the result says why."""
    lines = stdout.splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1])
        return TorchProbe(**report)
    except (IndexError, ValueError, TypeError):
        lines_of_stderr = stderr.strip().splitlines()
        return TorchProbe(
            problem=f"import torch failed: {lines_of_stderr[-1][:300] if lines_of_stderr else f'exit status {code}'}"
        )
