"""Reasons that ranks at fault report themselves: an exception being handled, a dead thread."""

from __future__ import annotations

import pytest

from safelaunch.stacks.tracebacks import of_threads

LOG = """13:00:49.591 err| Exception in thread prefetch:
13:00:49.591 err| Traceback (most recent call last):
13:00:49.592 err|   File "/usr/lib/python3.11/threading.py", line 982, in run
13:00:49.592 err|     self._target(*self._args, **self._kwargs)
13:00:49.592 err|   File "/home/me/data.py", line 28, in read_records
13:00:49.592 err|     n = int(header)
13:00:49.592 err|         ^^^^^^^^^^^
13:00:49.592 err| ValueError: invalid literal for int() with base 10: '<html>'
13:00:50.000 out| step 77
"""


@pytest.mark.parametrize("cut", range(0, len(LOG), 37))
def test_truncated_log_yields_only_real_frames(cut: int) -> None:
    for text in (LOG[:cut], LOG[cut:]):
        for found in of_threads(text):
            assert all(frame.file in LOG for frame in found.frames)
