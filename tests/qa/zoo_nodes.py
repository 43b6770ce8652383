"""The hang zoo on several nodes, each in a separate network namespace: the verdict must be the same as on one node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.qa import zoo
from tests.support import netns
from tests.support.jobs import Job, Result

PORT = 29500
PATIENCE_S = 150.0
ENV = {"GLOO_SOCKET_IFNAME": netns.DEVICE}


def run(specimen: zoo.Specimen, culprit: int, scratch: Path, *, ranks: int, nodes: int) -> list[Result]:
    """Runs the specimen with its ranks spread over the nodes, the first ones on node 0. Returns each node's result."""
    zoo.prepare(specimen, scratch)
    with ExitStack() as stack:
        network = stack.enter_context(netns.Network(nodes, scratch))
        jobs = []
        for number, mine in enumerate(shares(ranks, nodes)):
            place = scratch / netns.host(number)
            place.mkdir()
            meet = [f"--nnodes={nodes}", *netns.meeting(number, PORT, static=True)]
            words = [*zoo.options_of(specimen), *meet, f"--nproc-per-node={mine}"]
            words += zoo.script_of(specimen, culprit, scratch)
            command = [*network.enter(number), sys.executable, "-m", "safelaunch"]
            jobs.append(stack.enter_context(Job(words, place, env=ENV, interpreter=command)))
        return [job.wait(PATIENCE_S) for job in jobs]


def shares(ranks: int, nodes: int) -> list[int]:
    """How many ranks each node has: ``shares(3, 2) == [2, 1]``."""
    return [ranks // nodes + (number < ranks % nodes) for number in range(nodes)]


def judge(specimen: zoo.Specimen, culprit: int, results: Sequence[Result], *, ranks: int) -> list[str]:
    """Returns everything that is wrong: a node whose verdict, exit code or bundle is not as it should be."""
    wrong = []
    whole = [one for one in results if len(one.bundles) == 1 and one.verdict["bundle"]["whole"]]
    if len(whole) != 1:
        wrong.append(f"{len(whole)} bundles hold all nodes")
    for one in whole:
        wrong += zoo.judge(specimen, culprit, one, ranks=ranks)
    for number, one in enumerate(results):
        host = netns.host(number)
        if one.code != zoo.EXIT_HUNG:
            wrong.append(f"exit code {one.code} on {host}")
        wrong += [f"left behind on {host}: {what}" for what in one.leftovers]
        if len(one.bundles) != 1:
            wrong.append(f"{len(one.bundles)} bundles on {host}")
        elif whole and _common(one) != _common(whole[0]):
            wrong.append(f"{host} has another verdict: {one.verdict['summary']}")
    return wrong


def _common(result: Result) -> dict[str, object]:
    return {name: value for name, value in result.verdict.items() if name != "bundle"}
