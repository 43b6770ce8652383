"""Crashes: the first failure in time is named, its consequences are not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import (
    EarlierException,
    FatalError,
    Frame,
    Launched,
    MemoryKills,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.stacks.tracebacks import of_worker
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    C10D,
    SITE,
    at,
    in_c10d,
    in_init,
    job,
    rank,
    script,
    waiting,
)

RESET = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


ALL_REDUCE = Frame(C10D, 3252, "all_reduce")


def raised(
    number: int, kind: str, message: str, when: float, line: int = 41, frames: tuple[Frame, ...] = (), **fields: Any
) -> RankEvidence:
    own = (at(line, "step"), at(100, "<module>"))
    frames = frames or ((ALL_REDUCE, *own) if "peer" in message or "imed out" in message else own)
    exception = RankException(kind, message, when, frames)
    more = {"exception": exception, "exit": RankExit(1, when + 0.2)}
    return rank(number, seen=False, more=more, **fields)


def ended(number: int, code: int, when: float = 100.0, *, first: bool = True, log: str = "") -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(code, when, before_close=first), "log_tail": log})


def terminated(number: int) -> RankEvidence:
    return ended(number, -15, 105.0, first=False)


def named(*ranks: RankEvidence, **fields: Any) -> tuple[str, list[int]]:
    verdict = diagnose(job(*ranks, outcome="crash", **fields))
    return verdict.cause, [c.rank for c in verdict.culprits]


LOAD, STEP = (Frame("/home/me/data.py", 12, "load"), at(41, "step")), (at(43, "step"), at(100, "<module>"))
CHAINED = """Traceback (most recent call last):
  File "/home/me/train.py", line 41, in step
  File "/home/me/data.py", line 12, in load
KeyError: 'x'

{words}:

Traceback (most recent call last):
  File "/home/me/train.py", line 100, in <module>
  File "/home/me/train.py", line 43, in step
