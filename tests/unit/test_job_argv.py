"""Splitting the command line into own options, torchrun's and the script's.

The parser of the installed torchrun is the reference: for every line that it accepts, the split must find the same
script.
"""

from __future__ import annotations

import contextlib
import io
from argparse import ArgumentParser
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safelaunch.job.argv import CommandLine, options_given, split
from safelaunch.job.torchrun import KNOWN
from safelaunch.settings.options import OWN_OPTIONS
from safelaunch.system.errors import UsageError

OWN = {option.flag: option.takes_value for option in OWN_OPTIONS}


def cut(*words: str) -> CommandLine:
    return split(words, OWN, KNOWN)


# --- table ------------------------------------------------------------------------------------------------------------

# words → own, torchrun's, the script's
TABLE = {
    "nothing": ("", [], "", ""),
    "only a script": ("train.py", [], "", "train.py"),
    "a script and its arguments": ("train.py --lr 1 x", [], "", "train.py --lr 1 x"),
    "torchrun's, with a value": ("--nproc-per-node 2 train.py", [], "--nproc-per-node 2", "train.py"),
    "torchrun's, joined": ("--nproc_per_node=2 train.py", [], "--nproc_per_node=2", "train.py"),
    "torchrun's flag": ("--standalone train.py", [], "--standalone", "train.py"),
    "an abbreviation with a value": ("--nproc-per 2 train.py", [], "--nproc-per 2", "train.py"),
    "an abbreviated flag": ("--standal train.py", [], "--standal", "train.py"),
    "a module": ("-m package.train --lr 1", [], "-m", "package.train --lr 1"),
    "short, joined": ("-r3 train.py", [], "-r3", "train.py"),
    "short, apart": ("-t 3 train.py", [], "-t 3", "train.py"),
    "short, with =": ("-r=3 train.py", [], "-r=3", "train.py"),
    "a flag and a valued one in one word": ("-mr 3 train.py", [], "-mr 3", "train.py"),
    "a flag and a joined value in one word": ("-mr3 train.py", [], "-mr3", "train.py"),
    "a value that looks like a script": ("--role train.py main.py", [], "--role train.py", "main.py"),
    "a value that is a number below zero": ("--node-rank -1 train.py", [], "--node-rank -1", "train.py"),
    "ours first": ("--preset x --nnodes 1 train.py", [("--preset", "x")], "--nnodes 1", "train.py"),
    "ours last": ("--nnodes 1 --preset x train.py", [("--preset", "x")], "--nnodes 1", "train.py"),
    "ours, joined": ("--preset=x train.py", [("--preset", "x")], "", "train.py"),
    "ours, joined and empty": ("--preset= train.py", [("--preset", "")], "", "train.py"),
    "ours, with = in the value": ("--preset=a=b train.py", [("--preset", "a=b")], "", "train.py"),
    "ours, without a value": ("--dry-run train.py", [("--dry-run", None)], "", "train.py"),
    "ours, twice": ("--preset a --preset b t.py", [("--preset", "a"), ("--preset", "b")], "", "t.py"),
    "ours, with a value or without": ("--wait=10m --wait t.py", [("--wait", "10m"), ("--wait", None)], "", "t.py"),
    "ours after the script is the script's": ("t.py --preset x --wait", [], "", "t.py --preset x --wait"),
    "ours between": (
        "--standalone --wait --nnodes 1 --gpus=2 t.py --gpus 3",
        [("--wait", None), ("--gpus", "2")],
        "--standalone --nnodes 1",
        "t.py --gpus 3",
    ),
    "ours is never abbreviated": ("--prese x t.py", [], "--prese", "x t.py"),
    "ours as the value of torchrun's": ("--role --preset t.py", [], "--role --preset", "t.py"),
    "ours after --": ("-- --preset x", [], "--", "--preset x"),
    "-- before the script": ("--nnodes 1 -- t.py -- x", [], "--nnodes 1 --", "t.py -- x"),
    "-- after the script": ("t.py -- --preset x", [], "", "t.py -- --preset x"),
    "an unknown option is torchrun's to reject": ("--nope t.py", [], "--nope", "t.py"),
    "a lone dash is a script": ("- x", [], "", "- x"),
    "a number below zero is a script": ("-3 --preset x", [], "", "-3 --preset x"),
    "a value is missing": ("--nnodes", [], "--nnodes", ""),
}


