"""Adds ``--whole``: every row of the fault matrix (``tests/qa/faults``), with its table, and the tests marked ``rare``.

This is not in ``tests/qa/faults``: under pytest-xdist, the process that prints loads no other conftest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from tests.support.nvml import stub

# What the build makes, in a checkout that was installed before it had to.
ROOT = Path(__file__).parents[1]
if (ROOT / "safelaunch").is_dir() and not (ROOT / "safelaunch" / "cli" / "completions").is_dir():
    subprocess.run([sys.executable, "-m", "scripts.build.generate"], cwd=ROOT, check=True)

# A shell starts background processes with these signals ignored, and children inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# safelaunch runs jobs in the active environment; the tests are about the one they run in.
for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
    os.environ.pop(variable, None)

# A bug of torch (2.13, issue 190489): a gloo thread that frees the last collective's tensors needs the GIL, and aborts
# the process if Python is shutting down. It affects up to a third of short jobs, under plain torchrun as well.
TORCH_ABORTS_AT_EXIT = "terminate called without an active exception"


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Repeats a test once if it failed for that reason and no other."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed and TORCH_ABORTS_AT_EXIT in report.longreprtext for report in reports):
        item._initrequest()  # type: ignore[attr-defined]  # as a new run begins: fixtures anew
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture
def node(tmp_path: Path) -> stub.Node:
    """A simulated node of eight idle GPUs with its own leases. Its ``environ`` shows it to a process."""
    from tests.support.nvml import stub

    if stub.library() is None:
        pytest.skip("no C compiler for the stand-in of libnvidia-ml.so.1")
    there = stub.Node(tmp_path / "nvml.state", tmp_path / "leases")
    there.write()
    return there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every row of the fault matrix, every rare test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is rare, unless ``--whole`` or the test's own name asks for it."""
    if config.getoption("--whole") or any("::" in word for word in config.args):
        return
    rare = [item for item in items if item.get_closest_marker("rare")]
    config.hook.pytest_deselected(items=rare)
    items[:] = [item for item in items if not item.get_closest_marker("rare")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_row" in metafunc.fixturenames:
        from tests.qa.faults import matrix

        names = matrix.BY_NAME if metafunc.config.getoption("--whole") else matrix.SHORT
        metafunc.parametrize("fault_row", [pytest.param(matrix.BY_NAME[name], id=name) for name in names])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of the rows, which the reports carry as properties."""
    from tests.qa.faults import row

    found = [each for reports in terminalreporter.stats.values() for each in reports]
    properties = [each for report in found for each in getattr(report, "user_properties", ())]
    rows = dict.fromkeys(tuple(cells) for name, cells in properties if name == row.PROPERTY)
    if rows:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(row.table(list(rows)))
