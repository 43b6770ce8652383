"""Errors of torchrun's agent, as the supervisor reads them."""

from __future__ import annotations

import pytest

from safelaunch.capture.pages import AgentEvent
from safelaunch.model import RankExit
from safelaunch.supervise.failed_rendezvous import advice_on, is_failed_rendezvous
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import job, rank


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
def test_failed_rendezvous_is_recognized_by_torchruns_error(error: str, message: str, expected: bool) -> None:
    event = AgentEvent("raised", 0.0, error=error, message=message)
    assert is_failed_rendezvous(event) is expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("/torch.rendezvous.none.1/MASTER_ADDR", True),
        ("/torch.rendezvous.none.1/torchelastic/role_info/0, /torch.rendezvous.none.1/torchelastic/role_info/1", True),
        ("/default_pg/0//cpu//0/rank_1", False),
        ("/torch.rendezvous.none.1/torchelastic/agent/terminal_state/1", False),
    ],
)
def test_late_join_error_gets_advice(keys: str, expected: bool) -> None:
    message = f"wait timeout after 60000ms, keys: {keys}"
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in advice_on(AgentEvent("raised", 0.0, message=message))) is expected
    lost = (f"torchrun itself failed: DistStoreError: {message}",)
    verdict = diagnose(
        job(rank(0, seen=False, more={"exit": RankExit(-15, 9.0, before_close=False)}), outcome="crash", notes=lost)
    )
    assert [text for text in verdict.suggestions if "TORCH_DISABLE" in text] == list(
        verdict.suggestions[: int(expected)]
    )
