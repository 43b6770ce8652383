"""Nodes without a store of torchrun's: the supervisor on the named host starts one, and all meet there."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Literal

import pytest

from safelaunch.supervise.cluster.store_host import PROGRAM
from tests.support.clusters import TOGETHER, said_the_same, training, whole_and_half
from tests.support.nodes import APART, TASK, TwoNodes, free_port

pytestmark = pytest.mark.torch
STARTED = "started a store"


def quick(port: int) -> list[str]:
    return ["--stall-timeout=3", "--max-stall=120", f"--cluster-store=127.0.0.1:{port}"]


def stores() -> dict[int, list[str]]:
    """The helpers of all jobs here, with their command lines."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(PROGRAM) in words:
                found[int(entry.name)] = [os.fsdecode(word) for word in words]
    return found


def met(nodes: TwoNodes) -> None:
    """Waits until the nodes have met: the store's helper imports torch, which may take long; then one misbehaves."""
    for job in nodes.jobs:
        job.until(lambda job=job: TOGETHER in job.stderr, "the nodes to meet")  # type: ignore[misc]
    (nodes.scratch / "met").touch()


@pytest.mark.nightly  # as in test_cluster, and what failed elsewhere is read from the same store below
@pytest.mark.parametrize(("over", "ranks"), [("exec", (2, 2)), ("task", (1, 1))])
def test_a_hang_has_one_verdict(tmp_path: Path, over: Literal["exec", "task"], ranks: tuple[int, int]) -> None:
    culprit = sum(ranks) - 1
    program = APART if over == "exec" else TASK
    script: list[str | Path] = [program, "--how=asleep", f"--culprit={culprit}", f"--once={tmp_path}/met"]
    with TwoNodes(tmp_path, quick(free_port()), script, over=over, ranks=ranks) as nodes:
        met(nodes)
        results = [job.wait() for job in nodes.jobs]
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    assert sum(STARTED in result.said for result in results) == 1, [result.said for result in results]
    whole, half = whole_and_half(results)
    verdict = said_the_same((whole, half))
    assert [one["rank"] for one in verdict["culprits"]] == [culprit], verdict["summary"]
    assert {path.name for path in (whole.path / "ranks").iterdir()} == {str(rank) for rank in range(sum(ranks))}
    assert not any(result.leftovers for result in results)


@pytest.mark.nightly
def test_a_hang_of_nodes_that_meet_in_etcd_has_one_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("etcd", reason="takes python-etcd, as torchrun does")
    binary = shutil.which("etcd") or pytest.skip("there is no etcd server")
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", binary)
    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer

    server = EtcdServer()
    server.start(timeout=60)
    try:
        script = [APART, "--how=asleep", "--culprit=3", f"--once={tmp_path}/met"]
        endpoint = server.get_endpoint()
        with TwoNodes(tmp_path, quick(free_port()), script, over="etcd", endpoint=endpoint) as nodes:
            met(nodes)
            results = [job.wait() for job in nodes.jobs]
    finally:
        server.stop()
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    verdict = said_the_same(whole_and_half(results))
    assert [one["rank"] for one in verdict["culprits"]] == [3], verdict["summary"]
    assert not any(result.leftovers for result in results)


@pytest.mark.nightly
def test_the_store_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = [APART, "--how=evaluates", "--seconds=0"]
    with TwoNodes(tmp_path, quick(free_port()), script, over="exec") as nodes:
        training(nodes)
        host = next(job for job in nodes.jobs if STARTED in job.stderr)
        other = next(job for job in nodes.jobs if job is not host)
        host.until(lambda: len(set(stores()) & set(host.pids())) == 1, "the store")
        mine = set(stores()) & set(host.pids())
        host.process.send_signal(signal.SIGKILL)
        host.until(lambda: not mine & set(stores()), "the store to end")
        result = other.wait()
    assert result.code not in (0, 124), result.stderr
    assert result.verdict["culprits"] == [], result.said
    assert any(words in result.said for words in ("no longer be reached", "no longer respond", "lost contact")), (
        result.said
    )


@pytest.mark.nightly
def test_what_failed_elsewhere_is_read_before_the_store_goes(tmp_path: Path) -> None:
    script = [APART, "--how=evaluates", "--seconds=0"]
    with TwoNodes(tmp_path, quick(free_port()), script, over="exec") as nodes:
        training(nodes)
        host = next(job for job in nodes.jobs if STARTED in job.stderr)
        other = next(job for job in nodes.jobs if job is not host)
        rank, pid = next(iter(host.ranks().items()))
        os.kill(pid, signal.SIGKILL)
        results = [host.wait(), other.wait()]
    assert [one["rank"] for one in results[0].verdict["culprits"]] == [rank], results[0].said
    named = [one["rank"] for one in results[1].verdict["culprits"]]
    assert named == [rank] or f"rank {rank} on" in results[1].said, results[1].said
