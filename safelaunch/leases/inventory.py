"""Lists the node's GPUs, their memory, processes and MIG instances, using NVML.

A broken driver blocks its callers forever, so a separate process queries it: ``python -m safelaunch.leases.inventory``
prints a JSON document. Without a driver, that process isn't started.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelaunch.leases.choose import GpuUser, Inventory, LeasableGpu
from safelaunch.system import procstat
from safelaunch.system.nvml import ask, processes, text

LIBRARY = "libnvidia-ml.so.1"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def has_driver(environ: Mapping[str, str]) -> bool:
    """Returns whether the driver's files exist, or its library is in LD_LIBRARY_PATH."""
    if any(os.path.exists(path) for path in _SIGNS):
        return True
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(folder and os.path.exists(os.path.join(folder, LIBRARY)) for folder in folders)


DEADLINE_S = 10.0
GRACE_S = 0.5
LONGEST_S = 60.0
LOOK_EVERY_S = 0.1
MOST_COUNTED_S = 1.0  # per look, because this process might have been stopped
ASKING = b"asking\n"
if TYPE_CHECKING:
    import subprocess

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_MOST_INSTANCES = 64


def inventory(environ: Mapping[str, str], *, deadline_s: float = DEADLINE_S) -> Inventory:
    """Queries NVML, waiting up to ``deadline_s``. Never raises; a failure is described in the result."""
    question = Asking(environ, deadline_s=deadline_s)
    while (answer := question.answer(LOOK_EVERY_S)) is None:
        pass
    return answer


class Asking:
    """Query to NVML in a separate process. Call ``answer`` until it returns a result; the first call starts it.

    The driver's time limit starts when the process prints ``ASKING``, and excludes time in which the process itself
    runs, because an interpreter takes seconds to start while many jobs start. ``LONGEST_S`` limits the total.
    """

    def __init__(self, environ: Mapping[str, str], *, deadline_s: float = DEADLINE_S) -> None:
        self._environ = environ
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, wait_s: float = 0.0) -> Inventory | None:
        """Returns NVML's answer, or an inventory that says why it failed; None if NVML needs longer than ``wait_s``."""
        if self._process is None:
            if not has_driver(self._environ):
                return Inventory(missing="no NVIDIA driver on this node")
            try:
                self._process = _ask_elsewhere(self._environ)
            except OSError as error:
                return Inventory(missing=f"NVML could not be asked: {error.strerror or error}")
            self._data = b""
            self._began_s = self._looked_s = time.monotonic()
            self._silent_s = 0.0
        found = self._look(self._process, wait_s)
        if found is not None:
            self.drop()
        return found

    def drop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _look(self, process: subprocess.Popen[bytes], wait_s: float) -> Inventory | None:
        assert process.stdout is not None
        output = process.stdout.fileno()
        while select.select([output], [], [], wait_s)[0]:
            chunk = os.read(output, 65536)
            if not chunk:
                return _read(self._data.removeprefix(ASKING))
            self._data += chunk
        now = time.monotonic()
        stat = procstat.read(process.pid)
        if self._data.startswith(ASKING) and (stat is None or stat.state != "R"):
            self._silent_s += min(now - self._looked_s, MOST_COUNTED_S)
        self._looked_s = now
        if self._silent_s < self._deadline_s and now - self._began_s < max(LONGEST_S, self._deadline_s):
            return None
        silent = f"the NVIDIA driver did not answer within {self._deadline_s:g} s"
        return Inventory(missing=silent, trouble="silent")


def _ask_elsewhere(environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-m", "safelaunch.leases.inventory"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=_PACKAGE_ROOT,  # with -m, modules come first from here, not from the user's directory
        env=dict(environ),
    )


