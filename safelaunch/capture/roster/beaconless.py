"""Why a worker has no beacon, from what its processes are. A process that is slow to start gives no reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from safelaunch import beacon
from safelaunch.job import process
from safelaunch.system import procstat

INJECT = os.fspath(Path(beacon.__file__).parent / "inject")
WITHOUT_SITE = "IES"  # Python's options that ignore PYTHONPATH or leave out the site module
WITH_VALUE = "WX"
PROGRAM = "cm"  # what follows is the program's


def why(pid: int) -> str:
    """What keeps the worker's processes from having a beacon; empty while one of them may still get one."""
    reasons: list[str] = []
    name = ""
    for one in (pid, *(child.pid for child in process.descendants([pid]))):
        found = procstat.read(one)
        if found is None or found.state in "ZX":
            continue
        name = name or found.name
        try:
            reason = _of_process(one, found.ppid)
        except OSError:
            return ""
        if reason == "":
            return ""
        reasons += [reason] if reason is not None else []
    return reasons[-1] if reasons else f"{name} is not Python" if name else ""


def _of_process(pid: int, ppid: int) -> str | None:
    """The reason of one process; None if it is not Python, empty if it may still claim a page."""
    directory = Path(f"/proc/{pid}")
    if not (directory / "exe").readlink().name.startswith(("python", "pypy")):
        return None
    words = (directory / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    if words == _command_line(ppid):
        return ""  # forked, and not yet the program that it will be; a forked rank claims its page later
    option = isolation(words)
    if option:
        return f"python -{option}"
    variables = (directory / "environ").read_bytes().split(b"\0")
    path = next((one.partition(b"=")[2] for one in variables if one.startswith(b"PYTHONPATH=")), b"")
    if os.fsencode(INJECT) not in path.split(os.fsencode(os.pathsep)):
        return "PYTHONPATH was replaced"
    # A rank claims its page before its program begins. A spawned one is told its rank only after it has imported torch.
    spawned = "--multiprocessing-fork" in words
    if not spawned and b"/libtorch" in (directory / "maps").read_bytes():
        return "its beacon has failed"
    return ""


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []


def isolation(words: Sequence[str]) -> str:
    """The first of a Python command line's options that keeps ``sitecustomize`` from running: I, E or S."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word in ("-", "--"):
            return ""
        if word == "--check-hash-based-pycs":
            next(rest, "")
        for index, letter in enumerate("" if word.startswith("--") else word[1:]):
            if letter in WITHOUT_SITE:
                return letter
            if letter in PROGRAM:
                return ""
            if letter in WITH_VALUE:
                if index == len(word) - 2:
                    next(rest, "")
                break
    return ""
