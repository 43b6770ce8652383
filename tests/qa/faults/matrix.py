"""The fault matrix: every row, in the order of the table."""

from __future__ import annotations

from tests.qa.faults import fault_clocks, fault_disks, fault_processes, fault_ranks, fault_tools
from tests.qa.faults.row import Row

# What runs in CI: a process of the product dies, one doesn't respond, a tool is missing, a disk is full.
IN_CI = (
    "kill -9 safelaunch, writing, training",
    "SIGSTOP torchrun agent, capture, training",
    "py-spy missing, suspicion, training",
    "bundle directory fills up, writing, training",
)
ROWS: tuple[Row, ...] = (
    *fault_processes.ROWS,
    *fault_tools.ROWS,
    *fault_disks.ROWS,
    *fault_ranks.ROWS,
    *fault_clocks.ROWS,
)
BY_NAME = {row.name: row for row in ROWS}
assert len(BY_NAME) == len(ROWS), "two rows of one name"
