"""A shorter form of ``scripts/qa/soak.py``: under ``auto``, no healthy job is ended and no freeze is missed."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.qa import soak
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

HEALTHY = ("rank 0 saves",)  # the soak runs them all
FROZEN = ("evaluating, lock, busy thread",)
AT_ONCE = 3


def test_healthy_jobs_continue_and_frozen_jobs_are_found(tmp_path: Path) -> None:
    """Three at a time, so that they also disturb each other."""
    healthy = [case for case in soak.HEALTHY if case.name in HEALTHY]
    frozen = [case for case in soak.FROZEN if case.name in FROZEN]

    def run(case: soak.Healthy | soak.Frozen) -> list[str]:
        scratch = tmp_path / case.name.replace(" ", "-").replace(",", "")
        scratch.mkdir()
        if isinstance(case, soak.Healthy):
            return soak.run_healthy(case, scratch)
        return soak.run_frozen(case, scratch)[0]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = dict(zip([case.name for case in (*healthy, *frozen)], pool.map(run, [*healthy, *frozen]), strict=True))
    assert wrong == {name: [] for name in (*HEALTHY, *FROZEN)}


@pytest.mark.nightly
def test_a_job_without_a_step_is_watched_by_its_collectives(tmp_path: Path) -> None:
    """--stall-timeout alone: the time before the first step, which never comes, is half an hour by default."""
    mine = ["--how=collectives", "--freeze=sleep", "--after=70", "--length=0.1", "--culprit=1", f"--scratch={tmp_path}"]
    with Job(["--stall-timeout=3", "--nproc-per-node=2", soak.SCRIPT, *mine], tmp_path) as job:
        result = job.wait()
    assert result.code == 124, result.stderr
    assert (result.verdict["cause"], [c["rank"] for c in result.verdict["culprits"]]) == ("stuck-in-user-code", [1])
    watch = result.bundle.json("manifest.json")["watch"]
    assert watch["threshold_s"] == 3 and "so far at least one collective every" in watch["why"]


@pytest.mark.nightly
def test_a_server_without_clients_is_not_ended(tmp_path: Path) -> None:
    with Job(
        ["--stall-floor=0.5", "--nproc-per-node=2", PROGRAMS / "server.py", "--after=120", f"--scratch={tmp_path}"],
        tmp_path,
    ) as job:
        job.until(lambda: "no proof of a hang" in job.stderr, "word of the wait")
        url = f"http://127.0.0.1:{(tmp_path / 'port').read_text()}/"
        assert urllib.request.urlopen(url, timeout=30).status == 200
        result = job.wait()
    assert (result.code, result.leftovers) == (0, ()), result.stderr
    assert {bundle.verdict["outcome"] for bundle in result.bundles} <= {"suspect"}


@pytest.mark.nightly
def test_the_evidence_is_taken_before_the_process_groups_time_out(tmp_path: Path) -> None:
    """Tests a timeout of 36 s, for which the default floor of 60 s would come too late.

    The script might handle what gloo then raises, so torch ends the job, and the verdict is on the hang.
    """
    mine = ["--how=steady", "--freeze=sleep", "--after=60", "--culprit=1", "--timeout=36", f"--scratch={tmp_path}"]
    with Job(["--nproc-per-node=2", soak.SCRIPT, *mine], tmp_path) as job:
        result = job.wait()
    assert result.code == 1, result.stderr
    first, last = result.bundles
    assert [bundle.verdict["outcome"] for bundle in (first, last)] == ["suspect", "hang"], "a sleep is no proof"
    assert (last.verdict["cause"], [c["rank"] for c in last.verdict["culprits"]]) == ("stuck-in-user-code", [1])
    watch = first.json("manifest.json")["watch"]
    assert watch["threshold_s"] == pytest.approx(0.7 * 36)
    assert watch["why"] == "the timeout of the default process group"