@pytest.mark.parametrize("case", TABLE)
def test_argv_split_matches_table(case: str) -> None:
    words, own, torchrun, script = TABLE[case]
    assert cut(*words.split()) == CommandLine(tuple(own), tuple(torchrun.split()), tuple(script.split()))


def test_argv_words_with_spaces_or_empty_are_kept() -> None:
    assert cut("--role", "a b", "my script.py", "c d", "") == CommandLine(
        (), ("--role", "a b"), ("my script.py", "c d", "")
    )
    assert cut("", "x").script == ("", "x")
    assert cut("-x y", "--preset").script == ("-x y", "--preset"), "argparse: a word with a space is no option"
    assert cut("-r3 4", "t.py").torchrun == ("-r3 4",), "... unless it begins with a short one"
    assert cut("--role=a b", "t.py").torchrun == ("--role=a b",)


def test_argv_arguments_are_all_but_own_options() -> None:
    assert cut("--nnodes", "1", "--wait", "t.py", "--wait").arguments == ("--nnodes", "1", "t.py", "--wait")


def test_argv_flags_after_script_do_not_count() -> None:
    assert cut("-h", "t.py").has_flag("-h", "--help")
    assert not cut("t.py", "-h").has_flag("-h", "--help")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset"], "--preset needs a value"),
        (["--standalone", "--run-name"], "--run-name needs a value"),
        (["--no-lease=1", "t.py"], "--no-lease takes no value, but got '1'"),
        (["--dry-run=", "t.py"], "--dry-run takes no value, but got ''"),
    ],
)
def test_argv_own_option_with_wrong_value_is_usage_error(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut(*words)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--nnodes 2 -mr3 --standalone", [["--nnodes"], ["-m", "-r"], ["--standalone"]]),
        ("--nnodes=2 --stall-timout", [["--nnodes"], []]),
        ("--no-py", [["--no-python"]]),
        ("-x -mx", [[], ["-m"]]),
    ],
)
def test_argv_option_abbreviations_are_resolved(words: str, options: list[list[str]]) -> None:
    assert [meant for _, meant in options_given(words.split(), KNOWN)] == options


# --- torchrun's parser as the reference -------------------------------------------------------------------------------


@cache
def parser() -> ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@cache
def table() -> dict[str, bool]:
    return {name: action.nargs != 0 for action in parser()._actions for name in action.option_strings}


