"""``pytest tests/faults --whole`` runs every row of the fault matrix, without it the shorter form. Prints the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every row of the fault matrix (half an hour)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames:
        return
    import matrix

    names = matrix.BY_NAME if metafunc.config.getoption("--whole", default=False) else matrix.SHORT
    metafunc.parametrize("row", [pytest.param(matrix.BY_NAME[name], id=name) for name in names])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The rows come as properties of the reports: the tests may have run in other processes."""
    import row

    found = [each for reports in terminalreporter.stats.values() for each in reports]
    properties = [each for report in found for each in getattr(report, "user_properties", ())]
    rows = dict.fromkeys(tuple(cells) for name, cells in properties if name == row.PROPERTY)
    if rows:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(row.table(list(rows)))
