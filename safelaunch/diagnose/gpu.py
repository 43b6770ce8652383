"""A rank that waits for its own GPU: in a synchronize, while no peer is what keeps the stream.

The CPU runs ahead of the GPU, so a stack in a synchronize says only that some work queued before it does not end. That
may be a collective that waits for peers (then the rank waits for them), or a kernel of its own. Entries of the Flight
Recorder tell: a collective that the device has *started* waits for peers; one that is still scheduled stands behind
something else. Where the record does not know about starts (``TORCH_NCCL_ENABLE_TIMING`` off), a pending collective
that has peers is taken for the wait, as before.
"""

from __future__ import annotations

from itertools import takewhile

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import Alignment, op_name
from safelaunch.diagnose.conditions import Condition, View
from safelaunch.model import Claim, Collective, Frame, RankEvidence

_SYNCHRONIZE = (
    "torch/cuda/__init__.py",
    "torch/cuda/streams.py",
    "torch/cuda/graphs.py",
    "torch/accelerator/__init__.py",
)
_DRIVER_CALLS = ("Synchronize", "cuMemcpy", "cudaMemcpy", "cuEventQuery", "cuStreamQuery")
_DRIVER_LIBRARIES = ("libcuda.so", "libcudart", "libamdhip", "libhsa-runtime")


def gpu_condition(rank: RankEvidence, view: View, alignment: Alignment) -> Condition | None:
    """``gpu-kernel`` where the main thread waits for the device and no peer explains it; else None."""
    where = waits_for_device(view)
    if not where:
        return None
    pending = [entry for entry in alignment.pending(rank.rank) if not entry.op.startswith("gloo:")]
    with_peers = [entry for entry in pending if _has_peers(rank.rank, entry, alignment)]
    if any(entry.started is not False and not alignment.is_over_elsewhere(rank.rank, entry) for entry in with_peers):
        return None  # it waits for peers, or may do so
    frame = view.user_frame
    text = f"waits for its GPU in {where}{f' at {fr.place(frame)}' if frame else ''}"
    claims = [view.stack_claim(f"its main thread is in {where}")]
    if with_peers and with_peers[0].started is not False:
        done = _done_elsewhere(with_peers[0])
        text += f"; {done}"
        claims.append(Claim(done, f"{view.folder}/flight_recorder.json"))
    elif with_peers:
        behind = with_peers[0]
        text += f"; behind what runs there stands {op_name(behind)} number {behind.seq}, which the device has not begun"
        claims.append(
            Claim(
                f"{op_name(behind)} number {behind.seq} is scheduled, not started",
                f"{view.folder}/flight_recorder.json",
            )
        )
    else:
        text += ", with no collective outstanding that a peer could hold up"
    return Condition("gpu-kernel", text, frame, view.process.pid, claims=tuple(claims))


def device_condition(rank: RankEvidence, alignment: Alignment) -> Condition | None:
    """``gpu-kernel`` where the record alone shows that the device, and no peer, keeps a collective from its end.

    Either the device has begun nothing of what is queued, while peers' devices have; or all peers have completed what
    it is in.
    """
    pending = [entry for entry in alignment.pending(rank.rank) if not entry.op.startswith("gloo:")]
    if not pending:
        return None
    first = next((entry for entry in pending if entry.started), pending[0])
    if alignment.is_over_elsewhere(rank.rank, first):
        what = _done_elsewhere(first)
    elif all(entry.started is False for entry in pending) and alignment.is_begun_elsewhere(rank.rank, first):
        what = f"it has queued {op_name(first)} number {first.seq}, which its device has not begun; peers' devices have"
    else:
        return None
    frame = fr.user_frame(first.frames, rank.code_roots)
    text = f"waits for its GPU: {what}"
    claim = Claim(
        f"{op_name(first)} number {first.seq} of group {first.group!r}: {what}",
        f"ranks/{rank.rank}/flight_recorder.json",
    )
    return Condition(
        "gpu-kernel",
        text + (f", at {fr.place(frame)}" if frame else ""),
        frame,
        rank.pid,
        confidence="medium",
        claims=(claim,),
    )


def _done_elsewhere(entry: Collective) -> str:
    return f"all its peers have completed {op_name(entry)} number {entry.seq}, in which it still is"


def _has_peers(rank: int, entry: Collective, alignment: Alignment) -> bool:
    return bool(alignment.members(entry.group)[0] - {rank})


def waits_for_device(view: View) -> str:
    """``torch.cuda.synchronize`` or the driver's call by name; empty where the thread is elsewhere."""
    inner, _ = fr.user_part(view.frames, view.code_roots)
    for frame in inner[:2]:
        if fr.normal(frame.file).endswith(_SYNCHRONIZE) and fr.short(frame.function) in (
            "synchronize",
            "wait",
            "replay",
        ):
            return "a synchronize"
    for sample in view.process.stacks:
        for thread in sample.threads if sample.native else ():
            if thread.os_tid == view.process.pid:
                called = next((name for f in takewhile(fr.is_native, thread.frames) if (name := _driver_call(f))), "")
                if called:
                    return called
    return ""


def _driver_call(frame: Frame) -> str:
    """Of the driver or the runtime; futexes and locks of libc are not."""
    if any(call in frame.function for call in _DRIVER_CALLS):
        return frame.function.partition("(")[0]
    return "the driver" if any(library in frame.file for library in _DRIVER_LIBRARIES) else ""
