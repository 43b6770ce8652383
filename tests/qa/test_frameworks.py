"""Frameworks, unmodified: healthy jobs come to their end, and a planted hang is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.qa import frameworks

pytestmark = [pytest.mark.torch, pytest.mark.nightly, pytest.mark.timeout(240)]

HANGS = [(framework.name, how) for framework in frameworks.FRAMEWORKS for how in framework.hangs]


def framework(name: str) -> frameworks.Framework:
    found = frameworks.BY_NAME[name]
    if not found.installed():
        pytest.skip(f"{found.needs} is not installed: scripts/qa/frameworks.sh runs this")
    return found


@pytest.mark.parametrize("name", frameworks.BY_NAME)
def test_a_healthy_job_comes_to_its_end(name: str, tmp_path: Path) -> None:
    assert not frameworks.judge_healthy(frameworks.run(framework(name), tmp_path))


@pytest.mark.parametrize(("name", "how"), HANGS)
def test_a_hang_is_found_and_named(name: str, how: str, tmp_path: Path) -> None:
    culprit = HANGS.index((name, how)) % 2
    found = framework(name)
    result = frameworks.run(found, tmp_path, how, culprit)
    assert not frameworks.judge_hang(found, how, culprit, result), result.said
