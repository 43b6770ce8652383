"""Bundles that are being staged and published."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from safelaunch.bundle.publication import Publication, Retention, publish
from safelaunch.bundle.staging import Staging
from safelaunch.model import Artifact

NAME = "train-20260101T000000Z-hang"


def begun(root: Path) -> Staging:
    """A small bundle as an incident leaves it."""
    staging = Staging(root)
    staging.add_json(Artifact("verdict.json", "safelaunch", 0.0), {"outcome": "hang"})
    staging.add(Artifact("ranks/0/stack.txt", "py-spy dump", 0.1), "Thread 1\n")
    staging.finish({})
    return staging


def staged(root: Path) -> Path:
    return begun(root).root


def published(directory: Path, name: str = NAME, keeping: Retention | None = None) -> Publication:
    source = staged(directory.parent / f"staged-{time.monotonic_ns()}")
    result = publish(source, directory, name, directory.parent / "fallback", keeping, deadline_s=30.0)
    assert not source.exists() or result.path == source
    return result


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    directory.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)
