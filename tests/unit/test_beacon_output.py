"""Ring of a rank's last output: appended records are read back from intact and damaged files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safelaunch.beacon import output
from safelaunch.beacon.output import CAPACITY, HEADER, RECORD, STDERR, STDOUT, Ring

SMALL = 256
Written = list[tuple[int, bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "0-0-1.ring")


def back(path: str) -> Written:
    return [(stream, data) for _, stream, data in output.read(path)]


def write(path: str, written: Written, capacity: int = CAPACITY) -> Ring:
    made = Ring(path, capacity)
    for stream, data in written:
        made.append(stream, data)
    return made


def expected(written: Written, capacity: int) -> Written:
    """Returns the newest records that fit, with oversized ones cut to their end."""
    kept: Written = []
    used = 0
    for stream, data in reversed(written):
        data = data[-(capacity - RECORD.size) :]
        used += RECORD.size + len(data)
        if used > capacity:
            break
        kept.insert(0, (stream, data))
    return kept


def test_empty_ring_has_no_records_and_is_private(path: str) -> None:
    write(path, [])
    assert output.read(path) == []
    assert Path(path).stat().st_size == HEADER.size + CAPACITY
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_ring_returns_records_with_time_and_stream(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000, 2_000])
    monkeypatch.setattr(output, "time_ns", lambda: next(clock))
    write(path, [(STDOUT, b"hello\n"), (STDERR, b"\xff\x00\n")])
    assert output.read(path) == [(1_000, STDOUT, b"hello\n"), (2_000, STDERR, b"\xff\x00\n")]


def test_ring_is_readable_while_writer_lives_and_after(path: str) -> None:
    made = write(path, [(STDOUT, b"one")])
    assert back(path) == [(STDOUT, b"one")]
    made.append(STDERR, b"two")
    assert back(path) == [(STDOUT, b"one"), (STDERR, b"two")]
    del made
    assert back(path) == [(STDOUT, b"one"), (STDERR, b"two")]


def test_ring_copies_memory_views(path: str) -> None:
    """The caller might reuse the buffer afterwards."""
    made = Ring(path)
    buffer = bytearray(b"abc")
    made.append(STDOUT, memoryview(buffer))
    buffer[:] = b"xyz"
    assert back(path) == [(STDOUT, b"abc")]


def test_ring_append_during_append_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler prints during a print."""
    made = Ring(path)
    real = output.time_ns

    def interrupted() -> int:
        made.append(STDERR, b"inner")
        return real()

    monkeypatch.setattr(output, "time_ns", interrupted)
    made.append(STDOUT, b"outer")
    monkeypatch.undo()
    made.append(STDOUT, b"after")
    assert back(path) == [(STDOUT, b"outer"), (STDOUT, b"after")]


def test_ring_accepts_records_after_failed_append(path: str) -> None:
    made = Ring(path)
    with pytest.raises(TypeError):
        made.append(STDOUT, 3)  # type: ignore[arg-type]
    made.append(STDOUT, b"after")
    assert back(path) == [(STDOUT, b"after")]


def test_ring_refuses_existing_file(path: str) -> None:
    Path(path).write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Ring(path)
    assert Path(path).read_bytes() == b"mine"


def fresh(places: pytest.TempPathFactory) -> str:
    """Returns one path for all examples, because creating hundreds of directories takes longer than the test itself."""
    path = places.getbasetemp() / "ring"
    path.unlink(missing_ok=True)
    return str(path)


RECORDS = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=SMALL + 40)), max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(RECORDS, st.integers(RECORD.size + 1, SMALL))
def test_ring_returns_newest_records_that_fit(
    tmp_path_factory: pytest.TempPathFactory, written: Written, capacity: int
) -> None:
    path = fresh(tmp_path_factory)
    write(path, written, capacity)
    assert back(path) == expected(written, capacity)


# --- files that are no rings, or damaged ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\x00" * (HEADER.size - 1), "too short"),
        (b"\x00" * 4096, "not a ring"),
        (HEADER.pack(output.MAGIC, 64, 0, 0) + b"\x00" * 63, "not a ring"),
        (HEADER.pack(output.MAGIC, 64, 0, 1) + b"\x00" * 64, "not a ring"),
        (HEADER.pack(output.MAGIC, 64, 65, 0) + b"\x00" * 64, "not a ring"),
        (HEADER.pack(output.MAGIC, 2**63, 0, 0) + b"\x00" * 64, "not a ring"),
        (HEADER.pack(output.MAGIC, 0, 0, 0), None),
    ],
    ids=["empty", "half a header", "zeros", "cut short", "tail ahead", "overfull", "absurd", "of no capacity"],
)
def test_ring_read_rejects_invalid_header(path: str, content: bytes, message: str | None) -> None:
    Path(path).write_bytes(content)
    if message is None:
        assert output.read(path) == []
        return
    with pytest.raises(ValueError, match=message):
        output.read(path)


def test_ring_read_of_absent_file_raises(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        output.read(path)


def test_ring_read_stops_at_torn_record(path: str) -> None:
    write(path, [(STDOUT, b"whole"), (STDOUT, b"torn")], SMALL)
    content = bytearray(Path(path).read_bytes())
    second = HEADER.size + RECORD.size + len(b"whole")
    for damage in (RECORD.pack(1, 4, 9), RECORD.pack(1, 5, STDOUT), RECORD.pack(1, 2**32 - 1, STDOUT)):
        content[second : second + RECORD.size] = damage
        Path(path).write_bytes(content)
        assert back(path) == [(STDOUT, b"whole")]


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    RECORDS, st.lists(st.tuples(st.integers(0, HEADER.size + SMALL - 1), st.integers(0, 255)), max_size=40), st.data()
)
def test_damaged_ring_is_read_as_far_as_valid(
    tmp_path_factory: pytest.TempPathFactory,
    written: Written,
    damage: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    path = fresh(tmp_path_factory)
    write(path, written, SMALL)
    content = bytearray(Path(path).read_bytes())
    for position, value in damage:
        content[position] = value
    Path(path).write_bytes(content[: data.draw(st.integers(0, len(content)))] if damage else content)
    try:
        records = output.read(path)
    except ValueError:
        return
    assert all(stream in (STDOUT, STDERR) for _, stream, _ in records)
    assert sum(RECORD.size + len(piece) for _, _, piece in records) <= SMALL


def test_ring_header_is_four_words() -> None:
    """Ranks might run another version of safelaunch, so the layout is a contract between versions."""
    assert HEADER.size == 32
    assert struct.calcsize(RECORD.format) == RECORD.size == 16
