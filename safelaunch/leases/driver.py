"""Whether the node has an NVIDIA driver. Every start asks, so the answer costs only a few file system lookups."""

from __future__ import annotations

import os
from collections.abc import Mapping

LIBRARY = "libnvidia-ml.so.1"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def has_driver(environ: Mapping[str, str]) -> bool:
    """Whether NVML is worth asking: the driver's own files exist, or its library in LD_LIBRARY_PATH."""
    if any(os.path.exists(path) for path in _SIGNS):
        return True
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(folder and os.path.exists(os.path.join(folder, LIBRARY)) for folder in folders)
