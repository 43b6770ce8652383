"""Adds ``--whole`` and ``--max-skips``, and prints the fault matrix.

That isn't in ``tests/qa/faults``: under pytest-xdist, the process that prints loads no other conftest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from tests.qa.faults import ROW_PROPERTY

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


REPEATED = "repeated"


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Repeats a test once if it failed for that reason and no other. The summary counts these."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed and TORCH_ABORTS_AT_EXIT in report.longreprtext for report in reports):
        item._initrequest()  # type: ignore[attr-defined]  # as a new run begins: fixtures anew
        item.user_properties.append((REPEATED, item.nodeid))
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
    parser.addoption("--whole", action="store_true", help="the nightly tests too, and every row of the fault matrix")
    parser.addoption("--max-skips", type=int, metavar="N", help="fail if more than N tests are skipped")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out nightly tests, unless ``--whole`` or the test's own name asks for them."""
    if config.getoption("--whole") or any("::" in word for word in config.args):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def skipped(config: pytest.Config) -> Counter[str]:
    """The skipped tests of this run, by reason. Empty in a worker of pytest-xdist."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    reports = terminal.stats.get("skipped", ()) if terminal is not None else ()
    return Counter(report.longrepr[2] for report in reports)


def has_too_many_skips(config: pytest.Config) -> bool:
    limit = config.getoption("--max-skips")
    return limit is not None and skipped(config).total() > limit


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and has_too_many_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the fault matrix, the tests that ran twice, and the skips if they are too many."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    rows = dict.fromkeys(tuple(cells) for name, cells in properties if name == ROW_PROPERTY)
    if rows:
        from tests.qa.faults import row

        terminalreporter.section("fault matrix")
        terminalreporter.write_line(row.table(list(rows)))
    repeated = dict.fromkeys(test for name, test in properties if name == REPEATED)
    if repeated:
        terminalreporter.section(f"ran twice because torch aborted a process at its exit: {len(repeated)}")
        terminalreporter.write_line("\n".join(repeated))
    if has_too_many_skips(config):
        reasons = skipped(config)
        terminalreporter.section(f"{reasons.total()} skips, {config.getoption('--max-skips')} are allowed", red=True)
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:>5}  {reason.removeprefix('Skipped: ')}")
