"""``safelaunch``, ``safelaunch --help`` and ``safelaunch help``."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from safelaunch.cli import COMMANDS, main, program
from safelaunch.cli import help as command
from safelaunch.settings.options import OPTION_GROUPS, OWN_OPTIONS
from safelaunch.system.console import command_lines, folded
from safelaunch.system.errors import UsageError


def test_safelaunch_without_arguments_prints_short_help_and_exits_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "usage: safelaunch" in shown.err
    assert all(f"\n  {name} " in shown.err for name in COMMANDS)
    assert len(shown.err.splitlines()) <= max(24, 10 + len(COMMANDS))  # a small terminal


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["--nproc-per-node", "2", "--help"], ["--hel"]])
def test_help_options_print_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == command.text(command.width()) + "\n"


@pytest.mark.parametrize("width", [80, 100])
def test_help_lists_subcommands_options_and_exit_codes(width: int) -> None:
    text = command.text(width)
    examples = text.index("\nExamples:")
    assert max(map(len, text[:examples].splitlines())) <= width
    places = [
        text.index(f"\n{title}:") for title in ("Subcommands (safelaunch help SUBCOMMAND shows more)", *OPTION_GROUPS)
    ]
    places += [text.index("\nOptions of torchrun:"), text.index("\nExit codes:"), examples]
    assert places == sorted(places)
    for option in OWN_OPTIONS:
        assert (f"\n  {option.flag}" in text) == option.is_available
    for code in ("124", "125", "2"):
        assert f"\n  {code} " in text


def test_help_introduction_takes_three_lines() -> None:
    assert len(command.text(100).split("\n\n")[0].splitlines()) == 3


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "help"])
def test_help_of_subcommand_equals_its_help_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["help", name], [name, "--help"]):
        try:
            assert main(words) == 0
        except SystemExit as end:  # argparse
            assert end.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and f"safelaunch {name}" in shown[0]


TEXT = """\
name      a text that is longer than the line is wide
a table   of several cells  each of which  stays whole
  indented words that do not fit
word --nproc-per-node=2 /a/path/that/is/longer/than/the/line/is/wide"""


def test_folded_text_breaks_between_words_and_cells() -> None:
    assert folded(TEXT, 100) == TEXT
    assert folded(TEXT, 30).splitlines() == [
        *("name      a text that is", "          longer than the line", "          is wide"),
        *("a table   of several cells", "    each of which  stays whole"),
        *("  indented words that do not", "    fit"),
        *("word --nproc-per-node=2", "/a/path/that/is/longer/than/the/line/is/wide"),
    ]


def test_command_over_several_lines_is_valid_shell() -> None:
    words = ["safelaunch", "--nproc-per-node=2", "'my train.py'", "--lr", "0.1"]
    assert command_lines(words, "command  ", 1000) == [f"command  {' '.join(words)}"]
    lines = command_lines(words, "  ", 32)
    assert max(map(len, lines)) <= 32
    read = subprocess.run(["sh", "-c", "printf '%s\n' " + "\n".join(lines)], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == shlex.split(" ".join(words))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", [["presets"], ["diagnose", "--help"], ["demo", "--help"], ["--dry-run", __file__]])
def test_output_on_terminal_breaks_no_word(words: list[str], width: int) -> None:
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        done = subprocess.Popen([*program(), *words], stdin=subprocess.DEVNULL, stdout=slave)
        os.close(slave)
        shown = b""
        with suppress(OSError):  # a terminal signals its end by an error
            while data := os.read(master, 65536):
                shown += data
        assert done.wait(120) == 0
    finally:
        os.close(master)
    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert len(lines) > 5
    assert not [line for line in lines if len(line) > width and " " in line.strip()], "only a word may be longer"


def test_help_of_unknown_subcommand_names_nearest() -> None:
    with pytest.raises(UsageError, match=r"^help: there is no subcommand 'statsu'; did you mean 'status'\?$"):
        command.main(["statsu"])


@pytest.mark.torch
@pytest.mark.nightly
def test_help_torchrun_prints_torchrun_help() -> None:
    done = subprocess.run([*program(), "--help-torchrun"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--nproc-per-node" in done.stdout and "--stall-timeout" not in done.stdout


def test_help_takes_little_cpu_time() -> None:
    """Importing torch would take sixty times as much CPU time."""

    def cpu_s(*words: str) -> float:
        spent = []
        for _ in range(3):
            process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            spent.append(used.ru_utime + used.ru_stime)
        return min(spent)

    assert cpu_s(*program()[1:], "--help") < 20 * cpu_s("-c", "pass")
