"""Starts ranks from Python, by ``safelaunch.launch`` and torch's ``elastic_launch``, several times in one process.

    launches.py --bundle-dir=DIR SCENARIO [START METHOD]

Prints a line of JSON for each launch.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import safelaunch

BUNDLES = sys.argv[1].partition("=")[2]
SIGNS = Path("signs")


def begin():
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


def train(first, second):
    rank = begin()
    for _ in range(3):
        safelaunch.step()
        torch.distributed.barrier()
    return first + second + rank


def fail():
    rank = begin()
    if rank == 1:
        raise ValueError("no such sample")
    time.sleep(3600)  # in a collective, torch could report this rank in place of the other


def hang():
    rank = begin()
    for step in range(10_000):
        safelaunch.step()
        if step == 20 and rank == 1:
            time.sleep(3600)  # HANGS
        torch.distributed.barrier()
        time.sleep(0.01)


def stepless():
    """Marks no step and has no optimizer, like what a test of a collective calls."""
    rank = begin()
    if rank == 1:
        time.sleep(3600)  # NEVER COMES
    torch.distributed.barrier()


def leave():
    rank = begin()
    for step in range(10_000):
        safelaunch.step()
        if step == 20 and rank == 1:
            return "early"
        torch.distributed.barrier()
        time.sleep(0.01)


def outlives():
    """Returns, and leaves a thread that keeps the process of rank 1 from its end."""
    rank = begin()
    for _ in range(3):
        safelaunch.step()
        torch.distributed.barrier()
    if rank == 1:
        threading.Thread(target=time.sleep, args=(3600,), name="uploader").start()
    return rank


def steady():
    """Runs until the test says so."""
    rank = begin()
    go_on = torch.ones(1)
    while go_on.item():
        safelaunch.step()
        (SIGNS / f"stepped-{rank}").touch()
        go_on[0] = not (SIGNS / "enough").exists()
        torch.distributed.all_reduce(go_on, op=torch.distributed.ReduceOp.MIN)
        time.sleep(0.05)
    return rank


def config(method):
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="launches",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method=method,
    )


def told(name, launcher, *args):
    """Returns the outcome of a launch."""
    before = dict(os.environ)
    found = {"name": name, "pid": os.getpid()}
    try:
        found["results"] = launcher(*args)
    except safelaunch.HangError as error:
        found["verdict"], found["bundle"] = error.verdict.summary, os.fspath(error.bundle)
        found["culprits"] = [(one.rank, one.frame and one.frame.line) for one in error.verdict.culprits]
        found["cause"], found["said"] = error.verdict.cause, str(error)
    except ChildFailedError as error:
        failure = error.failures[1]
        last = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        found["failed"] = [error.name, sorted(error.failures), failure.exitcode, last]
    except BaseException as error:
        found["raised"] = type(error).__name__
    if isinstance(launcher, safelaunch.Launch):
        found["newest"] = launcher.bundle and os.fspath(launcher.bundle)
    found["changed"] = sorted(name for name, _ in set(os.environ.items()) ^ set(before.items()))
    print(json.dumps(found), flush=True)


def watched(function, method, **options):
    return safelaunch.launch(
        config(method), function, bundle_dir=BUNDLES, stall_timeout=2, **{"startup_timeout": 60, **options}
    )


def main():
    scenario, method = sys.argv[2], (sys.argv[3:] or ["fork"])[0]
    SIGNS.mkdir(exist_ok=True)
    if scenario == "several":
        told("results", watched(train, "fork"), 10, 20)
        told("plain", elastic_launch(config("fork"), fail))
        told("failed", watched(fail, "fork"))
        told("refused", watched(train, "fork", on_stall="explode"), 10, 20)
        told("hung", watched(hang, "fork"))
        told("stepless", watched(stepless, "fork", startup_timeout=None))
    else:
        told(scenario, watched(globals()[scenario], method))


if __name__ == "__main__":
    main()
