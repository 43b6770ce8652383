"""Warnings before a run about options without effect, and the cluster key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safelaunch.settings.config import resolve
from safelaunch.supervise.cluster.key import BadKeyFile, read_key
from safelaunch.supervise.preflight import without_effect

WATCHING = [("--pg-timeout", "30s"), ("--check-every", "5"), ("--run-name", "trial")]


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (WATCHING, {}, []),
        (
            [*WATCHING, ("--no-watch", None)],
            {},
            ["--no-watch: --check-every, --pg-timeout: no effect, because nothing of safelaunch runs in the ranks"],
        ),
        ([("--no-watch", None)], {"SAFELAUNCH_PG_TIMEOUT": "30s"}, []),
        ([("--no-watch", None), ("--preset", "oom-debug")], {}, []),
    ],
)
def test_no_watch_option_names_options_without_effect(
    words: list[tuple[str, str | None]], environ: dict[str, str], said: list[str], tmp_path: Path
) -> None:
    assert without_effect(resolve(words, environ, tmp_path, lambda: "2.13.0")) == said


def test_key_is_stripped_of_white_space(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  0123456789abcdef\n")
    assert read_key(file) == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"short", b"\n" * 100, b"x" * 5000])
def test_key_of_a_wrong_length_is_rejected(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(BadKeyFile, match="16 to 4096 bytes"):
        read_key(file)


def test_key_path_that_is_no_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadKeyFile, match="not a file"):
        read_key(tmp_path / "fifo")
    with pytest.raises(BadKeyFile, match="No such file"):
        read_key(tmp_path / "none")
