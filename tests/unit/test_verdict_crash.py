"""Crashes: the first failure in time is named, its consequences are not."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import (
    EarlierException,
    ExitCall,
    FatalError,
    Frame,
    Launched,
    MemoryKills,
    NcclLog,
    Progress,
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
    entry,
    in_c10d,
    in_init,
    job,
    past,
    rank,
    record,
    script,
    waiting,
)
from tests.support.verdict_cases import calls_in

OLD_TORCH = Launched(torch="2.9.1")  # in which DETAIL works with DDP
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
def test_the_first_exception_of_a_chain_is_the_cause(
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


def test_time_decides_not_rank() -> None:
    first, second = raised(2, "ValueError", "a", 100.0, 41), raised(0, "KeyError", "b", 100.5, 60)
    assert named(second, terminated(1), first) == ("rank-exception", [2])


def test_equal_exceptions_are_equally_at_fault() -> None:
    assert named(*(raised(n, "ImportError", "x", 100.0 + n) for n in range(3))) == ("rank-exception", [0, 1, 2])


def test_a_reset_connection_of_the_users_own_is_a_cause() -> None:
    own = raised(1, "ConnectionResetError", "[Errno 104] Connection reset by server", 100.0)
    assert named(terminated(0), own) == ("rank-exception", [1])


def test_the_last_words_of_an_abort_are_told() -> None:
    log = "step 3\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  sizes differ\n"
    verdict = diagnose(job(ended(0, -6, log=log), terminated(1), outcome="crash"))
    assert "sizes differ" in verdict.culprits[0].reason


@pytest.mark.parametrize("state", ["exited", "torch"])
def test_an_abort_after_the_script_had_ended_is_told_as_such(state: str) -> None:
    log = "trained\nterminate called without an active exception\n"
    page = Progress(1, 1, 2, 0, 1001, 1, state)
    verdict = diagnose(job(terminated(0), replace(ended(1, -6, log=log), progress=page), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-killed", [1])
    ended_before = state == "exited"
    assert ("after its script had ended" in verdict.summary) == ended_before
    assert any("190489" in advice for advice in verdict.suggestions) == ended_before


def test_an_exit_code_without_an_exception() -> None:
    assert named(raised(0, "RuntimeError", RESET, 101.0), ended(1, 3)) == ("rank-exited", [1])


@pytest.mark.parametrize(
    ("inner", "fits"),
    [((), False), ((Frame(C10D, 2500, "recv"),), False), ((Frame(C10D, 3252, "all_reduce"),), True)],
)
def test_a_clean_exit_may_have_left_out_a_send(inner: tuple[Frame, ...], fits: bool) -> None:
    """Sends and receives are met by one peer, not by all: that it is gone says nothing about its batches."""
    left = raised(0, "RuntimeError", RESET, 101.0, frames=(*inner, at(41, "step"), at(100, "<module>")))
    verdict = diagnose(job(left, ended(1, 0), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("uneven-batches", "medium" if fits else "low"), verdict.summary
    assert any("send or receive" in text for text in verdict.ruled_out) != fits


def _at_six(number: int, size: tuple[int, ...], dtype: str = "Float") -> RankEvidence:
    flight = record(*past(5), entry("all_reduce", 6, line=50, size=size, dtype=dtype))
    return rank(number, in_c10d("all_reduce", 50), flight=flight, more={"exit": RankExit(-15, 105.0, False)})


def _aborted(number: int, *frames: Frame, line: int = 50) -> RankEvidence:
    return died(number, -6, fatal=FatalError("Aborted", frames or in_c10d("all_reduce", line)))


def died(number: int, code: int, when: float = 100.0, **fields: Any) -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(code, when), **fields})


def test_what_did_not_fit_came_from_the_rank_that_took_another_group() -> None:
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}

    def of(number: int, text: str, line: int) -> RankEvidence:
        return rank(number, in_c10d("all_reduce", line), flight=record(*calls_in(text), groups=groups))

    survivors = (of(0, "3@60x5 1@50*", 50), of(1, "4@60x5 4@60*", 60), of(3, "4@60x5 2@60*", 60))
    verdict = diagnose(job(*survivors[:2], _aborted(2), survivors[2], outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [(c.rank, c.frame and c.frame.line) for c in verdict.culprits] == [(3, 60)]
    assert verdict.summary.startswith("Rank 3 made its 5 earlier calls at train.py:60 (train) in group '4': with group")
    assert verdict.suggestions[0].startswith("Check how this line selects its group")


def test_the_condition_that_sent_an_aborted_rank_to_its_call() -> None:
    source = "def train():\n    if epoch % 2 == 1 and rank == 0:\n        evaluate()\n" + "    pass\n" * 60
    read = {at(3).file: source}.get
    peers = (_at_six(n, (16,)) for n in (1, 2))
    verdict = diagnose(job(_aborted(0, line=3), *peers, outcome="crash"), read_source=read)
    assert (
        "Ranks 1-2 never reach train.py:3 (train) because of `if epoch % 2 == 1 and rank == 0 (train.py:2)`"
        in verdict.summary
    )
    assert "gate the side effect" in verdict.suggestions[0]


def test_one_survivor_against_one_after_an_abort_names_both() -> None:
    verdict = diagnose(job(_aborted(1), _at_six(0, (16,)), _at_six(2, (16,), "Double"), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "low")
    assert [c.rank for c in verdict.culprits] == [0, 2]


def test_the_way_to_one_helper_says_on_which_side_an_aborted_rank_was() -> None:
    """Both networks average their gradients by one function; some ranks skip the first of them."""

    def way(line: int) -> tuple[Frame, ...]:
        return (Frame(C10D, 3252, "all_reduce"), at(20, "average", "/home/me/comm.py"), at(line), at(100, "<module>"))

    def of(number: int, line: int, size: int) -> RankEvidence:
        now = replace(entry("all_reduce", 6, line=50, size=(size,)), frames=way(line))
        return rank(number, way(line), flight=record(*past(5), now), more={"exit": RankExit(-15, 105.0, False)})

    verdict = diagnose(job(of(0, 41, 145), _aborted(1, *way(41)), of(2, 43, 193), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [one.rank for one in verdict.culprits] == [2]


def test_ways_tell_nothing_of_ranks_in_several_groups() -> None:
    """Who waits in another group has come there by another way."""
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}

    def way(line: int) -> tuple[Frame, ...]:
        return (Frame(C10D, 3252, "all_reduce"), at(20, "reduce"), at(line), at(100, "<module>"))

    def of(number: int, line: int, group: str) -> RankEvidence:
        now = replace(entry("all_reduce", 6, group=group, line=20), frames=way(line))
        return rank(number, way(line), flight=record(*past(5), now, groups=groups))

    ranks = (of(0, 54, "3"), of(1, 54, "4"), _aborted(2, *way(39)), of(3, 39, "2"))
    summary = diagnose(job(*ranks, outcome="crash")).summary
    assert "other frames than most" not in summary
    assert "ranks 0-1 come from train.py:54 (train) and ranks 2-3 come from train.py:39" in summary


def test_an_abort_in_the_operator_that_waits_for_a_collective_is_one_in_a_collective() -> None:
    """``DTensor.full_tensor()``: the wait is an operator of torch's, called by c10d's functional collectives."""
    inner = (
        Frame(f"{SITE}/torch/_ops.py", 882, "redispatch"),
        Frame(f"{SITE}/torch/distributed/_functional_collectives.py", 142, "wait_tensor"),
        Frame(f"{SITE}/torch/distributed/tensor/_api.py", 774, "full_tensor"),
    )
    aborted = _aborted(1, *inner, at(41, "save"), at(100, "<module>"))
    verdict = diagnose(job(_at_six(0, (16,)), aborted, _at_six(2, (16,)), outcome="crash", launched=OLD_TORCH))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert verdict.culprits[0].frame == at(41, "save")
    assert any("desync-detail" in text for text in verdict.suggestions)


# --- where it ended, and why ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "message"), [(-11, "Segmentation fault"), (-6, "Aborted"), (-7, "Bus error")])
def test_a_fatal_signal_is_placed_by_faulthandler(code: int, message: str) -> None:
    fatal = FatalError(message, (Frame(C10D, 3252, "all_reduce"), at(41, "step"), at(100, "<module>")))
    verdict = diagnose(job(terminated(0), died(1, code, fatal=fatal), outcome="crash"))
    assert verdict.culprits[0].frame == at(41, "step")
    assert "train.py:41 (step)" in verdict.summary
    assert any(claim.file == "ranks/1/fault.txt" for claim in verdict.evidence)


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
def test_a_sigkill_and_the_memory(of: str, kills: MemoryKills, said: str, file: str) -> None:
    worker = raised(1, "RuntimeError", "DataLoader worker (pid 32061) is killed by signal: Killed. ", 100.0)
    killed = replace(worker, memory_kills=kills) if of == "worker" else died(1, -9, memory_kills=kills)
    verdict = diagnose(job(terminated(0), killed, outcome="crash"))
    assert said in verdict.summary
    assert any(claim.file == f"node/node1/{file}" for claim in verdict.evidence)
    assert ("memory limit for the job" in verdict.suggestions[0]) == ("took" in said)
    assert "memory" in verdict.suggestions[0] and "DataLoader workers" in verdict.suggestions[0]
    assert not any("Fix the exception" in text for text in verdict.suggestions)


def test_a_dataloader_worker_without_shared_memory() -> None:
    message = "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are"
    one = raised(1, "RuntimeError", f"{message} out of shared memory. Please try to raise your shared memory limit.", 9)
    assert "/dev/shm" in diagnose(job(terminated(0), one, outcome="crash")).suggestions[0]


def test_an_ordinary_traceback_has_no_remote_part() -> None:
    assert not of_worker("Traceback (most recent call last):\nValueError: x")[1].frames


def of_a_checkpoint(failed: int) -> RankException:
    """What torch raises on every rank where ``failed`` could not write its part."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        raise OSError(122, "quota: 40960 of 30720 bytes")
    except OSError as error:
        gathered = CheckpointException("", {failed: (error, traceback.extract_tb(error.__traceback__))})
    frames = (Frame(f"{SITE}/torch/distributed/checkpoint/utils.py", 263, "all_reduce"), at(41, "save"))
    return RankException("torch.distributed.checkpoint.api.CheckpointException", str(gathered), 100.0, frames)


