"""Completed calls that would wait for each other are made without waiting for them."""

from __future__ import annotations

from pathlib import Path

from nccl_formats import Recorder, write

from safelaunch.bundle.reading import locate
from safelaunch.reproduce import Extent, Wish, reproduction_of

ALL = Wish(Extent(everything=True))
GROUPS = {"0": (0, 1), "1": (0, 1)}


def script_of(folder: Path, *ranks: Recorder) -> str:
    return reproduction_of(locate.read(write(folder, ranks)).evidence, ALL).text


def test_ranks_that_both_send_first_do_not_wait_for_it(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one in pair:
        one.send(1 - one.rank).recv(1 - one.rank)
    pair[0].collective(state="started")
    text = script_of(tmp_path, *pair)
    assert "dist.isend(" in text
    assert "dist.recv(" in text


def test_ranks_that_send_in_turn_wait(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    pair[0].send(1).recv(1).collective(state="started")
    pair[1].recv(0).send(0)
    text = script_of(tmp_path, *pair)
    assert "dist.send(" in text
    assert "isend" not in text


def test_groups_that_ranks_have_called_in_different_orders(tmp_path: Path) -> None:
    """Of two threads or two streams, say: it is over on all ranks."""
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one, order in zip(pair, (("0", "1"), ("1", "0")), strict=True):
        for group in order:
            one.collective(group=group)
    pair[0].collective(state="started")
    assert "async_op=True" in script_of(tmp_path, *pair)


def test_the_order_that_hangs_stays(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one, order in zip(pair, (("0", "1"), ("1", "0")), strict=True):
        one.collective().collective(group=order[0], state="started")
    assert "async_op" not in script_of(tmp_path, *pair)
