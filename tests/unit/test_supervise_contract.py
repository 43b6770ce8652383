"""What a job computes with, and what of that has changed since the last run of its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safelaunch.beacon import contract as beacon_contract
from safelaunch.beacon import layout
from safelaunch.roster.progress import Noted, read_contract
from safelaunch.supervise import contract
from safelaunch.supervise.contract import Contract, changes, elsewhere, path_in, remember


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (Contract(2, 32), Contract(2, 32), ""),
        (Contract(2, 32), Contract(2, None), ""),
        (Contract(2, None), Contract(4, None), "world size 2 → 4"),
        (Contract(2, 32), Contract(4, None), "world size 2 → 4"),
        (
            Contract(2, 32),
            Contract(2, 16),
            "batch of a rank 32 → 16: 64 → 32 a step, if all ranks are data-parallel",
        ),
        (
            Contract(1, 32),
            Contract(8, 32),
            "world size 1 → 8: 32 → 256 a step, if all ranks are data-parallel",
        ),
        (
            Contract(2, 32),
            Contract(4, 16),
            "batch of a rank 32 → 16, world size 2 → 4: 64 a step as before, if all ranks are data-parallel",
        ),
    ],
)
def test_changes_between_runs(before: Contract, now: Contract, said: str) -> None:
    assert changes(before, now) == said


def test_ranks_on_another_device_than_their_own_are_named() -> None:
    local = {8: 0, 9: 1, 10: 2}
    assert elsewhere({8: Noted(device=0), 9: Noted(device=1), 10: Noted()}, local) == ""
    text = elsewhere({8: Noted(device=0), 9: Noted(device=0), 10: Noted(device=0)}, local)
    assert text.startswith("ranks 9-10 compute on cuda:0, which is not the device of the rank's LOCAL_RANK")


def names_in(directory: Path) -> list[str]:
    return list(json.loads(path_in(directory).read_bytes())["runs"])


def test_the_note_is_kept_by_name_and_the_one_before_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "MOST_NAMES", 3)
    directory = tmp_path / "bundles"
    for number in range(5):
        assert remember(directory, f"run{number}", Contract(number)) == (None, True)
    assert remember(directory, "run3", Contract(7, 32)) == (Contract(3), True)
    assert names_in(directory) == ["run2", "run4", "run3"]
    assert path_in(directory).stat().st_mode & 0o777 == 0o600


def test_a_damaged_note_starts_anew_and_that_is_told(tmp_path: Path) -> None:
    remember(tmp_path, "run", Contract(2))
    path_in(tmp_path).write_bytes(b'{"runs":{"run":{"world_size":')
    assert remember(tmp_path, "run", Contract(4)) == (None, False)
    assert remember(tmp_path, "run", Contract(8)) == (Contract(4), True)


def test_what_a_rank_notes_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_contract(tmp_path / "page") is None
    monkeypatch.setattr(beacon_contract, "_batch", lambda: 16)
    monkeypatch.setattr(beacon_contract, "_device", lambda: {"device": None})
    beacon_contract.write(str(tmp_path / "page"))
    assert read_contract(tmp_path / "page") == Noted(16, None)
    (tmp_path / f"page{layout.CONTRACT_SUFFIX}").write_bytes(b"batch\t-3\ndevice\t\xff\nnonsense\ndevice\t" + b"9" * 50)
    assert read_contract(tmp_path / "page") == Noted()
