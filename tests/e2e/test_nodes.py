"""Several nodes, whose supervisors do not talk: none ends a job for what it does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.nodes import APART, TwoNodes, feed

pytestmark = pytest.mark.torch
QUICK = ["--stall-timeout=3", "--max-stall=120"]


def trained(job: Job) -> int:
    return sum(line.endswith(" trained") for line in job.stdout.splitlines())


def test_a_healthy_job_whose_rank_0_evaluates_is_left_alone(tmp_path: Path) -> None:
    """Rank 2, on the other node, polls for a file that rank 0 writes at the end."""
    words = [APART, "--how=evaluates", "--seconds=120", "--poller=2", "--steps=20"]
    with TwoNodes(tmp_path, QUICK, words, ranks=(1, 2), over="file") as nodes:
        with_0, other = nodes.with_rank(0)
        other.until(lambda: "the other nodes were not seen" in other.stderr, "a closer look")
        (tmp_path / "enough").touch()
        results = [job.wait() for job in (with_0, other)]
    said = [result.said for result in results]
    assert [result.code for result in results] == [0, 0], said
    assert sum(map(trained, nodes.jobs)) == 3
    assert all("of 3; the others are on other nodes" in text and "store_type=file" in text for text in said)
    assert "progress resumed" in said[1]
    assert [result.bundles for result in results] == [(), ()], said


@pytest.mark.nightly
def test_a_node_that_sees_its_own_ranks_alone_ends_a_hang_at_max_stall(tmp_path: Path) -> None:
    """What the ranks of the other node do is not seen: they may be what its own ones wait for."""
    own = ["--stall-timeout=3", "--max-stall=20"]
    with TwoNodes(tmp_path, own, [APART, "--how=asleep", "--culprit=1"], ranks=(1, 2), over="file") as nodes:
        results = [job.wait() for job in nodes.jobs]
    assert 124 in [result.code for result in results], [result.stderr for result in results]
    hung = next(result for result in results if result.code == 124)
    assert (hung.verdict["outcome"], hung.verdict["confidence"] != "high") == ("hang", True)
    assert "--max-stall has been reached" in hung.said
    assert not any(result.leftovers for result in results)


# --- runnable is alive ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_rank_that_gets_no_core_is_left_alone(tmp_path: Path) -> None:
    words = ["--stall-timeout=3", "--max-stall=600", "--nproc-per-node=2", APART, "--how=starved", "--steps=8"]
    with Job([*words, f"--scratch={tmp_path}"], tmp_path) as job:
        feed(job, tmp_path)
        result = job.wait()
    assert result.code == 0, result.stderr
    assert (trained(job), result.bundles) == (2, ())
    assert "the job is working" in result.said
