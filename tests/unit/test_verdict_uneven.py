"""Ranks that had fewer batches: each rank's steps, the loop that was left, and advice that fits what it read."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from safelaunch.model import Frame, RankExit
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import SCRIPT, at, in_c10d, job, rank, waiting

SOURCE = """\
{given}
for epoch in range(3):
    for batch in loader:
        all_reduce(batch)
barrier()
"""
ITERABLE = "class Stream(IterableDataset): ...; data = Stream(files); loader = DataLoader(data, batch_size=4)"
MAP = "data = Images(files); loader = DataLoader(data, sampler=DistributedSampler(data))"
GENERATOR = "def read(n): yield n"


@pytest.mark.parametrize(
    ("given", "loop", "iterable"),
    [
        (ITERABLE.replace("; ", "\n"), "loader", True),
        (MAP.replace("; ", "\n"), "loader", False),
        (GENERATOR, "read(5)", True),
        ("data = load_dataset(name, streaming=True)\n", "DataLoader(data)", True),
        ("", "range(9)", False),
    ],
)
def test_uneven_batches_report_steps_loop_and_dataset_advice(given: str, loop: str, iterable: bool) -> None:
    source = SOURCE.format(given=given).replace("in loader", f"in {loop}").replace("for epoch in range(3):\n    ", "")
    source = source.replace("        all_reduce", "    all_reduce")
    line = next(n for n, text in enumerate(source.splitlines(), 1) if text.startswith("for "))
    ranks = [rank(n, in_c10d("all_reduce", line + 1), step=20) for n in range(3)]
    ranks[1] = rank(1, in_c10d("barrier", line + 2), step=19)
    verdict = diagnose(job(*ranks), lambda path: source if path == SCRIPT else None)
    (culprit,) = verdict.culprits
    assert (verdict.cause, culprit.rank) == ("uneven-batches", 1)
    assert isinstance(culprit.left, Frame) and (culprit.left.file, culprit.left.line) == (SCRIPT, line)
    assert "Steps made: 19 on rank 1, 20 on ranks 0,2." in verdict.summary
    assert any(one.claim == "steps made: 19 on rank 1, 20 on ranks 0,2" for one in verdict.evidence)
    assert any("iterable dataset" in text for text in verdict.suggestions) == iterable
    assert any("DistributedSampler" in text for text in verdict.suggestions) != iterable


def test_exited_rank_has_left_its_peers_outermost_loop() -> None:
    source = SOURCE.format(given="")
    ended = rank(1, seen=False, more={"exit": RankExit(0, 100.0)})
    peers = [structs.replace(waiting(n, line=4), exit=RankExit(-15, 105.0, before_close=False)) for n in (0, 2)]
    verdict = diagnose(job(peers[0], ended, peers[1], outcome="crash"), lambda path: source)
    (culprit,) = verdict.culprits
    assert isinstance(culprit.left, Frame) and (culprit.left.file, culprit.left.line) == (SCRIPT, 2)
    assert "ranks 0,2 waited in" in verdict.summary
    streams = SOURCE.format(given=ITERABLE.replace("; ", "\n"))  # the loop over epochs holds that over batches
    peers = [structs.replace(waiting(n, line=6), exit=None) for n in (0, 2)]
    verdict = diagnose(job(peers[0], ended, peers[1], outcome="crash"), lambda path: streams)
    assert any("iterable dataset" in text for text in verdict.suggestions)


def test_loop_without_source_is_not_reported() -> None:
    ranks = [rank(n, in_c10d("all_reduce", 3)) for n in range(2)]
    verdict = diagnose(job(*ranks, rank(2, (at(9),), "sleep")))
    assert [one.left for one in verdict.culprits] == [UNSET]
