"""Timers that the beacon records, and signals that its threads accept."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from safelaunch.beacon import signals

SETS = """
import os, sys
from safelaunch.beacon import layout, timers
import mmap
page = mmap.mmap(-1, layout.SIZE)  # which forks share
words = memoryview(page).cast("Q")
before = words[layout.TIMERS]
timers.install(words)
from signal import ITIMER_REAL, alarm, getitimer, setitimer
watched = words[layout.TIMERS]
if os.fork() == 0:
    {call}
    os._exit(0)
os.wait()
print(before, watched == layout.NO_TIMER, words[layout.TIMERS] == layout.TIMER_SET)
"""


@pytest.mark.parametrize(
    ("call", "noted"), [("alarm(60)", True), ("setitimer(ITIMER_REAL, 60.0)", True), ("getitimer(ITIMER_REAL)", False)]
)
def test_timer_set_by_fork_is_recorded(call: str, noted: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SETS.format(call=call)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["0", "True", str(noted)], "")


def blocked(tid: int) -> int:
    match = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/self/task/{tid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1], 16)


def test_beacon_threads_block_script_signals() -> None:
    masks: list[int] = []
    thread = threading.Thread(target=lambda: masks.append(blocked(threading.get_native_id())))
    before = blocked(threading.get_native_id())
    signals.without(thread.start)
    thread.join()
    assert all(masks[0] >> number - 1 & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM))
    assert not any(masks[0] >> number - 1 & 1 for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
    assert blocked(threading.get_native_id()) == before
