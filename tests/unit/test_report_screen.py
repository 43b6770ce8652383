"""Screen of a verdict, as golden files.

A screen must not break a line within a word or a path, and its last lines can be copied whole.
"""

from __future__ import annotations

import os
import pty
import re
import shlex

import pytest
from msgspec.structs import replace

from safelaunch.model import Claim, Culprit, Frame, NextStep, Verdict
from safelaunch.report import screen, sentences
from safelaunch.system import console
from safelaunch.system.console import Display, display, terminal_safe
from tests.support import golden

BUNDLE = "/home/me/My Experiments/safelaunch-bundles/train-20261122T022137Z-hang"
COMMAND = "safelaunch --preset nccl-debug --nproc-per-node=8 train.py --data '/data/My Corpus' --steps 1000 --lr 1e-3"
WIDTHS = (60, 80, 120)

_GATHER = Frame("/home/me/My Experiments/llm/training/metrics.py", 8, "log_metric")
MISMATCH = Verdict(
    schema=1,
    outcome="hang",
    cause="collective-mismatch",
    confidence="high",
    summary="Rank 0 waits in all_gather at metrics.py:8 (log_metric) while ranks 1-7 wait in all_reduce at train.py:18."
    " Ranks 1-7 never reach metrics.py:8 (log_metric) because of"
    " `if step % 100 == 0 and dist.get_rank() == 0 (train.py:20)`.",
    culprits=(Culprit(0, "node1", 13575, "main", _GATHER, 100, "Rank 0 waits in all_gather."),),
    victims="1-7",
    evidence=(
        Claim("collective #106 of group '0' is all_gather on rank 0, all_reduce on ranks 1-7",
              "ranks/0/flight_recorder.json"),
        Claim("Ranks 1-7 never reach metrics.py:8 (log_metric) because of"
              " `if step % 100 == 0 and dist.get_rank() == 0 (train.py:20)`",
              "ranks/0/stack.txt"),
        Claim("rank 0: pending: all_gather #106 of group '0', float32 scalar", "ranks/0/flight_recorder.json"),
        Claim("rank 0: its main thread waits at metrics.py:8 (log_metric)", "ranks/0/stack.txt"),
        Claim("rank 1: its main thread waits at train.py:18", "ranks/1/stack.txt"),
        Claim("rank 2: its main thread waits at train.py:18", "ranks/2/stack.txt"),
    ),
    ruled_out=(),
    missing=(),
    suggestions=(
        "Every rank must make this call: gate the side effect (a print, writing a file) with `if rank == 0`, not the "
        "collective.",
    ),
    next=NextStep("Once that is fixed", COMMAND.replace("--preset nccl-debug ", "")),
    run="train",
    command=tuple(shlex.split(COMMAND.replace("--preset nccl-debug ", ""))),
)  # fmt: skip
TRANSPORT = replace(
    MISMATCH,
    cause="no-rank-stands-out",
    confidence="medium",
    summary="Ranks 0-7 wait in all_reduce at train.py:18 (train); every rank has arrived: no rank stands out.",
    culprits=(),
    victims="0-7",
    evidence=tuple(
        Claim(f"rank {n}: pending: all_reduce #31 of group '0', bfloat16[4096,1024]", f"ranks/{n}/flight_recorder.json")
        for n in range(3)
    ),
    suggestions=(
        "All ranks have arrived: suspect the transport (NIC, `NCCL_SOCKET_IFNAME`, firewall between nodes) or a GPU.",
        "To see what the transport does: `safelaunch --preset nccl-debug ...`",
    ),
    next=NextStep("To see what the transport does", COMMAND),
)
CRASH = replace(
    MISMATCH,
    outcome="crash",
    cause="rank-exception",
    summary="Rank 3 raised ValueError: loss 3.2 is above the limit at metrics.py:8 (log_metric), while ranks 0-2,4-7"
    " wait in all_reduce at train.py:18 (train).",
    culprits=(
        Culprit(3, "node1", 13578, "dataloader worker (pid 13578)", _GATHER, 41, "Rank 3 raised ValueError."),
        Culprit(5, "node2", 13580, "main", None, None, "Rank 5 raised ValueError."),
    ),
    victims="0-2,4-7",
    evidence=(Claim("rank 3: first exception: ValueError", "ranks/3/exception.json"),),
    missing=("no Flight Recorder: ranks 0-7",),
    suggestions=("Fix the exception on this rank; the errors of the other ranks follow from it.",),
    next=None,
)
SUSPECT = replace(
    MISMATCH,
    outcome="suspect",
    cause="blocking-io",
    confidence="medium",
    summary="Rank 0 waits for an answer at metrics.py:8 (log_metric), while ranks 1-7 wait in all_reduce at"
    " train.py:18.",
    doubts=("There is no proof that the job cannot continue: what it waits for may still arrive.",),
    suggestions=("Add a timeout, or move the call to where no other rank depends on it.",),
)
SCREENS = {"mismatch": MISMATCH, "transport": TRANSPORT, "crash": CRASH, "suspect": SUSPECT}


