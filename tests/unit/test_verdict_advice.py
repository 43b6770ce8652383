"""Advice that fits the case: what sets cases of one cause apart, and the command that can be pasted."""

from __future__ import annotations

import pytest
import yaml
from msgspec.structs import replace

from safelaunch.model import Evidence, Frame, Launched, RankEvidence, RankException, RankExit, Verdict
from safelaunch.settings.presets import find_builtin_dir, list_presets
from safelaunch.verdict import suggestions
from safelaunch.verdict.advice import Scene, again
from safelaunch.verdict.blame import waiting_culprits
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import ABORTED, LEFT_OUT, ROOTS_DIFFER, Advice
from tests.support.evidence import (
    C10D,
    SITE,
    WRAPPER,
    at,
    behind,
    entry,
    in_backward,
    in_c10d,
    in_user,
    job,
    past,
    rank,
    record,
    waiting,
)
from tests.support.verdict_cases import calls_in

DDP = f"{SITE}/torch/nn/parallel/distributed.py"
TYPED = ("--nproc-per-node=4", "train.py", "--name", "my run")
GUARDED = "def train():\n    if rank == 0:\n        evaluate()\n    loss.backward()\n"


def in_ddp_forward(line: int) -> tuple[Frame, ...]:
    """A broadcast of DDP's buffers, under ``model(batch)``."""
    inner = [(1900, "_default_broadcast_coalesced"), (2100, "_sync_buffers"), (1600, "_pre_forward"), (1700, "forward")]
    return (*(Frame(DDP, number, function) for number, function in inner), at(line), at(100, "<module>"))


def in_full_state_dict(line: int) -> tuple[Frame, ...]:
    inner = (Frame(C10D, 3000, "all_gather_into_tensor"), WRAPPER)
    where = Frame(f"{SITE}/torch/distributed/checkpoint/state_dict.py", 900, "get_model_state_dict")
    return (*inner, where, at(line, "save"), at(100, "<module>"))


def stuck(number: int, op: str, frames: tuple[Frame, ...], seq: int = 4) -> RankEvidence:
    pending = replace(entry(op, seq), frames=frames)
    return rank(number, frames, flight=record(*past(seq - 1), pending))


def suggestions_on(evidence: Evidence, source: str = "") -> tuple[str, ...]:
    return diagnose(evidence, read_source=lambda path: source or None).suggestions


def raised(number: int, kind: str, message: str, line: int = 41) -> RankEvidence:
    frames = (at(line, "step"), at(100, "<module>"))
    error = RankException(kind, message, 100.0, frames, f"{kind}: {message}")
    return rank(number, in_user(line), "sleep", more={"exception": error, "exit": RankExit(1, 101.0)})


# --- sub-cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_forward_on_one_rank_suggests_model_module(world: int) -> None:
    """Rank 0 evaluates, and DDP broadcasts its buffers; the others are in the next backward pass."""
    ranks = [stuck(n, "all_reduce", in_backward(4)) for n in range(world)]
    ranks[0] = stuck(0, "broadcast", in_ddp_forward(3))
    found = suggestions_on(job(*ranks), GUARDED)
    assert "`model.module`" in found[0]
    assert not any("gate the side effect" in text for text in found)


def test_barrier_against_ddp_forward_suggests_no_model_module() -> None:
    ranks = [stuck(n, "broadcast", in_ddp_forward(4)) for n in range(3)]
    ranks[1] = stuck(1, "barrier", in_c10d("barrier", 3))
    assert not any("`model.module`" in text for text in suggestions_on(job(*ranks)))


@pytest.mark.parametrize("world", [2, 3])
def test_full_state_dict_on_one_rank_gets_advice(world: int) -> None:
    ranks = [stuck(n, "all_reduce", in_backward(50)) for n in range(world)]
    ranks[0] = stuck(0, "all_gather_into_tensor", in_full_state_dict(20))
    assert "Create the state dict, or call `full_tensor()`, on all ranks" in suggestions_on(job(*ranks))[0]


