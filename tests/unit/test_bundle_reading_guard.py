"""Files of other users, read in child processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from safelaunch.bundle.reading import parallel
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.bundle.reading.guard import LimitExceeded, ReadLimits, in_child
from safelaunch.bundle.reading.parallel import parse_all

# --- parsing by several processes gives the same as parsing by one, even if a process dies ----------------------------


def read(paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    return ((path.read_text(), os.getpid()) for path in paths)


def read_and_die_of(*names: str) -> Callable[[Sequence[Path]], Iterator[tuple[str, int]]]:
    return partial(_read_and_die, names)


def _read_and_die(names: tuple[str, ...], paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    for path in paths:
        if path.name in names:
            os.kill(os.getpid(), signal.SIGSEGV)
        yield from read([path])


def texts(results: Sequence[tuple[str, int] | str]) -> list[str]:
    return [result if isinstance(result, str) else result[0] for result in results]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr("safelaunch.bundle.reading.parallel.os.sched_getaffinity", lambda pid: {0, 1, 2})
    for number in range(100):
        (tmp_path / str(number)).write_text(f"text {number}")
    return [tmp_path / str(number) for number in range(100)]


ALL = [f"text {number}" for number in range(100)]


@pytest.mark.parametrize("parallel_from_bytes", [0, 1 << 30])
def test_parse_all_yields_files_in_order_from_child_processes(files: list[Path], parallel_from_bytes: int) -> None:
    results = list(parse_all(files, read, parallel_from_bytes=parallel_from_bytes))
    assert texts(results) == ALL
    assert os.getpid() not in {result[1] for result in results}


@pytest.mark.parametrize("parallel_from_bytes", [0, 1 << 30])
def test_parse_all_file_that_kills_reader_loses_only_itself(files: list[Path], parallel_from_bytes: int) -> None:
    results = list(parse_all(files, read_and_die_of("3", "70"), parallel_from_bytes=parallel_from_bytes))
    died = "reading it killed the reader (SIGSEGV)"
    assert texts(results) == [died if number in (3, 70) else text for number, text in enumerate(ALL)]


def test_parse_all_stops_after_several_killed_readers(files: list[Path]) -> None:
    results = texts(list(parse_all(files, read_and_die_of(*map(str, range(10, 20))))))
    assert results[:10] == ALL[:10]
    assert results[14:] == ["skipped, because 4 other files could not be read"] * 86


def test_parse_all_works_without_process_pool(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", refuse)
    assert texts(list(parse_all(files, read, parallel_from_bytes=0))) == ALL


# --- bounds -----------------------------------------------------------------------------------------------------------


def dies_of_a_deep_key() -> object:
    key: tuple[object, ...] = ()
    for _ in range(1_000_000):
        key = (key,)
    return {key: 1}


def spins() -> object:
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "why"),
    [
        (dies_of_a_deep_key, "reading it killed the reader .SIGSEGV."),
        (lambda: bytearray(1 << 30), "reading it takes more than 256 MB of memory"),
        (spins, "reading it takes more than 0 s of CPU time"),
        (lambda: os._exit(3), "its reader failed with exit code 3"),
        (
            lambda: {}["a key"],
            r"an internal error of safelaunch; .*: KeyError \(test_bundle_reading_guard.py:\d+\): 'a key'",
        ),
    ],
)
def test_in_child_reports_exceeded_limit_or_failure(work: Callable[[], object], why: str) -> None:
    with pytest.raises(LimitExceeded, match=why):
        in_child(work, ReadLimits(256 << 20, cpu_s=0 if work is spins else 20))


def test_in_child_passes_on_unreadable() -> None:
    def refuse() -> None:
        raise Unreadable("no")

    with pytest.raises(Unreadable, match=r"^no$"):
        in_child(refuse, ReadLimits(256 << 20, cpu_s=5))


def test_in_child_returns_large_answer_whole() -> None:
    assert in_child(lambda: b"." * 10_000_000, ReadLimits(256 << 20, cpu_s=5)) == b"." * 10_000_000


def test_in_child_limits_file_size(tmp_path: Path) -> None:
    def fill() -> int:
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(bytes(2 << 20))
        return (tmp_path / "file").stat().st_size

    assert in_child(fill, ReadLimits(256 << 20, cpu_s=5, file_bytes=1 << 20)) == 1 << 20
