"""Exceptions of ranks: the first one of a chain, what it means, and if it only reports a peer's failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from msgspec import structs

from safelaunch.model import EarlierException, Evidence, NcclLog, RankEvidence, RankException
from safelaunch.stacks import failures, tracebacks
from safelaunch.stacks import frames as fr

# Messages of a rank whose peer is gone or doesn't join: transport and store errors, group timeouts.
_CONSEQUENCE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|closed by (?:the )?(?:remote )?peer|reset by peer"
    r"|broken pipe|remote process (?:exited|has)|socket (?:was )?closed|network error|failed to connect"
    r"|no route to host|nccl (?:communicator was aborted|error.*remote)|ncclremoteerror|ncclsystemerror"
    r"|timed out waiting|timed out after|timed out initializing process group|wait timeout|watchdog caught collective"
    r"|\btimeout\b.*(?:recv|send|rank|store|barrier)"
    r"|rank \d+ (?:successfully reached|failed to (?:pass|reach|reply))|ranks? .* failed to pass"
    r"|another rank|other ranks? (?:failed|exited)|store.*(?:unavailable|connection)|failed to recv"
    r"|application timeout caused pair closure|connectfullmesh failed|socket timeout|connection abort"
    r"|detected mismatch between collectives on ranks|rpc ran for more than set timeout"
    r"|unhandled system error|horovod has been shut down|\Acheckpointexception ranks:",
    re.IGNORECASE | re.DOTALL,
)
# Messages of c10d, gloo and NCCL if a RuntimeError has no torch line on its stack, as from `work.wait()`.
_LIBRARY_MESSAGES = re.compile(
    r"gloo|nccl|horovod|c10d|tcpstore|watchdog|monitoredbarrier|store->get|timed out waiting \d+ ?ms for (?:send|recv)"
    r"|caused pair closure|store based barrier|by peer \[[0-9a-f.:]+\]:\d+|another rank"
    r"|\A(?:connection (?:reset|closed) by peer|broken pipe|socket timeout)\b",
    re.IGNORECASE,
)
# Parts of torch that read files or the network without communicating between ranks.
_NO_COMMUNICATION = ("/torch/utils/data/", "/torch/hub.py", "/torch/serialization.py", "/torch/utils/tensorboard/")
_TIMEOUT = re.compile(r"timed? ?out|failed to pass monitoredbarrier|timeout", re.IGNORECASE)
DIST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")


def is_consequence(exception: RankException, log: NcclLog | None = None) -> bool:
    """Returns whether the error, or an error that led to it, blames a peer's death or absence."""
    return any(_blames_a_peer(link, log) for link in (exception, *_causes_of(exception)))


def _earlier(exception: RankException) -> Sequence[EarlierException]:
    return exception.earlier or tracebacks.earlier(exception.text)


def _causes_of(exception: RankException) -> Iterator[RankException]:
    for earlier in _earlier(exception):
        yield RankException(earlier.type, earlier.message, exception.time_unix_s, earlier.frames)


# Exceptions that ordinary code catches: `try: return cache[key]`, `except KeyError: return compute(key)`.
USUALLY_CAUGHT = (
    "StopIteration", "Empty", "Full", "KeyError", "AttributeError", "ImportError", "ModuleNotFoundError",
)  # fmt: skip


def root_of(exception: RankException) -> RankException:
    """Returns the first exception of a chain.

    A handler can also try another way, which fails for its own reason. Then the handled exception isn't the cause.
    """
    _, remote = tracebacks.of_worker(exception.text)
    root: RankException | EarlierException = exception
    for earlier in reversed(_earlier(exception)):
        if not earlier.frames or earlier.frames == remote.frames or _is_another_way(earlier, root):
            break
        root = earlier
    return root if isinstance(root, RankException) else RankException(root.type, root.message, 0.0, root.frames)


def _is_another_way(handled: EarlierException, later: RankException | EarlierException) -> bool:
    if handled.explicit or handled.type.rpartition(".")[2] not in USUALLY_CAUGHT:
        return False
    handler, raised = handled.frames[-1], later.frames[0] if later.frames else None
    return raised is None or (handler.file, handler.function) != (raised.file, raised.function)


