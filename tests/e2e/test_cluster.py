"""Several nodes whose supervisors talk: they look together, decide together, and write one verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.clusters import QUICK, TOGETHER, said_the_same, training, whole_and_half
from tests.support.nodes import APART, TwoNodes
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch
TRAINING = [APART, "--how=evaluates", "--seconds=0"]


@pytest.mark.nightly
def test_one_node_computes_and_the_other_waits_for_it(tmp_path: Path) -> None:
    words = [APART, "--how=evaluates", "--seconds=120", "--steps=20"]
    with TwoNodes(tmp_path, QUICK, words) as nodes:
        one, other = nodes.jobs
        one.until(lambda: "the job is working" in one.stderr + other.stderr, "a closer look")
        (tmp_path / "enough").touch()
        results = [job.wait() for job in nodes.jobs]
    said = [result.said for result in results]
    assert [result.code for result in results] == [0, 0], said
    assert all(TOGETHER in text for text in said), said
    assert not any("lost contact" in text for text in said), said
    assert [result.bundles for result in results] == [(), ()]


@pytest.mark.parametrize("over", ["c10d", pytest.param("static", marks=pytest.mark.nightly)])
def test_a_hang_has_one_verdict_on_all_nodes(tmp_path: Path, over: Literal["c10d", "static"]) -> None:
    with TwoNodes(tmp_path, QUICK, [APART, "--how=asleep", "--culprit=3"], over=over) as nodes:
        results = [job.wait() for job in nodes.jobs]
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    whole, half = whole_and_half(results)
    verdict = said_the_same((whole, half))
    assert (verdict["cause"], verdict["confidence"]) == ("stuck-in-user-code", "medium")
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [3]
    assert half.verdict["bundle"]["path"] == str(whole.path)
    assert whole.problems() == []
    assert {path.name for path in (whole.path / "ranks").iterdir()} == {"0", "1", "2", "3"}
    recorders = {path.parent.name for path in (whole.path / "ranks").glob("*/flight_recorder.pickle")}
    assert recorders == {"0", "1", "2", "3"}
    assert len([*(whole.path / "node").glob("*/resources.json")]) == 2, "one of each node, although their hosts are one"
    assert {tuple(node["ranks"]) for node in whole.json("nodes.json")} == {(0, 1), (2, 3)}
    assert not any(result.leftovers for result in results)
    again = diagnosed(whole.path)
    assert (again["cause"], again["culprits"]) == (verdict["cause"], verdict["culprits"])


def diagnosed(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "safelaunch", "diagnose", os.fspath(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.nightly
def test_a_supervisor_that_is_killed_is_told_of(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, QUICK, TRAINING) as nodes:
        left, killed = training(nodes)
        killed.process.kill()
        result = left.wait()
    assert result.code not in (0, 124), result.stderr
    assert "gone without reporting a failure" in result.said or "no longer be reached" in result.said, result.said
    assert (result.verdict["outcome"], result.verdict["culprits"]) == ("crash", []), result.said


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [pytest.param(0, id="with rank 0"), pytest.param(2, id="the other")])
def test_a_node_that_is_told_to_stop_accuses_nobody_anywhere(tmp_path: Path, rank: int) -> None:
    with TwoNodes(tmp_path, QUICK, TRAINING) as nodes:
        training(nodes)
        stopped, other = nodes.with_rank(rank)
        stopped.process.send_signal(signal.SIGTERM)
        results = [stopped.wait(), other.wait()]
    assert results[0].bundles == (), results[0].stderr
    assert all(result.code != 0 for result in results)
    assert not any(bundle.verdict["culprits"] for bundle in results[1].bundles), results[1].said


@pytest.mark.nightly  # the fault matrix for nodes kills a rank
def test_a_rank_that_is_killed_is_named_by_all_nodes_alike(tmp_path: Path) -> None:
    rank = 3
    with TwoNodes(tmp_path, QUICK, TRAINING) as nodes:
        training(nodes)
        failing, victims = nodes.with_rank(rank)
        os.kill(failing.ranks()[rank], signal.SIGKILL)
        results = [failing.wait(), victims.wait()]
    first, second = results[0].verdict, results[1].verdict
    assert (first["cause"], [culprit["rank"] for culprit in first["culprits"]]) == ("rank-killed", [rank])
    assert {**first, "bundle": 0} == {**second, "bundle": 0}, [result.stderr for result in results]
    wholes = [result.bundle for result in results if result.verdict.get("bundle", {}).get("whole")]
    assert all(whole.problems() == [] for whole in wholes)


@pytest.mark.nightly  # the fault matrix for nodes has more of it
@pytest.mark.parametrize("rank", [pytest.param(0, id="with rank 0"), pytest.param(2, id="the other")])
def test_a_node_whose_processes_are_all_killed_is_lost_or_nobody_is_named(tmp_path: Path, rank: int) -> None:
    """Where it hosts the store of torchrun's agents, its end looks as if it had ended in good order."""
    with TwoNodes(tmp_path, QUICK, TRAINING) as nodes:
        training(nodes)
        lost, left = nodes.with_rank(rank)
        doomed = [lost.process.pid, *lost.pids()]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first, so that nobody sees another one end
            for pid in doomed:
                os.kill(pid, number)
        result = left.wait()
    verdict = result.verdict
    named = (verdict["cause"], [node["ranks"] for node in verdict["nodes"]])
    ranks = "0-1" if rank == 0 else "2-3"
    # Either may host the store. Where torchrun on the other node fails of it, the host still answers.
    known = [("node-lost", [ranks]), ("rank-exited", []), ("launcher-stopped", [ranks])]
    assert named in known, result.stderr
    assert verdict["culprits"] == []
    assert "no longer be reached" in result.said or named[0] == "node-lost", result.said


