"""Durations as keywords of ``safelaunch.launch``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import safelaunch
from safelaunch.addons.embed.keywords import flags_of
from safelaunch.settings.config import resolve


@pytest.mark.parametrize("given", [300, 300.0, "300", "5m"], ids=repr)
def test_keyword_accepts_durations_of_option(given: Any, tmp_path: Path) -> None:
    settings = resolve(flags_of({"stall_timeout": given}), {}, tmp_path, lambda: None)
    assert settings.stall_timeout_s == 300.0


@pytest.mark.parametrize("name", ["stall_timeout", "stall_floor", "max_stall", "startup_timeout", "pg_timeout", "wait"])
def test_invalid_keyword_raises_at_call(name: str) -> None:
    for given in ("soon", -1, float("nan"), timedelta(0)):
        with pytest.raises(ValueError, match=f"{name}: .* is not .*, or a timedelta") as raised:
            safelaunch.launch(None, "train.py", **{name: given})  # type: ignore[call-overload]
        assert isinstance(raised.value, safelaunch.UsageError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stall_timeout": timedelta(minutes=5)}, [("--stall-timeout", "300")]),
        ({"stall_timeout": "auto", "max_stall": "2h"}, [("--stall-timeout", "auto"), ("--max-stall", "2h")]),
        ({"pg_timeout": "10m!"}, [("--pg-timeout", "10m!")]),
        ({"pg_timeout": timedelta(hours=1)}, [("--pg-timeout", "3600")]),
        ({"wait": True}, [("--wait", None)]),
        ({"wait": False, "stall_floor": None}, []),
        ({"wait": timedelta(seconds=1.5)}, [("--wait", "1.5")]),
    ],
)
def test_keywords_become_flags(options: dict[str, Any], words: list[tuple[str, str | None]]) -> None:
    assert list(flags_of(options)) == words
