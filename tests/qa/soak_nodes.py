"""The soak on several nodes: the same healthy and frozen jobs, each node in a separate network namespace.

Of three jobs in a row, one runs on nodes that are well, one where the clocks of node 1 are ten minutes ahead, and one
over a link to node 1 with a round trip of 0.2 s, which loses one frame in twenty.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tests.qa import soak
from tests.support import netns
from tests.support.jobs import Job, Result
from tests.support.paths import PROGRAMS

PORT = 29400
AHEAD_S = 600
SLOW = (0.1, 0.05)  # a link: seconds of delay each way, part of the frames that is lost
PATIENCE_S = 420.0
Trouble = Literal["", "clocks", "slow link"]
TROUBLES: tuple[Trouble, ...] = ("", "clocks", "slow link")


def trouble_of(number: int) -> Trouble:
    """Returns the trouble with the nodes of the case with this number."""
    return TROUBLES[number % len(TROUBLES)]


def run(
    case: soak.Healthy | soak.Frozen, scratch: Path, nodes: int, trouble: Trouble
) -> tuple[list[str], list[Result]]:
    """Runs the case. Returns what went wrong, and each node's result."""
    if trouble == "slow link":
        case = _shorter(case)
    ranks = -(-case.ranks // nodes)
    with ExitStack() as stack:
        slow = {1: SLOW} if trouble == "slow link" else None
        network = stack.enter_context(netns.Network(nodes, scratch, slow=slow))
        jobs = [stack.enter_context(_start(case, scratch, network, n, ranks, trouble)) for n in range(nodes)]
        if isinstance(case, soak.Healthy) and case.meanwhile is not None:
            case.meanwhile(jobs)
        if isinstance(case, soak.Frozen):
            soak.end_what_is_not_proved(case, jobs)
        results = [job.wait(PATIENCE_S) for job in jobs]
    if isinstance(case, soak.Healthy):
        return soak.wrong_with_healthy(case, results, ranks * nodes), results
    if case.busy and any(soak.WORKS in one.stderr for one in results):  # one node says it for all
        return [left for one in results for left in one.leftovers], results
    wrong = [
        f"{fault} on {netns.host(n)}" for n, one in enumerate(results) for fault in soak.wrong_with_frozen(case, one)
    ]
    verdicts = [{**one.verdict, "bundle": None} for one in results if len(one.bundles) == 1]
    wrong += ["the nodes have different verdicts"] if any(verdict != verdicts[0] for verdict in verdicts) else []
    return wrong, results


def _shorter(case: soak.Healthy | soak.Frozen) -> soak.Healthy | soak.Frozen:
    # A step over the slow link takes seconds. A rhythm is learned from 24 steps; before, the watch has patience.
    if isinstance(case, soak.Frozen):
        return replace(case, after=min(case.after, 41 if case.freeze == "loader" else 30))
    return replace(case, steps=min(case.steps, 52))


def _start(
    case: soak.Healthy | soak.Frozen, scratch: Path, network: netns.Network, number: int, ranks: int, trouble: Trouble
) -> Job:
    place = scratch / netns.host(number)
    place.mkdir()
    skewed = trouble == "clocks" and number == 1
    env: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": netns.DEVICE}
    env |= _clock(place) if skewed else {}
    own = case.own if isinstance(case, soak.Healthy) else (f"--stall-floor={soak.FLOOR_S}",)
    torchrun = [f"--nnodes={network.nodes}", *netns.meeting(number, PORT, static=trouble == "clocks")]
    words = [*own, *torchrun, f"--nproc-per-node={ranks}", soak.SCRIPT, *soak.script_of(case), f"--scratch={scratch}"]
    entering = network.enter(number, ahead_s=AHEAD_S if skewed else 0)
    return Job(words, place, env=env, interpreter=(*entering, sys.executable, "-m", "safelaunch"))


def _clock(place: Path) -> dict[str, str | None]:
    # The wall clock is ahead of the machine's.
    library, offset = place / "libclock.so", place / "offset"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, PROGRAMS / "libclock.c"], check=True)
    offset.write_bytes(struct.pack("q", AHEAD_S))
    return {"LD_PRELOAD": os.fspath(library), "CLOCK_OFFSET": os.fspath(offset)}
