"""The row of the fault matrix for nodes that runs in CI. ``python -m scripts.qa faults --nodes`` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.qa.faults import ROW_PROPERTY
from tests.qa.faults.node_matrix import BY_NAME, IN_CI
from tests.qa.faults.node_row import run
from tests.support import netns

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(netns.cannot()), reason=netns.cannot() or "-"),
]


@pytest.mark.parametrize("name", IN_CI)
def test_a_fault_on_a_node_loses_nothing(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcome = run(BY_NAME[name], tmp_path)
    record_property(ROW_PROPERTY, outcome.cells())
    assert outcome.wrong == (), f"{name}\n{outcome.stderr}"
