"""Comparison with torch's own analyser (``torchfrtrace``): an equal or better answer for each of its match states."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.model import Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.nccl_formats import Op, Recorder, write


@dataclass
class Theirs:
    """Result of torchfrtrace: match states, the ranks that it blames, and its log."""

    states: set[str] = field(default_factory=set)
    culprits: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    said: str = ""


Analyse = Callable[..., Theirs]


@pytest.fixture(scope="module")
def torchfrtrace() -> Analyse:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
        from torch.distributed.flight_recorder.components.config_manager import JobConfig
        from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger
        from torch.distributed.flight_recorder.components.loader import read_dir

    def analyse(folder: Path, *options: str) -> Theirs:
        found = Theirs()
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = FlightRecorderLogger().logger
        before, logger.handlers = logger.handlers, [handler]
        try:
            arguments = JobConfig().parse_args([str(folder), "-p", "nccl_trace_rank_", *options])
            details, version = read_dir(arguments)
            database = trace.build_db(details, arguments, version)
        finally:
            logger.handlers = before
            gc.enable()  # which reading switches off
        for one in database.collectives:
            found.missing |= one.missing_ranks or set()
            for rank, other in (one.mismatch_collectives or {}).items():
                found.states.add(other.type_of_mismatch.state.name)
                found.culprits.add(rank)
            if one.pass_check and not one.missing_ranks:
                found.states.add("FULLY_MATCHED")
        found.said = "\n".join(lines)
        return found

    return analyse


def ours(folder: Path) -> Verdict:
    return diagnose(locate.read(folder).evidence)


def named(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits]


def ranks(count: int = 4, past: int = 2) -> list[Recorder]:
    found = [Recorder(rank, {"0": range(count)}) for rank in range(count)]
    for one in found:
        for _ in range(past):
            one.collective()
    return found


def together(recorders: list[Recorder], odd: int, usual: dict[str, Any], other: dict[str, Any]) -> list[Recorder]:
    """One more collective, in which ``odd`` differs."""
    for one in recorders:
        one.collective(**({"state": "started"} | (other if one.rank == odd else usual)))
    return recorders


MISMATCHES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("COLLECTIVE_TYPE_MISMATCH", {}, {"op": "all_gather"}),
    ("COLLECTIVE_TYPE_MISMATCH", {}, {"op": "all_reduce_barrier", "size": (1,), "dtype": "Byte"}),
    ("SIZE_OR_SYNTAX_MISMATCH", {}, {"size": (5,)}),
    ("SIZE_OR_SYNTAX_MISMATCH", {"op": "gather"}, {"op": "gather", "size": (5,)}),
    ("SIZE_OR_SYNTAX_MISMATCH", {"op": "scatter"}, {"op": "scatter", "output": (5,)}),
    ("COLLECTIVE_DTYPE_MISMATCH", {}, {"dtype": "Half"}),
]


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize(("state", "usual", "other"), MISMATCHES)
def test_differing_operations_sizes_and_types_name_the_odd_rank(
    state: str, usual: dict[str, Any], other: dict[str, Any], odd: int, torchfrtrace: Analyse, tmp_path: Path
) -> None:
    folder = write(tmp_path, together(ranks(), odd, usual, other))
    theirs, verdict = torchfrtrace(folder), ours(folder)
    assert state in theirs.states
    assert theirs.culprits == ({1, 2, 3} if odd == 0 else {odd})  # to them the first rank is always right
    assert (verdict.cause, named(verdict)) == ("collective-mismatch", [odd])
    assert any("#3 of group '0'" in claim.claim for claim in verdict.evidence)
    if "op" not in other:
        assert ("of float32[5]" if "size" in other else "of float16[4]") in verdict.summary  # in what they differ


@pytest.mark.parametrize("odd", range(4))
def test_differing_state_names_the_odd_rank(odd: int, torchfrtrace: Analyse, tmp_path: Path) -> None:
    folder = write(tmp_path, together(ranks(), odd, {"state": "completed"}, {"state": "started"}))
    theirs, verdict = torchfrtrace(folder), ours(folder)
    assert "COLLECTIVE_STATE_MISMATCH" in theirs.states
    assert theirs.culprits == ({1, 2, 3} if odd == 0 else {odd})
    assert (verdict.cause, named(verdict), verdict.confidence) == ("gpu-kernel", [odd], "medium")
    assert "all its peers have completed all_reduce #3" in verdict.summary


@pytest.mark.parametrize(("output", "state"), [(4, "FULLY_MATCHED"), (3, "SIZE_OR_SYNTAX_MISMATCH")])
def test_all_to_all_sizes_are_judged_over_all_ranks(
    output: int, state: str, torchfrtrace: Analyse, tmp_path: Path
) -> None:
    """all_to_all: sizes can differ, but the totals sent and expected have to be equal."""
    differs = {"op": "all_to_all", "output": (output,)}
    folder = write(tmp_path, together(ranks(), 1, {"op": "all_to_all"}, differs))
    theirs, verdict = torchfrtrace(folder), ours(folder)
    assert state in theirs.states
    assert named(verdict) == []
    if output == 4:
        assert verdict.cause == "no-rank-stands-out"
    else:
        assert theirs.culprits == {0}, "which is as good as any other"
        assert verdict.cause == "collective-mismatch"
        assert "#3 of group '0': together the ranks send 16 elements and expect 15" in verdict.summary


def test_matching_dumps_name_no_rank(torchfrtrace: Analyse, tmp_path: Path) -> None:
    folder = write(tmp_path, ranks())
    assert torchfrtrace(folder) == Theirs({"FULLY_MATCHED"})
    assert (ours(folder).cause, named(ours(folder))) == ("no-rank-stands-out", [])


@pytest.mark.parametrize("absent", [(1,), (0, 3), (2, 3)])
def test_ranks_missing_from_a_collective_are_named(
    absent: tuple[int, ...], torchfrtrace: Analyse, tmp_path: Path
) -> None:
    recorders = ranks()
    for one in recorders:
        if one.rank not in absent:
            one.collective(state="started")
    folder = write(tmp_path, recorders)
    theirs, verdict = torchfrtrace(folder), ours(folder)
    assert theirs.missing == set(absent)
    assert (verdict.cause, named(verdict)) == ("missing-from-collective", list(absent))
    assert "all_reduce #2 of group '0'" in verdict.summary  # the last that they did, and where


def test_missing_dump_leaves_a_mismatch_without_culprits(torchfrtrace: Analyse, tmp_path: Path) -> None:
    folder = write(tmp_path, together(ranks(), 1, {}, {"op": "all_gather"})[:3])
    with pytest.raises(AssertionError, match="Missing dump files"):
        torchfrtrace(folder)
    assert "COLLECTIVE_TYPE_MISMATCH" in torchfrtrace(folder, "--allow-incomplete-ranks").states
    verdict = ours(folder)
    assert (verdict.cause, named(verdict)) == ("collective-mismatch", [])
    assert "ranks not seen: 3" in verdict.missing
    assert "#3 of group '0'" in verdict.summary


def test_missing_dump_of_a_matching_call_leaves_it_undecided(torchfrtrace: Analyse, tmp_path: Path) -> None:
    folder = write(tmp_path, together(ranks(), 1, {}, {})[:3])
    assert "We cannot decide what's wrong" in torchfrtrace(folder, "--allow-incomplete-ranks").said
    verdict = ours(folder)
    assert (named(verdict), verdict.confidence) == ([], "low")
    assert "rank 3 was not seen and might be what they wait for" in verdict.summary


@pytest.mark.parametrize("odd", range(4))
def test_differing_operation_in_a_coalesced_block_is_named(odd: int, torchfrtrace: Analyse, tmp_path: Path) -> None:
    recorders = ranks()
    for one in recorders:
        one.block([Op("all_reduce"), Op("all_reduce", (5,) if one.rank == odd else (4,))], "started")
    folder = write(tmp_path, recorders)
    theirs, verdict = torchfrtrace(folder), ours(folder)
    assert "SIZE_OR_SYNTAX_MISMATCH" in theirs.states
    assert (verdict.cause, named(verdict)) == ("collective-mismatch", [odd])


def test_unmatched_send_and_receive_name_their_ranks(torchfrtrace: Analyse, tmp_path: Path) -> None:
    recorders = ranks()
    recorders[0].send(1, "started")
    alone = write(tmp_path / "alone", recorders)
    assert torchfrtrace(alone).missing == {1, 2, 3}  # as of a collective of all
    assert (ours(alone).cause, named(ours(alone))) == ("missing-from-collective", [1])
    recorders[1].recv(0, "started", size=(5,))
    unequal = write(tmp_path / "unequal", recorders)
    assert "SIZE_OR_SYNTAX_MISMATCH" in torchfrtrace(unequal).states
    assert (ours(unequal).cause, named(ours(unequal))) == ("collective-mismatch", [0, 1])


def test_wrapped_ring_buffers_still_name_the_odd_rank(torchfrtrace: Analyse, tmp_path: Path) -> None:
    """They cut all windows to the same place; here each is read as far as it goes."""
    folder = write(tmp_path, together(ranks(past=40), 2, {}, {"op": "all_gather"}), window=10)
    assert torchfrtrace(folder).culprits == {2}
    assert named(ours(folder)) == [2]


def test_every_torchfrtrace_state_is_documented(torchfrtrace: Analyse) -> None:
    """A torch with another state shows here first, and then belongs into the table of the docs."""
    from torch.distributed.flight_recorder.components.types import MatchState

    page = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text()
    for state in MatchState:
        assert f"`{state.name}`" in page
