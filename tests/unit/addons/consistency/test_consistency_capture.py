"""Reading the series of checks that ranks write."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from safelaunch.addons.consistency import layout
from safelaunch.addons.consistency.capture import SeriesReader

# --- the files of the consistency checks, written here as the beacon writes them --------------------------------------

ABOUT = {"key": "SGD", "kind": "parameters", "every": 3, "rank": 1, "groups": [[0, 1]], "tensors": [["w", 0], ["b", 0]]}
SIZE = layout.CHECK_SLOT + 3 * 2 + 2 * layout.CHECK_WINDOW
SLOTS = 2


class File:
    """A file of a series with two tensors and two slots."""

    def __init__(self, path: Path, about: object = ABOUT) -> None:
        self.path = path
        text = json.dumps(about).encode()
        self.begin = 8 * layout.CHECK_HEADER + (len(text) + 7) // 8 * 8
        header = struct.pack("=4q", layout.CHECK_MAGIC, len(text), SLOTS, SIZE)
        self.path.write_bytes((header + text).ljust(self.begin, b"\0") + bytes(8 * SIZE * SLOTS))

    def put(self, number: int, position: int, *, sequence: int | None = None) -> None:
        """Writes check ``number``; the sentinel of step s is s, the losses are 0.5 and 0.25 from step 7 on."""
        numbers = struct.pack("=7q", sequence or 2 * number + 2, position, 1, 2, 7, 0, position).ljust(
            8 * layout.CHECK_SLOT, b"\0"
        )
        numbers += struct.pack("=2q4d", position, -position, 1.0, 2.0, 3.0, float("nan"))
        numbers += struct.pack(f"={layout.CHECK_WINDOW}d", *range(layout.CHECK_WINDOW)) + struct.pack("=2d", 0.5, 0.25)
        with self.path.open("r+b") as file:
            file.seek(self.begin + number % SLOTS * 8 * SIZE)
            file.write(numbers)


def test_series_check_is_read_once(tmp_path: Path) -> None:
    file = File(tmp_path / "series")
    series = SeriesReader(file.path, 1)
    assert series.read() == []
    file.put(0, 1)
    file.put(1, 3)
    first, second = series.read()
    assert (first.position, second.position, second.prints, second.sizes) == (1, 3, (3, -3), (1.0, 2.0))
    assert second.gradients[0] == 3.0 and second.gradients[1] != second.gradients[1]
    assert second.sentinel == ((2, 2.0), (3, 3.0)) and second.losses == ((7, 0.5), (8, 0.25))
    assert series.read() == []


def test_unfinished_slot_waits_and_overwritten_slot_is_lost(tmp_path: Path) -> None:
    file = File(tmp_path / "series")
    series = SeriesReader(file.path, 1)
    for number in range(3):
        file.put(number, 3 * number + 3)
    assert [one.position for one in series.read()] == [6, 9]
    file.put(3, 12, sequence=7)
    assert series.read() == []
    file.put(3, 12)
    assert [one.position for one in series.read()] == [12]


def test_unready_or_damaged_file_raises(tmp_path: Path) -> None:
    File(tmp_path / "fine")
    data = (tmp_path / "fine").read_bytes()
    young = tmp_path / "young"
    for begun in (b"", data[:16], bytes(8) + data[8:]):
        young.write_bytes(begun)
        with pytest.raises(BlockingIOError):
            SeriesReader(young, 1)
    for number, broken in enumerate((data[:-8], data[:16] + struct.pack("=q", 1 << 40) + data[24:])):
        path = tmp_path / f"broken{number}"
        path.write_bytes(broken)
        with pytest.raises(ValueError):
            SeriesReader(path, 1)
    with pytest.raises(ValueError):
        SeriesReader(File(tmp_path / "group", {**ABOUT, "groups": []}).path, 1)
