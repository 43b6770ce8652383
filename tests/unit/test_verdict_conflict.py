"""Ranks that do not meet in a collective, by Flight Recorder and by stacks alone."""

from __future__ import annotations

import msgspec

from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import signature
from safelaunch.verdict.conflict import conflict_at
from tests.support.evidence import (
    entry,
    past,
    rank,
    record,
)


def test_signature_compares_element_counts_not_shapes() -> None:
    assert signature(entry("all_reduce", 1, size=(4, 1))) == signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("all_reduce", 1, size=(4, 2))) != signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("gather", 1, size=(4,))) != signature(entry("gather", 1, size=(8,)))
    assert signature(entry("scatter", 1, size=(4,))) == signature(entry("scatter", 1, size=(8,)))  # the root's input
    assert signature(entry("all_to_all", 1, size=(4,))) == signature(entry("all_to_all", 1, size=(8,)))


def test_wrapped_window_causes_no_conflict() -> None:
    long, short = record(*past(3), entry("all_reduce", 4)), record(entry("all_reduce", 4))
    ranks = [rank(0, flight=long), rank(1, flight=short)]
    assert conflict_at(Alignment(ranks, 2), "0", 4) is None


# --- loops and history ------------------------------------------------------------------------------------------------


def test_signature_of_tensor_list_equals_flat_tensor_signature() -> None:
    listed = msgspec.structs.replace(entry("reduce_scatter", 4), input_sizes=((4,),) * 3, input_dtypes=("Float",) * 3)
    single = entry("_reduce_scatter_base", 4, size=(12,))
    assert signature(listed) == signature(single)
    assert signature(entry("_reduce_scatter_base", 4, size=(9,))) != signature(single)
