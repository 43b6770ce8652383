"""Terminal sequences are removed from all text that is shown."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelaunch.system import console
from safelaunch.system.printable import clean, clean_json, clean_lines, clean_text, is_clean, json_document

OBEYED = [*map(chr, (*range(9), *range(0x0B, 0x20), *range(0x7F, 0xA0))), "\u202e", "\u2066", "\u061c", "\U000e0041"]
any_text = st.text(st.characters() | st.sampled_from(OBEYED))


@pytest.mark.parametrize("character", OBEYED)
def test_control_character_is_removed(character: str) -> None:
    text = f"a{character}b"
    assert clean(text) == "ab" and not is_clean(text)
    assert clean_text(f"ä\tx\n{text}") == "ä x\nab"
    assert character not in json_document({text: text})


@given(any_text)
def test_clean_json_decodes_to_same_value(text: str) -> None:
    written = clean_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert json.loads(written) == {text: [text]}
    assert is_clean(written)
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in written if c != "\n")


@given(any_text)
def test_cleaned_text_is_clean(text: str) -> None:
    assert is_clean(clean(text)) and is_clean(clean_text(text)) and all(map(is_clean, clean_lines(text)))


def test_say_removes_terminal_sequences(capfd: pytest.CaptureFixture[str]) -> None:
    console.say("größe\n\x1b[2Jrank \x9b31m3\u202e is \x1b]0;title\x07late")
    assert capfd.readouterr().err == "safelaunch: größe\nsafelaunch: rank 31m3 is late\n"
