"""Each row of the fault matrix: nothing that is done to a job or to us loses the job, a process or a bundle.

``pytest tests/qa/faults --whole`` runs all of it, ``scripts/qa/faults.py`` some of it, and both print the table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.qa.faults.row import PROPERTY, Row, run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_a_fault_loses_nothing(fault_row: Row, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    outcome = run(fault_row, tmp_path)
    record_property(PROPERTY, outcome.cells())
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.wrong == (), f"{fault_row.name}\n{outcome.stderr}"
