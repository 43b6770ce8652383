"""Asks the interpreter that jobs will use whether it imports torch, runs the beacon, and serves dumps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safelaunch import beacon
from safelaunch.capture import command
from safelaunch.settings.config import INTERNAL_ENV
from safelaunch.system.errors import CaptureError

from .torch_rules import Probe

DEADLINE_S = 60.0
INJECT = Path(beacon.__file__).parent / "inject"

# torch's own interpreter runs this; it need not have safelaunch. The server must never be destroyed, so the process
# exits without cleaning up.
PROGRAM = """
import json, os, shutil, signal, socket, sys, tempfile, time
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

def detailed():
    from torch import distributed
    distributed.set_debug_level(distributed.DebugLevel.DETAIL)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

def outcome(program, limit_s):
    "How a fork that runs the program ends: it may crash, or hang."
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            program()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return "works" if code == 0 else signal.Signals(-code).name if code < 0 else "fails"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

if seen["distributed"]:
    seen["detail"] = outcome(detailed, 15)
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


def ask(python: str, environ: Mapping[str, str], *, deadline_s: float = DEADLINE_S) -> Probe:
    """Runs the program in ``python`` with the beacon on its PYTHONPATH; never raises."""
    own = environ.get("PYTHONPATH")
    entries = [str(Path(entry).absolute()) for entry in own.split(os.pathsep)] if own else []
    path = os.pathsep.join([os.fspath(INJECT), *entries])
    without = [word for name in sorted(INTERNAL_ENV) for word in ("-u", name)]
    argv = ["env", *without, f"PYTHONPATH={path}", str(Path(python).absolute()), "-c", PROGRAM, os.fspath(INJECT)]
    try:
        # With -c, the working directory comes first on the module path, so it must not be one that others may write to.
        output = command.run(argv, deadline_s=deadline_s, cwd=Path("/"))
    except CaptureError as error:
        return Probe(problem=error.message)
    if output.timed_out:
        return Probe(problem=f"import torch did not finish within {deadline_s:g} s")
    return parse(output.stdout, output.stderr, output.returncode)


def parse(stdout: bytes, stderr: str, code: int | None) -> Probe:
    """The document on the program's last line, or the reason for having none."""
    lines = stdout.splitlines()
    try:
        seen: dict[str, Any] = json.loads(lines[-1])
        return Probe(**seen)
    except (IndexError, ValueError, TypeError):
        said = stderr.strip().splitlines()
        return Probe(problem=f"import torch failed: {said[-1][:300] if said else f'exit status {code}'}")
