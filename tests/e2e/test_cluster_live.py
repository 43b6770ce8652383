"""``status``, ``dump`` and ``record`` of a job on several nodes, asked on any of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import asked, asking
from tests.support.clusters import QUICK
from tests.support.jobs import Bundle, Job
from tests.support.nodes import APART, TwoNodes

pytestmark = pytest.mark.torch


def nodes_by(job: Job) -> list[dict[str, Any]]:
    """The nodes, as ``status`` on this one's lists them."""
    done = asked(job, "status", "--json")
    assert done.returncode == 0, done.stderr
    mine = [run for run in json.loads(done.stdout) if run["supervisor_pid"] == job.process.pid]
    return mine[0].get("nodes", []) if mine else []


def is_sampled(job: Job) -> bool:
    """Whether py-spy samples this node's ranks."""
    return bool(list(job.runtime.glob("**/record-*")))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rank", [pytest.param(0, id="with rank 0"), pytest.param(2, id="the other", marks=pytest.mark.nightly)]
)
def test_status_dump_and_record_have_every_node_and_the_job_goes_on(tmp_path: Path, rank: int) -> None:
    stop = ["--steps=1000000"]
    with TwoNodes(tmp_path, QUICK, [APART, "--how=asleep", "--culprit=-1", *stop]) as nodes:
        job, other = nodes.with_rank(rank)
        for one in (job, other):
            one.until(lambda one=one: "together with" in one.stderr, "the nodes to meet")  # type: ignore[misc]
        for one in (job, other):
            one.until(lambda one=one: all(node["step"] for node in nodes_by(one)), "steps of all")  # type: ignore[misc]
            found = nodes_by(one)
            assert [node["ranks"] for node in found] == ["0-1", "2-3"]
            assert {(node["state"], node["doing"]) for node in found} == {("heard", "watching")}
            here = found[0] if 0 in one.ranks() else found[1]
            assert [node["here"] for node in found] == [node is here for node in found]
            assert sum(node["leads"] for node in found) == 1
        said = asked(other, "status", str(other.process.pid)).stdout
        assert "this node" in said and "leads" in said and "2-3" in said, said
        done = asked(job, "dump", str(job.process.pid), patience_s=150.0)
        assert done.returncode == 0, done.stderr
        bundle = Bundle(Path(done.stdout.strip()))
        assert {path.name for path in (bundle.path / "ranks").iterdir()} == {"0", "1", "2", "3"}
        assert bundle.problems() == []
        assert bundle.verdict["outcome"] == "dump"
        assert bundle.verdict["bundle"]["whole"] is True
        assert other.bundles() == ()
        with asking(other, "record", str(other.process.pid), "--duration", "300", "--json") as cut:
            job.until(lambda: is_sampled(job) and is_sampled(other), "both nodes to be sampled")
            done = asked(job, "dump", str(job.process.pid), patience_s=150.0)
            assert done.returncode == 0, done.stderr
            bundle = Bundle(Path(done.stdout.strip()))
            assert {path.name for path in (bundle.path / "ranks").iterdir()} == {"0", "1", "2", "3"}, "no wait of 300 s"
            said = cut.communicate(timeout=60.0)[1]
        assert cut.returncode == 1 and "a bundle of this run was requested" in said, said
        recorded = asked(job, "record", str(job.process.pid), "--duration", "2", "--json", patience_s=150.0)
        assert recorded.returncode == 0, recorded.stderr
        document = json.loads(recorded.stdout)
        assert [one["rank"] for one in document["ranks"]] == [0, 1, 2, 3] and document["missing"] == []
        before = max(one["step"] for one in nodes_by(job))
        job.until(lambda: min(one["step"] for one in nodes_by(job)) > before, "more steps")
        assert [one.process.poll() for one in nodes.jobs] == [None, None]

        leads = next(node["leads"] for node in nodes_by(job) if node["here"])
        leader, follower = (job, other) if leads else (other, job)
        os.kill(follower.process.pid, signal.SIGSTOP)
        leader.until(
            lambda: [node["state"] for node in nodes_by(leader) if not node["here"]] == ["silent"],
            "the silence to be noticed",
            60.0,
        )
        os.kill(follower.process.pid, signal.SIGCONT)
