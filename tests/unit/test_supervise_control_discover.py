"""Discovery of runs on this node by their directories."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from safelaunch.supervise.control.discover import look


@pytest.mark.parametrize("held", [True, False])
def test_run_without_owner_file_is_alive_while_directory_locked(tmp_path: Path, held: bool) -> None:
    run = tmp_path / "r4711"
    run.mkdir(mode=0o700)
    descriptor = os.open(run, os.O_RDONLY)
    try:
        if held:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        (found,) = look([tmp_path])
        assert (found.status, found.alive) == (None, held)
    finally:
        os.close(descriptor)
