"""Fewer ranks and smaller tensors, with the same verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.addons.reproduce import Extent, ScriptOptions, reproduction_of
from safelaunch.addons.reproduce.fewer_ranks import restricted_to
from safelaunch.addons.reproduce.programs import program_of
from safelaunch.bundle.reading import locate
from safelaunch.model import Evidence
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.nccl_formats import Recorder, write
from tests.support.replayed import replayed
from tests.support.synthetic import KINDS, generated

FEWEST = ScriptOptions(Extent(), fewest=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_reduced_program_has_same_verdict(kind: str) -> None:
    for seed, variant in enumerate(("plain", "no stacks", "sends, no stacks")):
        evidence = generated(kind, variant, (4, 2, 2), seed)
        if evidence is None:
            continue
        made = reproduction_of(evidence, FEWEST)
        ranks = replayed(made.text, made.world_size)
        assert (made.hang.cause, len(made.hang.culprits)) == (
            (verdict := diagnose(evidence)).cause,
            len({one.rank for one in verdict.culprits}),
        )
        assert set(made.hang.culprits) <= set(ranks)


def test_absent_rank_is_reproduced_with_one_peer() -> None:
    evidence = generated("stop", "plain", (8, 8, 1), 1)
    assert evidence is not None
    assert reproduction_of(evidence, FEWEST).world_size == 2


def test_header_lists_original_ranks(tmp_path: Path) -> None:
    text = reproduction_of(absent(tmp_path, 3), FEWEST).text
    assert "# Ranks are renumbered: 0 was 0, 1 was 3." in text


def test_transfers_in_reduced_program_have_renumbered_peers(tmp_path: Path) -> None:
    ring = [Recorder(number, {"0": (0, 1, 2, 3)}) for number in range(4)]
    for one in ring:
        one.collective()
    ring[1].send(3)
    ring[3].recv(1)
    for one in ring[1:]:
        one.collective(state="started")
    program = program_of(CaseFacts.of(locate.read(write(tmp_path, ring)).evidence), Extent(everything=True))
    fewer = restricted_to(program, [0, 1, 3])
    assert [(call.op, call.peer) for rank in (1, 2) for call in fewer.ranks[rank].calls[1:2]] == [
        ("send", 2),
        ("recv", 1),
    ]
    assert [call.op for call in restricted_to(program, [0, 3]).ranks[1].calls] == ["all_reduce", "all_reduce"]


def absent(folder: Path, odd: int) -> Evidence:
    found = [Recorder(number, {"0": (0, 1, 2, 3)}) for number in range(4)]
    for one in found:
        one.collective(size=(1000,)).collective(size=(10, 10))
        if one.rank != odd:
            one.collective(size=(1000,), state="started")
    return locate.read(write(folder, found)).evidence


def test_shrunk_tensors_keep_size_differences(tmp_path: Path) -> None:
    text = reproduction_of(absent(tmp_path, 3), ScriptOptions(Extent(everything=True), shrink=True)).text
    sizes = [one.tensors[0].shape for one in replayed(text, 4)[0].calls]
    assert sizes == [(2,), (1,), (2,)]


def test_tensors_too_small_for_gloo_are_enlarged(tmp_path: Path) -> None:
    """With segments of equal length, a gloo rank would return from the call."""
    found = [Recorder(number, {"0": (0, 1, 2, 3)}) for number in range(4)]
    for one in found:
        one.collective(size=(5,)).collective(size=(1,)).collective(size=(2 if one.rank == 3 else 1,), state="started")
    made = reproduction_of(locate.read(write(tmp_path, found)).evidence, ScriptOptions(Extent(everything=True)))
    ranks = replayed(made.text, 4)
    assert [call.tensors[0].shape for call in ranks[0].calls] == [(5,), (8,), (8,)]
    assert [call.tensors[0].shape for call in ranks[3].calls[:3]] == [(5,), (8,), (16,)]
    assert any("8 times as many elements" in note for note in made.notes)
