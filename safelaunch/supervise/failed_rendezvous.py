"""Handles jobs that never began, because torchrun gave up waiting for other nodes or failed before its first rank."""

from __future__ import annotations

import msgspec

from safelaunch.capture.pages import AgentEvent
from safelaunch.model import NodeEvidence, Rendezvous
from safelaunch.supervise.collecting import JobSnapshot, take_evidence
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import RENDEZVOUS
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.publishing import Report, finish


def write_failed_rendezvous(
    rendezvous: Rendezvous, error: str, nodes: tuple[NodeEvidence, ...], context: JobContext
) -> Report:
    """Writes the bundle of a job that didn't begin because nodes are missing."""
    collected = take_evidence(RENDEZVOUS, Looks(()), JobSnapshot({}, 0, ()), context)
    rendezvous = context.cleaned(msgspec.structs.replace(rendezvous, error=error))
    return finish(collected.with_facts(nodes=nodes, rendezvous=rendezvous))


def is_failed_rendezvous(raised: AgentEvent) -> bool:
    """Returns whether torchrun gave up waiting for other nodes. A taken port doesn't count."""
    of_store = raised.error in ("DistStoreError", "DistNetworkError", "TimeoutError")
    return raised.error.startswith("Rendezvous") or (of_store and "failed to listen" not in raised.message)


def advice_on(raised: AgentEvent) -> str:
    from safelaunch.verdict.suggestions import LATE_JOIN, is_late_join

    return LATE_JOIN.shown if is_late_join(raised.message) else ""