def test_skipped_call_gets_no_side_effect_advice() -> None:
    """``if rank == 1: continue`` before the call: from there on, that rank lags by one call."""
    source = "def train():\n    for batch in loader:\n        if rank == 1:\n            continue\n        reduce()\n"
    steps = "1@50 1@5 " * 4
    ranks = [rank(n, in_c10d("all_reduce", 50), flight=record(*calls_in(steps + "1@50*"))) for n in range(3)]
    ranks[1] = rank(
        1, in_c10d("barrier", 70), flight=record(*calls_in("1@50 1@5 1@50 " + "1@50 1@5 " * 2 + "barrier:1@70*"))
    )
    verdict = diagnose(job(*ranks), read_source=lambda path: source)
    assert verdict.summary.startswith("Rank 1 skipped")
    assert not any("gate the side effect" in text for text in verdict.suggestions)
    assert any("the skipped call" in text for text in verdict.suggestions)


@pytest.mark.parametrize("world", [2, 4])
def test_exception_on_every_rank_gets_common_cause_advice(world: int) -> None:
    found = suggestions_on(job(*(raised(n, "ImportError", "no module") for n in range(world)), outcome="crash"))
    assert any("Every rank raised this exception" in text for text in found)
    assert not any("follow from it" in text for text in found)


def test_exception_on_one_rank_explains_other_errors() -> None:
    ranks = [raised(0, "ValueError", "bad sample"), waiting(1), waiting(2)]
    found = suggestions_on(job(*ranks, outcome="crash"))
    assert any("follow from it" in text for text in found)
    assert not any("alike" in text for text in found)


@pytest.mark.parametrize(
    ("kind", "message", "advice"),
    [
        (
            "RuntimeError",
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "Only if some steps skip parameters on purpose, pass `find_unused_parameters=True`",
        ),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "--preset oom-debug"),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "--preset cuda-sync"),
    ],
)
def test_errors_worded_by_torch_get_specific_advice(kind: str, message: str, advice: str) -> None:
    ranks = [raised(n, kind, message) for n in range(2)]
    assert any(advice in text for text in suggestions_on(job(*ranks, outcome="crash")))


@pytest.mark.parametrize("peers_in", ["ddp", "plain"])
def test_uneven_loaders_suggest_model_join_only_under_ddp(peers_in: str) -> None:
    """``model.join()`` answers for DDP's collectives, and for no others."""
    frames = in_backward(50) if peers_in == "ddp" else in_c10d("all_reduce", 50)
    gone = rank(1, (), "zombie", page="exited", more={"exit": RankExit(0, 100.0)})
    ranks = [stuck(0, "all_reduce", frames), replace(gone, flight_record=behind())]
    verdict = diagnose(job(*ranks))
    assert verdict.cause == "uneven-batches"
    assert any("model.join()" in text for text in verdict.suggestions) is (peers_in == "ddp")


def given(
    cause: str, *attached: Advice, doubts: tuple[Doubt, ...] = (), launched: Launched | None = None
) -> list[Advice]:
    """The advice on a finding that names rank 0, of two that wait in the same collective."""
    facts = CaseFacts.of(job(waiting(0), waiting(1), launched=launched))
    finding = Finding(cause, doubts, "", waiting_culprits(facts, [0]), advice=frozenset(attached))
    return [one for one in CAUSES[cause].advice if one.fits(Scene(facts, finding))]


@pytest.mark.parametrize(("kind", "fits"), [(ROOTS_DIFFER, False), (LEFT_OUT, True)])
def test_conditional_root_gets_no_side_effect_advice(kind: Advice, fits: bool) -> None:
    assert kind in given("collective-mismatch", suggestions.GUARDED, kind)
    assert (suggestions.GUARDED in given("collective-mismatch", suggestions.GUARDED, kind)) is fits


def test_advice_without_stacks_names_no_lines() -> None:
    unseen = suggestions_on(job(rank(0, seen=False), rank(1, seen=False), launched=Launched(TYPED, (), "2.13.0")))
    assert any("`safelaunch doctor`" in text for text in unseen)
    assert not any("the line" in text for text in unseen)
    seen = suggestions_on(job(*(rank(n, in_user(7 + n), "sleep") for n in range(2))))
    assert not any("`safelaunch doctor`" in text for text in seen)


