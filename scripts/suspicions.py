"""How often a repeat makes innocent hardware suspect, and how soon a broken GPU or node is: random histories.

python scripts/suspicions.py --count 10000 --json out.json

A history is 2 to 10 incidents of causes that hardware could be behind. In the first rows the script is at fault each
time; in the others a GPU or a node is, for a share of the incidents. Each incident is judged as a run judges it, with
those before it. ``suspected``: histories in which innocent hardware (for the first rows, any) was called suspect at any
time, ``firmly``: not only in the weaker words, "may be". ``found``: histories that called the broken unit suspect,
``after 2``, ``after 3``: of its own incidents at most.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from safelaunch.blame.repeats import repeats
from safelaunch.model import BlamedRank, Incident, Unit

LINES = (41, 57, 60, 112, 130, 177)  # of a script; the first ones are met most often
WEIGHTS = (6, 3, 2, 1, 1, 1)
PARTS = 20
ROW = "{:<66}{:>11}{:>9}{:>8}{:>9}{:>9}"


@dataclass(frozen=True)
class Cluster:
    """``hosts`` nodes of ``gpus`` GPUs. A job has them all, with the ranks in the order of the hosts and GPUs.

    ``anew``: in an order of its own each time, as a scheduler or a lease gives them.
    """

    hosts: int
    gpus: int = 8
    anew: bool = False

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus

    def order(self, random: Random) -> list[int]:
        """Rank → GPU, numbered over all hosts; the GPUs of a host stay together."""
        hosts, gpus = list(range(self.hosts)), list(range(self.gpus))
        if self.anew:
            random.shuffle(hosts)
            random.shuffle(gpus)
        return [host * self.gpus + gpu for host in hosts for gpu in gpus]


BOX, CLUSTER = Cluster(1), Cluster(64)
MOVED_BOX, MOVED_CLUSTER = Cluster(1, anew=True), Cluster(64, anew=True)


@dataclass(frozen=True)
class Event:
    """Whom a verdict blames. ``rank`` None: the node of rank ``of_node`` as a whole."""

    rank: int | None
    line: int = 0
    of_node: int = 0
    cause: str = "gpu-kernel"


Bug = Callable[[Cluster, Random], Iterator[Event]]


def a_line(random: Random) -> int:
    return random.choices(LINES, WEIGHTS)[0]


def one_line_of_rank_0(cluster: Cluster, random: Random) -> Iterator[Event]:
    while True:
        yield Event(0, 41)


def lines_of_rank_0(cluster: Cluster, random: Random) -> Iterator[Event]:
    while True:
        yield Event(0, a_line(random))


def one_line_of_any_rank(cluster: Cluster, random: Random) -> Iterator[Event]:
    while True:
        yield Event(random.randrange(cluster.ranks), 41)


def lines_of_any_rank(cluster: Cluster, random: Random) -> Iterator[Event]:
    while True:
        yield Event(random.randrange(cluster.ranks), a_line(random))


def lines_with_their_ranks(cluster: Cluster, random: Random) -> Iterator[Event]:
    """Each bug belongs to a line and a rank, half of them to rank 0, which logs and saves."""
    bugs = {line: random.choice((0, random.randrange(cluster.ranks))) for line in LINES}
    while True:
        line = a_line(random)
        yield Event(bugs[line], line)


def crashes_of(bug: Bug, cluster: Cluster, random: Random) -> Iterator[Event]:
    for event in bug(cluster, random):
        yield Event(event.rank, event.line, cause="rank-killed")


def node_of_rank_0(cluster: Cluster, random: Random) -> Iterator[Event]:
    """Rank 0 gathers the state of all, until its node has no memory left."""
    while True:
        yield Event(None, of_node=0, cause="node-lost")


def any_node(cluster: Cluster, random: Random) -> Iterator[Event]:
    while True:
        yield Event(None, of_node=random.randrange(cluster.ranks), cause="node-lost")


@dataclass(frozen=True)
class Case:
    """``bad``: the broken unit, if any, whose fault ``share`` of the incidents are; the others are ``bug``'s."""

    name: str
    cluster: Cluster
    bug: Bug
    bad: Unit | None = None
    share: float = 1.0


