"""Reads and writes the files of an attempt, which remain even after the scheduler has forgotten the attempt.

They are in the job's directory, which all nodes and the submitting host share:

    attempt-1.claim   the task that runs the attempt: only one task can create this link, so no attempt runs twice
    attempt-1.end     its outcome
    attempt-1.pace    its latest step
    attempt-1.closed  its outcome was recorded, so a task that the scheduler requeues must not start
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from safelaunch.addons.sweep.jobs import Pace
from safelaunch.system.decoding import from_json

if TYPE_CHECKING:
    pass


T = TypeVar("T")
LARGEST = 1 << 16


class AttemptClaim(msgspec.Struct, frozen=True):
    name: str
    restart: int  # times the scheduler has requeued the submission
    host: str
    began_unix_s: float

    def precedes(self, other: AttemptClaim) -> bool:
        return self.name == other.name and self.restart < other.restart


class TaskEnd(msgspec.Struct, frozen=True):
    name: str
    restart: int
    exit_code: int
    duration_s: float
    signalled: bool = False
    word: str = ""  # scheduler's reason for its SIGTERM, such as TIMEOUT or CANCELLED
    over_limit: bool = False
    last_step: int | None = None
    gpus: tuple[str, ...] = ()
    bundle: str = ""
    wrong: str = ""


class AttemptFiles:
    def __init__(self, directory: Path, attempt: int) -> None:
        self._stem = directory / f"attempt-{attempt}"

    def _path(self, kind: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{kind}")

    def claim(self, own_claim: AttemptClaim) -> AttemptClaim | None:
        """Claims the attempt. Returns None on success, or else the claim of another task. Raises OSError."""
        path, beside = self._path("claim"), self._new_file("claim", own_claim)
        try:
            if _link(beside, path):
                return None
            other = self.read_claim()
            if other == own_claim:
                return None  # the file server executed the link twice, because its first answer was lost
            if other is None or not other.precedes(own_claim):
                return other or own_claim
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        return None

    def read_claim(self) -> AttemptClaim | None:
        return _read(self._path("claim"), AttemptClaim)

    def write_end(self, end: TaskEnd) -> None:
        self._new_file("end", end).replace(self._path("end"))

    def read_end(self) -> TaskEnd | None:
        return _read(self._path("end"), TaskEnd)

    def write_pace(self, pace: Pace) -> None:
        self._new_file("pace", pace, sync=False).replace(self._path("pace"))

    def read_pace(self) -> Pace:
        return _read(self._path("pace"), Pace) or Pace()

    def close(self) -> None:
        self._path("closed").touch(mode=0o600)

    @property
    def is_closed(self) -> bool:
        return self._path("closed").exists()

    def _new_file(self, kind: str, record: object, *, sync: bool = True) -> Path:
        path = self._path(f"{kind}.{os.uname().nodename}.{os.getpid()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(record) + b"\n")
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return path


def _link(source: Path, path: Path) -> bool:
    """Links the file to a new name; copies it if the disk doesn't support links. Returns False if the name is taken."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        try:
            with path.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError:
            return False
    return True


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        with path.open("rb") as file:
            return from_json(file.read(LARGEST), kind)
    except (OSError, msgspec.DecodeError, ValueError):
        return None
