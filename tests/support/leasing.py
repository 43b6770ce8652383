"""safelaunch processes that lease GPUs and ports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

AS_A_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def safelaunch(
    *words: str | Path, env: Mapping[str, str], pass_fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAFELAUNCH_", "PET_", "SLURM_", "CUDA_"))}
    with subprocess.Popen(
        [sys.executable, "-m", "safelaunch", *map(os.fspath, words)],
        env={**environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=pass_fds,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def log_of(place: Path) -> list[str]:
    return (place / "log").read_text().splitlines() if (place / "log").exists() else []
