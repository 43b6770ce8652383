"""A signal stops one rank. The rank sends it itself, or the test does."""

import os
import signal
import subprocess

from training import Training, parser

options = parser.parse_args()


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HANGS: itself


def main() -> None:
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if job.misbehaves(step) and options.how == "itself":
                stop_myself()
            if job.misbehaves(step) and options.how == "other":
                subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}"], check=True)


if __name__ == "__main__":
    main()
