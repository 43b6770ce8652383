"""Detects, through two named pipes in the run directory, that the processes responsible for ending this job have died.

Nothing is written to the pipes. A reader of ``life`` gets end-of-file if the supervisor has died. A reader of
``keepers`` gets end-of-file if no keeper is left: no supervisor, no guardian, and no process in ``watch``. After a
normal end of the job, the run directory is gone, and the reader does nothing.
"""

from __future__ import annotations

import os
from time import monotonic, sleep

from . import layout, log, page, signals

F_SETSIG = 10
SIGKILL, SIGTERM = 9, 15  # importing signal costs a rank 2 ms
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4  # flag in /proc/PID/stat
GUARDIAN_STARTS_S = 5.0
TRIES = 30
GUARDIAN_ENDS_S = 20.0  # a live guardian takes at most SIGTERM, 5 s, SIGKILL, 5 s


@log.guarded
def watch(run_dir: str, role: str) -> None:
    """Starts a thread that starts a new guardian once both the supervisor and the guardian are dead.

    The thread waits in ``read`` without the GIL. ``role`` is ``layout.AGENT_ROLE`` for the parent of all ranks.
    """
    import _thread
    import atexit

    keepers = _open(run_dir, layout.KEEPERS, os.O_RDWR)
    life = _open(run_dir, layout.LIFE, os.O_RDONLY | os.O_NONBLOCK)
    if life < 0 or keepers < 0:
        return  # no guardian, which the supervisor has reported
    os.set_blocking(life, True)
    signals.without(lambda: _thread.start_new_thread(_wait, (life, run_dir, role)))
    atexit.register(_leave, run_dir)


@log.guarded
def end_with_keepers(run_dir: str) -> None:
    """Makes the kernel kill this process once no keeper of the job is left, even if a thread never releases the GIL.

    Only for a process that the job waits for: any other process could outlive the job's normal end, and would then be
    killed, too.
    """
    import fcntl

    pipe = _open(run_dir, layout.KEEPERS, os.O_RDONLY | os.O_NONBLOCK)
    if pipe < 0:
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, F_SETSIG, SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(pipe, 1)  # end-of-file: all keepers are dead already
    except BlockingIOError:
        return
    os.kill(os.getpid(), SIGKILL)


def _open(run_dir: str, name: str, flags: int) -> int:
    try:
        return page.out_of_the_way(os.open(os.path.join(run_dir, name), flags | os.O_CLOEXEC))
    except OSError:
        return -1


@log.guarded
def _wait(life: int, run_dir: str, role: str) -> None:
    os.read(life, 1)
    deadline = monotonic() + GUARDIAN_ENDS_S
    while os.path.exists(os.path.join(run_dir, layout.RESCUE)):
        if monotonic() > deadline or not _is_guarded(run_dir):
            _start_guardian(run_dir, role)
            deadline = monotonic() + GUARDIAN_ENDS_S
            sleep(GUARDIAN_STARTS_S)
        sleep(0.1)


@log.guarded
def _leave(run_dir: str) -> None:
    # Waits at exit until a guardian runs, perhaps one that ``_wait`` starts. If a guardian were killed just after it
    # ended this process, the orphans would stay.
    rescue, deadline = os.path.join(run_dir, layout.RESCUE), monotonic() + GUARDIAN_STARTS_S
    while os.path.exists(rescue) and not _is_guarded(run_dir) and monotonic() < deadline:
        sleep(0.05)


def _is_guarded(run_dir: str) -> bool:
    # A live guardian removes the run directory once it has ended the job.
    words = [line.split() for line in _recorded_members(run_dir, "guardian")]
    return any(_lives(pid, ticks) for pid, ticks in words)


def _recorded_members(run_dir: str, what: str) -> list[str]:
    try:
        with open(os.path.join(run_dir, layout.MEMBERS)) as file:
            lines = [line.rstrip("\n").partition(" ") for line in file]
    except OSError:
        return []
    return [value for word, _, value in lines if word == what]


def _lives(pid: str, start_ticks: str) -> bool:
    """Returns whether that process is alive. A killed process counts as dead, because it can take a moment to end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    is_killed = int(fields[6]) & PF_EXITING or int(fields[28]) >> (SIGKILL - 1) & 1
    return fields[19] == start_ticks and fields[0] not in "ZX" and not is_killed


def _start_guardian(run_dir: str, role: str) -> None:
    # A subreaper inherits the job's orphans, so the guardian finds them below it.
    log.guarded(_become_subreaper)()
    for _ in range(TRIES):  # a node without free memory regains some as the job ends
        try:
            with open(os.path.join(run_dir, layout.RESCUE), "rb") as file:
                executable, code = (os.fsdecode(part) for part in file.read().split(b"\0"))
            env = {**os.environ, layout.GUARDIAN_CODE: code, layout.GUARDIAN_STARTER: role}
            os.posix_spawn(executable, [executable, *layout.GUARDIAN_ARGUMENTS], env)
            return
        except OSError:
            log.fault("rescue")
            sleep(0.1)
    _end_without(run_dir)


def _end_without(run_dir: str) -> None:
    """Ends the job without a guardian, through its control group, which includes this process.

    If that fails, sends SIGTERM to this process, so that torchrun ends its ranks.
    """
    for group in _recorded_members(run_dir, "group"):
        try:
            with open(os.path.join(group, "cgroup.kill"), "w") as file:
                file.write("1")
        except OSError:
            continue  # the group was never created, or is gone with the job
    os.kill(os.getpid(), SIGTERM)


def _become_subreaper() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
