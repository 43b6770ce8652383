"""What the error of a communication library, of CUDA or of a device mesh means, by the fixed words of these libraries.

An error may be the rank's ``own``, or report what became of a peer or of the way to it. What a process that was aborted
wrote last is read by the fixed words of the C++ runtime, glibc, Python and the out-of-memory killer; how much memory a
GPU had left, by those of the allocator.
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
    """``means``: in a clause. ``own``: this rank itself failed, whatever its peers do. ``text``: that says so."""

    kind: FailureKind
    means: str
    own: bool
    text: str

    @property
    def general(self) -> bool:
        return self.means.endswith(_IN_THE_LOG)


_IN_THE_LOG = "NCCL's log has the call"
_UNTOLD = {"peer": "a peer", "what": "the driver refused it"}


# Kind, own, pattern, meaning. The first that fits; ``{...}``: a group of the pattern.
_KINDS: tuple[tuple[FailureKind, bool, str, str], ...] = (
    (
        "one-gpu",
        True,
        r"duplicate gpu detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on cuda device",
        "ranks {a} and {b} use one and the same GPU",
    ),
    (
        "nccl-memory",
        True,
        r"cuda failure (?:\d+ )?'out of memory'",
        "the GPU had no memory left for NCCL's own buffers",
    ),
    ("nccl-ending", False, r"cuda failure (?:\d+ )?'driver shutting down'", "the process was ending by then"),
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
        "an InfiniBand transfer with {peer} failed with status {code} (12: it did not answer; 5: it had failed before)",
    ),
    (
        "nccl-limit",
        True,
        r"(?:call to )?(?P<call>ibv_\w+) failed.{0,80}cannot allocate memory",
        "{call} was refused memory: the limit of locked memory is too low for InfiniBand",
    ),
    (
        "infiniband",
        True,
        r"(?:call to )?(?P<call>ibv_\w+) failed(?: with (?:error )?(?:\d+ )?(?P<what>[^\n,]+))?",
        "{call} of InfiniBand failed: {what}",
    ),
    ("open-files", True, r"too many open files", "the process has as many open files as its limit allows"),
    (
        "port",
        True,
        r"address already in use|eaddrinuse|failed to listen on any local network address",
        "another process has the port on which it is to listen",
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
        "two ranks meet in one transfer with different sizes: those of the call, or NCCL's settings, differ",
    ),
    (
        "peer-late",
        False,
        r"timed out waiting (?P<ms>\d+) ?ms for (?P<way>send|recv) operation",
        "a peer did not come to this {way} within the group's timeout of {ms} ms",
    ),
    (
        "peer-late",
        False,
        r"application timeout caused pair closure",
        "the group's timeout ended another call over the same connection before",
    ),
    (
        "peer-late",
        False,
        r"timed out after \d+ seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        "{here} of {all} processes came to the store",
    ),
    (
        "peer-late",
        False,
        r"store->get\('[^']*'\) got (?:error|exception): (?:socket timeout|(?:wait )?timeout)"
        r"|wait timeout after \d+ ?ms, keys",
        "a peer did not leave in the store what this rank waits for",
    ),
    (
        "peer-late",
        False,
        r"watchdog caught collective operation timeout",
        "a collective was not over within the group's timeout",
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
        "the dimensions of the device mesh and the world size do not go together",
    ),
    ("nccl-cuda", True, r"unhandled cuda error|ncclunhandledcudaerror", f"a CUDA call of NCCL failed; {_IN_THE_LOG}"),
    (
        "nccl-system",
        False,
        r"unhandled system error|ncclsystemerror",
        f"a system call of NCCL failed, of its network, its memory or a device; {_IN_THE_LOG}",
    ),
    (
        "nccl-system",
        True,
        r"nccl error[^\n]*internal error[^\n]*\nncclinternalerror[^\n]*(?:\nlast error:)?\s*\Z",
        f"a check inside NCCL failed, up to NCCL 2.18 also when a connection was lost; {_IN_THE_LOG}",
    ),
    (
        "mesh",
        True,
        r"the new group's rank should be within",
        "a process group is to have ranks that the job does not have",
    ),
)


@dataclass(frozen=True)
class Fingerprint:
    """A call as torch compares it among the ranks (``TORCH_DISTRIBUTED_DEBUG=DETAIL``)."""

    op: str
    sizes: str
    dtypes: str
    number: str

    @property
    def words(self) -> str:
        """``BROADCAST [4]``."""
        return f"{self.op} {self.sizes}".strip()


_FINGERPRINT = re.compile(r"Rank (?P<rank>\d{1,9}) is running (?:inconsistent )?collective: CollectiveFingerPrint\(")
_FIELDS = ("OpType", "TensorShape", "TensorDtypes", "SequenceNumber")


def fingerprints(message: str) -> dict[int, Fingerprint]:
    """Rank of the group → its call, of an error that calls do not match: first who raised it, then one of its peers."""
    if not message.startswith("Detected mismatch between collectives"):
        return {}
    _, *parts = _FINGERPRINT.split(message)
    told = {}
    for rank, text in zip(parts[::2], parts[1::2], strict=True):
        # of a barrier, torch 2.13 writes the fields without anything between them: "SequenceNumber=31OpType=BARRIER"
        found = (re.search(rf"(?<![A-Za-z]){name}=(\[[^\]]*\]|\d+|\w+)", text) for name in _FIELDS)
        told[int(rank)] = Fingerprint(*(one[1] if one is not None else "" for one in found))
    return told


def failure(text: str) -> KnownFailure | None:
    """What the error says; None for one of anything else."""
    for kind, own, pattern, means in _KINDS:
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None:
            told = {name: value or _UNTOLD.get(name, "") for name, value in found.groupdict().items()}
            return KnownFailure(kind, means.format(**told), own, text)
    return None


def first_failure(messages: Iterable[str]) -> KnownFailure | None:
    """Of the warnings of one process, in their order: the first of the process's own, else the first of any."""
    told = [found for text in messages if (found := failure(text)) is not None and found.kind != "nccl-ending"]
    return next((one for one in told if one.own), told[0] if told else None)


