"""A job that records which GPUs it got, and checks with its own locks that it has them alone.

    gpu_user.py WITNESSES SECONDS|FILE      (FILE: until that file exists)

Its locks end with the process and are independent of safelaunch's. If two live jobs have the same GPU (or port), one of
them detects it.
"""

import fcntl
import os
import sys
import time

witnesses, limit = sys.argv[1:3]
mine = [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
if os.environ.get("WITNESS_PORT"):
    mine.append("port-" + os.environ["MASTER_PORT"])


def note(word, what):
    """Appends one line in a single write."""
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
if limit[0].isdigit():
    time.sleep(float(limit))
while not (limit[0].isdigit() or os.path.exists(limit)):
    time.sleep(0.02)
note("done", ",".join(mine))
