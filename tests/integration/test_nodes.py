"""Several nodes, whose supervisors do not talk: none ends a job for what it does not see."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import Job
from nodes import APART, TwoNodes

pytestmark = pytest.mark.torch
QUICK = ["--stall-timeout=3", "--max-stall=120"]


def trained(job: Job) -> int:
    return sum(line.endswith(" trained") for line in job.stdout.splitlines())


def test_a_healthy_job_whose_rank_0_evaluates_is_left_alone(tmp_path: Path) -> None:
    """Rank 2, on the other node, polls for a file that rank 0 writes at the end."""
    words = [APART, "--how=evaluates", "--seconds=120", "--poller=2", "--steps=20"]
    with TwoNodes(tmp_path, QUICK, words, ranks=(1, 2), over="file") as nodes:
        with_0, other = nodes.with_rank(0)
        other.until(lambda: "it may be waiting for another node" in other.stderr, "a closer look")
        other.until(lambda: "bundle: " in other.stderr, "its evidence")
        (tmp_path / "enough").touch()
        results = [job.wait() for job in (with_0, other)]
    said = [result.said for result in results]
    assert [result.code for result in results] == [0, 0], said
    assert sum(map(trained, nodes.jobs)) == 3
    assert all("of 3; the others are on other nodes" in text and "store_type=file" in text for text in said)
    assert "progress resumed" in said[1]
    for result in results:
        assert all(b.verdict["outcome"] == "dump" and not b.verdict["culprits"] for b in result.bundles), said
        assert len(result.bundles) <= 1 and not any(bundle.problems() for bundle in result.bundles)
    assert len(results[1].bundles) == 1, "the evidence is taken once, while it is there"


def test_the_node_whose_own_rank_hangs_ends_the_job_and_the_other_says_so(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, QUICK, [APART, "--how=asleep", "--culprit=1"], ranks=(1, 2), over="file") as nodes:
        lonely, pair = nodes.jobs  # rank 1 is one of the pair, whichever node came first
        hung, lost = pair.wait(), lonely.wait()
    assert hung.code == 124, hung.stderr
    assert (hung.verdict["outcome"], hung.verdict["cause"]) == ("hang", "stuck-in-user-code")
    assert [culprit["rank"] for culprit in hung.verdict["culprits"]] == [1]
    assert lost.code == 1, lost.stderr
    told = lost.bundles[-1].verdict
    assert (told["outcome"], told["culprits"]) == ("crash", []), lost.stderr
    assert "on another node, ended first" in told["summary"] and "may have ended a hang" in told["summary"]
    assert not hung.leftovers and not lost.leftovers


# --- runnable is alive ------------------------------------------------------------------------------------------------


def feed(job: Job, scratch: Path, *, after_s: float = 0.0) -> None:
    """Ends what keeps rank 0 of ``apart.py --how=starved`` from its core, once it has been noticed, or ``after_s``."""
    starving = scratch / "starving"
    job.until(lambda: starving.exists() and starving.read_text(), "a rank that would compute")
    enough_s = job.seconds + after_s
    job.until(lambda: job.seconds > enough_s if after_s else "no step for" in job.stderr, "some time")
    for pid in starving.read_text().split():
        with suppress(ProcessLookupError):  # the job was ended
            os.kill(int(pid), signal.SIGKILL)


def test_a_rank_that_gets_no_core_is_left_alone(tmp_path: Path) -> None:
    words = ["--stall-timeout=3", "--max-stall=600", "--nproc-per-node=2", APART, "--how=starved", "--steps=8"]
    with Job([*words, f"--scratch={tmp_path}"], tmp_path) as job:
        feed(job, tmp_path)
        result = job.wait()
    assert result.code == 0, result.stderr
    assert (trained(job), result.bundles) == (2, ())
    assert "something computes, writes or serves" in result.said
