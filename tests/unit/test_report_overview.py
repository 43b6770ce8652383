"""Tree of the stacks of many ranks, and the environment contract: devices of local ranks, and batch sizes."""

from __future__ import annotations

import time

from safelaunch.model import Evidence, Frame, GilTest, RankEvidence, RankException, format_ranks, rank_words
from safelaunch.report import contract
from safelaunch.report.stack_tree import StackBranch, stack_tree, tree_lines


def stack(*places: str) -> tuple[Frame, ...]:
    """Returns a stack from places like ``"main:3"``, outermost first."""
    names = [place.split(":") for place in places]
    return tuple(Frame("train.py", int(line), name) for name, line in reversed(names))


def test_stack_tree_branches_where_lines_differ() -> None:
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


def test_stack_tree_marks_stack_that_ends_at_branch() -> None:
    tree = stack_tree({0: stack("main:9"), 1: stack("main:9", "step:4"), 2: stack("main:9", "step:4")}, range(3))
    assert tree_lines(tree) == [
        "ranks 0-2",
        "  train.py:9 main",
        "    ranks 1-2 | missing 0",
        "      train.py:4 step",
        "    rank 0: here",
    ]


def test_stack_tree_without_common_frame_has_separate_roots() -> None:
    tree = stack_tree({0: stack("a:1"), 1: stack("b:1")}, [0, 1])
    assert [branch.ranks for branch in tree] == ["0", "1"]
    assert stack_tree({}, range(4)) == ()
    assert stack_tree({0: ()}, range(4)) == ()


def test_stack_tree_cuts_long_run_in_middle() -> None:
    frames = stack(*(f"f{n}:{n}" for n in range(100)))
    lines = tree_lines(stack_tree({0: frames, 1: frames}, range(2)), frames=10)
    assert lines[1] == "  train.py:0 f0" and lines[-1] == "  train.py:99 f99"
    assert "  ... 90 more" in lines and len(lines) == 12


def test_large_stack_tree_is_cut_at_end() -> None:
    tree = stack_tree({rank: stack("main:1", f"f{rank}:2") for rank in range(300)}, range(300))
    lines = tree_lines(tree, lines=50)
    assert len(lines) == 51 and lines[-1] == "... 552 more lines"


def test_stack_tree_of_recursion_has_bounded_depth() -> None:
    tree = stack_tree({rank: stack(*["again:1"] * (rank + 1)) for rank in range(400)}, range(400))
    depth = 0
    branches = tree
    while branches:
        depth += 1
        branches = next((branch.branches for branch in branches if branch.branches), ())
    assert 50 < depth < 100
    assert all(isinstance(branch, StackBranch) and branch.count for branch in tree)


def test_stack_tree_merges_thousands_of_ranks_in_linear_time() -> None:
    """Time is linear in the number of ranks, measured against smaller merges."""

    def taken(ranks: int) -> float:
        stacks = {r: stack(*(f"f{n}:1" for n in range(40)), f"leaf:{r}") for r in range(ranks)}
        begin = time.process_time()
        assert stack_tree(stacks, range(ranks))[0].count == ranks
        return time.process_time() - begin

    taken(100)
    small = min(taken(500) for _ in range(3))
    assert min(taken(4000) for _ in range(2)) < 8 * small * 8


# --- devices and batches ----------------------------------------------------------------------------------------------


def job(*ranks: RankEvidence) -> Evidence:
    return Evidence("hang", len(ranks), ranks)


def rank(number: int, local: int, gpu: str = "", message: str = "", **batches: int) -> RankEvidence:
    raised = RankException("RuntimeError", message, 0.0) if message else None
    return RankEvidence(
        rank=number,
        host="node",
        pid=100 + number,
        local_rank=local,
        gpu=gpu,
        exception=raised,
        gil=GilTest(batches=batches),
    )


def test_contract_without_devices_and_loaders_is_empty() -> None:
    assert (contract.devices(job(rank(0, 0))), contract.batches(job(rank(0, 0)))) == ("", "")


def test_contract_lists_device_of_each_local_rank() -> None:
    nodes = job(rank(0, 0, "0"), rank(1, 1, "1"), rank(2, 0, "0"), rank(3, 1, "GPU-5ac1e2d3-77"))
    assert contract.devices(nodes) == "local rank 0: GPU 0, 1: GPU 1 or GPU-5ac1e2d3"


def test_contract_names_rank_used_as_device_number() -> None:
    message = "CUDA error: invalid device ordinal"
    second = job(rank(0, 0, "0"), rank(1, 0, message=message))
    assert contract.devices(second).endswith(
        "rank 1 requested a device that does not exist: a device is numbered by LOCAL_RANK, not by RANK"
    )
    assert "LOCAL_RANK" not in contract.devices(job(rank(1, 1, message=message))), "they are the same on one node"


def test_contract_has_batch_per_rank_and_step() -> None:
    assert contract.batches(job(rank(0, 0, loader=32), rank(1, 1, loader=32))) == (
        "32 (loader) a rank, 64 a step if all 2 ranks are data-parallel"
    )
    assert contract.batches(job(rank(0, 0, train=32, val=64), rank(1, 1))) == "32 (train), 64 (val) a rank"
    uneven = job(rank(0, 0, loader=32), rank(1, 1, loader=16))
    assert contract.batches(uneven) == "not the same on all ranks: 32 (loader) or 16 (loader)"


def test_contract_world_has_mesh_dimensions() -> None:
    assert contract.world(8, (("dp", 2), ("tp", 4))) == "8 ranks = dp 2 x tp 4"
    assert (contract.world(8), contract.world(0)) == ("8 ranks", "")


def test_long_rank_list_is_capped_in_sentence() -> None:
    assert rank_words(range(3, 64, 4)) == "ranks " + ",".join(str(rank) for rank in range(3, 64, 4)), "16 are whole"
    scattered = [*range(0, 200, 2), 500, 501, 502]
    assert rank_words(scattered) == "ranks 0,2,4,6,8,10,12,14 and 95 more"
    assert rank_words(format_ranks(scattered)) == rank_words(scattered)
    assert rank_words(",".join(["x"] * 40)) == "ranks x,x,x,x,x,x,x,x and others", "somebody else's text"