def line_of(path: str, number: int) -> str:
    return "    dist.all_gather(losses, loss)  # only rank 0 gets here, and no other rank ever reaches the line"


def shown(verdict: Verdict, width: int, *, color: bool = False) -> str:
    return screen.screen(verdict, bundle_path=BUNDLE, page="report.html", width=width, color=color, read_line=line_of)


EVERY = pytest.mark.parametrize(("name", "width"), [(name, width) for name in SCREENS for width in WIDTHS])


@EVERY
def test_screen_matches_golden_file(name: str, width: int) -> None:
    golden.compare(f"verdict_screens/{name}-{width}.txt", shown(SCREENS[name], width))


@EVERY
def test_screen_breaks_no_word_or_path(name: str, width: int) -> None:
    verdict = SCREENS[name]
    lines = shown(verdict, width).splitlines()
    # The suggestion with the command is shown separately, on the last line but one.
    advice = [text for text in verdict.suggestions if "safelaunch --preset" not in text]
    words = set(" ".join([verdict.summary, *advice]).split())
    text = " ".join(line.removeprefix("safelaunch: ").strip() for line in lines)
    assert words <= set(text.split())
    paths = [f"{culprit.frame.file}:{culprit.frame.line}" for culprit in verdict.culprits if culprit.frame is not None]
    for whole in (*paths, BUNDLE, *([step.command] if (step := sentences.next_step(verdict)) else [])):
        assert sum(whole in line for line in lines) == 1, whole
    copied = [line for line in lines if BUNDLE in line or COMMAND[-20:] in line or any(path in line for path in paths)]
    assert all(len(line) <= width for line in lines if line not in copied)


def test_screen_last_line_is_whole_bundle_path() -> None:
    for width in (10, 40, 120):
        assert shown(MISMATCH, width).splitlines()[-1] == f"safelaunch: bundle: {BUNDLE}"


def test_screen_merged_claim_lists_all_files() -> None:
    text = shown(TRANSPORT, 200)
    assert text.count("#31") == 1
    assert "each of ranks 0-2: pending: all_reduce #31 of group '0', bfloat16[4096,1024]" in text
    assert all(f"ranks/{n}/flight_recorder.json" in text for n in range(3))


def test_screen_omits_claim_already_in_summary() -> None:
    assert shown(MISMATCH, 120).count("never reach") == 1


def test_screen_shows_next_command_once() -> None:
    text = shown(TRANSPORT, 120)
    assert text.count("--preset nccl-debug") == 1
    assert text.splitlines()[-3] == f"safelaunch:     {COMMAND}"


def test_screen_names_page_above_bundle() -> None:
    assert shown(MISMATCH, 60).splitlines()[-2] == "safelaunch:   details: report.html in the bundle"
    assert "report" not in screen.screen(replace(MISMATCH, culprits=MISMATCH.culprits * 5), bundle_path=BUNDLE)


@EVERY
def test_screen_names_explain_command_of_cause(name: str, width: int) -> None:
    command = f"safelaunch explain {SCREENS[name].cause}"
    assert sum(line.endswith(command) for line in shown(SCREENS[name], width).splitlines()) == 1
    without_page = screen.screen(SCREENS[name], bundle_path=BUNDLE, place="read from", width=width).splitlines()
    assert without_page[-2] == f"safelaunch:   more: {command}"
    assert max(len(without_page), len(shown(SCREENS[name], width).splitlines())) <= screen.MAX_LINES


# --- colour -----------------------------------------------------------------------------------------------------------


