"""The fault matrix: every row, in the order of the table."""

from __future__ import annotations

from tests.qa.faults import fault_clocks, fault_disks, fault_processes, fault_ranks, fault_tools
from tests.qa.faults.row import Row

# The shorter form, which runs with the other tests: the cheapest row of each kind that no other test is about.
SHORT = (
    "kill -9 safelaunch, writing, training",
    "kill -9 guardian, suspicion, training",
    "SIGSTOP torchrun agent, capture, training",
    "run directory fills up, restart, restarting",
    "rank closes descriptors, start-up, training",
    "progress page corrupted (ones), training, training",
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
