"""Screen of ``status --watch``: golden files for three sizes, the sparkline, and the restored terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from safelaunch.cli.status_screen import ASCII, Glyphs, course, screen, spark
from safelaunch.model import WrongResult
from tests.support import golden, screens
from tests.support.paths import ROOT
from tests.support.screens import RUNS, SIZES


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", RUNS)
def test_status_screen_matches_golden_file(name: str, width: int, height: int) -> None:
    golden.compare(f"status_screens/{name}-{width}.txt", screens.drawn(name, width, height))


@pytest.mark.parametrize("name", RUNS)
def test_status_screen_fits_terminal(name: str) -> None:
    for width, height in ((1, 1), (20, 3), (40, 8), (60, 10), (200, 100)):
        lines = screen(RUNS[name], 0.0, width, height, ASCII)
        assert len(lines) <= height and all(len(line.text) <= width for line in lines)
        assert all(line.text.isascii() for line in lines)


def test_status_screen_of_many_runs_shows_conspicuous_ones() -> None:
    lines = [line.text for line in screen(RUNS["several-12"], screens.NOW, 80, 6)]
    assert [line.split()[0] for line in lines[:4]] == ["r2402", "r9", "r3000", "r3001"]
    assert lines[4] == "and 10 more runs: see safelaunch status --watch RUN"


@pytest.mark.parametrize(("height", "lines"), [(5, 4), (4, 2)])
def test_status_screen_run_has_second_line_if_it_fits(height: int, lines: int) -> None:
    assert len(screen(RUNS["several-12"][:2], screens.NOW, 80, height)) == lines + 1


def test_status_removes_escape_sequences_of_job() -> None:
    evil = "\x1b[2J\x1b]0;title\x07evil\r\n"
    ranks = [screens.rank(0, phase=evil, state=evil)]
    fields = {"name": evil, "threshold_why": evil, "notes": [evil], "alone": evil, "watch": evil}
    text = "\n".join(line.text for line in screen((screens.run(1, ranks, **fields),), 0.0, 200, 50))
    assert "evil" in text and not [char for char in text if ord(char) < 32 and char != "\n"]


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        ([], ""),
        ([(120.0, 0), (0.0, 1200)], "████████████████████████"),
        ([(60.0, 0), (0.0, 600)], "████████████"),
        ([(120.0, 0), (60.0, 600)], "████████████▁▁▁▁▁▁▁▁▁▁▁▁"),  # no progress for a minute
        ([(120.0, 0), (60.0, 600), (0.0, 900)], "████████████▅▅▅▅▅▅▅▅▅▅▅▅"),
        ([(900.0, 7)], "▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁"),
    ],
)
def test_status_sparkline_shows_rate_history(history: list[tuple[float, int]], shown: str) -> None:
    assert spark(course(history), Glyphs()) == shown


def test_status_screen_shows_wrong_result_in_full() -> None:
    words = "parameters diverged between steps 6 and 9: rank 2 differs from the others in 3 of 6, the first is 2.w"
    wrong = WrongResult("replicas-diverged", 1.0, step=9, words=words)
    runs = (screens.run(1, [screens.rank(0)], wrong_results=[wrong]),)
    text = " ".join(" ".join(line.text for line in screen(runs, 0.0, 60, 30)).split())
    assert f"wrong result: {words}" in text


# --- the terminal -----------------------------------------------------------------------------------------------------

WATCHING = """
from safelaunch.cli import status
from tests.support import screens
status.choose = lambda runs, word: ()
status.select = lambda runs, word: screens.healthy()
status.main(["--watch"])
"""


@pytest.mark.parametrize(("ending", "code"), [("SIGINT", 0), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_status_watch_restores_terminal(ending: str, code: int) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    path = os.fspath(ROOT)
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "latin-1", "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", WATCHING], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
    ) as process:
        shown = until_shown(master, b"pretrain")
        process.send_signal(signal.Signals[ending])
        shown += until_shown(master, b"\x1b[?1049l", b"\x1b[?25h")
        process.wait(60)
    after = termios.tcgetattr(slave)
    os.close(slave)
    os.close(master)
    assert (after, process.returncode) == (before, code)
    assert b"\x1b[?1049h" in shown and b"\x1b[?25l" in shown


def until_shown(master: int, *wanted: bytes) -> bytes:
    """Returns the terminal's output up to the last of ``wanted``."""
    shown = b""
    deadline = time.monotonic() + 60
    while not all(text in shown for text in wanted):
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown
        shown += os.read(master, 65536)
    return shown
