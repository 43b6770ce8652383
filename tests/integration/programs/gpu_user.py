"""A job that says which GPUs it was given, and finds out by locks of its own whether it has them alone.

    gpu_user.py WITNESSES SECONDS

Its locks die with it and have nothing to do with safelaunch's: if a second job that lives has the same GPU (or port), one
of the two sees it.
"""

import fcntl
import os
import sys
import time

witnesses, seconds = sys.argv[1], float(sys.argv[2])
mine = [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
if os.environ.get("WITNESS_PORT"):
    mine.append("port-" + os.environ["MASTER_PORT"])


def note(word, what):
    """One line, appended whole."""
    fd = os.open(os.path.join(witnesses, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, f"{time.monotonic():.6f} {word} {os.getpid()} {what}\n".encode())
    os.close(fd)


os.umask(0)
held = []
for thing in mine:
    fd = os.open(os.path.join(witnesses, thing), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note("got", thing)
    except BlockingIOError:
        note("CONFLICT", thing)
    held.append(fd)
if not mine:
    note("NOTHING", "-")
time.sleep(seconds)
note("done", ",".join(mine))
