"""What a loop asks for again and again, as its source says."""

from __future__ import annotations

from textwrap import dedent

import pytest

from safelaunch.model import Frame
from safelaunch.verdict.reading.innermost import Poll, poll_at

FILE = "/home/me/train.py"


def poll(text: str, *functions: str, asleep: bool = True) -> Poll | None:
    """``text`` marks the lines of the stack, innermost first, with ``# 1``, ``# 2``."""
    lines = dedent(text).strip("\n").splitlines()
    marked = [
        next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {at}"))
        for at in range(1, 3)
        if f"# {at}" in text
    ]
    return poll_at([Frame(FILE, line, "f") for line in marked], lambda path: "\n".join(lines), asleep=asleep)


@pytest.mark.parametrize(
    ("test", "of"),
    [
        ("not os.path.exists(path)", "file"),
        ("not (root / 'done').is_file()", "file"),
        ("len(glob.glob(pattern)) < 4", "file"),
        ("not work.is_completed()", "work"),
        ("child.poll() is None", "process"),
        ("actors[0].is_alive()", "process"),
        ("not store.check(['ready'])", "key"),
        ("not self.ready", ""),
    ],
)
def test_the_condition_of_the_loop(test: str, of: str) -> None:
    found = poll(f"while {test}:\n    log('waiting')\n    time.sleep(1)  # 1")
    assert found is not None
    assert (found.line, found.of, found.text) == (1, of, f"while {test}")
    assert found.words == f"`while {test}` (train.py:1)"


def test_the_branch_that_leaves_a_loop_without_a_condition() -> None:
    found = poll(
        """
        def wait_for(path):
            for _ in range(10_000):
                if os.path.exists(path):
                    return
                time.sleep(0.2)  # 1
        """
    )
    assert found is not None and (found.line, found.text, found.of) == (3, "if os.path.exists(path)", "file")


@pytest.mark.parametrize("where", ["handler", "after"])
def test_what_is_tried_again(where: str) -> None:
    sleep = "time.sleep(1)  # 1"
    found = poll(
        f"""
        def fetch(url):
            while True:
                try:
                    with urlopen(url) as answer:
                        return answer.read()
                except OSError:
                    {sleep if where == "handler" else "log('again')"}
                {sleep if where == "after" else "pass"}
        """
    )
    assert found is not None and (found.line, found.text, found.of) == (4, "urlopen(url)", "attempt")


def test_a_sleep_in_a_function_that_the_loop_calls() -> None:
    found = poll(
        """
        def pause():
            time.sleep(0.5)  # 1

        def wait_for(path):
            while not path.exists():
                pause()  # 2
        """
    )
    assert found is not None and (found.line, found.of) == (5, "file")


@pytest.mark.parametrize(
    "text",
    [
        "for batch in loader:\n    train(batch)\n    library.call()  # 1",  # no sleep of its own
        "while True:\n    time.sleep(1)  # 1",
        "time.sleep(1)  # 1",
        "for step in range(9):\n    time.sleep(1)  # 1\n    train()",
        "try:\n    train()\nexcept OSError:\n    time.sleep(1)  # 1",
        "while not (:\n    time.sleep(1)  # 1",
    ],
)
def test_no_poll(text: str) -> None:
    assert poll(text) is None


def test_a_loop_that_spins_has_a_condition_or_nothing_is_said() -> None:
    spins = poll("while not work.is_completed():\n    pass  # 1", asleep=False)
    assert spins is not None and spins.of == "work"


def test_without_a_source_nothing_is_said() -> None:
    assert poll_at([Frame(FILE, 2, "f")], lambda path: None) is None
    assert poll_at([], lambda path: "x = 1") is None
