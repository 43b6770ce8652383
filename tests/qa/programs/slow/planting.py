"""When the planted rank becomes slow, and when a program ends. It stands for no part of a real training.

A program asks ``more`` before each step. Rank 0 logs its steps (``steps.txt``), from which the costs are measured, and
decides on the last one; the planted rank writes the step and the time of the onset (``onset.json``).
"""

import argparse
import json
import os
import sys
import time

import torch.distributed

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
AHEAD = 20  # steps; no rank is so far ahead of rank 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    found.add_argument("--scratch", default=".")
    found.add_argument("--how", default="", help="what is slow, or what a healthy job does")
    found.add_argument("--slow-rank", type=int, default=-1)
    found.add_argument("--extra", type=float, default=0.0, help="seconds that the planted rank loses in each step")
    found.add_argument("--onset", type=float, default=0.0, help="seconds from the first step to the onset")
    found.add_argument("--seconds", type=float, default=20.0, help="from the first step to the end")
    return found


class Plant:
    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.active = False
        self._begin_s = 0.0
        self._last = sys.maxsize
        self._log = open(self._path("steps.txt"), "w", buffering=1) if rank == 0 else None

    def _path(self, name: str) -> str:
        return os.path.join(self.options.scratch, name)

    @property
    def seconds(self) -> float:
        """Seconds since the first step."""
        return time.monotonic() - self._begin_s if self._begin_s else 0.0

    @property
    def extra_s(self) -> float:
        return self.options.extra if self.active else 0.0

    def hits(self, how: str) -> bool:
        """Returns whether this rank is slow now, in this way."""
        return self.active and self.options.how == how

    def more(self, step: int) -> bool:
        """Returns whether to make the step, the same on all ranks. The first step is 1."""
        self._begin_s = self._begin_s or time.monotonic()
        if self._log is not None:
            self._log.write(f"{step} {time.time():.3f}\n")
        self._begin(step)
        return step <= self._end(step)

    def _begin(self, step: int) -> None:
        if self.active or self.rank != self.options.slow_rank or self.seconds < self.options.onset:
            return
        self.active = True
        with open(self._path("onset.new"), "w") as file:
            json.dump({"step": step, "time": time.time()}, file)
        os.replace(self._path("onset.new"), self._path("onset.json"))

    def _end(self, step: int) -> int:
        end = self._path("end.txt")
        if self.rank == 0 and self._last == sys.maxsize and self.seconds > self.options.seconds:
            self._last = step + AHEAD
            with open(end + ".new", "w") as file:
                file.write(str(self._last))
            os.replace(end + ".new", end)
        if self._last == sys.maxsize and os.path.exists(end):
            with open(end) as file:
                self._last = int(file.read())
        return self._last


def finish() -> None:
    """Ends the process once all ranks are here. Freeing DDP after its group can hang in gloo."""
    torch.distributed.barrier()
    sys.stdout.flush()
    time.sleep(1.0)
    os._exit(0)
