"""A stall's way through looks and votes, without a job: the watch and the other nodes are played."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from safelaunch.capture.look import Look, Target
from safelaunch.supervise.answer import Judged
from safelaunch.supervise.cluster.messages import Page, Vote
from safelaunch.supervise.incident import Circumstances
from safelaunch.supervise.stall import StallCase
from safelaunch.supervise.watch.job import Glance
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.supervise.watch.stall import Event, Limits, Policy, Stall
from safelaunch.supervise.watch.work import Background

SUSPECT = Stall(ranks=(0,), mark_s=0.0, stalled_s=5.0, threshold_s=3.0, step=5, before_first_step=False)


class Watch:
    """A job without ranks that stands still."""

    policy = Policy(3.0, 60.0, 1000.0, confirm_s=0.0, stall_given=True)
    attempt = (0, 1)
    quiet, background, unseen, notes, early, inconsistent, world_size = None, Background(), (), (), (), (), 0
    roster = SimpleNamespace(pages=dict, workers={})

    def steps(self) -> dict[int, int]:
        return {}

    def read_quiet_again(self) -> None: ...

    def targets(self) -> tuple[()]:
        return ()

    def standing(self, now: float) -> Stall:
        return SUSPECT

    def stepped_since(self, stall: Stall) -> bool:
        return False

    def threshold(self) -> Threshold:
        return Threshold(3.0, "given")


class Together:
    """The other nodes, which open incidents one after the other."""

    def __init__(self) -> None:
        self.open = self.limits = 0
        self.asked = 0
        self.joined = 0
        self.votes: list[tuple[int, Vote]] = []

    def suspect(self, window_s: float) -> bool:
        self.asked += 1
        return True

    def at_limit(self) -> None:
        self.limits += 1

    def calls(self) -> Page | None:
        return Page(leader=1, phase="looking", incident=self.open, window_s=0.0) if self.open > self.joined else None

    def join(self, incident: int) -> None:
        self.joined = incident

    def vote(self, vote: Vote) -> None:
        self.votes.append((self.joined, vote))

    def outcome(self, incident: int) -> None:
        return None


def case_of(watch: object, together: Together, place: Path) -> StallCase:
    about = Circumstances("train", place, place / "bundles", place, {}, host="here")
    return StallCase(watch, about, dict, together)  # type: ignore[arg-type]


def advance(case: StallCase, together: Together, votes: int) -> None:
    deadline = time.monotonic() + 30
    while len(together.votes) < votes:
        assert time.monotonic() < deadline, together.votes
        case.advance(Glance((), None, ()), 5.0)
        time.sleep(0.01)


def test_a_node_looks_and_votes_anew_in_every_incident(tmp_path: Path) -> None:
    """The next incident may open before this node has seen how the last one ended."""
    together = Together()
    case = case_of(Watch(), together, tmp_path)
    case.advance(Glance((), Event("suspect", SUSPECT), ()), 5.0)
    together.open = 1
    advance(case, together, votes=1)
    together.open = 2
    advance(case, together, votes=2)
    assert [incident for incident, _ in together.votes] == [1, 2]


def test_a_node_that_looks_for_another_keeps_its_vote_when_it_suspects_the_job_as_well(tmp_path: Path) -> None:
    """Its ranks' marks are a moment younger: it is asked first, and its own suspicion comes while it looks."""
    together = Together()
    case = case_of(Watch(), together, tmp_path)
    together.open = 1
    case.advance(Glance((), None, ()), 5.0)
    case.advance(Glance((), Event("suspect", SUSPECT), ()), 5.0)
    advance(case, together, votes=1)
    assert (together.votes, together.asked) == ([(1, "still")], 0)


def test_on_a_starved_machine_a_look_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def take(*_: object, deadline_s: float) -> Look:
        given.append(deadline_s)
        return Look(0.0, 0.0)

    monkeypatch.setattr("safelaunch.supervise.looks.take", take)
    monkeypatch.setattr("safelaunch.supervise.looks.Starvation.factor", lambda self: 3.0)
    together = Together()
    case = case_of(Watch(), together, tmp_path)
    together.open = 1
    case.advance(Glance((), None, ()), 5.0)
    until = time.monotonic() + 60
    while not given and time.monotonic() < until:
        time.sleep(0.01)
    assert given == [18.0]


