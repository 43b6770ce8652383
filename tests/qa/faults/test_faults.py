"""Each row of the fault matrix: no fault of a job or of safelaunch loses the job, a process or a bundle.

CI runs some rows, ``--whole`` all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.qa.faults import ROW_PROPERTY
from tests.qa.faults.matrix import BY_NAME, IN_CI
from tests.qa.faults.row import Row, run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = BY_NAME if metafunc.config.getoption("--whole") else IN_CI
    metafunc.parametrize("fault_row", [pytest.param(BY_NAME[name], id=name) for name in names])


def test_a_fault_loses_nothing(fault_row: Row, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    outcome = run(fault_row, tmp_path)
    record_property(ROW_PROPERTY, outcome.cells())
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.wrong == (), f"{fault_row.name}\n{outcome.stderr}"
