"""Keeps the journal of a sweep: a file that survives ``kill -9`` at any point.

The file is append-only and has one JSON document per line. Each line is on the disk before the action that it
announces:

    {"event": "begun", "pid": 4711, ...}                                           colaunch was started
    {"event": "started", "job": "lr-1e-3", "attempt": 1, "fingerprint": ..., "pid": ..., "start_ticks": ...}
    {"event": "handed", "job": "lr-1e-3", "attempt": 1, "fingerprint": ..., "batch": ...}
    {"event": "ended", "job": "lr-1e-3", "attempt": 1, "state": "succeeded", ...}

"started" is written before the job's process runs, so the journal contains every job. With a scheduler, "handed"
replaces it; it contains the unique name ``batch`` and is written before the submission. An incomplete last line is
removed, because its action never happened. ``--resume`` repeats a job that has no "ended", unless the job's own
safelaunch recorded a success, because colaunch might have been killed before it could record the end. While colaunch
runs the sweep, it locks the journal (flock).
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import ValidationError

from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.sweep import JobHistory
from safelaunch.job.process import ProcessId
from safelaunch.system.decoding import from_builtins
from safelaunch.system.errors import UsageError
from safelaunch.system.files import try_lock

JournalRecord = Mapping[str, Any]
NOBODY = ProcessId(0, 0)


@dataclass(frozen=True, slots=True)
class Attempt:
    job: str
    number: int
    fingerprint: str
    process: ProcessId
    outcome: AttemptOutcome | None = None  # None if its end was never recorded
    gpus: tuple[str, ...] = ()
    began_unix_s: float = 0.0
    handed: tuple[str, ...] = ()  # unique names of its submissions to a scheduler: several after an unclear answer


def parse(data: bytes, name: str) -> tuple[list[JournalRecord], int]:
    """Returns a journal's records, and the size in bytes of its complete lines. Raises UsageError for a damaged line.

    Only the last line can be incomplete, because nothing is ever appended to an incomplete line.
    """
    records: list[JournalRecord] = []
    whole = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if number < len(lines) - (not lines[-1]):
                raise UsageError(
                    f"{name}:{number}: the journal is damaged: this line is not a record of safelaunch",
                    "remove the line to run its job again, or choose another directory with --sweep-dir",
                )
            break
        records.append(record)
        whole += len(line) + 1
    return records, min(whole, len(data))


def attempts(records: Sequence[JournalRecord]) -> tuple[Attempt, ...]:
    by_key: dict[tuple[str, int], Attempt] = {}
    for record in records:
        try:
            key = (str(record["job"]), int(record["attempt"]))
            if record["event"] == "started":
                process = ProcessId(int(record["pid"]), int(record["start_ticks"]))
                gpus = tuple(str(gpu) for gpu in record.get("gpus", ()))
                began_s = float(record.get("time_unix_s", 0.0))
                by_key[key] = Attempt(*key, str(record["fingerprint"]), process, None, gpus, began_s)
            elif record["event"] == "handed":
                earlier = by_key[key].handed if key in by_key else ()
                handed = (*earlier, str(record["batch"]))
                by_key[key] = Attempt(*key, str(record["fingerprint"]), NOBODY, handed=handed)
            elif record["event"] == "ended" and key in by_key:
                by_key[key] = replace(by_key[key], outcome=from_builtins(record, AttemptOutcome))
        except (KeyError, TypeError, ValueError, ValidationError):
            continue  # from another version, so unreliable: the job runs again
    return tuple(by_key.values())


@dataclass(frozen=True, slots=True)
class JournalHistory:
    before: Mapping[str, JobHistory]
    changed: tuple[str, ...] = ()  # jobs that were done but have changed since
    unfinished: tuple[Attempt, ...] = ()

    @property
    def done(self) -> int:
        return sum(job.outcome is not None for job in self.before.values())


def history(attempts: Sequence[Attempt], jobs: Sequence[SweepJob]) -> JournalHistory:
    """Returns the state of all jobs. A job is done if an attempt at exactly the same work succeeded."""
    before: dict[str, JobHistory] = {}
    changed = []
    for job in jobs:
        own = [attempt for attempt in attempts if attempt.job == job.name]
        if not own:
            continue
        succeeded = [attempt for attempt in own if attempt.outcome and attempt.outcome.state == "succeeded"]
        same = [attempt for attempt in succeeded if attempt.fingerprint == job.fingerprint]
        if succeeded and not same:
            changed.append(job.name)
        before[job.name] = JobHistory(max(attempt.number for attempt in own), same[-1].outcome if same else None)
    return JournalHistory(before, tuple(changed), tuple(attempt for attempt in attempts if attempt.outcome is None))


class Journal:
    def __init__(self, path: Path) -> None:
        """Opens the journal. Raises UsageError if another colaunch uses it, or if it is damaged."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(
                f"{path.parent}: cannot write the sweep there: {error.strerror or error}", "see --sweep-dir"
            ) from error
        try:
            if not try_lock(self._file):
                self._close_and_complain()
        except OSError as error:
            os.close(self._file)
            raise UsageError(
                f"{path.parent}: files cannot be locked there: {error.strerror or error}",
                "choose a directory on another disk with --sweep-dir",
            ) from error
        self.records, self._length = parse(self._read(), str(path))
        self._pending: list[bytes] = []
        self._cut()
        _sync_directory(path.parent)

    def _close_and_complain(self) -> None:
        records = [record for record in _tolerant(self._read()) if record.get("event") == "begun"]
        os.close(self._file)
        who = f" (pid {records[-1].get('pid')})" if records else ""
        raise UsageError(
            f"{self.path.parent}: another safelaunch colaunch runs this sweep{who}.",
            "wait for it, or choose another directory with --sweep-dir",
        )

    def _read(self) -> bytes:
        size = os.fstat(self._file).st_size
        return os.pread(self._file, size, 0)

    def _cut(self) -> None:
        os.ftruncate(self._file, self._length)
        if self._length and os.pread(self._file, 1, self._length - 1) != b"\n":
            self._append(b"\n")

    def record_launch(self, jobs: int, sweep_id: str = "") -> None:
        """Records that colaunch was started. ``sweep_id`` marks the sweep's jobs in a scheduler. Raises OSError."""
        extra = {"sweep_id": sweep_id} if sweep_id else {}
        self._write({"event": "begun", "pid": os.getpid(), "jobs": jobs, "version": 1, **extra})

    def record_start(self, job: SweepJob, attempt: int, process: ProcessId, gpus: Sequence[str] = ()) -> None:
        """Records that a job starts. Raises OSError if that can't be written; then the job must not start."""
        words = {"job": job.name, "attempt": attempt, "fingerprint": job.fingerprint, "gpus": list(gpus)}
        self._write({"event": "started", **words, "pid": process.pid, "start_ticks": process.start_ticks})

    def record_submission(self, job: SweepJob, attempt: int, name: str) -> None:
        words = {"job": job.name, "attempt": attempt, "fingerprint": job.fingerprint}
        self._write({"event": "handed", **words, "batch": name})

    def record_end(self, name: str, attempt: int, outcome: AttemptOutcome) -> None:
        record = {"event": "ended", "job": name, "attempt": attempt, **asdict(outcome)}
        self._pending.append(_line(record))
        self.catch_up()

    def catch_up(self) -> bool:
        """Writes records that couldn't be written before; returns whether all are written now."""
        try:
            while self._pending:
                self._append(self._pending[0])
                self._pending.pop(0)
        except OSError:
            return False
        return True

    def _write(self, record: JournalRecord) -> None:
        if not self.catch_up():
            raise OSError(errno.EIO, "earlier records could not be written")
        self._append(_line(record))

    def _append(self, line: bytes) -> None:
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._length)  # nothing must follow half a line
            raise
        self._length += len(line)

    def close(self) -> None:
        os.close(self._file)


def _line(record: JournalRecord) -> bytes:
    return json.dumps({**record, "time_unix_s": round(time.time(), 3)}).encode() + b"\n"


def _tolerant(data: bytes) -> list[JournalRecord]:
    try:
        return parse(data, "")[0]
    except UsageError:
        return []


def _sync_directory(directory: Path) -> None:
    """Ensures that a new file's name is on the disk, if the file system supports that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