CASES = (
    Case("8 GPUs: one line of rank 0", BOX, one_line_of_rank_0),
    Case("8 GPUs: one line, any rank", BOX, one_line_of_any_rank),
    Case("8 GPUs: 6 lines, any rank", BOX, lines_of_any_rank),
    Case("8 GPUs: 6 lines, any rank, GPUs leased anew", MOVED_BOX, lines_of_any_rank),
    Case("8 GPUs: 6 lines, each of one rank, half of rank 0", BOX, lines_with_their_ranks),
    Case("8 GPUs: 6 lines of rank 0", BOX, lines_of_rank_0),
    Case("8 GPUs: 6 lines of rank 0, GPUs leased anew", MOVED_BOX, lines_of_rank_0),
    Case("64 nodes: one line of any rank stops it on its GPU", CLUSTER, one_line_of_any_rank),
    Case("64 nodes: 6 lines of any rank stop it on its GPU", CLUSTER, lines_of_any_rank),
    Case("64 nodes: 6 lines, each of one rank, half of rank 0", CLUSTER, lines_with_their_ranks),
    Case("64 nodes: 6 lines of any rank, SIGSEGV", CLUSTER, partial(crashes_of, lines_of_any_rank)),
    Case("64 nodes: 6 lines of rank 0, SIGSEGV", CLUSTER, partial(crashes_of, lines_of_rank_0)),
    Case("64 nodes: any node is lost", CLUSTER, any_node),
    Case("64 nodes: rank 0's node is lost", CLUSTER, node_of_rank_0),
    Case("64 nodes: rank 0's node is lost, nodes allocated anew", MOVED_CLUSTER, node_of_rank_0),
    Case("8 GPUs: a GPU at 6 lines", BOX, lines_of_any_rank, "gpu"),
    Case("8 GPUs: a GPU at 6 lines, GPUs leased anew", MOVED_BOX, lines_of_any_rank, "gpu"),
    Case("8 GPUs: a GPU for 2 of 3, the script's 6 lines else", BOX, lines_of_any_rank, "gpu", 2 / 3),
    Case("64 nodes: a GPU at 6 lines", CLUSTER, lines_of_any_rank, "gpu"),
    Case("64 nodes: a GPU for 2 of 3, the script's 6 lines else", CLUSTER, lines_of_any_rank, "gpu", 2 / 3),
    Case("64 nodes: a node that is lost", CLUSTER, any_node, "host"),
    Case("64 nodes: a node that is lost for half, any node else", CLUSTER, any_node, "host", 0.5),
    Case("64 nodes, allocated anew: a node that is lost for half", MOVED_CLUSTER, any_node, "host", 0.5),
)


@dataclass(frozen=True)
class Outcome:
    """Of one history. ``after``: of how many incidents of the broken unit it was first called suspect; 0: never."""

    suspected: bool
    firmly: bool
    after: int


def history(case: Case, seed: int) -> Outcome:
    random = Random(seed)
    cluster, script = case.cluster, case.bug(case.cluster, random)
    bad = random.randrange(cluster.ranks) if case.bad is not None else None  # a GPU, or one of the node
    incidents: list[Incident] = []
    theirs = after = 0
    suspected = firmly = False
    for number in range(random.randint(2, 10)):
        order = cluster.order(random)
        if bad is not None and random.random() < case.share:
            event = _of_the_unit(case, order.index(bad), random)
            theirs += 1
        else:
            event = next(script)
        incidents.append(_incident(event, number, cluster, order))
        for one in repeats(incidents):
            if incidents[-1] not in one.incidents:
                continue
            if bad is not None and one.name in (_gpu(bad), _host(cluster, bad)):
                after = after or theirs
            else:
                suspected, firmly = True, firmly or one.is_firm
    return Outcome(suspected, firmly, after)


def _of_the_unit(case: Case, rank: int, random: Random) -> Event:
    if case.bad == "gpu":
        return Event(rank, a_line(random))
    return Event(None, of_node=rank, cause="node-lost")


def _gpu(number: int) -> str:
    return f"GPU-{number}"


def _host(cluster: Cluster, gpu: int) -> str:
    return f"node-{gpu // cluster.gpus}"


def _incident(event: Event, number: int, cluster: Cluster, order: list[int]) -> Incident:
    rank = event.rank if event.rank is not None else event.of_node
    gpu = order[rank]
    host = _host(cluster, gpu)
    blamed = (BlamedRank(rank, host, _gpu(gpu), "/train.py", event.line),) if event.rank is not None else ()
    first = rank - rank % cluster.gpus
    units: tuple[Unit, ...] = ("gpu", "host") if event.cause == "gpu-kernel" else ("host",)
    return Incident(
        id=str(number),
        run_name="train",
        unix_s=float(number),
        outcome="hang" if event.cause == "gpu-kernel" else "crash",
        cause=event.cause,
        confidence="high",
        ranks=blamed,
        hosts=() if blamed else (host,),
        units=units,
        line_tells=event.cause != "gpu-kernel",
        of_gpus=cluster.ranks,
        of_hosts=cluster.hosts,
        host_ranks="" if blamed else f"{first}-{first + cluster.gpus - 1}",
    )


def part(case: Case, count: int, number: int) -> list[Outcome]:
    return [history(case, seed) for seed in range(number, count, PARTS)]


def table(count: int, jobs: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(jobs) as pool:
        for case in CASES:
            found = [one for several in pool.map(partial(part, case, count), range(PARTS)) for one in several]
            rows.append(_row(case, found))
            print(ROW.format(*map(_cell, rows[-1].values())), flush=True)
    return rows


def _row(case: Case, found: list[Outcome]) -> dict[str, object]:
    share = lambda told: round(sum(told) / len(found), 4)  # noqa: E731
    broken = case.bad is not None
    return {
        "case": case.name,
        "suspected": share(one.suspected for one in found),
        "firmly": share(one.firmly for one in found),
        "found": share(one.after > 0 for one in found) if broken else None,
        "after 2": share(0 < one.after <= 2 for one in found) if broken else None,
        "after 3": share(0 < one.after <= 3 for one in found) if broken else None,
    }


def _cell(value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) else str(value if value is not None else "-")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--count", type=int, default=10_000, help="histories of each case (10000)")
    words.add_argument("--jobs", type=int, default=2, help="processes (2)")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    chosen = words.parse_args()
    print(ROW.format("case", "suspected", "firmly", "found", "after 2", "after 3"))
    rows = table(chosen.count, chosen.jobs)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
