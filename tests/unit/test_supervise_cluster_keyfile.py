"""The file of the job's key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safelaunch.supervise.cluster.keyfile import BadKeyFile, read_key


def test_white_space_around_a_key_is_none_of_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  0123456789abcdef\n")
    assert read_key(file) == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"short", b"\n" * 100, b"x" * 5000])
def test_what_is_no_key(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(BadKeyFile, match="16 to 4096 bytes"):
        read_key(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadKeyFile, match="not a file"):
        read_key(tmp_path / "fifo")
    with pytest.raises(BadKeyFile, match="No such file"):
        read_key(tmp_path / "none")