def accepted(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns torchrun's script and arguments, or None if it rejects the line (or shows its help)."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            parsed = parser().parse_args(words)
        except SystemExit:
            return None
    return parsed.training_script, parsed.training_script_args


def agree(words: list[str], own: list[tuple[int, list[str]]] = []) -> bool:  # noqa: B006
    """Checks a line, and returns False if torchrun rejects it.

    Args:
        own: Own options, each with the position in ``words`` at which it is inserted.
    """
    judged = accepted(words)
    if judged is None:
        return False
    mixed = list(words)
    for position, ours in sorted(own, key=lambda item: -item[0]):
        mixed[position:position] = ours
    line = split(mixed, OWN, table())
    script, arguments = judged
    assert [*line.torchrun, *line.script] == words
    assert line.script[0] == script
    assert all(meant for _, meant in options_given(line.torchrun, table())), "an option that torchrun accepts"
    # Whether argparse drops a "--" after the script depends on the version; torchrun sees it in any case.
    assert [w for w in line.script[1:] if w != "--"] == [w for w in arguments if w != "--"]
    if "--" not in words:
        assert list(line.script[1:]) == arguments
    expected = [word.partition("=")[0] for _, ours in sorted(own, key=lambda item: item[0]) for word in ours[:1]]
    assert [name for name, _ in line.own] == expected
    return True


VALUES = {
    "--max-restarts": "3",
    "--monitor-interval": "0.5",
    "--start-method": "fork",
    "--node-rank": "1",
    "--master-port": "29501",
    "--numa-binding": "node",
    "--shutdown-timeout": "7",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_argv_split_agrees_with_torchrun_for_every_option_form(name: str) -> None:
    """Every option is tried separate, joined and abbreviated, before a script with the same argument."""
    if name not in table():
        pytest.skip(f"this torch has no {name}")
    value = VALUES.get(name.replace("_", "-"), "x")
    tail = ["t.py", name, "y"]
    if name in ("-h", "--help"):
        assert split([name, *tail], OWN, table()) == CommandLine((), (name,), tuple(tail))
        return
    forms = [[name, value], [f"{name}={value}"]] if table()[name] else [[name]]
    assert all(agree([*form, *tail]) for form in forms)
    for end in range(3, len(name)):
        for form in forms:
            agree([form[0].replace(name, name[:end]), *form[1:], *tail])


def test_argv_split_agrees_with_torchrun_on_abbreviations() -> None:
    assert agree(["--stand", "t.py"])
    assert agree(["--max-r", "3", "t.py"])
    assert agree(["--mast=1", "t.py"]) is False, "ambiguous: torchrun rejects it"


NASTY = [
    "t.py",
    "-m",
    "-r",
    "3",
    "-r3",
    "-mr",
    "--",
    "-3",
    "-1.5",
    "-",
    "",
    "a b",
    "-x y",
    "-r3 4",
    "--role=a b",
    "--no-python",
    "--x",
]


def test_argv_split_agrees_with_torchrun_on_unusual_words() -> None:
    judged = [agree(list(words)) for words in product(NASTY, repeat=3)]
    assert sum(judged) > 1000


SHORT = st.sampled_from(["-m", "-r3", "-r3 4", "-t=3", "-mr3", "-mmt1", "-mt a b"]).map(
    lambda word: [word]
) | st.sampled_from([["-r", "3"], ["-t", "0:1,1:2"], ["-mr", "3"], ["-mt", "-1"], ["-r", "a b"]])
WORD = st.sampled_from(["2", "x", "-1", "a b", "train.py", "-.5", "a=b", "--"]) | st.text("ab-= ", max_size=4)
OWN_WORDS = st.sampled_from(
    [["--preset", "x"], ["--preset=--"], ["--wait"], ["--run-name", "--nnodes"], ["--gpus", ""]]
)


@st.composite
def options(draw: st.DrawFn) -> list[str]:
    """Draws an option of torchrun in some form."""
    name = draw(st.sampled_from(sorted(name for name in table() if name.startswith("--") and name != "--help")))
    cut_at = draw(st.integers(4, len(name)) | st.just(len(name)))
    if not table()[name]:
        return [name[:cut_at]]
    value = VALUES.get(name.replace("_", "-")) or draw(WORD)
    return [f"{name[:cut_at]}={value}"] if draw(st.booleans()) else [name[:cut_at], value]


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Draws a command line, and own options with their positions among torchrun's."""
    words: list[str] = []
    own = []
    for option in draw(st.lists(options() | SHORT, max_size=4)):
        if draw(st.booleans()):
            own.append((len(words), draw(OWN_WORDS)))
        words += option
    if draw(st.booleans()):
        words.append("--")
    script = draw(st.sampled_from(["t.py", "a.b", "my script.py", "-3"]) | WORD)
    arguments = draw(st.lists(st.sampled_from(["--preset", "--wait", "--nnodes", "-m", "--help"]) | WORD, max_size=4))
    return [*words, script, *arguments], own


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@example((["--standalone", "t.py", "--wait"], [(0, ["--wait"]), (1, ["--preset", "x"])]))
@given(lines())
def test_argv_split_agrees_with_torchrun_on_generated_lines(
    line: tuple[list[str], list[tuple[int, list[str]]]],
) -> None:
    agree(*line)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(NASTY) | WORD | st.sampled_from(sorted(KNOWN)), max_size=6))
def test_argv_split_agrees_with_torchrun_on_random_words(words: list[str]) -> None:
    agree(words)
