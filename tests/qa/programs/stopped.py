"""A signal stops one rank. The rank sends it itself, or the test does."""

import os
import signal
import subprocess

from training import parser, train_until

options = parser.parse_args()


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HANGS: itself


def be_stopped() -> None:
    subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}"], check=True)


if __name__ == "__main__":
    train_until(options, {"itself": stop_myself, "other": be_stopped})