def test_screen_with_colour_has_same_text() -> None:
    colored = shown(MISMATCH, 80, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == shown(MISMATCH, 80)
    assert terminal_safe(colored, color=True) == colored
    assert terminal_safe(colored) == shown(MISMATCH, 80)


def test_screen_highlights_culprit_line_and_condition() -> None:
    colored = shown(MISMATCH, 120, color=True).splitlines()
    strong = [line for line in colored if "\x1b[1m" in line]
    assert any("rank 0 (pid 13575" in line for line in strong)
    assert any("> dist.all_gather" in line for line in strong)
    assert any("\x1b[33mif step % 100 == 0" in line for line in colored)


def test_terminal_safe_redacts_secret_split_by_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.redact, "_function", lambda text: text.replace("hunter2", "[redacted]"))
    assert terminal_safe("\x1b[1mhunt\x1b[0mer2", color=True) == "[redacted]"


@pytest.mark.parametrize(
    ("environ", "colored"),
    [
        ({"TERM": "xterm"}, True),
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_on_terminal_follows_environment(environ: dict[str, str], colored: bool) -> None:
    master, slave = pty.openpty()
    try:
        assert display(slave, environ).color is colored
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize(("environ", "colored"), [({"TERM": "xterm"}, False), ({"FORCE_COLOR": "1"}, True)])
def test_colour_in_pipe_needs_force_color(environ: dict[str, str], colored: bool) -> None:
    ends = os.pipe()
    try:
        assert display(ends[1], environ) == Display(100, colored)
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("width", [60, 132, 7])
def test_display_width_comes_from_terminal(width: int) -> None:
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        assert display(slave, {"COLUMNS": "99"}).width == max(width, console.NARROWEST)
    finally:
        os.close(master)
        os.close(slave)


LONG = "/home/me/experiments/of/a/long/name/safelaunch-bundles/train-20261122T022137Z-hang"


@pytest.mark.parametrize(
    ("cwd", "end"),
    [
        ("", [f"bundle: {LONG}"]),
        ("/home/me/experiments/of/a/long/name", ["bundle: safelaunch-bundles/train-20261122T022137Z-hang"]),
        ("/home/me/exp", ["bundle:", LONG]),
        ("/", ["bundle:", LONG]),
        ("/home/me/experiments", ["bundle:", LONG.removeprefix("/home/me/experiments/")]),
    ],
)
def test_screen_long_path_is_relative_or_on_own_line(cwd: str, end: list[str]) -> None:
    """The path is relative if that fits, otherwise on its own line.

    In a file, where programs look for it, it is unchanged.
    """
    shown = screen.screen(MISMATCH, bundle_path=LONG, width=80, cwd=cwd).splitlines()
    assert [line.removeprefix("safelaunch: ") for line in shown[-len(end) :]] == end
    assert len(shown) <= screen.MAX_LINES


@pytest.mark.parametrize("width", [40, 80])
def test_message_on_terminal_breaks_between_words(width: int) -> None:
    text = f"safelaunch:   no step for 13 s: {LONG}/early.json tells what each rank was about when it was last seen"
    parts = console._broken(text, width)
    assert all(part.startswith("safelaunch:   ") for part in parts)
    assert " ".join(part.removeprefix("safelaunch:").strip() for part in parts).split() == text.split()[1:]
    assert all(len(part) <= width or LONG in part for part in parts)
    assert console._broken("safelaunch: short", width) == ["safelaunch: short"]


def test_display_of_closed_descriptor_is_no_terminal() -> None:
    assert display(987, {}) == Display(100, False)


@pytest.mark.parametrize("width", WIDTHS)
def test_screen_advice_is_whole_or_ends_in_ellipsis(width: int) -> None:
    advice = f"First {'word ' * 60}end."
    crowded = replace(MISMATCH, culprits=MISMATCH.culprits * 3, suggestions=(advice, advice))
    shown = screen.screen(crowded, bundle_path=BUNDLE, width=width)
    texts = [line.removeprefix("safelaunch: ") for line in shown.splitlines()]
    starts = [at for at, text in enumerate(texts) if text.startswith("  next: ")]
    ends = [next(n for n in range(at + 1, len(texts)) if not texts[n].startswith("    ")) - 1 for at in starts]
    assert starts and all(texts[at].endswith(("end.", " …")) for at in ends)
    assert len(texts) <= screen.MAX_LINES
