"""Waits for the rank's own GPU, which no peer explains."""

from __future__ import annotations

import re

from safelaunch.model import Collective, RankEvidence
from safelaunch.stacks import frames as fr
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import op_name
from safelaunch.verdict.conditions import Condition, record_claim
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.exits import kernel_claim
from safelaunch.verdict.peers import has_peers
from safelaunch.verdict.thread_view import View


def gpu_condition(view: View, alignment: Alignment) -> Condition | None:
    """Returns ``gpu-kernel`` if the main thread waits for the device and no peer explains it."""
    where = view.device
    if not where:
        return None
    rank = view.rank.rank
    with_peers = [entry for entry in _pending_on_device(rank, alignment) if has_peers(rank, entry, alignment)]
    if any(entry.started is not False and not alignment.is_over_elsewhere(rank, entry) for entry in with_peers):
        return None  # it waits, or might wait, for peers
    frame = view.user_frame
    first = with_peers[0] if with_peers else None
    if first is None:
        why = "no collective is outstanding that a peer could hold up"
    elif first.started is not False:
        why = _peers_completed(first)
    else:
        why = f"{op_name(first)} #{first.seq} is queued behind it and has not started"
    claims = (view.stack_claim(f"{view.words} is in {where}"), *((record_claim(rank, why),) if first else ()))
    text = f"waits for its GPU in {where}{fr.at(frame)}; {why}"
    return Condition("gpu-kernel", text, frame, view.process.pid, claims=claims)


def lost_condition(view: View, alignment: Alignment) -> Condition | None:
    """Returns ``gpu-lost`` if the driver reports an error of a GPU in use."""
    rank = view.rank
    if not rank.gpu_errors or not (view.device or _pending_on_device(rank.rank, alignment)):
        return None
    claims = tuple(kernel_claim(rank, line) for line in rank.gpu_errors)
    frame, number = view.user_frame, re.search(r"\): (\d+)", rank.gpu_errors[-1])
    text = f"waits{fr.at(frame)}, and the driver has reported Xid {number[1] if number else ''} of its GPU"
    return Condition("gpu-lost", text, frame, view.process.pid, claims=claims)


def device_condition(rank: RankEvidence, alignment: Alignment) -> Condition | None:
    """Returns ``gpu-kernel`` if the record alone shows that the device, not a peer, holds up a collective.

    Either the device has begun nothing of its queue while peers' devices have, or all peers have completed the
    collective.
    """
    pending = _pending_on_device(rank.rank, alignment)
    if not pending:
        return None
    first = next((entry for entry in pending if entry.started), pending[0])
    if alignment.is_over_elsewhere(rank.rank, first):
        what = _peers_completed(first)
    elif all(entry.started is False for entry in pending) and alignment.is_begun_elsewhere(rank.rank, first):
        what = f"it has queued {op_name(first)} #{first.seq}, which its device has not started, unlike its peers'"
    else:
        return None
    frame = fr.stack_of(rank, first.frames).user_frame
    text = f"waits for its GPU: {what}" + (f", at {fr.place(frame)}" if frame else "")
    claim = record_claim(rank.rank, f"{op_name(first)} #{first.seq} of {alignment.group(first.group)}: {what}")
    return Condition("gpu-kernel", text, frame, rank.pid, doubts=(Doubt.RECORD_ALONE,), claims=(claim,))


def _pending_on_device(rank: int, alignment: Alignment) -> list[Collective]:
    return [entry for entry in alignment.pending(rank) if not entry.by_gloo]


def _peers_completed(entry: Collective) -> str:
    return f"all its peers have completed {op_name(entry)} #{entry.seq}, and it has not"