@pytest.mark.nightly
def test_a_node_whose_ranks_are_all_stopped_is_named_as_a_node(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, QUICK, TRAINING) as nodes:
        training(nodes)
        behind, _ = nodes.with_rank(2)
        for pid in behind.ranks().values():
            os.kill(pid, signal.SIGSTOP)
        results = [job.wait() for job in nodes.jobs]
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    verdict = said_the_same(whole_and_half(results))
    assert (verdict["cause"], verdict["culprits"], verdict["victims"]) == ("node-behind", [], "0-1")
    assert [node["ranks"] for node in verdict["nodes"]] == ["2-3"]


@pytest.mark.nightly
def test_a_supervisor_that_is_stopped_costs_no_healthy_job(tmp_path: Path) -> None:
    """Its ranks are unknown while it is: rank 0, on its node, computes for longer than it takes to be silent."""
    words = [APART, "--how=evaluates", "--seconds=120", "--steps=10"]
    with TwoNodes(tmp_path, QUICK, words) as nodes:
        stopped, other = nodes.with_rank(0)
        other.until(lambda: TOGETHER in other.stderr, "the nodes to meet")
        stopped.until(lambda: (tmp_path / "evaluating").exists(), "the evaluation")
        os.kill(stopped.process.pid, signal.SIGSTOP)
        # The leader itself may be the one that is stopped: then the other takes over first.
        other.until(lambda: "judges alone" in other.stderr, "the silence to be noticed")
        os.kill(stopped.process.pid, signal.SIGCONT)
        (tmp_path / "enough").touch()
        results = [stopped.wait(), other.wait()]
    assert [result.code for result in results] == [0, 0], [result.stderr for result in results]
    for result in results:
        assert all(not bundle.verdict["culprits"] for bundle in result.bundles), result.said


# --- elastic jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_nodes_with_different_numbers_of_ranks(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, QUICK, [APART, "--how=asleep", "--culprit=2"], ranks=(1, 2)) as nodes:
        results = [job.wait() for job in nodes.jobs]
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    verdict = said_the_same(whole_and_half(results))
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [2]


@pytest.mark.nightly
def test_a_job_that_may_get_more_nodes_is_watched_by_the_one_that_has_come(tmp_path: Path) -> None:
    own = [*QUICK, "--rdzv-conf=last_call_timeout=1"]
    with TwoNodes(tmp_path, own, [APART, "--how=asleep", "--culprit=1"], nnodes="1:2", late=True) as nodes:
        result = nodes.jobs[0].wait()
    assert result.code == 124, result.stderr
    assert [culprit["rank"] for culprit in result.verdict["culprits"]] == [1]
    assert (result.verdict["confidence"], result.verdict["missing"]) == ("medium", [])


