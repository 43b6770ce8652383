"""What is said before a run about options that have no effect in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.settings.config import resolve
from safelaunch.supervise.preflight import without_effect

WATCHING = [("--pg-timeout", "30s"), ("--check-every", "5"), ("--run-name", "trial")]


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (WATCHING, {}, []),
        (
            [*WATCHING, ("--no-watch", None)],
            {},
            ["--no-watch: --check-every, --pg-timeout: no effect, because nothing of safelaunch runs in the ranks"],
        ),
        ([("--no-watch", None)], {"SAFELAUNCH_PG_TIMEOUT": "30s"}, []),
        ([("--no-watch", None), ("--preset", "oom-debug")], {}, []),
    ],
)
def test_options_of_the_watch_without_it_are_named(
    words: list[tuple[str, str | None]], environ: dict[str, str], said: list[str], tmp_path: Path
) -> None:
    assert without_effect(resolve(words, environ, tmp_path, lambda: "2.13.0")) == said
