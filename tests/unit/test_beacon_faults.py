"""The beacon's own JSON: it may not import the library's, and has to be read by a strict decoder."""

from __future__ import annotations

import msgspec
import pytest

from safelaunch.beacon.faults import quoted


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quoted" \\ path', "tab\tline\nnul\0bell\x07del\x7f", "naïve 例え 🏖️", "</script>"]
)
def test_aquoted_text_is_read_back(text: str) -> None:
    assert msgspec.json.decode(quoted(text)) == text


def test_what_no_file_can_hold_is_replaced() -> None:
    assert msgspec.json.decode(quoted("lone \udc80 surrogate")) == "lone ? surrogate"