@pytest.mark.parametrize(("raising", "culprits"), [((0, 1, 2), [1]), ((0, 1), [0, 1])])  # the two may be a group
def test_a_checkpoint_that_one_rank_could_not_write(raising: tuple[int, ...], culprits: list[int]) -> None:
    more = {"exception": of_a_checkpoint(failed=1), "exit": RankExit(1, 100.2)}
    ranks = [rank(one, seen=False, more=more) if one in raising else terminated(one) for one in range(3)]
    verdict = diagnose(job(*ranks, outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", culprits)
    assert "raised OSError: [Errno 122] quota: 40960 of 30720 bytes at test_verdict_crash.py" in verdict.summary
    assert "Every rank" not in " ".join(verdict.suggestions)


# --- NCCL's own log ---------------------------------------------------------------------------------------------------

GENERAL = "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
GENERAL += "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
RETRIES = "NET/IB : Got completion from peer 10.5.0.34<33956> with status=12 opcode=129 len=0 vendor err 129 (Send)"
NO_SHM = "Error: failed to extend /dev/shm/nccl-H1dBqY to 9637892 bytes"
NOISE = "Failed to open libibverbs.so[.1]"


def warned(one: RankEvidence, *warnings: str) -> RankEvidence:
    return replace(one, nccl_log=NcclLog(f"node/node1/nccl.node1.{one.pid}.log", (NOISE, *warnings)))


def in_nccl(number: int, message: str, when: float) -> RankEvidence:
    frames = (ALL_REDUCE, at(41, "step"), at(100, "<module>"))
    return raised(number, "torch.distributed.DistBackendError", message, when, frames=frames)


def test_the_log_says_what_a_general_error_leaves_open() -> None:
    """Shared memory is a failure of the rank's own, though the exception alone reads as if a peer were gone."""
    verdict = diagnose(job(in_nccl(0, GENERAL, 101.0), warned(in_nccl(1, GENERAL, 102.0), NO_SHM), outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [1])
    assert "NCCL could not get shared memory" in verdict.summary
    assert any(one.file == "node/node1/nccl.node1.1010.log" for one in verdict.evidence)
    assert any("/dev/shm" in one for one in verdict.suggestions)


def test_ranks_that_all_abort_over_a_dead_link_are_told_of_the_link() -> None:
    verdict = diagnose(job(*(warned(died(n, -6, 100.0 + n), RETRIES) for n in range(2)), outcome="crash"))
    assert verdict.culprits == ()
    assert "transfer with 10.5.0.34 failed with status 12 (12: it did not answer" in verdict.summary
    assert any("`ibstat`" in one for one in verdict.suggestions)


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
def test_who_was_aborted_behind_the_loop_of_its_peers_has_left_it(
    line: int, cause: str, named: list[int], caller: str
) -> None:
    aborted = _aborted(1, ALL_REDUCE, at(line), at(100, "<module>"))
    lost = raised(0, "RuntimeError", RESET, 101.0, frames=(ALL_REDUCE, at(45), at(100, "<module>")))
    verdict = diagnose(job(lost, aborted, outcome="crash"), script(PATIENCE + "\n" * 52 + caller))
    named = [0, 1] if "while" in caller else named  # in a loop around it, either may be a round behind
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == (cause, named), verdict.summary
    assert ("Rank 1 has left the loop at train.py:41" in verdict.summary) == (line == 46)
    if line == 46:
        assert verdict.suggestions[0].startswith("If that `if` is why")


@pytest.mark.parametrize(
    ("mine", "cause", "culprits"),
    [
        ("0@41 1@41 1@41 0@41", "uneven-batches", [1]),
        ("1@41 1@41 1@41 0@41", "missing-from-collective", [0]),
        ("1@41 0@41", "uneven-batches", [1]),
        ("1@41 1@41 1@41 1@41", "uneven-batches", [1]),
    ],
    ids=["it has been in both", "never before", "too few calls", "as ever"],
)
def test_peers_that_end_are_innocent_of_a_call_in_another_group(mine: str, cause: str, culprits: list[int]) -> None:
    """Rank 1 has ended its program, so the connections of rank 0's call break: the record counts that as completed."""
    flight = record(*calls_in(mine), groups={"0": (0, 1), "1": (0,)})
    frames = (ALL_REDUCE, at(41), at(100, "<module>"))
    lost = raised(0, "RuntimeError", RESET, 101.0, frames=frames, flight=flight)
    verdict = diagnose(job(lost, ended(1, 0), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == (cause, culprits), verdict.summary
    if culprits == [0]:
        assert verdict.confidence == "medium"
        assert "Rank 0 made its 3 earlier calls at train.py:41" in verdict.summary
        assert "how this line selects its group" in verdict.suggestions[0]


# --- one process: a launcher's error, and no advice about other ranks -----------------------------

LAUNCH = f"{SITE}/accelerate/commands/launch.py"
BY_NAME = Frame("/opt/venv/bin/accelerate", 8, "<module>")
BY_MODULE = (Frame(LAUNCH, 1200, "<module>"), Frame("<frozen runpy>", 88, "_run_code"))


def of_exec(*frames: Frame, typed: tuple[str, ...] = ("exec", "--", "accelerate", "launch"), **more: Any) -> Verdict:
    failed = RankException("ValueError", "mpirun was not found", 100.0, frames)
    one = rank(0, seen=False, step=None, more={"exception": failed, "exit": RankExit(1, 100.5), **more})
    return diagnose(job(one, outcome="crash", launched=Launched(typed)))


@pytest.mark.parametrize(("outer", "name"), [((BY_NAME,), "accelerate"), (BY_MODULE, "accelerate")])
def test_an_error_of_the_launcher_is_no_ranks(outer: tuple[Frame, ...], name: str) -> None:
    verdict = of_exec(Frame(LAUNCH, 900, "simple_launcher"), *outer)
    assert (verdict.cause, verdict.culprits) == ("rank-exception", ())
    told = f"The launcher ({name}) raised ValueError: mpirun was not found at launch.py:900 (simple_launcher)"
    assert verdict.summary == f"{told}, in its own code: no rank was seen."
    assert verdict.suggestions[0].startswith("Fix what the launcher reports") and len(verdict.suggestions) == 1


def test_a_launcher_that_rejects_its_command_line_is_no_rank() -> None:
    parser = Frame("/usr/lib/python3.11/argparse.py", 2617, "exit")
    call = ExitCall("sys.exit", 2, (parser, Frame(LAUNCH, 43, "main"), BY_NAME))
    one = rank(0, seen=False, step=None, more={"exit": RankExit(2, 100.5), "exit_call": call})
    verdict = diagnose(job(one, outcome="crash", launched=Launched(("exec", "--", "accelerate", "launch"))))
    assert (verdict.cause, verdict.culprits) == ("rank-exited", ())
    assert verdict.summary == "The launcher (accelerate) called sys.exit(2): no rank was seen."
    assert verdict.suggestions[0].startswith("Fix what the launcher reports") and len(verdict.suggestions) == 1


@pytest.mark.parametrize(
    ("frames", "typed"),
    [
        ((at(7), at(100, "<module>")), ("exec", "--", "python", "train.py")),
        ((Frame(LAUNCH, 900, "f"), at(7), BY_NAME), ("exec", "--", "accelerate", "launch")),
        ((Frame(f"{SITE}/torch/nn/modules/module.py", 1, "forward"), at(7)), ("exec", "--", "python", "train.py")),
        ((Frame(LAUNCH, 900, "simple_launcher"), BY_NAME), ("train.py",)),
    ],
)
def test_an_error_of_the_users_code_is_the_ranks(frames: tuple[Frame, ...], typed: tuple[str, ...]) -> None:
    verdict = of_exec(*frames, typed=typed)
    assert [one.rank for one in verdict.culprits] == [0]
    assert verdict.suggestions == ("Fix the exception at this line; errors of other ranks follow from it.",)


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
def test_a_rank_that_failed_at_another_address_than_its_peers_wait_at(message: str, culprit: int) -> None:
    """As that of the attempt before: its peers have the new one."""
    ranks = [rank(n, in_init(12), "poll", step=None) for n in range(3)]
    ranks[culprit] = astray(culprit, message)
    verdict = diagnose(job(*ranks, outcome="crash"))
    assert (verdict.outcome, verdict.cause) == ("crash", "rank-exception")
    assert [one.rank for one in verdict.culprits] == [culprit] and "29512" in verdict.summary
    assert any(one.startswith("Print `MASTER_ADDR`") for one in verdict.suggestions)
    assert verdict.confidence == "high"
    looking = [rank(n, (MAKES_STORE, *in_init(12)), "poll", step=None) if n != culprit else ranks[n] for n in range(3)]
    assert diagnose(job(*looking, outcome="crash")).confidence == "medium"  # they may not reach a store either


@pytest.mark.parametrize(
    ("frames", "kernel", "expected"),
    [
        (in_c10d("barrier", 17, "close")[:-1], "futex", "it waits in barrier at train.py:17 (close), called at interp"),
        (in_c10d("barrier", 17)[:2], "futex", "it waits in barrier, called at interpreter exit, while"),
        ((at(17, "close"),), "sleep", "it is asleep in train.py:17 (close), called at interpreter exit"),
        ((at(17, "close"), at(100, "<module>")), "sleep", "it is asleep in train.py:17 (close), while"),
    ],
)
def test_a_rank_that_raised_and_lives_is_named_with_what_keeps_it(
    frames: tuple[Frame, ...], kernel: str, expected: str
) -> None:
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


def test_a_rank_that_called_exit_with_a_code_and_lives_is_named_where_it_called() -> None:
    left = ExitCall("sys.exit", 3, (at(23, "check"), at(100, "<module>")))
    mine = rank(1, (at(17, "close"),), "futex", more={"exit_call": left})
    verdict = diagnose(job(waiting(0), mine))
    assert verdict.cause == "rank-exited"
    assert [(c.rank, c.frame and c.frame.line) for c in verdict.culprits] == [(1, 23)]
    assert verdict.summary.startswith("Rank 1 called sys.exit(3) at train.py:23 (check) and never exited: "), (
        verdict.summary
    )
    fine = replace(mine, exit_call=ExitCall("sys.exit", 0, left.frames))
    assert diagnose(job(waiting(0), fine)).cause == "uneven-batches"
