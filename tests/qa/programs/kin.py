"""A rank with one kind of descendants. All hold the file ``marker`` open, which identifies the job's processes.

kin.py KIND MARKER SECONDS   (after SECONDS the rank ends and leaves its descendants)
"""

import os
import subprocess
import sys
import time
from pathlib import Path

DAEMONS_AT_MOST = 100

kind, marker, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
held = os.open(marker, os.O_RDONLY | os.O_CREAT)
os.set_inheritable(held, True)


def run(*words: str, new_session: bool = False) -> subprocess.Popen:
    return subprocess.Popen(words, close_fds=False, start_new_session=new_session)


def fork() -> None:
    """Forks a sleeping child that forks another sleeping child."""
    if not os.fork():
        os.fork()
        time.sleep(3600)


def daemon() -> None:
    """Starts a daemon in the standard way: fork, setsid, fork."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execvp("sleep", ["sleep", "3600"])


def wiped() -> None:
    """Starts an orphan with an empty environment in its own session, and another whose parent stays."""
    run("env", "-i", "/bin/sh", "-c", "setsid sleep 3600 & sleep 3600 & exit 0").wait()
    run("env", "-i", "/bin/sh", "-c", "sleep 3600; true", new_session=True)


def workers() -> None:
    import torch.utils.data

    class Asleep(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(3600)
            return index

    global keep
    keep = iter(torch.utils.data.DataLoader(Asleep(), num_workers=2))


{"plain": lambda: None, "forked": fork, "session": lambda: run("sleep", "3600", new_session=True), "daemons": daemon,
 "daemonizing": daemon, "wiped": wiped, "workers": workers}[kind]()  # fmt: skip
Path(f"{marker}-ready-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
deadline = time.monotonic() + seconds
daemons = 0
while (left := deadline - time.monotonic()) > 0:
    if kind == "daemonizing" and daemons < DAEMONS_AT_MOST:
        daemons += 1
        daemon()
    time.sleep(min(0.05, left))
os._exit(0)
