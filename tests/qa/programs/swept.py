"""One job of a sweep: marks its start and end in ``marks/``, prints numbered lines, and ends as HOW says.

python swept.py NAME HOW SECONDS|FILE   (HOW: ok, fail, flaky, stubborn, polite, hang)

With FILE, it runs until that file exists.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import safelaunch

LINES = 500

name, how, limit = sys.argv[1:4]
marks = Path("marks")
marks.mkdir(exist_ok=True)


def mark(what):
    with (marks / f"{name}.{what}").open("a") as file:
        file.write(f"{os.getpid()}\n")


lock = (marks / f"{name}.lock").open("a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    mark("twice")
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "polite":

    def leave(signum, frame):
        mark("left")
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
mark("begun")  # from here on, a stop request can come
print("threads", os.environ["OMP_NUM_THREADS"])
print("visible", os.environ.get("EXTRA"), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
for number in range(LINES):
    stream = sys.stderr if number % 10 == 9 else sys.stdout
    print(f"{name} line {number} of {LINES} loss={LINES - number}", file=stream, flush=number % 10 >= 8)
begin = time.monotonic()


def is_over():
    return time.monotonic() >= begin + float(limit) if limit[0].isdigit() else os.path.exists(limit)


steps = 0
while how == "hang" or not is_over():
    safelaunch.step()
    steps += 1
    time.sleep(0.05)
    if how == "hang" and is_over():
        print("steps", steps, flush=True)
        time.sleep(1000)
print("steps", steps)
if how == "fail" or (how == "flaky" and len((marks / f"{name}.begun").read_text().split()) == 1):
    sys.exit(7)
mark("done")