TrainError: step failed
"""
FROM, DURING = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
CACHE = (Frame("/home/me/data.py", 12, "compute"), at(43, "step"), at(100, "<module>"))


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize(
    ("words", "kind", "frames", "first"),
    [
        (FROM, "KeyError", STEP, True),
        (DURING, "KeyError", STEP, True),  # its handler raises another one in its place
        (DURING, "KeyError", CACHE, False),  # its handler computes what the cache does not have
        (DURING, "OSError", CACHE, True),  # the handler's own clean-up fails
    ],
)
def test_first_exception_of_a_chain_is_the_cause(
    words: str, kind: str, frames: tuple[Frame, ...], first: bool, printed: bool
) -> None:
    earlier = () if printed else (EarlierException(kind, "'x'", LOAD, words == FROM),)
    text = CHAINED.format(words=words).replace("KeyError", kind) if printed else ""
    exception = RankException("__main__.TrainError", "step failed", 100.0, frames, text, earlier)
    one = rank(1, seen=False, more={"exception": exception, "exit": RankExit(1, 100.2)})
    verdict = diagnose(job(terminated(0), one, outcome="crash"))
    (culprit,) = verdict.culprits
    outer = f"TrainError: step failed at {'data.py:12 (compute)' if frames is CACHE else 'train.py:43 (step)'}"
    became = f"Rank 1 raised {kind}: 'x' at data.py:12 (load), which became {outer}."
    assert verdict.summary.startswith(became if first else f"Rank 1 raised {outer}")
    assert culprit.frame == (LOAD if first else frames)[0]


def _aborted(number: int, *frames: Frame, line: int = 50) -> RankEvidence:
    return died(number, -6, fatal=FatalError("Aborted", frames or in_c10d("all_reduce", line)))


def died(number: int, code: int, when: float = 100.0, **fields: Any) -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(code, when), **fields})


# --- where it ended, and why ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kills", "said", "file"),
    [
        (MemoryKills("Out of memory: Killed process 1010 (python)", 0, 0), "killer took it", "kernel_log.txt"),
        (MemoryKills("", 1, 1), "took 1 process in the job's control group", "resources.json"),
        (MemoryKills("", None, 2), "took 2 processes on this node", "resources.json"),
        (MemoryKills("", 0, 0), "counts no out-of-memory kill", "resources.json"),
    ],
)
@pytest.mark.parametrize("of", ["rank", "worker"])
def test_sigkill_summary_reports_memory_evidence(of: str, kills: MemoryKills, said: str, file: str) -> None:
    worker = raised(1, "RuntimeError", "DataLoader worker (pid 32061) is killed by signal: Killed. ", 100.0)
    killed = replace(worker, memory_kills=kills) if of == "worker" else died(1, -9, memory_kills=kills)
    verdict = diagnose(job(terminated(0), killed, outcome="crash"))
    assert said in verdict.summary
    assert any(claim.file == f"node/node1/{file}" for claim in verdict.evidence)
    assert ("memory limit for the job" in verdict.suggestions[0]) == ("took" in said)
    assert "memory" in verdict.suggestions[0] and "DataLoader workers" in verdict.suggestions[0]
    assert not any("Fix the exception" in text for text in verdict.suggestions)


def test_ordinary_traceback_has_no_remote_frames() -> None:
    assert not of_worker("Traceback (most recent call last):\nValueError: x")[1].frames


# --- NCCL's own log ---------------------------------------------------------------------------------------------------

GENERAL = "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
GENERAL += "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."


PATIENCE = (
    "def train():\n"  # 40
    "    for step in range(5000):\n"
    "        if wait > 30:\n"
    "            break\n"
    "        loss.backward()\n"
    "        dist.all_reduce(loss)\n"  # 45
    "    dist.all_reduce(total)\n"
)


@pytest.mark.parametrize("caller", ["while epochs:\n    train()\n", "if epochs:\n    train()\n"])
@pytest.mark.parametrize(("line", "cause", "named"), [(46, "uneven-batches", [1]), (44, "collective-mismatch", [0, 1])])
def test_rank_aborted_after_its_peers_loop_has_left_it(line: int, cause: str, named: list[int], caller: str) -> None:
    aborted = _aborted(1, ALL_REDUCE, at(line), at(100, "<module>"))
    lost = raised(0, "RuntimeError", RESET, 101.0, frames=(ALL_REDUCE, at(45), at(100, "<module>")))
    verdict = diagnose(job(lost, aborted, outcome="crash"), script(PATIENCE + "\n" * 52 + caller))
    named = [0, 1] if "while" in caller else named  # in a loop around it, either rank might lag by a round
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == (cause, named), verdict.summary
    assert ("Rank 1 has left the loop at train.py:41" in verdict.summary) == (line == 46)
    if line == 46:
        assert verdict.suggestions[0].startswith("If that `if` is the reason")


# --- one process: a launcher's error, and no advice about other ranks -----------------------------

LAUNCH = f"{SITE}/accelerate/commands/launch.py"
BY_NAME = Frame("/opt/venv/bin/accelerate", 8, "<module>")
BY_MODULE = (Frame(LAUNCH, 1200, "<module>"), Frame("<frozen runpy>", 88, "_run_code"))


def of_exec(*frames: Frame, typed: tuple[str, ...] = ("exec", "--", "accelerate", "launch"), **more: Any) -> Verdict:
    failed = RankException("ValueError", "mpirun was not found", 100.0, frames)
    one = rank(0, seen=False, step=None, more={"exception": failed, "exit": RankExit(1, 100.5), **more})
    return diagnose(job(one, outcome="crash", launched=Launched(typed)))


@pytest.mark.parametrize(("outer", "name"), [((BY_NAME,), "accelerate"), (BY_MODULE, "accelerate")])
def test_launcher_error_names_no_rank(outer: tuple[Frame, ...], name: str) -> None:
    verdict = of_exec(Frame(LAUNCH, 900, "simple_launcher"), *outer)
    assert (verdict.cause, verdict.culprits) == ("rank-exception", ())
    told = f"The launcher ({name}) raised ValueError: mpirun was not found at launch.py:900 (simple_launcher)"
    assert verdict.summary == f"{told}, in its own code: no rank was seen."
    assert verdict.suggestions[0].startswith("Fix what the launcher reports") and len(verdict.suggestions) == 1


# --- a rank that looks for its peers at another address -----------------------------

NOT_REACHED = [
    "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29512).",
    "The client socket has failed to connect to [localhost]:29512 (errno: 111 - Connection refused).",
]
MAKES_STORE = Frame(f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store")


def astray(number: int, message: str) -> RankEvidence:
    frames = (MAKES_STORE, *in_init(12))
    failed = RankException("torch.distributed.DistNetworkError", message, 100.0, frames)
    return rank(number, seen=False, step=None, more={"exception": failed, "exit": RankExit(1, 100.5)})


@pytest.mark.parametrize("message", NOT_REACHED)
@pytest.mark.parametrize("culprit", [0, 2])
def test_rank_with_a_differing_master_address_is_the_culprit(message: str, culprit: int) -> None:
    """It uses the address of the previous attempt; its peers have the new one."""
    ranks = [rank(n, in_init(12), "poll", step=None) for n in range(3)]
    ranks[culprit] = astray(culprit, message)
    verdict = diagnose(job(*ranks, outcome="crash"))
    assert (verdict.outcome, verdict.cause) == ("crash", "rank-exception")
    assert [one.rank for one in verdict.culprits] == [culprit] and "29512" in verdict.summary
    assert any(one.startswith("Print `MASTER_ADDR`") for one in verdict.suggestions)
    assert verdict.confidence == "high"
    looking = [rank(n, (MAKES_STORE, *in_init(12)), "poll", step=None) if n != culprit else ranks[n] for n in range(3)]
    assert diagnose(job(*looking, outcome="crash")).confidence == "medium"  # they might not reach a store either


@pytest.mark.parametrize(
    ("frames", "kernel", "expected"),
    [
        (in_c10d("barrier", 17, "close")[:-1], "futex", "it waits in barrier at train.py:17 (close), called at interp"),
        (in_c10d("barrier", 17)[:2], "futex", "it waits in barrier, called at interpreter exit, while"),
        ((at(17, "close"),), "sleep", "it is asleep in train.py:17 (close), called at interpreter exit"),
        ((at(17, "close"), at(100, "<module>")), "sleep", "it is asleep in train.py:17 (close), while"),
    ],
)
def test_rank_alive_after_raising_is_named_with_reason(frames: tuple[Frame, ...], kernel: str, expected: str) -> None:
    error = RankException("IndexError", "list index out of range", 100.0, (at(23, "fit"), at(100, "<module>")))
    mine = rank(1, frames, kernel, more={"exception": error})
    verdict = diagnose(job(waiting(0), mine))
    assert (verdict.cause, [(c.rank, c.frame and c.frame.line) for c in verdict.culprits]) == (
        "rank-exception",
        [(1, 23)],
    )
    words = "Rank 1 raised IndexError: list index out of range at train.py:23 (fit) and never exited: "
    assert verdict.summary.startswith(words + expected), verdict.summary
    assert "never exited" not in diagnose(job(waiting(0), mine, outcome="crash")).summary
