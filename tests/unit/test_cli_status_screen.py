"""The screen of ``status --watch``: golden files for three sizes (``python tests/unit/screens.py`` writes them), the
sparkline, the keys; and the terminal, which it leaves as it was.
"""

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

import msgspec
import pytest
import screens
from screens import GOLDEN, SIZES, VIEWS

from safelaunch.cli.status import Watching
from safelaunch.cli.status_screen import ASCII, Glyphs, View, course, screen, spark
from safelaunch.model import Inconsistency
from safelaunch.supervise.control.discover import Run
from safelaunch.supervise.control.protocol import DumpAnswer, Request, StacksAnswer


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", VIEWS)
def test_the_screen(name: str, width: int, height: int) -> None:
    assert screens.drawn(name, width, height) == (GOLDEN / f"{name}-{width}.txt").read_text("utf-8")


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_wider_or_higher_than_the_terminal(name: str) -> None:
    for width, height in ((1, 1), (20, 3), (40, 8), (60, 10), (200, 100)):
        lines = screen(VIEWS[name], width, height, ASCII)
        assert len(lines) <= height and all(len(line.text) <= width for line in lines)
        assert all(line.text.isascii() for line in lines)


def test_escapes_from_a_job_do_not_reach_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;title\x07evil\r\n"
    ranks = [screens.rank(0, phase=evil, state=evil)]
    known = {"name": evil, "threshold_why": evil, "notes": [evil], "alone": evil, "watch": evil}
    view = View((screens.run(1, ranks, **known),), 0.0, messages=(evil,))
    text = "\n".join(line.text for line in screen(view, 200, 50))
    assert "evil" in text and not [char for char in text if ord(char) < 32 and char != "\n"]


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        ([], ""),
        ([(120.0, 0), (0.0, 1200)], "████████████████████████"),
        ([(60.0, 0), (0.0, 600)], "████████████"),
        ([(120.0, 0), (60.0, 600)], "████████████▁▁▁▁▁▁▁▁▁▁▁▁"),  # frozen for a minute
        ([(120.0, 0), (60.0, 600), (0.0, 900)], "████████████▅▅▅▅▅▅▅▅▅▅▅▅"),
        ([(900.0, 7)], "▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁"),
    ],
)
def test_the_course_of_the_rate(history: list[tuple[float, int]], shown: str) -> None:
    assert spark(course(history), Glyphs()) == shown


def test_a_wrong_result_is_shown_whole() -> None:
    words = "parameters diverged between steps 6 and 9: rank 2 differs from the others in 3 of 6, the first is 2.w"
    wrong = Inconsistency("replicas-diverged", 1.0, step=9, words=words)
    view = View((screens.run(1, [screens.rank(0)], inconsistent=[wrong]),), 0.0)
    text = " ".join(" ".join(line.text for line in screen(view, 60, 30)).split())
    assert f"wrong result: {words}" in text


# --- keys -------------------------------------------------------------------------------------------------------------


def settle(watching: Watching, runs: tuple[Run, ...]) -> View:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watching.saw(runs)
        view = watching.view(0.0, keys=True)
        if view.stacks != () and not any("continues ..." in one for one in view.messages):
            return view
        time.sleep(0.01)
    raise AssertionError("the question has no answer")


def test_the_keys_ask_the_selected_run() -> None:
    asked: list[tuple[str, str]] = []

    def answer(run: Run, request: Request) -> bytes:
        asked.append((run.id, request.command))
        if run.id == "r3001":
            raise OSError("it is gone")
        return msgspec.json.encode(
            DumpAnswer("/b/train-dump", "Rank 3 reads.") if request.command == "dump" else StacksAnswer()
        )

    runs = screens.several(2).runs
    watching = Watching(answer)
    watching.saw(runs)
    assert watching.view(0.0, keys=True).selected == "r3000"
    watching.on_key("d")
    assert settle(watching, runs).messages == ("Rank 3 reads. bundle: /b/train-dump",)
    watching.on_key("\t")
    assert watching.view(0.0, keys=True).selected == "r3001"
    watching.on_key("d")
    assert settle(watching, runs).messages[1:] == ("no bundle of r3001: it is gone",)
    watching.on_key("s")
    (missing,) = settle(watching, runs).stacks or ()
    assert missing.missing == "no stacks: it is gone"
    watching.on_key("s")
    assert watching.view(0.0, keys=True).stacks is None, "again shows the ranks"
    watching.on_key("\x1b[A")
    watching.on_key("?")
    watching.saw(runs[1:])
    assert watching.view(0.0, keys=True).selected == "r3001", "the one that was selected has ended"
    assert asked == [("r3000", "dump"), ("r3001", "dump"), ("r3001", "stacks")]


# --- the terminal -----------------------------------------------------------------------------------------------------

DRAWING = """
import sys
from safelaunch.cli.status_screen import Line, Terminal
with Terminal() as terminal:
    terminal.draw([Line("step 1", "bold"), Line("r\\u00e9sum\\u00e9 \\u2581")])
    key = ""
    while key != "q":
        key = terminal.key(0.2)  # as status does: a signal right before it waits for a key is seen after it
        if key == "x":
            raise ValueError("on purpose")
        if key and key != "q":
            print(repr(key), end=" ", flush=True)
"""


@pytest.mark.parametrize("ending", ["j\x1b[A\x1b[Zq", "x", "\x03", "SIGTERM", "SIGHUP"])
def test_the_terminal_is_as_it_was_however_it_ends(ending: str) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "latin-1"}
    become = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    with subprocess.Popen(
        [sys.executable, "-c", become + DRAWING], stdin=slave, stdout=slave, stderr=slave, env=env
    ) as process:
        shown = until_shown(master, b"step 1")
        if ending.startswith("SIG"):
            process.send_signal(signal.Signals[ending])
        else:
            os.write(master, ending.encode())
        shown += until_shown(master, b"\x1b[?1049l", b"\x1b[?25h")
        process.wait(60)
    after = termios.tcgetattr(slave)
    os.close(slave)
    os.close(master)
    assert after == before
    assert all(one in shown for one in (b"\x1b[?1049h", b"\x1b[?25l", b"r\xe9sum\xe9 ?"))
    assert b"'j' '\\x1b[A' '\\x1b[Z' " in shown or not ending.endswith("q"), "keys that come at once"
    assert process.returncode == {"j\x1b[A\x1b[Zq": 0, "x": 1, "\x03": -2, "SIGTERM": 143, "SIGHUP": 129}[ending]


def until_shown(master: int, *wanted: bytes) -> bytes:
    """What the terminal shows, up to the last of ``wanted``."""
    shown = b""
    deadline = time.monotonic() + 60
    while not all(one in shown for one in wanted):
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown
        shown += os.read(master, 65536)
    return shown