def test_a_rank_whose_words_have_not_arrived_is_not_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cut link is mended, the nodes talk at once, and the ranks only when their kernels send again."""

    class Cut(Watch):
        def targets(self) -> tuple[Target, ...]:  # type: ignore[override]
            return (Target(0, 0, quiet.pid, 0),)

    monkeypatch.setattr("safelaunch.supervise.looks.take", lambda *_, **__: Look(0.0, 0.0))
    together = Together()
    with subprocess.Popen(["sleep", "600"]) as quiet:
        time.sleep(0.5)  # its start would be work
        monkeypatch.setattr("safelaunch.supervise.looks.resends", lambda pid: pid == quiet.pid)
        case = case_of(Cut(), together, tmp_path)
        case.advance(Glance((), Event("suspect", SUSPECT), ()), 5.0)
        together.open = 1
        advance(case, together, votes=1)
        quiet.kill()
    assert together.votes == [(1, "unknown")]


def test_ranks_that_were_started_anew_are_under_no_suspicion(tmp_path: Path) -> None:
    watch, together = Watch(), Together()
    together.withdraw = lambda: None  # type: ignore[attr-defined]
    case = case_of(watch, together, tmp_path)
    case.advance(Glance((), Event("suspect", SUSPECT), ()), 5.0)
    assert case.looking
    watch.attempt = (0, 2)
    case.advance(Glance((), None, ()), 5.0)
    assert not case.looking
    together.open = 1  # all look, those of the new round included
    case.advance(Glance((), Event("suspect", SUSPECT), ()), 9.0)
    assert case.looking and together.joined == 1


PROVED = Judged("dead")
OVER = Judged("unknown", limits=Limits(200.0), group="'0'")


@pytest.mark.parametrize(
    ("last_steps_s", "judged", "said"),
    [
        ((40.0, 40.0, 40.1), PROVED, "no progress for 60 s (last step 61): collecting"),
        (
            (99.9, 40.0, 99.8),
            PROVED,
            "rank 1 has made no step for 60 s (last step 61), while the others continue: coll",
        ),
        (
            (40.0, 40.0, 99.8),
            PROVED,
            "ranks 0-1 have made no step for 60 s (last step 61), while the others continue: c",
        ),
        ((40.0, 40.0, 40.1), OVER, "nothing proves a hang, but the timeout of group '0' expires then: collecting"),
        ((40.0, 40.0, 40.1), Judged("unseen"), "nothing proves a hang, but that is --max-stall: collecting"),
    ],
)
def test_what_is_said_before_a_job_is_ended(
    last_steps_s: tuple[float, ...], judged: Judged, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that meet in every step make their last one at nearly the same moment: that is no going on."""
    pages = {rank: SimpleNamespace(last_step_ns=int(at_s * 1e9)) for rank, at_s in enumerate(last_steps_s)}
    watch = SimpleNamespace(last_progress=pages, policy=Policy(60.0, 1800.0, 1800.0), unseen=())
    case = case_of(watch, Together(), tmp_path)
    case._say_hang(Stall((0,), 40.0, 60.0, 60.0, False, 61), judged, 100.0)
    assert said in " ".join(capfd.readouterr().err.split())


def test_one_node_of_several_knows_of_its_own_evidence_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All nodes' evidence, which is merged next, may prove the hang that this one could not."""
    pages = {0: SimpleNamespace(last_step_ns=int(40e9))}
    watch = SimpleNamespace(last_progress=pages, policy=Policy(60.0, 1800.0, 1800.0), unseen=(1,))
    case_of(watch, Together(), tmp_path)._say_hang(Stall((0,), 40.0, 60.0, 60.0, False, 61), OVER, 100.0)
    assert "nothing on this node proves a hang, but" in " ".join(capfd.readouterr().err.split())
