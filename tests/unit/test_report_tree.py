"""The stacks of many ranks as one tree."""

from __future__ import annotations

import time

from safelaunch.model import Frame
from safelaunch.report.overview import Branch, stack_tree, tree_lines


def stack(*places: str) -> tuple[Frame, ...]:
    """``"main:3"``, outermost first, as it is read."""
    names = [place.split(":") for place in places]
    return tuple(Frame("train.py", int(line), name) for name, line in reversed(names))


def test_ranks_part_where_their_lines_differ() -> None:
    waits, logs = stack("main:9", "step:4", "all_reduce:7"), stack("main:9", "step:5", "log:2")
    tree = stack_tree({0: waits, 1: logs, 2: waits, 3: waits}, range(5))
    assert tree_lines(tree) == [
        "ranks 0-3 | missing 4",
        "  train.py:9 main",
        "    ranks 0,2-3 | missing 1",
        "      train.py:4 step",
        "      train.py:7 all_reduce",
        "    rank 1",
        "      train.py:5 step",
        "      train.py:2 log",
    ]


def test_a_stack_that_ends_where_others_go_on() -> None:
    tree = stack_tree({0: stack("main:9"), 1: stack("main:9", "step:4"), 2: stack("main:9", "step:4")}, range(3))
    assert tree_lines(tree) == [
        "ranks 0-2",
        "  train.py:9 main",
        "    ranks 1-2 | missing 0",
        "      train.py:4 step",
        "    rank 0: here",
    ]


def test_nothing_in_common() -> None:
    tree = stack_tree({0: stack("a:1"), 1: stack("b:1")}, [0, 1])
    assert [branch.ranks for branch in tree] == ["0", "1"]
    assert stack_tree({}, range(4)) == ()
    assert stack_tree({0: ()}, range(4)) == ()


def test_a_long_run_is_cut_in_its_middle() -> None:
    frames = stack(*(f"f{n}:{n}" for n in range(100)))
    lines = tree_lines(stack_tree({0: frames, 1: frames}, range(2)), frames=10)
    assert lines[1] == "  train.py:0 f0" and lines[-1] == "  train.py:99 f99"
    assert "  ... 90 more" in lines and len(lines) == 12


def test_a_large_tree_is_cut_at_its_end() -> None:
    tree = stack_tree({rank: stack("main:1", f"f{rank}:2") for rank in range(300)}, range(300))
    lines = tree_lines(tree, lines=50)
    assert len(lines) == 51 and lines[-1] == "... 552 more lines"


def test_a_recursion_caught_at_every_depth_is_no_danger() -> None:
    tree = stack_tree({rank: stack(*["again:1"] * (rank + 1)) for rank in range(400)}, range(400))
    depth = 0
    branches = tree
    while branches:
        depth += 1
        branches = next((branch.branches for branch in branches if branch.branches), ())
    assert 50 < depth < 100
    assert all(isinstance(branch, Branch) and branch.count for branch in tree)


def test_thousands_of_ranks_that_all_differ_are_merged_quickly() -> None:
    """Linear: twice the ranks take about twice the time, measured against merging itself."""

    def taken(ranks: int) -> float:
        stacks = {r: stack(*(f"f{n}:1" for n in range(40)), f"leaf:{r}") for r in range(ranks)}
        begin = time.process_time()
        assert stack_tree(stacks, range(ranks))[0].count == ranks
        return time.process_time() - begin

    taken(100)
    small = min(taken(500) for _ in range(3))
    assert min(taken(4000) for _ in range(2)) < 8 * small * 8