def _read(answer: bytes) -> Inventory:
    try:
        return parse(json.loads(answer))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        garbled = f"NVML gave no usable answer ({type(error).__name__}: {error})"
        return Inventory(missing=garbled, trouble="garbled")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, and waits only briefly, because it can't die while it is stuck in the driver."""
    import subprocess

    if process.stdout is not None:
        process.stdout.close()
    process.kill()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -9  # not waited for


def parse(document: Mapping[str, Any]) -> Inventory:
    """Converts the document from ``query``. Replaces a GPU in MIG mode by its instances."""
    gpus: list[LeasableGpu] = []
    for device in document.get("gpus", ()):
        instances = device.get("instances")
        if instances is None:
            gpus.append(_record(device, str(device["index"])))
            continue
        for instance in instances:
            gpus.append(_record(instance, f"{device['index']}.{instance['index']}", parent=str(device["uuid"])))
    missing = "" if gpus else str(document.get("missing") or "no NVIDIA GPU found")
    return Inventory(tuple(gpus), missing)


def _record(device: Mapping[str, Any], label: str, parent: str = "") -> LeasableGpu:
    return LeasableGpu(
        label=label,
        uuid=str(device.get("uuid") or f"unknown-{label}"),
        name=str(device.get("name") or ""),
        parent=parent,
        memory_used_bytes=device.get("memory_used_bytes"),
        memory_total_bytes=device.get("memory_total_bytes"),
        processes=tuple(GpuUser(int(p["pid"]), p.get("memory_bytes")) for p in device.get("processes") or ()),
        error=str(device.get("error") or ""),
    )


# --- in the separate process ------------------------------------------------------------------------------------------


def query(nvml: Any) -> dict[str, Any]:
    """Returns the GPUs reported by the module ``pynvml``, or ``{"missing": reason}``.

    Each item of ``gpus`` has index, uuid, name, memory_used_bytes, memory_total_bytes, processes (pid, memory_bytes)
    and, in MIG mode, instances with the same fields. For a GPU that can't be queried, it has only index and error.
    """
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return {"missing": f"NVML: {error}"}
    return {"gpus": [_gpu(nvml, index) for index in range(count)]}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        device = {"index": index, **_device(nvml, handle)}
    except nvml.NVMLError as error:  # fallen off the bus, or hidden
        return {"index": index, "error": str(error)}
    mode = ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mode:
        device["instances"] = _instances(nvml, handle, device)
    return device


def _device(nvml: Any, handle: Any) -> dict[str, Any]:
    """Returns a GPU's fields. Raises NVMLError if the GPU has no UUID, which a lease needs."""
    uuid = text(nvml.nvmlDeviceGetUUID(handle))
    memory = _memory(nvml, handle)
    return {
        "uuid": uuid,
        "name": ask(nvml, lambda: text(nvml.nvmlDeviceGetName(handle))),
        "memory_used_bytes": memory.used if memory else None,
        "memory_total_bytes": memory.total if memory else None,
        "processes": processes(nvml, handle),
    }


def _memory(nvml: Any, handle: Any) -> Any:
    # Version 2 excludes the driver's hundreds of MiB from ``used``.
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=version)) if version else None
    return memory or ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))


def _instances(nvml: Any, handle: Any, parent: Mapping[str, Any]) -> list[dict[str, Any]]:
    most = ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    instances = []
    for index in range(min(most, _MOST_INSTANCES)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            record = {"index": index, **_device(nvml, instance)}
        except nvml.NVMLError:
            continue  # numbers can have gaps
        instances.append({**record, "name": record["name"] or parent.get("name")})
    return instances


def _main() -> int:
    import warnings

    warnings.simplefilter("ignore")
    try:
        import pynvml
    except ImportError:
        document: dict[str, Any] = {"missing": "the Python package nvidia-ml-py is not installed"}
    else:
        os.write(1, ASKING)
        document = query(pynvml)
    print(json.dumps(document), flush=True)
    os._exit(0)  # nvmlShutdown and the library's exit handlers can hang


if __name__ == "__main__":
    raise SystemExit(_main())
