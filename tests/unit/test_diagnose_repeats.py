"""What is remembered of a verdict, and what it says where earlier ones have blamed the same hardware."""

from __future__ import annotations

import signal

import pytest
from evidence import MODULE, SITE, at, in_c10d, in_user, job, rank
from msgspec import structs

from safelaunch.diagnose import diagnose
from safelaunch.diagnose.repeats import incident_of
from safelaunch.model import (
    Evidence,
    Frame,
    Incident,
    Launched,
    MemoryKills,
    NodeEvidence,
    RankEvidence,
    RankException,
    RankExit,
    Remembered,
    Verdict,
)

SYNCHRONIZE = Frame(f"{SITE}/torch/cuda/__init__.py", 1108, "synchronize")
NOW = 1_700_000_000.0


def with_gpu(side: RankEvidence) -> RankEvidence:
    return structs.replace(side, gpu=f"GPU-{side.rank}", local_rank=side.rank)


def stuck(line: int, culprit: int = 1, gpu: str = "", **fields: object) -> Evidence:
    """One rank waits for its GPU, the others for it."""
    ranks = [
        rank(n, (SYNCHRONIZE, at(line), MODULE), "run") if n == culprit else rank(n, in_c10d("all_reduce", 60))
        for n in range(4)
    ]
    ranks = [with_gpu(side) for side in ranks]
    if gpu:
        ranks[culprit] = structs.replace(ranks[culprit], gpu=gpu)
    return job(*ranks, remembered=Remembered("train", NOW, "node1", **fields))


def blamed(evidence: Evidence, number: int = 1) -> Incident:
    found = incident_of(diagnose(evidence), evidence)
    assert found is not None
    place = {"id": str(number), "unix_s": NOW - 3600 * number, "bundle": f"/b/train-{number}", "written_on": "node1"}
    return structs.replace(found, **place)


def test_what_is_remembered() -> None:
    found = blamed(stuck(41))
    (one,) = found.ranks
    assert (one.rank, one.host, one.gpu, one.file, one.line) == (1, "node1", "GPU-1", "/home/me/train.py", 41)
    assert (found.cause, found.units, found.line_tells) == ("gpu-kernel", ("gpu", "host"), False)
    assert (found.of_gpus, found.of_hosts) == (4, 1)


def test_the_same_gpu_at_another_line() -> None:
    verdict = diagnose(stuck(57, incidents=(blamed(stuck(41)),)))
    (suspect,) = verdict.suspected
    assert (suspect.unit, suspect.name, suspect.host, suspect.times) == ("gpu", "GPU-1", "node1", 2)
    assert suspect.chance == 0.25
    assert suspect.words == (
        "GPU GPU-1 of node1 is blamed for the second time, each time at another line. That may be the hardware; among 4"
        " GPUs, chance alone does it in 1 of 4 cases. If the trouble follows rank 1 to another GPU, it is the script."
    )
    (before,) = suspect.before
    assert (before.bundle, before.host) == ("/b/train-1", "node1")
    assert before.words == "2023-11-14 21:13 UTC: gpu-kernel, rank 1 at train.py:41"
    assert "--exclude-blamed" in verdict.suggestions[0]


def test_the_next_command_leaves_the_gpu_out() -> None:
    evidence = stuck(57, incidents=(blamed(stuck(41)),))
    typed = ("--preset", "hang-debug", "--nproc-per-node=4", "train.py")
    step = diagnose(structs.replace(evidence, launched=Launched(typed, ("hang-debug",)))).next
    assert step is not None
    assert step.command == "safelaunch --preset hang-debug --exclude-blamed --nproc-per-node=4 train.py"
    already = structs.replace(evidence, launched=Launched(("--exclude-blamed", *typed), ("hang-debug",)))
    assert "--exclude-blamed --preset" in str(diagnose(already).next), "as it was, with the cause's own advice"


def test_the_same_gpu_under_another_rank() -> None:
    earlier = blamed(stuck(41, culprit=2, gpu="GPU-1"))
    (suspect,) = diagnose(stuck(41, incidents=(earlier,))).suspected
    assert suspect.words.startswith("GPU GPU-1 of node1 is blamed for the second time, as ranks 1-2. That may be")


def test_the_words_are_as_firm_as_the_case() -> None:
    several = tuple(blamed(stuck(line), line) for line in (41, 43))
    (suspect,) = diagnose(stuck(57, incidents=several)).suspected
    assert "the third time, each time at another line. Among 4 GPUs, chance alone does that in at most 1 of 16" in (
        suspect.words
    )
    rank_0 = diagnose(stuck(57, culprit=0, incidents=(blamed(stuck(41, culprit=0)),)))
    assert "may be the hardware, or what the script does on rank 0 alone" in rank_0.suspected[0].words


@pytest.mark.parametrize(
    "earlier",
    [
        (),
        (blamed(stuck(57)),),  # the same rank at the same line
        (blamed(stuck(41, culprit=2)),),  # another GPU
        (structs.replace(blamed(stuck(41)), confidence="low"),),
        (structs.replace(blamed(stuck(41)), run_name="eval"),),
    ],
)
def test_what_tells_nothing(earlier: tuple[Incident, ...]) -> None:
    verdict = diagnose(stuck(57, incidents=earlier))
    assert verdict.suspected == ()
    assert verdict == diagnose(stuck(57)), "not one word more"


