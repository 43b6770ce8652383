"""Defines the message with which the caller of ``safelaunch.launch`` describes its job to the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelaunch.addons.embed.wire import (
    LaunchRequest,
)
from safelaunch.system import procstat

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def launch_request(
    config: LaunchConfig, entrypoint: object, args: tuple[Any, ...], own: tuple[tuple[str, str | None], ...]
) -> LaunchRequest:
    import torch

    itself = procstat.read(os.getpid())
    return LaunchRequest(
        own=own,
        torchrun=(
            f"--nnodes={config.min_nodes}:{config.max_nodes}",
            f"--nproc-per-node={config.nproc_per_node}",
            f"--max-restarts={config.max_restarts}",
            f"--rdzv-backend={config.rdzv_backend}",
            f"--rdzv-endpoint={config.rdzv_endpoint}",
            f"--rdzv-id={config.run_id}",
        ),
        script=_script(entrypoint, args),
        argv=(sys.executable, *sys.orig_argv[1:]),
        python=sys.executable,
        torch_package=os.fspath(Path(torch.__file__).parent),
        torch_version=str(torch.__version__),
        pid=os.getpid(),
        start_ticks=itself.start_ticks if itself is not None else 0,
    )


def _script(entrypoint: object, args: tuple[Any, ...]) -> tuple[str, ...]:
    if not isinstance(entrypoint, str):
        return (str(getattr(entrypoint, "__name__", type(entrypoint).__name__)),)
    words = [entrypoint, *(str(arg) for arg in args)]
    if entrypoint == sys.executable or Path(entrypoint).name.startswith("python"):
        scripts = [place for place, word in enumerate(words[1:], 1) if not word.startswith("-")]
        return tuple(words[scripts[0] :]) if scripts else tuple(words)
    return tuple(words)
