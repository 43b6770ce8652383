"""Training, usually on several nodes, in which one rank makes the others wait after some steps."""

import os
import subprocess
import sys
import time

import torch
from training import Training, parser

parser.add_argument(
    "--seconds", type=float, default=10.0, help="how long rank 0 computes, unless the file enough appears before"
)
parser.add_argument("--poller", type=int, default=-1, help="a rank that polls for a file from rank 0")
parser.add_argument("--pace", type=float, default=0.05, help="duration of a normal step in seconds")
parser.add_argument("--once", default="", help="the culprit makes the others wait once this file exists")
options = parser.parse_args()


def evaluate(seconds: float) -> None:
    end, weights = time.monotonic() + seconds, torch.randn(64, 64)
    while time.monotonic() < end and not os.path.exists(os.path.join(options.scratch, "enough")):
        burst = time.monotonic() + 0.02  # a part of a core will do: other tests want the rest
        while time.monotonic() < burst:
            weights = (weights @ weights).clamp(-1, 1)
        time.sleep(0.03 if seconds > 1 else 0)


def wait_for_file(name: str) -> None:
    while not os.path.exists(os.path.join(options.scratch, name)):
        time.sleep(0.5)


def compute_without_a_core() -> None:
    """Computes on a core where children spin, until they are gone. (Of one session: each has its share.)"""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with open(os.path.join(options.scratch, "starving"), "w") as file:
        file.write(" ".join(str(child.pid) for child in spinning))
    while any(child.poll() is None for child in spinning):
        evaluate(0.01)


def keep_waiting(rank: int) -> None:
    if options.how == "starved" and rank == 0:
        compute_without_a_core()
    elif options.how == "asleep" and rank == options.culprit:
        time.sleep(86_400)  # HANGS: asleep
    elif options.how == "evaluates" and rank == 0:
        open(os.path.join(options.scratch, "evaluating"), "w").close()
        evaluate(options.seconds)
        open(os.path.join(options.scratch, "evaluated"), "w").close()
    elif options.how == "evaluates" and rank == options.poller:
        wait_for_file("evaluated")


def main() -> None:
    with Training(options) as job:
        waiting_for = options.once if job.rank == options.culprit else ""
        for step, batch in job.batches():
            job.train(batch)
            time.sleep(options.pace)
            if step == options.after if not waiting_for else os.path.exists(waiting_for):
                waiting_for = ""
                keep_waiting(job.rank)
        print(f"rank {job.rank} trained\n", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
