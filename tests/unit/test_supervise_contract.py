"""What a job computes with: the device and the batch of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.beacon import layout, rank
from safelaunch.capture.pages import Noted, read_contract
from safelaunch.supervise.contract import elsewhere


def test_ranks_on_another_device_than_their_own_are_named() -> None:
    local = {8: 0, 9: 1, 10: 2}
    assert elsewhere({8: Noted(device=0), 9: Noted(device=1), 10: Noted()}, local) == ""
    text = elsewhere({8: Noted(device=0), 9: Noted(device=0), 10: Noted(device=0)}, local)
    assert text.startswith("ranks 9-10 compute on cuda:0, which is not the device of the rank's LOCAL_RANK")


def test_what_a_rank_notes_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_contract(tmp_path / "page") is None
    monkeypatch.setattr(rank, "_batch", lambda: 16)
    monkeypatch.setattr(rank, "_device", lambda: None)
    rank._note_contract(str(tmp_path / "page"))
    assert read_contract(tmp_path / "page") == Noted(16, None)
    for damaged in (b'{"batch":-3}', b'{"device":"\xff"}', b"nonsense", b'{"device":' + b"9" * 50 + b"}"):
        (tmp_path / f"page{layout.CONTRACT_SUFFIX}").write_bytes(damaged)
        assert read_contract(tmp_path / "page") is None
