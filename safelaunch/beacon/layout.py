"""Layout of the progress page: 64-bit words in a shared file, which one rank writes and the supervisor reads.

No lock is needed: each word has a single writer, and aligned 8-byte stores are atomic on the supported machines. The
rank stores ``MAGIC`` last, so a page without it isn't ready. Times are CLOCK_MONOTONIC in nanoseconds, 0 = never.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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
ACK = 20  # written by the supervisor after it sampled the peers
KIND = 22  # EXPLICIT, IMPLICIT (its environment has no rank) or LAUNCHER (it starts ranks)
ENDING = 21  # written by the supervisor in the agent's page before it ends this job
FIRST_OPTIMIZER = 32
MAX_OPTIMIZERS = 32

EXPLICIT, IMPLICIT, LAUNCHER = range(3)

# Variables for rank, world size and local rank. Slurm's describe a task of a step (srun), so the batch script has none.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
TASKS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)

PHASE_OFFSET = 1024  # bytes
PHASE_MAX = 128

STATES = ("started", "torch", "exception", "exited")
STARTED, TORCH, EXCEPTION, EXITED = range(4)


def numbers_in(env: Mapping[str, str], names: tuple[str, str, str]) -> tuple[int, int, int] | None:
    """Returns rank, world size and local rank (-1 if unknown) from these variables; None if they aren't set."""
    number, size, local = (env.get(name, "") for name in names)
    if number.isdigit() and size.isdigit() and int(number) < int(size):
        return int(number), int(size), int(local) if local.isdigit() else -1
    return None


def page_name(attempt: int, rank: int, pid: int) -> str:
    """Returns the name of a rank's page in ``pages/``. Names of companion files begin with it."""
    return f"{attempt}-{rank}-{pid}"


def parse_page_name(name: str) -> tuple[int, int, int] | None:
    parts = name.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


AGENT_PAGE = "agent"  # the torchrun agent's, which uses only PID, START_TICKS, ACK and ENDING
SERVER_SUFFIX = ".sock"
ASK_SUFFIX = ".ask"  # supervisor's socket, to which the rank sends its stacks
STACKS_SUFFIX = ".stk"  # rank's own socket for stacks, if its torch's worker server takes no handlers
RING_SUFFIX = ".ring"
META_SUFFIX = ".meta"
FAULT_SUFFIX = ".fault"
EXCEPTION_SUFFIX = ".exception"
EXIT_SUFFIX = ".exit"
FLIGHT_SUFFIX = ".flight"  # followed by the recorder's name
RECORDERS = ("fr", "nccl")  # also fr-NAME for each backend with its own recorder
PARTIAL = ".partial"
CAUGHT_SUFFIX = ".caught"
MEMORY_SUFFIX = ".memory"
CONTRACT_SUFFIX = ".contract"
SNAPSHOT_SUFFIX = ".snapshot"
EVENTS = "agent.events"
LOG = "beacon.log"
LIFE = "life"
KEEPERS = "keepers"
RESCUE = "rescue"
MEMBERS = "members"
# Passed in the environment, so that the guardian's command line doesn't name its owner.
GUARDIAN_CODE = "SL_GUARDIAN"
GUARDIAN_ARGUMENTS = ("-E", "-S", "-c", f"import os; exec(os.environ.pop('{GUARDIAN_CODE}'))")
GUARDIAN_STARTER = "SL_GUARDIAN_STARTER"  # AGENT_ROLE if torchrun's beacon starts it
AGENT_ROLE = "agent"
RESUMED_NS = 26  # last begin or end of a pause; for the rank itself
MARKED_NS = 25  # last begin or end of a phase or a pause, which is progress. PHASE_SINCE_NS: of the current phase
RETURNED_NS = 24  # the rank's function returned; the process might still hand over the result
TIMERS = 28  # NO_TIMER, or TIMER_SET by the rank or a process forked from it; 0: not watched
NO_TIMER, TIMER_SET = 1, 2
ASKED = 23  # by the supervisor: questions to handlers that need the GIL
ANSWERED = 27  # by the rank: these questions with a finished handler, even if the answer is unread
LAST_ANSWER_S = 2.0  # longest wait of an exiting rank for a handler that needs the GIL, in its own sleeps
HOLD_S = 3.0  # longest wait of a failing rank for ACK
GOODBYE_S = 1.5  # longest wait before an agent that must stop ends
AGENT_HOLD_S = 6.0  # longest wait before the agent ends the peers; several nodes agree on a verdict in that time
MEMORY_HISTORY = "SAFELAUNCH_ALLOCATIONS"  # 1: record where GPU memory is allocated; set by a preset
PROBES = "SAFELAUNCH_PROBES"  # add-ons with a probe that each rank loads, separated by commas; set by the supervisor
