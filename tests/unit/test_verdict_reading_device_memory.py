"""The allocator's error, in the forms that it has had since torch 2.1."""

from __future__ import annotations

import pytest

from safelaunch.verdict.reading.device_memory import shortage, words

GIB, MIB = 1 << 30, 1 << 20
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.00 GiB of which 512.00 "
    "MiB is free. Process 4711 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "73.50 GiB memory in use. Of the allocated memory 66.00 GiB is allocated by PyTorch, with 46.00 MiB "
    "allocated in private pools (e.g., CUDA Graphs), and 6.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation."
)


def test_all_sizes_are_read() -> None:
    found = shortage(FULL)
    assert found is not None
    assert (found.device, found.asked, found.total, found.free) == (1, 2 * GIB, 79 * GIB, 512 * MIB)
    assert (found.own, found.allocated, found.unused) == (73 * GIB + 512 * MIB, 66 * GIB, 6 * GIB)
    assert found.others == ((4711, 5 * GIB),)
    assert found.is_fragmented


def test_what_is_not_told_is_not_known() -> None:
    found = shortage("HIP out of memory. Tried to allocate 20.00 MiB.")
    assert found is not None
    assert (found.device, found.asked, found.own, found.others) == (-1, 20 * MIB, None, ())
    assert not found.is_fragmented


def test_nothing_free_is_a_size_too() -> None:
    found = shortage(FULL.replace("512.00 MiB is free", "0 bytes is free").replace("capacity", "capacty"))
    assert found is not None and (found.free, found.total) == (0, 79 * GIB)


@pytest.mark.parametrize("message", ["", "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_other_errors_are_none_of_it(message: str) -> None:
    assert shortage(message) is None


def test_sizes_in_words() -> None:
    assert [words(size) for size in (3 * GIB // 2, 40 * MIB, 0)] == ["1.5 GiB", "40 MiB", "0 MiB"]
