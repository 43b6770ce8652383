"""Finds the reason why a worker has no progress page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from safelaunch import beacon
from safelaunch.job import process
from safelaunch.system import procstat
from safelaunch.system.files import text_of

INJECT = os.fspath(Path(beacon.__file__).parent / "inject")
WITHOUT_SITE = "IES"  # Python options that ignore PYTHONPATH or skip the site module
WITH_VALUE = "WX"
PROGRAM = "cm"  # options after which the arguments are the program's


def why_without_beacon(pid: int) -> str:
    """Returns why no process of the worker has a beacon; empty if one might still start its beacon."""
    reasons: list[str] = []
    name = ""
    for process_id in (pid, *(child.pid for child in process.descendants([pid]))):
        status = procstat.read(process_id)
        if status is None or status.state in "ZX":
            continue
        name = name or status.name
        try:
            reason = _of_process(process_id, status.ppid)
        except OSError:
            return ""
        if reason == "":
            return ""
        reasons += [reason] if reason is not None else []
    return reasons[-1] if reasons else f"{name} is not Python" if name else ""


def _of_process(pid: int, ppid: int) -> str | None:
    """Returns why one process has no beacon; None if it isn't Python, empty if it might still claim a page."""
    directory = Path(f"/proc/{pid}")
    if not (directory / "exe").readlink().name.startswith(("python", "pypy")):
        return None
    words = (directory / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    if words == text_of(f"/proc/{ppid}/cmdline").split("\0")[:-1]:
        return ""  # forked without an exec yet; a forked rank claims its page later
    option = isolation(words)
    if option:
        return f"python -{option}"
    variables = (directory / "environ").read_bytes().split(b"\0")
    path = next((variable.partition(b"=")[2] for variable in variables if variable.startswith(b"PYTHONPATH=")), b"")
    if os.fsencode(INJECT) not in path.split(os.fsencode(os.pathsep)):
        return "PYTHONPATH was replaced"
    # A rank claims its page before its program begins, but a spawned one gets its rank only after importing torch.
    spawned = "--multiprocessing-fork" in words
    if not spawned and b"/libtorch" in (directory / "maps").read_bytes():
        return "its beacon failed"
    return ""


def isolation(words: Sequence[str]) -> str:
    """Returns the first option on a Python command line that disables ``sitecustomize``: I, E or S; empty if absent."""
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
