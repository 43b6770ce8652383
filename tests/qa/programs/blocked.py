"""One rank blocks in a call between two steps."""

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import time

import torch
from training import parser, train_until

options = parser.parse_args()


def wait_for_licence() -> None:
    sys.stderr.write("\r 50%|#####     | 23.92it/s")  # as a progress bar leaves the cursor
    time.sleep(86_400)  # HANGS: asleep


def read_new_prompts() -> str:
    path = os.path.join(options.scratch, "prompts")
    os.mkfifo(path)
    with open(path) as prompts:  # HANGS: fifo
        return prompts.read()


def ask_reward_server() -> bytes:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"score this\n")
    return client.recv(4096)  # HANGS: socket


def read_control_pipe() -> bytes:
    reading, _writing = os.pipe()
    return os.read(reading, 1)  # HANGS: pipe


def run_evaluation_script() -> None:
    subprocess.run(["sleep", "86400"], check=True)  # HANGS: subprocess


def confirm() -> str:
    return input()  # HANGS: input


def read_dead_disk() -> None:
    # A child of vfork() that does not exec: its parent waits in the kernel, uninterruptibly (state D).
    ctypes.CDLL(os.path.join(options.scratch, "libdisk.so")).read_dead_disk()  # HANGS: disk


def save_checkpoint() -> None:
    path = os.path.join(options.scratch, "checkpoint.pt")
    os.mkfifo(path)
    disk = os.open(path, os.O_RDWR)  # takes 64 KB and no more, as a full or dead disk does
    with open(disk, "wb") as file:
        torch.save({"buffer": torch.zeros(1 << 20)}, file)  # HANGS: checkpoint


def report() -> None:
    _reading, full = os.pipe()  # like `torchrun ... | less` without scrolling
    os.dup2(full, 1)
    print("metric " * 50_000, flush=True)  # HANGS: print


def compact_cache() -> None:
    time.sleep(86_400)  # HANGS: child


def run_in_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=compact_cache)
    child.start()
    child.join()


CALLS = {
    "print": report,
    "child": run_in_child,
    "asleep": wait_for_licence,
    "fifo": read_new_prompts,
    "socket": ask_reward_server,
    "pipe": read_control_pipe,
    "subprocess": run_evaluation_script,
    "input": confirm,
    "disk": read_dead_disk,
    "checkpoint": save_checkpoint,
}

if __name__ == "__main__":
    train_until(options, CALLS)