# --- what a process that was aborted wrote last -----------------------------------------------------------------------

_MOST_LINES = 60
_HEAP = "the heap was corrupted before, by native code that wrote past its memory or freed it twice"
_OUT_OF_MEMORY = "the out-of-memory killer took a process of the job"
_NO_ROOM = "there was no memory left to allocate"


@dataclass(frozen=True)
class Abort:
    """``words``: as written, in one line. ``means``: what that says to who has never met them; may be empty."""

    words: str
    means: str = ""


# The first that fits a line tells what it means. ``{...}``: a group of the pattern.
_ABORTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), means)
    for pattern, means in (
        (
            r"enforce fail at .*gloo/.*\.length <= .*?(?P<sent>\d+) vs (?P<room>\d+)",
            "a peer sent {sent} bytes into a call that has room for {room}",
        ),
        (r"enforce fail at .*gloo/", "gloo found what it got from a peer, or a connection to one, not to be as agreed"),
        (
            r"double free or corruption|(?:free|munmap_chunk|realloc|calloc|malloc)\(\): |corrupted (?:size|double)",
            _HEAP,
        ),
        (r"\*\*\* (?:stack smashing|buffer overflow) detected", "native code wrote past the end of a buffer"),
        (r"std::bad_alloc|DefaultCPUAllocator: can't allocate|Cannot allocate memory", _NO_ROOM),
        (r"oom[-_]kill|OOM Killed|Out of memory: Killed process", _OUT_OF_MEMORY),
        (r"insufficient shared memory \(shm\)", "/dev/shm is full"),
        (  # faulthandler's name for a signal says no more than the signal
            r"Fatal Python error: (?!Segmentation fault|Aborted|Bus error|Illegal instr|Floating.point)",
            "the interpreter itself gave up",
        ),
        (r"terminate called (?:after throwing|without an active)", "a C++ exception that nothing caught ended it"),
        (r"^\s*what\(\): ", "a C++ exception that nothing caught ended it"),
        (r"EnforceNotMet", "a check in C++ failed"),
        (r"Assertion `.*' failed", "an assertion in C or C++ failed"),
        (r"libgomp: |OMP: Error", "the OpenMP runtime gave up"),
    )
)


