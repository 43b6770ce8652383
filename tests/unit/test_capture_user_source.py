"""Which files are quoted as the user's source: Python files that are there, whatever a path says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safelaunch.capture import user_source


def test_lines_are_counted_from_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n    time.sleep(1)\n")
    assert [user_source.line(str(script), number) for number in (0, 1, 2, 3)] == [
        None,
        "import time",
        "    time.sleep(1)",
        None,
    ]


@pytest.mark.parametrize("kind", ["none", "text", "link to a text", "fifo", "directory", "loop"])
def test_nothing_but_a_python_file_is_read(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x\n")
    path = tmp_path / "evil.py"
    if kind == "text":
        path = secret
    elif kind == "link to a text":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    assert user_source.text(str(path)) is None


def test_a_link_to_a_python_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("x = 1\n")
    (tmp_path / "train.py").symlink_to(tmp_path / "real.py")
    assert user_source.line(str(tmp_path / "train.py"), 1) == "x = 1"


def test_a_strangers_relative_path_is_not_looked_up_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert user_source.text("train.py") == "x = 1\n"
    assert user_source.text_for_stranger("train.py") is None
    assert user_source.line_for_stranger("train.py", 1) is None
    assert user_source.line_for_stranger(str(tmp_path / "train.py"), 1) == "x = 1"
