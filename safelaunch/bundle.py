"""Assembling a bundle on the local disk, and publishing it whole or not at all.

The bundle directory may be a slow or dead network disk: a helper process does the copying, under a deadline, and when
it fails the bundle stays in a local place that is named.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .model import Artifact, Outcome

PUBLISH_DEADLINE_S = 60.0
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
ENOUGH_BYTES = 64 << 20  # Flight Recorders of a node's ranks, with frames, are the largest part


def make_private(directory: Path) -> None:
    """Makes a directory and those of its parents that are missing, all of them 0700. Raises OSError."""
    if not directory.parent.exists():
        make_private(directory.parent)  # mkdir(parents=True) would leave them open to others
    directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def roomier(wanted: Path, other: Path, *, enough_bytes: int = ENOUGH_BYTES) -> Path:
    """``wanted`` where its disk has room for a bundle, else whichever of the two has more. They need not exist."""
    room = _free_bytes(wanted)
    return wanted if room >= enough_bytes or room >= _free_bytes(other) else other


def _free_bytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


class Staging:
    """A bundle being assembled: every file is written as soon as it is there, and every artifact is listed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifacts: list[Artifact] = []
        with suppress(OSError):
            make_private(root)  # else each file says so; what is done about the job does not depend on it

    def add(self, artifact: Artifact, data: bytes | str | None) -> None:
        """Writes ``data`` to ``artifact.path``; None lists it as missing. A full disk costs this file only."""
        if data is None:
            self.artifacts.append(artifact)
            return
        content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        problem = self.write(artifact.path, content)
        size = 0 if problem else len(content)
        self.artifacts.append(msgspec.structs.replace(artifact, bytes=size, missing=artifact.missing or problem))

    def add_json(self, artifact: Artifact, value: object) -> None:
        self.add(artifact, msgspec.json.format(msgspec.json.encode(value), indent=1) if value is not None else None)

    def write(self, path: str, content: bytes) -> str:
        """Writes one file below the root; returns why it could not, or an empty string."""
        target = self.root / path
        try:
            for parent in reversed(target.relative_to(self.root).parents[:-1]):
                (self.root / parent).mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            with open(descriptor, "wb") as file:
                file.write(content)
        except OSError as error:
            with suppress(OSError):
                target.unlink()
            return f"could not be written: {error.strerror or error}"
        return ""


@dataclass(frozen=True, slots=True)
class Published:
    """Where the bundle is; ``problem`` says why it is not where it was wanted."""

    path: Path
    problem: str = ""


def name_of(run_name: str, unix_s: float, outcome: Outcome) -> str:
    """``<run-name>-<UTC time>-<hang|crash|dump>``."""
    return f"{run_name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix_s))}-{outcome}"


def publish(staged: Path, directory: Path, name: str, fallback: Path, *, deadline_s: float) -> Published:
    """Copies the staged bundle to ``directory/name``; never takes longer than ``deadline_s`` seconds, never raises.

    It is written beside under a hidden name and then renamed. When that fails, the staged bundle moves to ``fallback``.
    """
    command = [sys.executable, "-I", "-S", os.fspath(Path(__file__).parent / "publish.py")]
    process = subprocess.Popen(
        [*command, os.fspath(staged), os.fspath(directory), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
        if process.returncode == 0:
            shutil.rmtree(staged, ignore_errors=True)
            return Published(Path(out.decode().strip()))
        problem = err.decode("utf-8", "replace").strip() or f"the copy ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a write to a dead disk ends when the kernel lets it
        problem = f"no answer from {directory} within {deadline_s:g} s"
    return _keep_locally(staged, fallback, name, problem)


def _keep_locally(staged: Path, fallback: Path, name: str, problem: str) -> Published:
    """In ``fallback``, or where that cannot be (somebody else's, full) in a new directory in $TMPDIR."""
    for place in (fallback, None):
        try:
            return Published(_move(staged, place or Path(tempfile.mkdtemp(prefix="safelaunch-")), name), problem)
        except OSError as error:
            problem += f"; and {place or tempfile.gettempdir()}: {error.strerror or error}"
    return Published(staged, problem)


def _move(staged: Path, directory: Path, name: str) -> Path:
    make_private(directory)
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    target = next(directory / one for one in names if not (directory / one).exists())
    try:
        shutil.move(staged, target)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)  # what fitted of a copy to another disk
        raise
    return target


def check_directory(directory: Path) -> str:
    """Why a bundle could not be written to ``directory``, or an empty string. Creates nothing."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written"
    return ""