def last_abort(log: str) -> Abort | None:
    """The last such message at the end of a process's output; None where there is none."""
    lines = [line.strip() for line in log.splitlines()[-_MOST_LINES:]]
    for before, line in reversed([*zip(["", *lines], lines, strict=False)]):
        # The line before it names the type of the C++ exception that it is about.
        words = f"{before} {line}" if line.startswith("what(): ") and before.startswith("terminate called") else line
        for pattern, means in _ABORTS:
            if found := pattern.search(words):
                return Abort(words, means.format(**found.groupdict()))
    return None


# argparse's line, and click's.
_OPTIONS = re.compile(r"(?:\S+: error|Error): \S")


def options_refused(log: str) -> str:
    """The last line at the end of a process's output that says what was wrong with its command; "" without one."""
    lines = [line.strip() for line in log.splitlines()[-_MOST_LINES:]]
    return next((line for line in reversed(lines) if _OPTIONS.match(line)), "")


# --- the memory of a GPU, used up: the error of torch's CUDA allocator ----------------------------------------------

_SIZE = r"(?P<{}>\d+(?:\.\d+)?) ?(?P<{}_unit>bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _pattern(before: str, name: str, after: str = "") -> re.Pattern[str]:
    return re.compile(before + _SIZE.format(name, name) + after)


_DEVICE = re.compile(r"\bGPU (?P<number>\d+)\b")
_SIZES = {
    "asked": _pattern(r"Tried to allocate ", "asked"),
    "total": _pattern(r"total capaci?ty of ", "total"),
    "free": _pattern(r"of which ", "free", " is free"),
    "own": _pattern(r"this process has ", "own", " memory in use"),
    "allocated": _pattern(r"Of the allocated memory ", "allocated", " is allocated by PyTorch"),
    "unused": _pattern(r"and ", "unused", " is reserved by PyTorch but unallocated"),
}
_OTHER = _pattern(r"Process (?P<pid>\d+) has ", "of", " memory in use")


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes, None where the error does not give them.

    - ``device``: the rank's own number of the GPU; -1 unknown
    - ``own``: what the process has of it, with CUDA's own part
    - ``allocated``: in tensors; ``unused``: reserved from the GPU, and in no tensor
    - ``others``: pid → what it has. In a container, where pids are others, the process itself may be among them: then
      ``own`` is None, and they are left out.
    """

    device: int
    asked: int | None
    total: int | None
    free: int | None
    own: int | None
    allocated: int | None
    unused: int | None
    others: tuple[tuple[int, int], ...] = ()

    @property
    def is_fragmented(self) -> bool:
        """What torch holds and does not use would have been enough."""
        return bool(self.asked and self.unused and self.unused >= self.asked)


def shortage(message: str) -> Shortage | None:
    """None for the message of another error."""
    if "out of memory. Tried to allocate" not in message:
        return None
    device = _DEVICE.search(message)
    sizes = {name: _size(pattern.search(message), name) for name, pattern in _SIZES.items()}
    others = tuple((int(found["pid"]), _size(found, "of") or 0) for found in _OTHER.finditer(message) if sizes["own"])
    return Shortage(int(device["number"]) if device else -1, **sizes, others=others)


def _size(found: re.Match[str] | None, name: str) -> int | None:
    return int(float(found[name]) * _UNITS[found[f"{name}_unit"]]) if found is not None else None
