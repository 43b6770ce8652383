"""One-time notices about how well a job can be watched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.beacon import contract, layout
from safelaunch.capture.pages import RankContract, Worker, read_contract
from safelaunch.model import Progress
from safelaunch.supervise.device_notice import wrong_devices
from safelaunch.supervise.notices import Notices
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.supervise.watch.stall import Policy

FRESH = Progress(0, 0, 1, 0, 10, 1, "torch")


START = Threshold(100.0, "before the first step")
POLICY = Policy(60.0, 100.0, 1800.0)
ALONE: Any = SimpleNamespace(is_covered=False, why_alone="no answer", others="")


def watching(*workers: Worker, **known: Any) -> Any:
    """The part of a watch that notices use."""
    roster = SimpleNamespace(workers={one.rank: one for one in workers}, pages=known.pop("pages", dict))
    plain = {"last_progress": {}, "without_beacon": tuple, "unseen": (), "world_size": 2}
    return SimpleNamespace(roster=roster, **{**plain, **known})


def said(
    capfd: pytest.CaptureFixture[str],
    progress: Progress | None,
    *,
    server: bool = True,
    beacon: bool = True,
    limit: Threshold = START,
    unseen: tuple[int, ...] = (),
    council: Any = ALONE,
    why: str = "python -I",
    policy: Policy = POLICY,
) -> str:
    worker = Worker(0, 0, 10, 0)
    watch = watching(
        worker,
        pages=lambda: {0: SimpleNamespace(server_up=server)},
        last_progress={0: progress} if progress else {},
        without_beacon=lambda: () if beacon else (worker,),
        threshold_without_steps=lambda: limit,
        unseen=unseen,
    )
    notices = Notices(watch, policy, 0.0, council, why=lambda pid: why)
    for now in (1.0, 19.0, 49.0, 51.0, 400.0):
        notices.tick(now)
    return capfd.readouterr().err


def test_job_without_steps_gets_a_notice_about_other_signals(capfd: pytest.CaptureFixture[str]) -> None:
    text = said(capfd, FRESH)
    assert text.count("no step seen") == 1
    assert "collectives, CPU, I/O and stacks" in text and "100 s (--startup-timeout)" in text
    assert "collectives" not in said(capfd, FRESH, server=False)
    text = said(capfd, FRESH, limit=Threshold(60.0, "a collective came at least every 15 s"))
    assert "for 60 s (a collective came at least every 15 s)" in text


@pytest.mark.parametrize("marks", [{"step": 3}, {"paused": True}, {"phase": "eval"}])
def test_job_with_marks_gets_no_notice(capfd: pytest.CaptureFixture[str], marks: dict[str, Any]) -> None:
    assert said(capfd, Progress(0, 0, 1, 0, 10, 1, "torch", **marks)) == ""


def test_single_limit_needs_no_notice(capfd: pytest.CaptureFixture[str]) -> None:
    both = Policy(100.0, 100.0, 1200.0, stall_given=True, startup_given=True)
    assert said(capfd, FRESH, policy=both) == ""


def test_unwatched_job_gets_a_loud_notice(capfd: pytest.CaptureFixture[str]) -> None:
    text = said(capfd, None, beacon=False)
    assert text.count("CANNOT WATCH") == 1 and "rank 0 (pid 10, python -I)" in text and "no step" not in text


def test_slow_start_gets_no_notice(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, None, beacon=False, why="") == ""


def test_late_beacon_corrects_the_notice(capfd: pytest.CaptureFixture[str]) -> None:
    workers = [Worker(rank, rank, 10 + rank, 0) for rank in range(2)]
    watch = watching(*workers)
    watch.without_beacon = lambda: [one for one in workers if one.rank not in watch.last_progress]
    notices = Notices(watch, Policy(60.0, 1e6, 1800.0), 0.0, ALONE, why=lambda pid: "bash is not Python")
    for now, seen in ((30.0, ()), (40.0, (0,)), (50.0, (0,)), (60.0, (0, 1)), (70.0, (0, 1))):
        watch.last_progress = dict.fromkeys(seen, FRESH)
        notices.tick(now)
    lines = capfd.readouterr().err.splitlines()
    assert "CANNOT WATCH" in lines[1]
    assert lines[2:] == [
        "safelaunch: a beacon has appeared in rank 0: safelaunch watches this job",
        "safelaunch: a beacon has appeared in rank 1: safelaunch watches it",
    ]


@pytest.mark.parametrize("covered", [True, False])
def test_node_without_beacons_is_watched_with_the_others(capfd: pytest.CaptureFixture[str], covered: bool) -> None:
    others = SimpleNamespace(is_covered=covered, others="1 other node (b)", why_alone="no answer")
    text = said(capfd, None, beacon=False, unseen=(1,), council=others)
    assert ("when another node suspects the job" in text, "CANNOT WATCH" in text) == (covered, not covered)


@pytest.mark.parametrize(("by_torchrun", "progress", "told"), [(False, None, 1), (False, FRESH, 0), (True, None, 0)])
def test_command_without_ranks_gets_a_notice(
    capfd: pytest.CaptureFixture[str], by_torchrun: bool, progress: Progress | None, told: int
) -> None:
    watch = watching(last_progress={0: progress} if progress else {})
    notices = Notices(watch, Policy(60.0, 1000.0, 1800.0), 0.0, ALONE, by_torchrun=by_torchrun)
    for now in (1.0, 59.0, 61.0, 400.0):
        notices.tick(now)
    assert capfd.readouterr().err.count("CANNOT WATCH this command") == told


def told_of_nodes(capfd: pytest.CaptureFixture[str], *unseen: tuple[int, ...], by_agent: bool = True) -> list[str]:
    """Returns the notices about other nodes if the unseen ranks are ``unseen`` in each tick, of a world of 4."""
    workers = [Worker(0, 0, 10, 0)] if by_agent else []
    watch = watching(*workers, last_progress={0: FRESH}, world_size=4)
    notices = Notices(watch, Policy(60.0, 1e6, 1800.0), 0.0, ALONE)
    for now, watch.unseen in enumerate(unseen, 1):
        notices.tick(9.0 * now)  # the nodes have had time to meet
    return [line.partition(";")[0] for line in capfd.readouterr().err.splitlines()]


def test_watched_ranks_are_reported_once_and_after_a_change(capfd: pytest.CaptureFixture[str]) -> None:
    assert told_of_nodes(capfd, (), (), ()) == []
    assert told_of_nodes(capfd, (0, 1), (0, 1), (0, 1)) == ["safelaunch: watching ranks 2-3 of 4"]
    assert told_of_nodes(capfd, (0, 1), (0, 1), (0, 1, 3)) == [
        "safelaunch: watching ranks 2-3 of 4",
        "safelaunch: watching rank 2 of 4",
    ]
    assert told_of_nodes(capfd, (0, 1), (0, 1), by_agent=False) == [], "the others may only not have started yet"


def test_ranks_on_another_device_than_their_own_are_named() -> None:
    local = {8: 0, 9: 1, 10: 2}
    assert wrong_devices({8: RankContract(device=0), 9: RankContract(device=1), 10: RankContract()}, local) == ""
    text = wrong_devices({8: RankContract(device=0), 9: RankContract(device=0), 10: RankContract(device=0)}, local)
    assert text.startswith("ranks 9-10 compute on cuda:0, which is not the device of the rank's LOCAL_RANK")


def test_rank_contract_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_contract(tmp_path / "page") is None
    monkeypatch.setattr(contract, "_batch", lambda: 16)
    monkeypatch.setattr(contract, "_device", lambda: None)
    contract.note(str(tmp_path / "page"))
    assert read_contract(tmp_path / "page") == RankContract(16, None)
    for damaged in (b'{"batch":-3}', b'{"device":"\xff"}', b"nonsense", b'{"device":' + b"9" * 50 + b"}"):
        (tmp_path / f"page{layout.CONTRACT_SUFFIX}").write_bytes(damaged)
        assert read_contract(tmp_path / "page") is None
