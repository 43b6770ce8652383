"""A rendezvous that not all nodes come to: who has not come is in a bundle, unless somebody stops the job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.nodes import APART, TwoNodes

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def test_torchrun_gives_up_and_the_bundle_says_who_has_not_come(tmp_path: Path) -> None:
    own = ["--rdzv-conf=join_timeout=12,timeout=12"]
    with TwoNodes(tmp_path, own, [APART], over="c10d", late=True) as nodes:
        result = nodes.jobs[0].wait()
    assert result.code == 1, result.stderr
    verdict = result.verdict
    assert result.bundle.problems() == []
    assert (verdict["outcome"], verdict["cause"], verdict["culprits"]) == ("crash", "init-not-joined", [])
    assert verdict["summary"].startswith("1 of 2 nodes joined torchrun's rendezvous"), verdict["summary"]
    assert result.bundle.json("rendezvous.json")["error"].startswith("Rendezvous")
    assert not result.leftovers


@pytest.mark.nightly
def test_a_user_who_stops_the_wait_gets_no_bundle(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, [], [APART], late=True) as nodes:
        job = nodes.jobs[0]
        job.until(lambda: list(job.runtime.glob("safelaunch/*/agent")), "the agent")
        job.process.send_signal(signal.SIGINT)
        result = job.wait()
    assert result.code != 0
    assert (result.bundles, result.leftovers) == ((), ())
