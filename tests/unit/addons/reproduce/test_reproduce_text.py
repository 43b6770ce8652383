"""The written script: it compiles, it reads well, and nothing from a dump becomes code in it."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from safelaunch.addons.reproduce import Extent, ScriptOptions, reproduction_of
from safelaunch.addons.reproduce.rank_expressions import condition
from safelaunch.addons.reproduce.text import plain
from safelaunch.bundle.reading import locate
from safelaunch.model import Collective, Evidence, FlightRecord, Frame
from tests.support.evidence import in_c10d, job, rank
from tests.support.nccl_formats import Op, Recorder, write
from tests.support.replayed import Tensor, replayed

ALL = ScriptOptions(Extent(everything=True))
WORDS = {"gloo", "RANK", "not as recorded: rank ", " came back from its last call"}
HOSTILE = (
    "x\nimport os; os.system('touch /tmp/owned')",
    "x\r__import__('os')",
    'x"""\nraise SystemExit',
    "x\u2028print(1)",
    "x\x0cprint(1)",
    "x\x00y",
    "# -*- coding: utf-7 -*-",
    "{evil} %s {0}",
    "\\",
    "\ud800",
    "a" * 5000,
)


def of_dumps(folder: Path, recorders: list[Recorder], options: ScriptOptions = ALL) -> str:
    return reproduction_of(locate.read(write(folder, recorders)).evidence, options).text


def recorders(world: int, groups: dict[str, tuple[int, ...]] | None = None) -> list[Recorder]:
    return [Recorder(number, {"0": tuple(range(world)), **(groups or {})}) for number in range(world)]


