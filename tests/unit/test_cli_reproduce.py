"""``safelaunch reproduce``: what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from nccl_formats import Recorder, write

from safelaunch.cli import main


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    found = [Recorder(number, {"0": (0, 1, 2)}) for number in range(3)]
    for one in found:
        one.collective().collective()
    for one in found[1:]:
        one.collective(state="started")
    folder = tmp_path / "dumps"
    folder.mkdir()
    return write(folder, found)


def test_the_script_goes_to_standard_output(dumps: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(dumps)]) == 0
    out, _ = capfd.readouterr()
    compile(out, "repro.py", "exec")
    assert "if rank == 0:" in out


def test_or_into_a_file(dumps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my repro.py"
    assert main(["reproduce", str(dumps), "-o", str(path), "--ranks", "--shrink"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "--nproc-per-node=2 'my repro.py'" in err
    compile(path.read_text(), "repro.py", "exec")


def test_nothing_to_replay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(write(tmp_path, [Recorder(0, {"0": (0,)})]))]) == 1
    assert "no calls of torch.distributed" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["--last", "0"], ["--last", "x"], ["--all", "--last", "3"], ["--rank"], []])
def test_what_it_does_not_know(words: list[str], tmp_path: Path) -> None:
    assert main(["reproduce", str(tmp_path / "absent"), *words]) == 2


def test_a_file_that_cannot_be_written(dumps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(dumps), "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capfd.readouterr().err
