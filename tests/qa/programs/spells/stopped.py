"""Ranks that are stopped for a while, output without a reader, and tools that do not work."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .table import Outside, Spell, case, until


def _trains_on(spell: Spell) -> None:
    for _ in range(80):
        spell.step()


def _stops(pids: list[int], outside: Outside) -> None:
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(outside.quiet)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@case(on="all", outside=lambda outside: _stops(outside.begun(2)[:1], outside))
def one_rank_stopped(spell: Spell) -> None:
    _trains_on(spell)


@case(on="all", ranks=4, outside=lambda outside: _stops(outside.begun(4), outside))
def all_ranks_stopped(spell: Spell) -> None:
    _trains_on(spell)


@case(outside=lambda outside: _stops([int(outside.said("child"))], outside))
def a_stopped_child(spell: Spell) -> None:
    with subprocess.Popen(["sh", "-c", "for n in 1 2 3 4 5 6 7 8; do sleep 0.2; done"]) as child:
        spell.say("child", child.pid)
        assert child.wait() == 0


def _debugs(outside: Outside) -> None:
    pid = outside.begun(2)[0]
    time.sleep(0.5)
    words = ["gdb", "-q", "-batch", "-nx", "-p", str(pid), "-ex", f"shell sleep {outside.quiet}", "-ex", "detach"]
    env = {**os.environ, "DEBUGINFOD_URLS": ""}
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, check=False)


@case(on="all", outside=_debugs, tools=("gdb",))
def a_debugger_attached(spell: Spell) -> None:
    _trains_on(spell)


FREEZERS = Path("/sys/fs/cgroup/freezer")


def _freezes(outside: Outside) -> None:
    group = FREEZERS / f"alive-{os.getpid()}"
    pids = outside.begun(2)
    group.mkdir()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        time.sleep(outside.quiet)
    finally:
        (group / "freezer.state").write_text("THAWED")
        for pid in pids:
            (FREEZERS / "cgroup.procs").write_text(str(pid))
        until(lambda: _removed(group))


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@case(on="all", outside=_freezes, root=True, tools=(str(FREEZERS),))
def a_frozen_control_group(spell: Spell) -> None:
    _trains_on(spell)


# --- output without a reader ------------------------------------------------------------------------------------------


def _writes_much() -> None:
    for number in range(400):
        print(f"{number:0999d}", flush=True)


@case(launch="slow-reader")
def a_reader_that_rests(spell: Spell) -> None:
    _writes_much()


@case(launch="slow-reader", on="all")
def a_reader_that_rests_and_all_write(spell: Spell) -> None:
    _writes_much()


@case(launch="slow-reader-behind-cat")
def a_reader_behind_another_pipe(spell: Spell) -> None:
    _writes_much()


@case(launch="slow-reader")
def a_reader_that_rests_and_a_log(spell: Spell) -> None:
    """One thread writes with the lock of its handler, and the main thread logs, too."""
    logger = logging.getLogger("out")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    thread = threading.Thread(target=lambda: [logger.warning("%0999d", number) for number in range(400)])
    thread.start()
    time.sleep(0.5)
    logger.warning("from the main thread")
    thread.join()


@case(launch="slow-reader")
def a_reader_that_rests_and_a_child(spell: Spell) -> None:
    subprocess.run(["sh", "-c", "head -c 400000 /dev/zero | tr '\\0' x; echo"], check=True)


# --- evidence that cannot be had --------------------------------------------------------------------------------------


@case(launch="py-spy: exit 1")
def stacks_that_cannot_be_read(spell: Spell) -> None:
    time.sleep(spell.quiet)


@case(launch="py-spy: exec sleep 3606")
def stacks_that_take_for_ever(spell: Spell) -> None:
    with subprocess.Popen(["sleep", str(spell.quiet)]) as child:
        child.wait()


@case(launch="py-spy: echo gibberish")
def stacks_that_are_gibberish(spell: Spell) -> None:
    _reads(spell)


@case(launch="py-spy: echo []", ranks=4)
def stacks_without_a_thread(spell: Spell) -> None:
    _reads(spell)


@case(launch="py-spy: exit 1", works=True)
def computing_without_stacks(spell: Spell) -> None:
    while spell.lasts:
        sum(range(1000))


def _reads(spell: Spell) -> None:
    reader, writer = os.pipe()
    threading.Timer(spell.quiet, lambda: os.write(writer, b"x")).start()
    assert os.read(reader, 1) == b"x"
