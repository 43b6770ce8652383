"""Options of ``tests/conftest.py`` that CI uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest

def test_here():
    pass

@pytest.mark.nightly
def test_at_night():
    pass

@pytest.mark.parametrize("number", range(2))
def test_elsewhere(number):
    pytest.skip("needs another machine")
"""


def run(place: Path, *options: str) -> tuple[int, str]:
    (place / "test_them.py").write_text(TESTS)
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n  nightly: not in CI\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(place)]
    done = subprocess.run(
        [*command, f"--rootdir={place}", *options], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("most", "workers", "code"), [(1, 2, 1), (2, 0, 0)])
def test_too_many_skips_fail_and_are_listed_by_reason(most: int, workers: int, code: int, tmp_path: Path) -> None:
    exit_code, printed = run(tmp_path, f"--max-skips={most}", f"-n{workers}")
    assert exit_code == code and "1 passed, 2 skipped" in printed
    assert ("2 skips, 1 are allowed" in printed) == (code == 1)
    assert code == 0 or "    2  needs another machine" in printed


def test_whole_option_runs_nightly_tests(tmp_path: Path) -> None:
    exit_code, printed = run(tmp_path, "--whole")
    assert exit_code == 0 and "2 passed, 2 skipped" in printed