@pytest.mark.nightly  # another round of the rendezvous has a node that joins late
def test_a_node_that_joins_late_shares_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the store shared, torch gives nodes of a later round no MASTER_ADDR: plain torchrun fails as well.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    own = [*QUICK, "--rdzv-conf=last_call_timeout=1"]
    with TwoNodes(tmp_path, own, [APART, "--how=asleep", "--culprit=3"], nnodes="1:2", late=True) as nodes:
        first = nodes.jobs[0]
        first.until(lambda: len(first.ranks()) == 2, "the first round")
        second = nodes.start(1)
        results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [124, 124], [result.stderr for result in results]
    verdict = said_the_same(whole_and_half(results))
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [3]


@pytest.mark.nightly
def test_another_round_of_the_rendezvous_voids_an_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank hangs, and while the supervisor looks, a node joins: torchrun starts the rank anew, and it trains."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    own = ["--stall-timeout=5", "--max-stall=120", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1"]
    hang = tmp_path / "hang"
    words = [APART, "--how=asleep", f"--once={hang}", "--steps=40"]
    hang.touch()
    with TwoNodes(tmp_path, own, words, ranks=(1, 1), nnodes="1:2", late=True) as nodes:
        first = nodes.jobs[0]
        first.until(lambda: len(first.ranks()) == 1, "the first round")
        (hung,) = first.ranks().values()
        first.until(lambda: nodes.page().phase == "looking", "the incident")
        os.kill(first.process.pid, signal.SIGSTOP)
        hang.unlink()
        second = nodes.start(1)
        second.until(lambda: second.ranks() and [*first.ranks().values()] not in ([], [hung]), "the second round")
        os.kill(first.process.pid, signal.SIGCONT)
        results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [0, 0], [result.stderr for result in results]
    assert [result.bundles for result in results] == [(), ()]
    assert "although none had failed: nodes have joined or left" in first.stderr
    assert "crashed" not in first.stderr + second.stderr


@pytest.mark.nightly  # as another round of the rendezvous
def test_a_node_that_joins_is_no_crash_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the ranks of one node before those of the other, which lose their connections to them."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    own = ["--stall-timeout=5", "--max-stall=120", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1"]
    finish = tmp_path / "finish"
    words = [PROGRAMS / "steered.py"]
    with TwoNodes(tmp_path, own, words, ranks=(1, 1, 1), nnodes="1:3", late=True) as nodes:
        first, second = nodes.jobs[0], nodes.start(1)
        for job in (first, second):
            job.until(lambda job=job: "of 2, together" in job.stderr, "the first round")  # type: ignore[misc]
        first.until(lambda: all((tmp_path / f"training-{rank}").exists() for rank in (0, 1)), "both to train")
        third = nodes.start(2)
        third.until(lambda: (tmp_path / "training-2").exists(), "the second round")
        finish.touch()
        results = [job.wait() for job in nodes.jobs]
    assert [result.code for result in results] == [0, 0, 0], [result.stderr for result in results]
    assert [result.bundles for result in results] == [(), (), ()], [result.said for result in results]
    assert "nodes have joined or left" in first.stderr + second.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [pytest.param(0, id="where all wait"), pytest.param(2, id="where one is stuck")])
def test_ctrl_c_on_one_node_of_a_frozen_job_accuses_nobody_wrongly(tmp_path: Path, rank: int) -> None:
    with TwoNodes(tmp_path, ["--max-stall=120"], [APART, "--how=asleep", "--culprit=3"]) as nodes:
        asked = nodes.with_rank(rank)[0]
        stuck = nodes.with_rank(2)[0]
        stuck.until(lambda: "safelaunch: quiet for" in stuck.stderr, "a word that the job is quiet")
        asked.process.send_signal(signal.SIGINT)
        results = {job is asked: job.wait() for job in nodes.jobs}
    assert [result.code for result in results.values()] == [1, 1]
    assert "collecting evidence first" in results[True].said and results[True].bundle.problems() == []
    verdict = results[True].verdict
    assert verdict["outcome"] == "dump" and "not seen" in verdict["missing"][0], "the other node's ranks"
    assert [culprit["rank"] for culprit in verdict["culprits"]] in ([], [3] if rank else [])
    assert results[False].bundles == () and "was stopped on another node" in results[False].said
