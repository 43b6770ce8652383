"""Recognizes errors of communication libraries, CUDA and device meshes by the fixed parts of their messages.

Each error is either the rank's ``own``, or only reports that a peer, or the connection to it, failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "nccl-cuda", "nccl-memory", "nccl-shm", "nccl-limit", "infiniband", "interface", "one-gpu", "mesh", "nccl-versions",
    "nccl-sizes", "nccl-ending", "socket", "nccl-system", "port", "host-name", "open-files", "peer-late",
]  # fmt: skip


@dataclass(frozen=True)
class KnownFailure:
    kind: FailureKind
    means: str  # as a clause
    own: bool  # this rank failed independently of its peers
    text: str
    general: bool  # only NCCL's log shows which call failed


_DEFAULTS = {"peer": "a peer", "what": "the driver refused it"}


# Kind, own, pattern, meaning. The first match wins; ``{...}`` is a named group of the pattern.
_KINDS: tuple[tuple[FailureKind, bool, str, str], ...] = (
    (
        "one-gpu",
        True,
        r"duplicate gpu detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on cuda device",
        "ranks {a} and {b} use the same GPU",
    ),
    (
        "nccl-memory",
        True,
        r"cuda failure (?:\d+ )?'out of memory'",
        "the GPU had no memory left for NCCL's own buffers",
    ),
    ("nccl-ending", False, r"cuda failure (?:\d+ )?'driver shutting down'", "the process was already ending"),
    ("nccl-cuda", True, r"cuda failure (?:\d+ )?'(?P<what>[^']+)'", "a CUDA call of NCCL failed: {what}"),
    (
        "nccl-shm",
        True,
        r"(?:shared memory segment|/dev/shm|shm_open|posix_fallocate).{0,200}(?:no space left|fail|error|denied)"
        r"|error while (?:creating|attaching to) shared memory|failed to extend /dev/shm",
        "NCCL could not get shared memory for the ranks of its node",
    ),
    (
        "infiniband",
        False,
        r"got completion (?:from peer (?P<peer>\S+?)(?:<\d+>)? )?with (?:error |status=(?:\w+\()?)(?P<code>\d+)",
        "an InfiniBand transfer with {peer} failed with status {code} (12: no response; 5: it had failed before)",
    ),
    (
        "nccl-limit",
        True,
        r"(?:call to )?(?P<call>ibv_\w+) failed.{0,80}cannot allocate memory",
        "{call} got no memory: the limit of locked memory is too low for InfiniBand",
    ),
    (
        "infiniband",
        True,
        r"(?:call to )?(?P<call>ibv_\w+) failed(?: with (?:error )?(?:\d+ )?(?P<what>[^\n,]+))?",
        "{call} of InfiniBand failed: {what}",
    ),
    ("open-files", True, r"too many open files", "the process has reached its limit of open files"),
    (
        "port",
        True,
        r"address already in use|eaddrinuse|failed to listen on any local network address",
        "the port that it needs is already in use",
    ),
    (
        "host-name",
        True,
        r"gai error|name or service not known|temporary failure in name resolution"
        r"|network addresses of \([^)]*\) cannot be retrieved",
        "the name of a host could not be resolved on its node",
    ),
    (
        "interface",
        True,
        r"no socket interface found|no usable (?:listening )?interface|no interface found in the same subnet"
        r"|unable to find (?:interface|address for)",
        "no network interface fits the job's settings",
    ),
    (
        "nccl-versions",
        True,
        r"mismatched nccl version|nccl version mismatch",
        "the ranks have different versions of NCCL",
    ),
    (
        "nccl-sizes",
        False,
        r"message truncated ?: recei(?:ved|ving) (?P<sent>\d+) bytes instead of (?P<room>\d+)"
        r"|collective mismatch error, local size (?P<here>\d+) remote size (?P<there>\d+)",
        "two ranks use different sizes in the same transfer: the calls' sizes or NCCL's settings differ",
    ),
    (
        "peer-late",
        False,
        r"timed out waiting (?P<ms>\d+) ?ms for (?P<way>send|recv) operation",
        "no peer matched this {way} within the group's timeout ({ms} ms)",
    ),
    (
        "peer-late",
        False,
        r"application timeout caused pair closure",
        "the group's timeout ended an earlier call over the same connection",
    ),
    (
        "peer-late",
        False,
        r"timed out after \d+ seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        "{here} of {all} processes joined the store",
    ),
    (
        "peer-late",
        False,
        r"store->get\('[^']*'\) got (?:error|exception): (?:socket timeout|(?:wait )?timeout)"
        r"|wait timeout after \d+ ?ms, keys",
        "no peer set the store key that this rank waits for",
    ),
    (
        "peer-late",
        False,
        r"watchdog caught collective operation timeout",
        "a collective didn't finish within the group's timeout",
    ),
    (
        "socket",
        False,
        r"connectfullmesh failed|software caused connection abort"
        r"|(?:connect|socket)[^\n]*(?:no route to host|network is unreachable|connection refused|timed out)",
        "a peer could not be reached over the network",
    ),
    (
        "socket",
        False,
        r"connection (?:was )?(?:closed|reset) by (?:remote )?peer|failed to recv, got 0 bytes|broken pipe"
        r"|remote process exited or there was a network error|socket recv failed while polling",
        "a peer ended, or the network cut the connection to it",
    ),
    (
        "mesh",
        True,
        r"invalid (?:device ?mesh|parallel dim)|mesh should not be bigger than default world size"
        r"|devicemesh only supports? homogeneous hardware",
        "the device mesh's dimensions don't multiply to the world size",
    ),
    (
        "mesh",
        True,
        r"the new group's rank should be within",
        "a process group lists ranks that this job doesn't have",
    ),
)
_IN_THE_LOG = "NCCL's log has the call"
_GENERAL: tuple[tuple[FailureKind, bool, str, str], ...] = (
    ("nccl-cuda", True, r"unhandled cuda error|ncclunhandledcudaerror", f"a CUDA call of NCCL failed; {_IN_THE_LOG}"),
    (
        "nccl-system",
        False,
        r"unhandled system error|ncclsystemerror",
        f"a system call of NCCL failed (network, memory or device); {_IN_THE_LOG}",
    ),
    (
        "nccl-system",
        True,
        r"nccl error[^\n]*internal error[^\n]*\nncclinternalerror[^\n]*(?:\nlast error:)?\s*\Z",
        f"a check inside NCCL failed (up to NCCL 2.18, also after a lost connection); {_IN_THE_LOG}",
    ),
)


@dataclass(frozen=True)
class Fingerprint:
    """A call in the form in which torch compares it between ranks (``TORCH_DISTRIBUTED_DEBUG=DETAIL``)."""

    op: str
    sizes: str
    dtypes: str
    number: str

    @property
    def words(self) -> str:
        return f"{self.op} {self.sizes}".strip()


_FINGERPRINT = re.compile(r"Rank (?P<rank>\d{1,9}) is running (?:inconsistent )?collective: CollectiveFingerPrint\(")
_FIELDS = ("OpType", "TensorShape", "TensorDtypes", "SequenceNumber")


def fingerprints(message: str) -> dict[int, Fingerprint]:
    """Returns group rank → call, from an error that reports mismatched calls; empty for any other error.

    The rank that raised the error comes first, then one of its peers.
    """
    if not message.startswith("Detected mismatch between collectives"):
        return {}
    _, *parts = _FINGERPRINT.split(message)
    calls = {}
    for rank, text in zip(parts[::2], parts[1::2], strict=True):
        # For a barrier, torch 2.13 omits the separator: "SequenceNumber=31OpType=BARRIER".
        matches = (re.search(rf"(?<![A-Za-z]){name}=(\[[^\]]*\]|\d+|\w+)", text) for name in _FIELDS)
        calls[int(rank)] = Fingerprint(*(hit[1] if hit is not None else "" for hit in matches))
    return calls


def failure(text: str) -> KnownFailure | None:
    for row in (*_KINDS, *_GENERAL):
        kind, own, pattern, means = row
        hit = re.search(pattern, text, re.IGNORECASE)
        if hit is not None:
            values = {name: value or _DEFAULTS.get(name, "") for name, value in hit.groupdict().items()}
            return KnownFailure(kind, means.format(**values), own, text, row in _GENERAL)
    return None


def first_failure(messages: Iterable[str]) -> KnownFailure | None:
    """Returns the first failure that the process itself caused, or else the first failure; None if there is none."""
    failures = [match for text in messages if (match := failure(text)) is not None and match.kind != "nccl-ending"]
    return next((match for match in failures if match.own), failures[0] if failures else None)
