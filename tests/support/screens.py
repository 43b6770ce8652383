"""Runs that ``safelaunch status --watch`` might find, for its screen."""

from __future__ import annotations

from pathlib import Path

import msgspec

from safelaunch.cli.status_screen import screen
from safelaunch.job.process import ProcessId
from safelaunch.model import EarlyLook, Frame, Place
from safelaunch.supervise.control.discover import Run
from safelaunch.supervise.control.protocol import NodeStatus, RankStatus, RunStatus

NOW = 1_800_000_000.0
GIB = 1 << 30


def rank(number: int, step: int = 10_470, **known: object) -> RankStatus:
    plain = RankStatus(number, 4000 + number, "running", step, 37.7, 0.03, rss_bytes=3 * GIB + number * (GIB >> 8))
    return msgspec.structs.replace(plain, **known)


def run(pid: int, ranks: list[RankStatus], **known: object) -> Run:
    plain = RunStatus(
        run=f"r{pid}",
        name="pretrain",
        supervisor_pid=pid,
        cwd="/home/me",
        command=["train.py"],
        started_unix_s=NOW - 7500,
        attempt=0,
        world_size=len(ranks),
        watch="watching",
        threshold_s=60.0,
        threshold_why="auto: 60 s floor; 2.5 x its longest ordinary step (0.07 s) would be only 0.18 s",
        ranks=ranks,
        usual_step_s=0.05,
        history=[(ago, 10_470 - 38 * ago) for ago in range(170, -1, -10)],
    )
    return Run(Path(f"/tmp/s/r{pid}"), ProcessId(pid, 5), msgspec.structs.replace(plain, **known))


def healthy() -> tuple[Run, ...]:
    return (run(2402, [rank(0), rank(1, 10_469)]),)


def frozen(count: int) -> tuple[Run, ...]:
    """All wait for rank 3, which reads from something that does not answer."""
    ranks = [rank(number, 10_471 - (number == 3), steps_per_s=0.0, age_s=13.04) for number in range(count)]
    places = (Place(3, Frame("/home/me/data.py", 41, "load")),)
    others = f"ranks 0-2,4-{count - 1} wait in all_reduce at train.py:88"
    words = f"rank 3 is blocked in I/O at data.py:41 (load), while {others}"
    early = [EarlyLook(NOW - 6, 7.0, 0.05, "still", words, "blocking-io", places, said=True)]
    history = [(13 + ago, 10_471 - 20 * ago) for ago in range(150, -1, -10)]
    return (run(2402, ranks, early=early, history=history),)


def several(count: int) -> tuple[Run, ...]:
    runs = [run(3000 + number, [rank(0), rank(1)], name=f"sweep-{number}") for number in range(count)]
    lost = Run(Path("/tmp/s/r9"), ProcessId(9, 5), None, "gone: its supervisor was killed")
    return (*runs, *frozen(64), lost)


def nodes(count: int) -> tuple[Run, ...]:
    known = [NodeStatus(f"node{number}", f"{8 * number}-{8 * number + 7}", 10_470) for number in range(count)]
    known[0] = msgspec.structs.replace(known[0], leads=True, here=True)
    known[-2] = msgspec.structs.replace(known[-2], state="silent", step=None)
    ranks = [rank(number) for number in range(8)]
    return (run(2402, ranks, world_size=8 * count, nodes=known),)


def starting() -> tuple[Run, ...]:
    waiting = [RankStatus(number, 4000 + number, "starting", age_s=4.0, rss_bytes=GIB) for number in range(2)]
    return run(2402, waiting, usual_step_s=0.0, history=[]), run(2403, [], history=[], name="eval")


RUNS = {
    "healthy": healthy(),
    "frozen-64": frozen(64),
    "frozen-4096": frozen(4096),
    "several-12": several(12),
    "nodes-512": nodes(512),
    "starting": starting(),
    "none": (),
}
SIZES = ((60, 16), (80, 24), (120, 30))


def drawn(name: str, width: int, height: int) -> str:
    """The screen as text, with the style of each line that has one at its end."""
    lines = screen(RUNS[name], NOW, width, height)
    return "".join(
        f"{line.text.ljust(width)} | {line.style}".removesuffix(" | plain").rstrip() + "\n" for line in lines
    )