def test_a_verdict_on_another_rank_does_not_repeat_an_old_suspicion() -> None:
    earlier = (blamed(stuck(41), 2), blamed(stuck(43), 1))
    assert diagnose(stuck(57, culprit=2, incidents=earlier)).suspected == ()


def test_a_rank_that_has_its_gpu_by_a_number() -> None:
    evidence = stuck(41, gpu="3", uuids={"3": "GPU-x"})
    assert blamed(evidence).ranks[0].gpu == "GPU-x"
    assert blamed(stuck(41, gpu="3")).ranks[0].gpu == ""
    elsewhere = structs.replace(evidence, remembered=Remembered("train", NOW, "node2", uuids={"3": "GPU-x"}))
    assert blamed(elsewhere).ranks[0].gpu == "", "another node's numbers are others"


def test_nothing_is_remembered_of_a_look_or_of_nobody() -> None:
    evidence = stuck(41)
    assert incident_of(diagnose(evidence), structs.replace(evidence, remembered=None)) is None
    verdict = diagnose(evidence)
    assert incident_of(structs.replace(verdict, outcome="dump"), evidence) is None
    assert incident_of(structs.replace(verdict, culprits=()), evidence) is None


def _units_of(cause: str, side: RankEvidence) -> tuple[str, ...]:
    evidence = job(side, rank(1, in_user(3)), outcome="crash", remembered=Remembered("train", NOW, "node1"))
    verdict = structs.replace(diagnose(evidence), cause=cause)
    culprits = diagnose(stuck(41)).culprits
    named = structs.replace(verdict, culprits=(structs.replace(culprits[0], rank=0),))
    found = incident_of(named, evidence)
    assert found is not None
    return found.units


def killed(number: int, **more: object) -> RankEvidence:
    return rank(0, seen=False, more={"exit": RankExit(-number, NOW), **more})


def raised(text: str) -> RankEvidence:
    return rank(0, in_user(3), more={"exception": RankException("torch.AcceleratorError", text, NOW)})


@pytest.mark.parametrize(
    ("cause", "side", "units"),
    [
        ("gpu-kernel", rank(0), ("gpu", "host")),
        ("uninterruptible-io", rank(0), ("host",)),
        ("node-behind", rank(0), ("host",)),
        ("rank-killed", killed(signal.SIGSEGV), ("host",)),
        ("rank-killed", killed(signal.SIGBUS), ("host",)),
        ("rank-killed", killed(signal.SIGBUS, memory_kills=MemoryKills("Out of memory: Killed process 1000")), ()),
        ("rank-killed", killed(signal.SIGKILL), ()),
        ("rank-killed", killed(signal.SIGABRT), ()),
        ("rank-exception", raised("CUDA error: uncorrectable ECC error encountered"), ("gpu", "host")),
        ("rank-exception", raised("CUDA error: hardware stack error"), ("gpu", "host")),
        ("rank-exception", raised("CUDA error: an illegal memory access was encountered"), ()),
        ("rank-exception", raised("CUDA out of memory. Tried to allocate 2.00 GiB."), ()),
        *((cause, rank(0), ()) for cause in ("collective-mismatch", "busy-loop", "rank-stopped", "data-loading")),
    ],
)
def test_which_causes_can_be_hardware(cause: str, side: RankEvidence, units: tuple[str, ...]) -> None:
    assert _units_of(cause, side) == units


RESET = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
ENGINE = Frame(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward")


def _lost(host: str, *incidents: Incident) -> tuple[Verdict, Evidence]:
    """A job of two nodes, of which one, with ranks 2 and 3, is gone without a word."""
    exception = RankException("RuntimeError", RESET, -1.0, (ENGINE, at(41), MODULE))
    more = {"exception": exception, "exit": RankExit(1, -1.0)}
    evidence = job(
        *(structs.replace(rank(n, seen=False, more=more), host="a") for n in (0, 1)),
        outcome="crash",
        missing_ranks=(2, 3),
        nodes=(NodeEvidence("a", 1, (0, 1), here=True), NodeEvidence(host, 2, (2, 3), silent_s=20.0)),
        remembered=Remembered("train", NOW, "a", incidents),
    )
    return diagnose(evidence), evidence


def test_a_node_that_is_lost_again() -> None:
    verdict, evidence = _lost("b")
    assert ([one.host for one in verdict.nodes_at_fault], verdict.suspected) == (["b"], ())
    first = incident_of(verdict, evidence)
    assert first is not None
    earlier = structs.replace(first, id="1", unix_s=NOW - 60)
    again = _lost("b", earlier)[0]
    assert [(one.unit, one.host, one.chance) for one in again.suspected] == [("host", "b", 0.5)]
    advice = again.suggestions[0]
    assert advice.startswith("If that happens again, keep jobs off") and "nodename=b state=drain" in advice
    third = _lost("b", earlier, *(structs.replace(earlier, id=str(n)) for n in range(2, 6)))[0]
    assert third.suggestions[0].startswith("Keep jobs off the suspected host")
    assert _lost("c", earlier)[0].suspected == ()
