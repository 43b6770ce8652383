"""A rank that ends, or does not come, in one of many ways. The job leaves a log under any launcher."""

import ctypes
import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

how, culprit = sys.argv[1], int(sys.argv[2])


def fail() -> None:
    if how == "raises":
        raise ValueError("sample 17 is truncated")
    if how == "chain":
        try:
            {}["label"]
        except KeyError as error:
            raise RuntimeError("no label") from error
    if how == "assertion":
        assert torch.zeros(1).item() == 1, "loss is not 1"
    if how == "shapes":
        torch.ones(3) @ torch.ones(4)
    if how == "file":
        open("/no/such/file")  # noqa: SIM115
    if how == "memory":
        raise MemoryError
    if how == "exits":
        sys.exit(3)
    if how == "leaves":
        os._exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        ctypes.string_at(0)
    if how == "aborts":
        os.abort()
    if how == "asleep":
        time.sleep(20)
    if how == "thread":
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(20)
    if how == "logged":
        import logging

        try:
            raise OSError("retrying the upload")
        except OSError:
            logging.exception("upload")
        time.sleep(20)
    if how == "worker":
        from torch.utils.data import DataLoader

        list(DataLoader(Samples(), num_workers=1))


class Samples:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise KeyError("missing label")
        return index


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
    rank = dist.get_rank()
    for step in range(6):
        at_fault = step == 4 and (rank == culprit or culprit < 0)
        if at_fault:
            fail()
        if at_fault and how == "other-call":
            dist.broadcast(torch.ones(4), src=0)
        elif at_fault and how == "other-size":
            dist.all_reduce(torch.ones(1 << 20))
        elif not (at_fault and how == "skips"):
            dist.all_reduce(torch.ones(1 << (19 if how == "other-size" else 2)))
        print("step", step, flush=True)
    dist.destroy_process_group()


main()
