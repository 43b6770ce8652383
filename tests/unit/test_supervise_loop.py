"""What the loop makes of the end of torchrun's agent."""

from __future__ import annotations

import pytest

from safelaunch.capture.pages import AgentEvent
from safelaunch.supervise.loop import is_of_rendezvous


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        ("RendezvousTimeoutError", "", True),
        ("RendezvousConnectionError", "The connection to the C10d store has failed.", True),
        ("DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistNetworkError", "The client socket has timed out after 60000ms", True),
        ("DistNetworkError", "The server socket has failed to listen on any local network address", False),
        ("ChildFailedError", "", False),
        ("SignalException", "Process 1 got signal: 15", False),
        ("ValueError", "The number of nodes must be positive", False),
    ],
)
def test_which_errors_mean_that_nodes_did_not_come(error: str, message: str, expected: bool) -> None:
    event = AgentEvent("raised", 0.0, error=error, message=message)
    assert is_of_rendezvous(event) is expected
