"""``safelaunch record``: what it asks a run, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from safelaunch.addons.record import command as record
from safelaunch.addons.record.recording import RankRecord, Recording
from safelaunch.cli import dump, main
from safelaunch.supervise.control.protocol import ServiceAnswer
from tests.support.runs import RUNS
from tests.unit.addons.record.recordings import DATA, recorded


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServiceAnswer[Recording]]:
    """The answer of the only live run."""
    given = [ServiceAnswer(recorded("straggler"), str(tmp_path / "bundles"))]
    monkeypatch.setattr(record, "look", lambda _: RUNS[:1])
    monkeypatch.setattr(dump, "working_directory", lambda: Path("/work"))  # where that run was started
    monkeypatch.setattr(record, "_record", lambda *_: given[0])
    monkeypatch.chdir(tmp_path)
    return given


def test_record_shows_the_verdict_and_creates_private_folder(
    answer: list[ServiceAnswer[Recording]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["record", "--compare", str(DATA / "healthy.json")]) == 0
    out, err = capfd.readouterr()
    folder = Path(out.strip())
    assert folder.parent == tmp_path / "bundles" and folder.name.endswith("-record")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "record.html",
        "recording.json",
        "report.md",
        "stacks.speedscope.json",
    ]
    assert err.startswith("safelaunch: Rank 0 waits ") and "against" in err
    assert main(["record", "--bundle-dir", "here", "--compare", str(folder)]) == 0
    assert "no line takes noticeably longer" in capfd.readouterr().err.replace("\nsafelaunch: ", " ")


@pytest.mark.parametrize("text", ["90", "90s", "1.5m"])
def test_record_duration_accepts_units(text: str) -> None:
    assert record.parser().parse_args(["--duration", text]).duration == 90.0


def test_record_json_contains_the_findings(
    answer: list[ServiceAnswer[Recording]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["findings"][0]["kind"] == "late-rank" and document["findings"][0]["ranks"] == [1]
    assert [one["rank"] for one in document["ranks"]] == [0, 1]


def test_simultaneous_recordings_get_separate_folders(
    answer: list[ServiceAnswer[Recording]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert [main(["record"]), main(["record"])] == [0, 0]
    first, second = capfd.readouterr().out.split()
    assert second == f"{first}-2"
    assert len(list((tmp_path / "bundles").iterdir())) == 2, "nothing unfinished is left"


def test_record_without_samples_writes_nothing(
    answer: list[ServiceAnswer[Recording]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = recorded("straggler")
    answer[0] = ServiceAnswer(replace(whole, ranks=[RankRecord(0, missing="py-spy is not installed")]), str(tmp_path))
    assert main(["record"]) == 1
    assert "py-spy is not installed" in capfd.readouterr().err
    answer[0] = ServiceAnswer(problem="another recording of this run is in progress")
    assert main(["record"]) == 1
    assert "another recording of this run is in progress" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["nope"], ["--duration", "0"], ["--duration", "1e9"], ["--ranks", "3-1"], ["--compare", "none"], ["--rat"]],
)
def test_record_with_invalid_arguments_exits_2(
    answer: list[ServiceAnswer[Recording]], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *words]) == 2
    assert capfd.readouterr().err.startswith("safelaunch: record: ")
