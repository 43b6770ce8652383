"""``--whole`` runs every row of the fault matrix (``tests/faults``), without it the shorter form; prints the table.

Here rather than beside the matrix: where tests run in several processes, the one that prints loads no other conftest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("integration", "faults"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every row of the fault matrix (the better part of an hour)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_row" in metafunc.fixturenames:
        import matrix

        names = matrix.BY_NAME if metafunc.config.getoption("--whole") else matrix.SHORT
        metafunc.parametrize("fault_row", [pytest.param(matrix.BY_NAME[name], id=name) for name in names])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The rows come as properties of the reports."""
    import row

    found = [each for reports in terminalreporter.stats.values() for each in reports]
    properties = [each for report in found for each in getattr(report, "user_properties", ())]
    rows = dict.fromkeys(tuple(cells) for name, cells in properties if name == row.PROPERTY)
    if rows:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(row.table(list(rows)))
