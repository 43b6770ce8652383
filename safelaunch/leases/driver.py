"""Whether there is an NVIDIA driver at all: asked at every start, so it costs a few looks at the file system only."""

from __future__ import annotations

import os
from collections.abc import Mapping

LIBRARY = "libnvidia-ml.so.1"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def has_driver(environ: Mapping[str, str]) -> bool:
    """Whether NVML is worth asking: the driver's own signs, or its library where the user says that libraries are."""
    if any(os.path.exists(path) for path in _SIGNS):
        return True
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(folder and os.path.exists(os.path.join(folder, LIBRARY)) for folder in folders)