def _exception_in_text(exception: RankException, part: tracebacks.ParsedTraceback) -> RankException:
    kind, _, message = part.message.partition(": ")
    return RankException(kind, message, exception.time_unix_s, part.frames)


def with_gathered_errors(evidence: Evidence) -> Evidence:
    """Replaces an error that collects the exceptions of several ranks by the rank's own exception.

    The numbers in it are numbers in a group. So unless all ranks raised it, the first exception replaces it.
    """
    errors = {
        rank.rank: (rank.exception, inner)
        for rank in evidence.ranks
        if rank.exception is not None and (inner := tracebacks.gathered(rank.exception.message))
    }
    own_words = {rank.rank for rank in evidence.ranks if rank.exception is not None} - errors.keys()
    if not errors or any(own_words & inner.keys() for _, inner in errors.values()):
        return evidence
    all_raised = len(errors) == evidence.world_size

    def with_own_error(rank: RankEvidence) -> RankEvidence:
        if rank.rank not in errors:
            return rank
        error, inner = errors[rank.rank]
        part = inner.get(rank.rank) if all_raised else next(iter(inner.values()))
        return rank if part is None else structs.replace(rank, exception=_exception_in_text(error, part))

    return structs.replace(evidence, ranks=tuple(map(with_own_error, evidence.ranks)))


def _blames_a_peer(exception: RankException, log: NcclLog | None) -> bool:
    """Returns whether an error of torch's communication blames a peer.

    A ``requests`` call of the user's can have its connection reset independently.
    """
    kind, inner = failure_kind(exception), _in_communication(exception)
    failure = failure_of(exception)
    failure = (_log_failure(log) or failure) if failure is not None and failure.general else failure
    if failure is not None and failure.own:
        return False
    if kind in ("DistStoreError", "DistNetworkError"):
        return True
    named = kind in (*DIST_TYPES, "DistError", "HorovodInternalError") or (
        kind == "RuntimeError" and _LIBRARY_MESSAGES.search(exception.message)
    )
    if not named and not inner:
        return False
    if kind in ("ConnectionResetError", "BrokenPipeError") and not inner:
        return False
    return _CONSEQUENCE.search(exception.message) is not None


def _in_communication(exception: RankException) -> bool:
    files = [fr.normal(frame.file) for frame in exception.frames[:6]]
    return any("/torch/" in file for file in files) and not any(
        part in fr.normal(frame.file) for frame in exception.frames for part in _NO_COMMUNICATION
    )


def failure_of(exception: RankException) -> failures.KnownFailure | None:
    """Returns what an error of torch's communication or of a device mesh means."""
    inside = any("/torch/distributed/" in fr.normal(frame.file) for frame in exception.frames)
    kind = failure_kind(exception)
    is_library_error = kind in (*DIST_TYPES, "RuntimeError") and _LIBRARY_MESSAGES.search(exception.message) is not None
    named = is_library_error or kind in DIST_TYPES[:3]
    failure = failures.failure(exception.message)
    return failure if failure is not None and (inside or named or failure.kind == "mesh") else None


def failure_of_rank(rank: RankEvidence) -> failures.KnownFailure | None:
    """Returns what ended the rank's communication, by its exception or else by NCCL's log."""
    failure = failure_of(rank.exception) if rank.exception is not None else None
    logged = nccl_failure(rank) if (failure.general if failure is not None else is_aborted(rank)) else None
    return logged or failure


def nccl_failure(rank: RankEvidence) -> failures.KnownFailure | None:
    return _log_failure(rank.nccl_log)


def _log_failure(log: NcclLog | None) -> failures.KnownFailure | None:
    return failures.first_failure(log.warnings) if log is not None else None


def is_timeout(exception: RankException) -> bool:
    return is_consequence(exception) and _TIMEOUT.search(exception.message) is not None


def has_lost_a_peer(rank: RankEvidence) -> bool:
    if rank.exception is None:
        return False
    return is_consequence(rank.exception, rank.nccl_log) and not is_timeout(rank.exception)


def one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def is_aborted(rank: RankEvidence) -> bool:
    return rank.exit is not None and rank.exit.returncode == -signal.SIGABRT


def failure_kind(exception: RankException) -> str:
    """Returns ``DistNetworkError`` for ``torch.distributed.DistNetworkError``."""
    return exception.type.rsplit(".", 1)[-1]
