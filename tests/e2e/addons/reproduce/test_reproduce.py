"""Scripts of ``safelaunch reproduce`` really hang, with the verdict from which they were written.

``scripts/qa/reproductions.py`` does this for all classes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.addons.reproduce import ScriptOptions
from tests.qa import reproducing

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("extra", (3, 1, 1), id="a call too many"),
        pytest.param("skip", (2, 2, 1), id="a call skipped in one of several groups", marks=pytest.mark.nightly),
    ],
)
def test_nccl_dumps_give_script_with_same_hang(kind: str, layout: tuple[int, int, int], tmp_path: Path) -> None:
    source = tmp_path / "dumps"
    source.mkdir()
    evidence = reproducing.of_dumps((kind, "no stacks", "0"), source, layout)
    found = reproducing.replay(kind, evidence, tmp_path)
    assert not found.why_not


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["left-out", "thread-behind"])
def test_bundle_gives_script_with_same_hang(name: str, tmp_path: Path) -> None:
    source, replayed = tmp_path / "source", tmp_path / "replayed"
    source.mkdir()
    replayed.mkdir()
    evidence = reproducing.of_zoo(name, 1, source)
    found = reproducing.replay(name, evidence, replayed, ScriptOptions(fewest=True, shrink=True))
    assert not found.why_not
