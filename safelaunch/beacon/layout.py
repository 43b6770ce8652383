"""The progress page: 64-bit words in a shared file, written by one rank with plain stores, read by the supervisor.

A word is written by one process only and aligned stores of 8 bytes are not torn on the supported machines, so neither
side needs a lock. ``MAGIC`` is stored last: a page without it is not ready. Times are CLOCK_MONOTONIC in nanoseconds,
0 = never.
"""

from __future__ import annotations

SIZE = 4096
WORDS = SIZE // 8
MAGIC = 0x534146454C4E0001  # "SAFELN" and the layout's version

READY = 0
PID = 1
START_TICKS = 2
RANK = 3
LOCAL_RANK = 4
WORLD_SIZE = 5
ATTEMPT = 6
STATE = 7
CLAIMED_NS = 8
FIRST_STEP_NS = 9
LAST_STEP_NS = 10
USER_STEPS = 11
PHASE_LENGTH = 12
PHASE_SINCE_NS = 13
PHASE_TIMEOUT_NS = 14
PAUSED = 15
EXCEPTION_NS = 16
EXIT_NS = 17
SERVER_NS = 18
OPTIMIZERS = 19
ACK = 20  # written by the supervisor: it has looked at the peers
KIND = 22  # EXPLICIT, IMPLICIT (nobody said that it is a rank) or LAUNCHER (it turned out not to be one)
ENDING = 21  # written by the supervisor, in the agent's page: it is about to end this job
FIRST_OPTIMIZER = 32
MAX_OPTIMIZERS = 32

EXPLICIT, IMPLICIT, LAUNCHER = range(3)

PHASE_OFFSET = 1024  # bytes
PHASE_MAX = 128

STATES = ("started", "torch", "exception", "exited")
STARTED, TORCH, EXCEPTION, EXITED = range(4)


def page_name(attempt: int, rank: int, pid: int) -> str:
    """File name of a rank's page below ``pages/``; its companions append a suffix to it."""
    return f"{attempt}-{rank}-{pid}"


def parse_page_name(name: str) -> tuple[int, int, int] | None:
    """``(attempt, rank, pid)`` of a page's file name, or None for any other file."""
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


AGENT_PAGE = "agent"  # the torchrun agent's page: only PID, START_TICKS, ACK and ENDING are used
SERVER_SUFFIX = ".sock"
RING_SUFFIX = ".ring"
META_SUFFIX = ".meta"
FAULT_SUFFIX = ".fault"
EXCEPTION_SUFFIX = ".exception"
EXIT_SUFFIX = ".exit"
CAUGHT_SUFFIX = ".caught"
EVENTS = "agent.events"
LOG = "beacon.log"
ASKING = 23  # written by the supervisor: it asks, or has asked without an answer, a handler that needs the GIL
LAST_ANSWER_S = 2.0  # the longest that an exiting rank waits for such a handler
HOLD_S = 3.0  # the longest that a dying rank, or the agent ending its peers, waits for the supervisor's ACK
