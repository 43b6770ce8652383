"""``safelaunch reproduce``: what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.addons.reproduce import command as reproduce
from safelaunch.cli import main
from tests.support.nccl_formats import Recorder, write
from tests.support.replayed import Rank, replayed


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


def test_script_goes_to_standard_output(dumps: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(dumps)]) == 0
    out, _ = capfd.readouterr()
    compile(out, "repro.py", "exec")
    assert "if rank == 0:" in out


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Differences that each run of the script will have, next run first."""
    found: list[list[str]] = []
    monkeypatch.setattr(reproduce, "run", lambda *_: found.pop(0))
    monkeypatch.setattr(reproduce.importlib.util, "find_spec", lambda _: object())
    return found


def test_script_that_hangs_differently_is_reported(
    dumps: Path, tmp_path: Path, outcomes: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes += [["rank 0 was not seen"], ["rank 0 was in barrier, and is in all_reduce"]]
    assert main(["reproduce", str(dumps), "-o", str(tmp_path / "repro.py")]) == 1
    assert "does NOT hang in the same way: rank 0 was in barrier" in capfd.readouterr().err
    assert outcomes == []


def test_different_run_is_repeated_once(dumps: Path, tmp_path: Path, outcomes: list[list[str]]) -> None:
    outcomes += [["rank 0 was not seen"], []]
    assert main(["reproduce", str(dumps), "-o", str(tmp_path / "repro.py")]) == 0


def test_script_goes_to_output_file(
    dumps: Path, tmp_path: Path, outcomes: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes.append([])
    path = tmp_path / "my repro.py"
    assert main(["reproduce", str(dumps), "-o", str(path), "--ranks", "--shrink"]) == 0
    out, err = capfd.readouterr()
    assert "it hangs in the same way" in err
    assert out == ""
    assert "--nproc-per-node=2 'my repro.py'" in err
    compile(path.read_text(), "repro.py", "exec")


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Four ranks, of which one does not come to the last of many calls."""
    found = [Recorder(number, {"0": (0, 1, 2, 3)}) for number in range(4)]
    for number in range(30):
        for one in found:
            one.collective(size=(1000 + number,))
    for one in found[1:]:
        one.collective(size=(1000,), state="started")
    folder = tmp_path / "long"
    folder.mkdir()
    return write(folder, found)


def made(capfd: pytest.CaptureFixture[str], path: Path, world: int, *words: str) -> dict[int, Rank]:
    """Returns the calls of the script's ranks."""
    assert main(["reproduce", str(path), *words]) == 0
    text = capfd.readouterr().out
    assert f"--nproc-per-node={world} " in text
    return replayed(text, world)


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        ((), [6, 7, 7, 7]),  # a few rounds
        (("--all",), [30, 31, 31, 31]),
        (("--last", "3"), [3, 4, 4, 4]),  # rank 0 is a call behind, so the others make what meets its last 3
        (("--ranks",), [6, 7]),
    ],
)
def test_last_and_ranks_limit_script(
    words: tuple[str, ...], calls: list[int], long: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [len(rank.calls) for rank in made(capfd, long, len(calls), *words).values()] == calls


def test_shrink_makes_tensors_small(long: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {call.tensors[0].shape for call in made(capfd, long, 4, "--shrink", "--all")[1].calls}
    assert len(sizes) == 30, "those that differ stay different"
    assert max(size for (size,) in sizes) <= 30


def test_sends_are_replayed_and_header_notes_missing_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [Recorder(number, {"0": (0, 1)}) for number in range(2)]
    found[0].send(1).collective(state="started")
    found[1].recv(0)
    folder = tmp_path / "sends"
    folder.mkdir()
    assert main(["reproduce", str(write(folder, found))]) == 0
    text = capfd.readouterr().out
    assert "gloo doesn't record the sends and receives" in " ".join(text.replace("#", " ").split())
    assert [call.op for call in replayed(text, 2)[1].calls] == ["recv"]


def test_bundle_without_calls_gives_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(write(tmp_path, [Recorder(0, {"0": (0,)})]))]) == 1
    assert "no torch.distributed calls" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["--last", "0"], ["--last", "x"], ["--all", "--last", "3"], ["--rank"], []])
def test_unknown_path_gives_error(words: list[str], tmp_path: Path) -> None:
    assert main(["reproduce", str(tmp_path / "absent"), *words]) == 2


def test_unwritable_output_gives_error(dumps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(dumps), "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capfd.readouterr().err