def test_every_advice_belongs_to_a_cause() -> None:
    listed = {one for cause in CAUSES.values() for one in cause.advice}
    assert {one for one in vars(suggestions).values() if isinstance(one, Advice)} <= listed


# --- presets ----------------------------------------------------------------------------------------------------------


def test_advised_preset_works_in_its_torch_versions() -> None:
    """Advice for a preset is limited to the torch versions that the preset supports."""
    for one in (advice for cause in CAUSES.values() for advice in cause.advice if advice.preset):
        preset = yaml.safe_load((find_builtin_dir() / f"{one.preset}.yaml").read_text())
        limits = {setting.get("torch", "") for setting in preset["env"].values()}
        assert one.torch in limits or "" in limits, one.preset
    assert {one.preset for cause in CAUSES.values() for one in cause.advice} - {""} <= {p.name for p in list_presets()}


@pytest.mark.parametrize(("torch", "advised"), [("2.9.1", True), ("2.13.0+cpu", False), ("2.14", False), ("", False)])
def test_desync_detail_is_advised_only_for_supported_torch_versions(torch: str, advised: bool) -> None:
    found = [
        *given("rank-killed", *ABORTED, launched=Launched(torch=torch)),
        *given("collective-mismatch", doubts=(Doubt.NO_MAJORITY,), launched=Launched(torch=torch)),
        *given("no-rank-stands-out", launched=Launched(torch=torch)),
    ]
    assert sum(one.preset == "desync-detail" for one in found) == (3 if advised else 0)


def test_preset_already_in_use_is_not_advised() -> None:
    for presets, advised in (((), True), (("cuda-sync",), False)):
        assert (
            any(one.preset == "cuda-sync" for one in given("gpu-kernel", launched=Launched(presets=presets))) is advised
        )


# --- the next command -------------------------------------------------------------------------------------------------


def with_launch(launched: Launched, op: str = "nccl:all_reduce") -> Verdict:
    """All ranks wait in the same collective."""
    ranks = [waiting(n, flight=record(*past(3, op), entry(op, 4, line=50))) for n in range(2)]
    return diagnose(job(*ranks, launched=launched))


def test_next_command_adds_a_preset_to_the_users_command() -> None:
    step = with_launch(Launched(TYPED, ("hang-debug",), "2.13.0")).next
    assert step is not None
    assert step.why == "To see what the transport does"
    command = "safelaunch --preset hang-debug --preset nccl-debug --nproc-per-node=4 train.py --name 'my run'"
    assert step.command == command


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (("--nnodes=2", "--node-rank=1", "train.py"), "--nnodes=2 --node-rank=N train.py"),
        (("--node_rank", "0", "train.py"), "--node_rank N train.py"),
        (
            ("exec", "--", "accelerate", "launch", "--machine_rank", "1", "t.py"),
            "accelerate launch --machine_rank N t.py",
        ),
    ],
)
def test_next_command_contains_no_node_number(typed: tuple[str, ...], command: str) -> None:
    """The verdict of one node is shown on all of them."""
    step = with_launch(Launched(typed, (), "2.13.0")).next
    assert step is not None and step.command.endswith(command) and "nccl-debug" in step.command
    assert step.why == "To see what the transport does (on each node, with its own number as N)"


@pytest.mark.parametrize(
    ("typed", "presets", "command"),
    [
        (("train.py",), (), "safelaunch --preset more train.py"),
        (("exec", "--", "bash", "run.sh"), (), "safelaunch exec --preset more -- bash run.sh"),
        (("--preset", "a", "train.py"), ("a",), "safelaunch --preset a --preset more train.py"),
        (("--preset=a", "--preset=b", "t.py"), ("a", "b"), "safelaunch --preset=a --preset=b --preset more t.py"),
        (("exec", "--preset", "a", "--", "x"), ("a",), "safelaunch exec --preset a --preset more -- x"),
        (("train.py", "--token", "[redacted]"), (), ""),
        (("train.py", "two\nlines"), (), ""),
        ((), (), ""),
    ],
)
def test_rerun_command_contains_the_added_preset(
    typed: tuple[str, ...], presets: tuple[str, ...], command: str
) -> None:
    assert again(Launched(typed, presets), "more") == command