def hang(name: str, frame_file: str = "/home/me/train.py", op: str = "all_reduce") -> Evidence:
    """Two ranks: one waits in a call of a group of this name."""
    entry = Collective(
        group=name, seq=1, op=f"gloo:{op}", completed=False, input_sizes=((4,),), input_dtypes=("Float",),
        description=name, frames=(Frame(frame_file, 7, name),),
    )  # fmt: skip
    record = FlightRecord("2.10", (entry,), {name: (0, 1)})
    return job(
        rank(0, in_c10d("all_reduce", 7), flight=record), rank(1, in_c10d("barrier", 8), flight=FlightRecord("2.10"))
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_untrusted_names_stay_in_comments(name: str) -> None:
    found = reproduction_of(hang(name, f"/home/{name}.py", name), ScriptOptions(name=name))
    assert found.text.isascii()
    known = {
        "torch",
        "dist",
        "rank",
        "works",
        "_",
        "range",
        "SystemExit",
        "group_1",
        "step",
        "work",
        "time",
        "os",
        "list",
    }
    for node in ast.walk(ast.parse(found.text)):
        assert not isinstance(node, ast.Name) or node.id in known, ast.dump(node)
        assert not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node.value in WORDS


def test_calls_have_user_line_as_comment() -> None:
    text = reproduction_of(hang("tp"), ALL).text
    assert "dist.all_reduce(torch.zeros(4)" in text
    assert "# train.py:7 (tp)" in text


def test_plain_text_is_one_line_of_ascii() -> None:
    assert plain("a\n\x85b\u2028é") == "a b ?"


@pytest.mark.parametrize(
    ("ranks", "world", "words"),
    [
        ({1}, 4, "rank == 1"),
        ({0, 1, 2}, 8, "rank <= 2"),
        ({5, 6, 7}, 8, "rank >= 5"),
        ({2, 3, 4}, 8, "2 <= rank <= 4"),
        ({0, 2, 3}, 4, "rank != 1"),
        ({0, 2, 4, 6}, 8, "rank in range(0, 8, 2)"),
        ({0, 3}, 8, "rank in (0, 3)"),
    ],
)
def test_rank_conditions_are_short(ranks: set[int], world: int, words: str) -> None:
    assert condition(frozenset(ranks), world) == words
    for number in range(world):
        scope: dict[str, bool] = {}
        exec(f"yes = {words}", {"rank": number}, scope)
        assert scope["yes"] == (number in ranks)


# --- NCCL's records, from dumps alone ---------------------------------------------------------------------------------


def test_batch_of_sends_is_one_call(tmp_path: Path) -> None:
    ring = recorders(3)
    for one in ring:
        after, before = (one.rank + 1) % 3, (one.rank - 1) % 3
        one.collective().batch([Op("send", peer=after), Op("recv", peer=before)])
        one.collective(state="scheduled")
    text = of_dumps(tmp_path, ring)
    assert "dist.batch_isend_irecv([" in text
    for number, found in replayed(text, 3).items():
        assert [(one.op, one.peer) for one in found.calls[1:3]] == [
            ("send", (number + 1) % 3),
            ("recv", (number - 1) % 3),
        ]


def test_coalesced_collectives_are_one_call(tmp_path: Path) -> None:
    pair = recorders(2)
    for one in pair:
        one.block([Op("all_reduce", (4,)), Op("all_reduce", (6,))])
        one.collective(state="scheduled", size=(8,) if one.rank else (9,))
    text = of_dumps(tmp_path, pair)
    assert replayed(text, 2)[0].calls[0].tensors == (Tensor((4,), "float32"), Tensor((6,), "float32"))


def test_types_unsupported_by_gloo_are_replaced(tmp_path: Path) -> None:
    pair = recorders(2)
    pair[0].collective(state="scheduled", dtype="Float8_e4m3fn")
    pair[1].collective(state="scheduled", dtype="Long")
    text = of_dumps(tmp_path, pair)
    assert "gloo doesn't support Float8_e4m3fn: the script uses float32" in text and "support Long" not in text
    assert [found.calls[0].tensors[0].dtype for found in replayed(text, 2).values()] == ["float32", "int64"]


def test_call_after_hanging_one_is_asynchronous(tmp_path: Path) -> None:
    """The CPU queues calls for the device, which waits in the first of them."""
    pair = recorders(2)
    pair[0].collective(state="started").collective(state="scheduled", size=(5,)).collective(
        state="scheduled", size=(6,)
    )
    found = replayed(of_dumps(tmp_path, pair), 2)
    assert [one.waited_for for one in found[0].calls] == [False, False, False]
    assert found[1].ended == "sleep"


def test_groups_with_same_role_share_name(tmp_path: Path) -> None:
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    grid = recorders(4, groups)
    for one in grid:
        tensor, data = ("1" if one.rank < 2 else "2"), ("4" if one.rank % 2 else "3")
        for _ in range(3):
            one.collective(group=tensor, line=10).collective(group=data, line=11)
        one.collective(group=tensor, line=10, state="scheduled")
    grid[3].entries.pop()
    text = of_dumps(tmp_path, grid)
    assert "dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])" in text
    assert text.count("dist.all_reduce(") <= 3
    assert [one.ranks for one in replayed(text, 4)[2].calls[:2]] == [(2, 3), (0, 2)]


def test_unknown_root_fits_waiting_ranks(tmp_path: Path) -> None:
    trio = recorders(3)
    for one in trio[:2]:
        one.collective("broadcast", state="started")
    found = replayed(of_dumps(tmp_path, trio), 3)
    assert {found[number].calls[0].root for number in (0, 1)} == {2}


def test_tensors_too_large_for_machine_are_shrunk(tmp_path: Path) -> None:
    pair = recorders(2)
    pair[0].collective(state="scheduled", size=(1 << 40,))
    pair[1].collective(state="scheduled", size=(1 << 41,))
    text = of_dumps(tmp_path, pair)
    assert "Tensors are smaller" in text
    sizes = {found.calls[0].tensors[0].shape for found in replayed(text, 2).values()}
    assert sizes == {(4,), (8,)}


def test_coalesced_broadcasts_have_root(tmp_path: Path) -> None:
    pair = recorders(2)
    for one in pair:
        one.block([Op("broadcast", (4,)), Op("broadcast", (6,))])
        one.block([Op("broadcast", (4,)), Op("all_reduce", (6,))])
        one.collective(state="scheduled")
    text = of_dumps(tmp_path, pair)
    assert replayed(text, 2)[0].calls[0].root == 0
    assert "is replayed as all_reduce." in text


@pytest.mark.parametrize("seed", range(12))
def test_damaged_dumps_still_give_script(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    values = [
        "\n import os",
        '"""',
        -1,
        1 << 47,
        [],
        [[-5]],
        None,
        True,
        "nccl:send 1->0",
        "nccl:coalesced",
        "x\n1",
        [["a"]],
    ]
    four = recorders(4, {"1": (0, 1), "2": (2, 3)})
    for one in four:
        group = "1" if one.rank < 2 else "2"
        for _ in range(3):
            one.collective(group=group).collective("broadcast").batch([Op("send", peer=(one.rank + 1) % 4)])
        one.collective(dice.choice(["reduce", "gather", "scatter", "all_to_all", "odd"]), state="started")
        for _ in range(3):
            entry = dice.choice(one.entries)
            entry[dice.choice(list(entry))] = dice.choice(values)
    evidence = locate.read(write(tmp_path, four, as_json=True)).evidence
    for options in (ScriptOptions(), ALL, ScriptOptions(Extent(last=2), fewest=True, shrink=True)):
        tree = ast.parse(reproduction_of(evidence, options).text)
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert texts <= WORDS
