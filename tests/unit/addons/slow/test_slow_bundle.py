"""The bundle of a slow rank: its files, its verdict, and what ``diagnose`` prints of it."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace as _replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from safelaunch.addons.slow.bundle import FoundSlow, seconds, write_bundle
from safelaunch.addons.slow.late_rank import SlowRanks
from safelaunch.addons.slow.readings import RankReadings
from safelaunch.addons.slow.reasons import SlowReason
from safelaunch.addons.slow.service import Examination
from safelaunch.addons.slow.step_times import Onset
from safelaunch.bundle.publication import Retention
from safelaunch.cli import diagnose
from safelaunch.job.paths import Unfinished
from safelaunch.model import Frame
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.respond import JobView
from safelaunch.system.errors import UsageError
from tests.unit.addons.record.recordings import ALL_REDUCE, AUGMENT, FORWARD, recording

WAITS = {FORWARD: 0.4, ALL_REDUCE: 0.6}
LATE = {FORWARD: 0.4, AUGMENT: 0.5, ALL_REDUCE: 0.1}
SLOW = SlowRanks((1,), 0.5, Frame("/home/me/data.py", 12, "augment"), 0.5, 0.0)
QUEUE = SlowReason("cpu-queue", 0.4, "it waited 40% of the time for a CPU")


def job(root: Path) -> JobView:
    (root / "run").mkdir()
    context = JobContext(
        run_name="pretrain",
        run_dir=root / "run",
        bundle_dir=root / "bundles",
        fallback_dir=root / "local",
        launch={"run_name": "pretrain", "typed": ["train.py"], "torch": "2.13.0", "safelaunch": "0.1.0"},
        host="a",
        unfinished=Unfinished(),
    )
    progress = SimpleNamespace(step=4400)
    watch = SimpleNamespace(last_progress=dict.fromkeys(range(3), progress), world_size=3)
    return cast("JobView", SimpleNamespace(watch=watch, context=context))


def found(slow: SlowRanks = SLOW, *, onset: bool = True) -> FoundSlow:
    seen = recording(WAITS, LATE, WAITS)
    seen = replace(seen, ranks=[replace(rank, host="a") for rank in seen.ranks])
    since = Onset(4310, 100.0, 0.48, 0.61) if onset else None
    readings = [RankReadings(rank, "a", {"cpu-queue": 0.0}, gpu_errors={"pcie_replays": 31}) for rank in range(3)]
    return FoundSlow(slow, since, Examination(seen, readings), 0.61, "step", 1_795_948_920.0)


def test_bundle_is_private_complete_and_names_rank_line_onset_cost_and_reason(tmp_path: Path) -> None:
    verdict, published = write_bundle(found(SlowRanks(**{**_fields(SLOW), "reason": QUEUE})), job(tmp_path))
    names = {path.name for path in published.path.iterdir()}
    assert names == {
        *("launch.json", "manifest.json", "readings.json", "record.html", "recording.json", "report.md"),
        *("stacks.speedscope.json", "verdict.json"),
    }
    assert published.path.name.endswith("-slow") and published.path.stat().st_mode & 0o777 == 0o700
    document = json.loads((published.path / "verdict.json").read_text())
    assert document["outcome"] == "slow" and document["cause"] == "late-rank" and document["confidence"] == "high"
    (culprit,) = document["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["frame"]["line"], culprit["step"]) == (1, "a", 12, 4400)
    slow = document["slow"]
    assert (slow["step"], slow["before_s"], slow["now_s"], slow["lost"]) == (4310, 0.48, 0.61, 0.5)
    assert (slow["reason"], slow["explains"]) == ("cpu-queue", 0.4)
    assert verdict.summary.endswith("It waited 40% of the time for a CPU.")
    assert [claim.claim for claim in verdict.evidence][2:] == ["rank 1: errors of its GPU: pcie replays +31"]
    assert json.loads((published.path / "manifest.json").read_text())["job"]["outcome"] == "slow"
    assert verdict.summary in (published.path / "report.md").read_text().replace("\n", " ")
    assert "Slower since step 4,310" in (published.path / "record.html").read_text()
    assert not list((tmp_path / "run").iterdir())


def _fields(slow: SlowRanks) -> dict[str, Any]:
    return {name: getattr(slow, name) for name in SlowRanks.__slots__}


def test_without_a_reason_the_verdict_says_so_and_is_medium(tmp_path: Path) -> None:
    verdict, _ = write_bundle(found(onset=False), job(tmp_path))
    assert (verdict.confidence, verdict.doubts) == ("medium", ("No counter explains most of the loss.",))
    assert verdict.summary.startswith("The other ranks wait for rank 1 50% of the time; it spends 50% in")
    assert verdict.slow and (verdict.slow.step, verdict.slow.since, verdict.slow.reason) == (None, "", "")


def test_ranks_that_are_late_together_are_all_named(tmp_path: Path) -> None:
    verdict, _ = write_bundle(found(SlowRanks((0, 1), 0.3)), job(tmp_path))
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1] and verdict.victims == "2"
    assert "wait for ranks 0-1 30% of the time; their extra time is spread over many lines" in verdict.summary


def test_diagnose_prints_the_stored_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, published = write_bundle(found(), job(tmp_path))
    assert diagnose.main([str(published.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a rank slows the job down: late-rank (confidence: medium)")
    assert "data.py:12" in out
    assert diagnose.main(["--json", str(published.path)]) == 0
    assert json.loads(capsys.readouterr().out)["slow"]["step"] == 4310


def test_archive_of_the_bundle_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, published = write_bundle(found(), job(tmp_path))
    archive = tmp_path / "slow.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(published.path, published.path.name)
    assert diagnose.main([str(archive)]) == 0
    assert capsys.readouterr().out.startswith("a rank slows the job down: late-rank")


@pytest.mark.parametrize("outcome", ["hang", None])
def test_stored_verdict_on_something_else_is_not_believed(tmp_path: Path, outcome: str | None) -> None:
    _, published = write_bundle(found(), job(tmp_path))
    path = published.path / "verdict.json"
    document = {**json.loads(path.read_text()), "outcome": outcome}
    path.write_text(json.dumps(document)) if outcome else path.unlink()
    with pytest.raises(UsageError, match=r"verdict\.json has no such verdict"):
        diagnose.main([str(published.path)])


def test_damaged_bundle_is_an_error_not_a_verdict(tmp_path: Path) -> None:
    _, published = write_bundle(found(), job(tmp_path))
    (published.path / "verdict.json").write_text("{")
    with pytest.raises(UsageError, match="The verdict of this slow rank is missing or damaged"):
        diagnose.main([str(published.path)])


def test_times_of_long_steps_and_short_collectives_are_readable() -> None:
    assert [seconds(value) for value in (2e-5, 0.0123, 0.61, 999.7, 1234.5)] == [
        *("20 µs", "0.0123 s", "0.61 s", "1,000 s", "1,234 s"),
    ]


def test_bundle_of_a_slow_rank_costs_no_other_bundle_its_place(tmp_path: Path) -> None:
    view = job(tmp_path)
    view = cast("JobView", SimpleNamespace(watch=view.watch, context=_replace(view.context, keeping=Retention(1))))
    hang = tmp_path / "bundles" / "pretrain-20200101T000000Z-hang"
    hang.mkdir(parents=True)
    for name in ("verdict.json", "manifest.json"):
        (hang / name).write_text("{}")
    _, first = write_bundle(found(), view)
    (tmp_path / "bundles" / "latest").unlink()
    _, second = write_bundle(found(), view)
    assert hang.is_dir() and second.path.is_dir() and not first.path.exists()
