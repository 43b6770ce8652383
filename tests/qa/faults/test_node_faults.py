"""Some rows of the fault matrix for nodes; ``scripts/qa/faults.py --nodes`` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.qa.faults.node_matrix import BY_NAME, SHORT
from tests.qa.faults.node_row import run
from tests.qa.faults.row import PROPERTY
from tests.support import netns

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(netns.cannot()), reason=netns.cannot() or "-"),
]


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_on_a_node_loses_nothing(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcome = run(BY_NAME[name], tmp_path)
    record_property(PROPERTY, outcome.cells())
    assert outcome.wrong == (), f"{name}\n{outcome.stderr}"
