"""Finds the remaining processes of a job, for a guardian that isn't their parent.

The run directory records the job's first process, control group and orphans; the other processes are found from these.
Each is identified by pid and start time. The run's mark in a process's environment is accepted only for an orphan that
belongs to this user and started after the job, because unrelated processes might carry the mark.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from safelaunch.job import process
from safelaunch.job.controlgroup import ControlGroup
from safelaunch.job.paths import RunPaths
from safelaunch.job.process import ProcessId
from safelaunch.system import procstat
from safelaunch.system.files import text_of


def note(run: RunPaths, what: str, value: str) -> None:
    """Adds a line to the record: ``guardian``, ``agent`` or ``orphan`` and a process, or ``group`` and a path."""
    try:
        with open(run.members, "a") as file:
            file.write(f"{what} {value}\n")
    except OSError:
        return


class Remains:
    """Remaining processes of a job, except the process ``spare``."""

    def __init__(self, run: RunPaths) -> None:
        """Reads the record. Sets ``agent`` to None if the job didn't start."""
        lines = [line.partition(" ") for line in text_of(run.members).splitlines()]
        listed = {what: parse([value for kind, _, value in lines if kind == what]) for what in ("agent", "orphan")}
        group = next((value for kind, _, value in lines if kind == "group"), None)
        self.agent = listed["agent"][-1] if listed["agent"] else None  # earlier ones died with their guardians
        self.group = ControlGroup(Path(group)) if group is not None else None
        self.spare: ProcessId | None = None
        self._run = run
        self._known = {*listed["agent"], *listed["orphan"]}
        self._mark = f"SAFELAUNCH_RUN_DIR={run.root}".encode()

    def add(self, members: Iterable[ProcessId]) -> None:
        self._known.update(members)

    def find(self) -> set[ProcessId]:
        """Returns all live processes: known ones, descendants, members of their sessions, and marked orphans."""
        roots = self._known | set(parse(_workers(self._run.agent_events))) | members_of(self.group)
        alive = {root for root in roots if root.is_alive()}
        alive |= set(process.descendants((root.pid for root in alive), exclude=[os.getpid()]))
        alive |= set(self._kindred(alive))
        self._known = {member for member in alive if member.pid != os.getpid()}  # a beacon is our parent
        return self._known - {self.spare} if self.spare is not None else self._known

    def _kindred(self, members: set[ProcessId]) -> Iterable[ProcessId]:
        """Yields processes in the sessions of live members, and orphans that carry the run's mark."""
        pids = {member.pid for member in members}
        for entry in list(os.scandir("/proc")):
            if not entry.name.isdigit() or (pid := int(entry.name)) in pids:
                continue
            stat = procstat.read(pid)
            if stat is not None and (self._shares_a_session(pid, pids) or self._is_marked_orphan(stat)):
                yield ProcessId(pid, stat.start_ticks)

    def _shares_a_session(self, pid: int, members: set[int]) -> bool:
        try:
            return os.getsid(pid) in members
        except OSError:
            return False

    def _is_marked_orphan(self, stat: procstat.Stat) -> bool:
        """Returns whether a process carries the run's mark and its parent is one that adopts the job's orphans."""
        if self.agent is None or stat.start_ticks < self.agent.start_ticks or stat.ppid not in _reapers(self.agent):
            return False
        try:
            place = Path(f"/proc/{stat.pid}")
            return place.stat().st_uid == os.getuid() and self._mark in (place / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _reapers(agent: ProcessId) -> set[int]:
    above = procstat.read(agent.pid) if agent.is_alive() else None
    return {1, os.getppid(), *([above.ppid] if above is not None else [])} - {agent.pid}


def members_of(group: ControlGroup | None) -> set[ProcessId]:
    processes = (process.identify(pid) for pid in (group.members() if group is not None else ()))
    return {member for member in processes if member is not None}


def parse(lines: Iterable[str]) -> list[ProcessId]:
    processes = []
    for line in lines:
        words = line.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            processes.append(ProcessId(int(words[0]), int(words[1])))
    return processes


def _workers(events: Path) -> list[str]:
    """Returns the workers of all attempts listed in the agent's events."""
    import json  # late: the first guardian doesn't need it

    lines = []
    for line in text_of(events).splitlines():
        try:
            event = json.loads(line)
            lines += [f"{pid} {ticks}" for _, pid, ticks in event.get("workers", {}).values()]
        except (ValueError, AttributeError, TypeError):
            continue  # cut off
    return lines
