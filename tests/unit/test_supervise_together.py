"""What a supervisor makes of what the others say: a suspicion, an incident's outcome, what a person is told."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from safelaunch.job.argv import CommandLine
from safelaunch.job.plan import Plan
from safelaunch.model import BundlePlace, Evidence, Frame, Progress, RankEvidence, RankException
from safelaunch.model.recording import RankRecord, Recording
from safelaunch.settings.options import Settings
from safelaunch.supervise import joint_crash
from safelaunch.supervise import together as module
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.council import SILENT_S
from safelaunch.supervise.cluster.evidence import aged, condensed
from safelaunch.supervise.cluster.messages import Decision, Node, Page, Question, Result, packed
from safelaunch.supervise.cluster.seen import Answers, Neighbour, Seen, Word
from safelaunch.supervise.crash import notes_of, own_failure
from safelaunch.supervise.incident import Circumstances
from safelaunch.supervise.joint_crash import Told
from safelaunch.supervise.together import SUCCEED_S, Outcome, Together


class Unheard(Channel):
    """One whose thread is not started: a test says what has been heard (``say``), and reads what would be sent."""

    def __init__(self, *_: object) -> None:
        super().__init__(Node("", "here", 1, "0.1", "2.13"))
        self.seen = Seen(Page(leader=1, nodes=2, covered=True, world=4), why="")
        self.verdicts: list[Decision] = []

    def start(self, *_: object) -> None: ...

    def decide(self, incident: int, decision: Decision) -> None:
        self.say(decision=(incident, decision))

    def fail(self, crash: int, chunks: list[bytes]) -> None:
        super().fail(crash, chunks)
        self.tell(failed=len(chunks))

    def decide_crash(self, decision: Decision) -> None:
        self.verdicts.append(decision)
        self.say(crash=(self.beat.crash, decision))

    def say(self, *, page: dict[str, Any] | None = None, **changes: Any) -> None:
        assert self.seen.page is not None
        self.seen = dataclasses.replace(self.seen, page=replace(self.seen.page, **(page or {})), **changes)

    @property
    def dumped(self) -> tuple[int, list[bytes]]:
        assert self._dumped is not None
        return self._dumped


class Roster:
    agent_page = None
    agent_error = ""

    def __init__(self) -> None:
        self.workers: dict[int, object] = {0: object()}


class Watch:
    roster = Roster()
    seen: tuple[int, ...] = (0, 1)
    world_size = 4
    last_progress: ClassVar[dict[int, Progress]] = {}
    attempt = (0, 1)
    has_ended = False

    def missed_s(self, now: float) -> float:
        return 0.0


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Unheard:
    made = Unheard()
    monkeypatch.setattr(module, "Channel", lambda *_: made)
    return made


@pytest.fixture
def node(channel: Unheard, tmp_path: Path) -> Together:
    command = CommandLine((), ("--nnodes=2",), ("train.py",))
    plan = Plan((), {}, (), "train", tmp_path, None, Settings(), True, (), command=command)
    about = Circumstances("train", tmp_path, tmp_path / "bundles", tmp_path, {}, host="here")
    return Together(plan, about, Watch())  # type: ignore[arg-type]


def test_nobody_is_asked_where_a_rank_is_not_seen_or_the_leader_not_heard(node: Together, channel: Unheard) -> None:
    assert node.suspect(2.0)
    assert (channel.beat.doing, channel.beat.suspects) == ("suspecting", 0)
    channel.say(silent_s=SILENT_S)
    assert not node.suspect(2.0)
    assert "no message from the leader" in node.why_alone
    channel.say(silent_s=0.0, page={"covered": False})
    assert not node.suspect(2.0)
    assert "not every rank" in node.why_alone
    channel.seen = Seen(why="no store at h:1: refused")
    assert not node.suspect(2.0)
    assert (node.is_covered, node.why_alone) == (False, "no store at h:1: refused")


def test_a_page_that_does_not_count_this_node_says_nothing_about_its_job(node: Together, channel: Unheard) -> None:
    """A launcher that has not started its ranks yet looks like the only rank of a job."""
    channel.say(page={"nodes": 1, "world": 1})
    assert not node.is_covered
    assert not node.suspect(2.0)


def test_a_call_is_answered_once(node: Together, channel: Unheard) -> None:
    assert node.calls() is None
    channel.say(page={"phase": "looking", "incident": 3})
    call = node.calls()
    assert call is not None and call.incident == 3
    node.join(3)
    assert node.calls() is None
    assert (channel.beat.incident, channel.beat.vote, channel.beat.chunks) == (3, "", -1)


def test_an_incident_answers_what_was_asked_while_it_was_open(node: Together, channel: Unheard) -> None:
    channel.say(page={"phase": "looking", "incident": 3})
    node.suspect(2.0)
    assert channel.beat.suspects == 3, "it would have the next one opened"
    node.join(3)
    assert channel.beat.suspects == 2


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        ({"incident": 3, "phase": "looking"}, None),
        ({"incident": 3, "phase": "collecting"}, "hang"),
        ({"incident": 3, "phase": "decided"}, "hang"),
        ({"incident": 3, "phase": "agreed"}, "hang"),
        *(({"incident": 3, "phase": "idle", "result": r}, r) for r in ("moving", "active", "stopped", "paused")),
        ({"incident": 4, "phase": "looking"}, "elsewhere"),
        ({"incident": 2, "phase": "idle"}, "alone"),
    ],
)
def test_the_outcome(node: Together, channel: Unheard, page: dict[str, Any], outcome: Outcome | None) -> None:
    channel.say(page=page)
    assert node.outcome(3) == outcome


def test_a_leader_that_is_not_heard_is_given_time_to_be_followed(node: Together, channel: Unheard) -> None:
    channel.say(page={"incident": 3, "phase": "looking"}, silent_s=SILENT_S + 1)
    assert node.outcome(3) is None
    channel.say(silent_s=SILENT_S + SUCCEED_S)
    assert node.outcome(3) == "alone"


@pytest.mark.parametrize("result", ["active", "moving"])
def test_an_incident_that_was_over_before_this_node_looked(node: Together, channel: Unheard, result: Result) -> None:
    node.suspect(2.0)
    assert node.outcome(0) is None
    channel.say(page={"incident": 1, "phase": "idle", "result": result})
    assert node.outcome(0) == result


# --- what is settled --------------------------------------------------------------------------------------------------


def half(*ranks: int) -> Evidence:
    progress = [Progress(rank, 0, 4, 0, 10 + rank, 1, "torch", step=7 + rank) for rank in ranks]
    sides = tuple(RankEvidence(p.rank, "here", p.pid, progress=p) for p in progress)
    return Evidence("hang", 4, sides, tuple(set(range(4)) - set(ranks)))


def test_the_leader_judges_the_evidence_of_all(node: Together, channel: Unheard, tmp_path: Path) -> None:
    evidence = {2: condensed(half(2, 3)), 3: [b"garbage"]}
    channel.say(page={"incident": 3, "phase": "collecting"}, leads=True, complete=True, evidence=evidence)
    settled = node.settle(3, replace(half(0, 1), ends=True))
    assert settled is not None and settled.common is not None
    assert [rank.rank for rank in settled.common.evidence.ranks] == [0, 1, 2, 3]
    assert [rank.rank for rank in settled.common.others] == [2, 3]
    assert "could not be read" in settled.common.evidence.notes[0]
    place = settled.common.verdict.bundle
    assert place == BundlePlace("here", str(tmp_path / "bundles" / settled.common.name), True)
    assert (settled.action, settled.step, channel.beat.agrees) == ("kill", 7, True)


def test_another_node_takes_the_decision_as_it_is(node: Together, channel: Unheard) -> None:
    verdict = module.judged(half(0, 1, 2, 3), node._about)
    decision = Decision(verdict, "restart", "there", "/there/bundle", 5)
    channel.say(page={"incident": 3, "phase": "decided"}, decision=(3, decision))
    settled = node.settle(3, half(0, 1))
    assert settled is not None and settled.common is not None
    assert (settled.action, settled.step) == ("restart", 5)
    assert settled.common.verdict.bundle == BundlePlace("there", "/there/bundle", False)
    assert [rank.rank for rank in settled.common.evidence.ranks] == [0, 1]


def test_a_job_that_moves_after_all_is_no_incident(node: Together, channel: Unheard) -> None:
    channel.say(page={"incident": 3, "phase": "idle", "result": "active"})
    assert node.settle(3, half(0, 1)) is None


@pytest.mark.parametrize(
    ("page", "acts"),
    [
        ({"incident": 3, "phase": "agreed"}, True),
        ({"incident": 3, "phase": "idle", "result": "moving"}, False),  # torchrun has started ranks anew
        ({"incident": 4, "phase": "looking"}, True),  # that was agreed on before
    ],
)
def test_nobody_acts_before_all_agree_nor_upon_what_is_void(
    node: Together, channel: Unheard, page: dict[str, Any], acts: bool
) -> None:
    channel.say(page={"incident": 3, "phase": "decided"})
    timer = threading.Timer(0.2, lambda: channel.say(page=page))
    timer.start()
    assert node.all_agree(3) is acts
    assert channel.seen.page is not None and channel.seen.page.phase == page["phase"], "it has waited"
    timer.join()


def test_where_the_others_are_lost_a_decision_stands_and_a_node_has_its_own_half(
    node: Together, channel: Unheard
) -> None:
    channel.seen = Seen(why="gone")
    assert node.all_agree(3)
    settled = node.settle(3, half(0, 1))
    assert settled is not None and settled.common is None


# --- what a person asks for -------------------------------------------------------------------------------------------


def test_a_dump_has_what_all_have_handed_in(node: Together, channel: Unheard) -> None:
    with node.dump.asking() as asked:
        assert asked and channel._asks == Question()
        channel.say(page={"dumps": (1,)}, answers=Answers(1, True, {2: condensed(half(2, 3)), 3: [b"garbage"]}))
        assert node.dump.wanted(100.0) is None, "it is this node's own"
        everything, others = node.dump.collected(half(0, 1))
        assert [rank.rank for rank in everything.ranks] == [0, 1, 2, 3]
        assert [rank.rank for rank in others] == [2, 3]
        assert "could not be read" in everything.notes[0]
    channel.say(answers=None, questions={1: Question()})
    assert channel._asks is None
    assert node.dump.wanted(100.0) is None, "the page may still have it"


def test_a_dump_of_another_node_is_answered_once_and_not_too_often(node: Together, channel: Unheard) -> None:
    channel.say(page={"dumps": (3, 4)})
    assert node.dump.wanted(100.0) is None, "what it is about has not been read yet"
    wants = {3: Question(), 4: Question("record", 10.0, "0-3")}
    channel.say(questions=wants)
    assert [node.dump.wanted(100.0), node.dump.wanted(100.0), node.dump.wanted(102.0)] == [(3, wants[3]), None, None]
    assert [node.dump.wanted(110.0), node.dump.wanted(120.0)] == [(4, wants[4]), None]
    node.dump.hand_in(3, half(0, 1))
    assert channel.dumped[0] == 3


def test_a_dump_comes_before_a_recording(node: Together, channel: Unheard) -> None:
    dump, recording = Question(), Question("record", 10.0)
    channel.say(page={"dumps": (3, 4)}, questions={3: recording, 4: dump})
    assert node.dump.presses
    assert [node.dump.wanted(100.0), node.dump.presses] == [(4, dump), False]
    assert [node.dump.wanted(110.0), node.dump.presses] == [(3, recording), False]


def test_the_answers_to_an_earlier_question_are_not_those_to_the_next(node: Together, channel: Unheard) -> None:
    old = Answers(1, True, {2: condensed(half(2, 3))})
    with node.dump.asking():
        channel.say(answers=old)
        assert len(node.dump.collected(half(0, 1))[1]) == 2
    with node.dump.asking(Question("record", 10.0)):
        stop = Event()
        stop.set()
        assert node.dump.recorded(stop) == ([], []), "the channel still has the last question's"


def test_a_recording_has_what_all_have_handed_in(node: Together, channel: Unheard) -> None:
    theirs = Recording(frames=[Frame("/x/train.py", 7, "step")], stacks=[(0,)], ranks=[RankRecord(2, "there")])
    node.dump.hand_in_recording(5, theirs)
    with node.dump.asking(Question("record", 10.0)):
        channel.say(answers=Answers(6, True, {2: channel.dumped[1], 3: [b"garbage"], 4: packed(b"\x81") or []}))
        found, notes = node.dump.recorded(Event())
    assert found == [theirs]
    assert len(notes) == 2 and "could not be read" in notes[0]


def test_one_question_of_a_node_waits_for_the_other(node: Together, channel: Unheard) -> None:
    second = threading.Event()

    def ask() -> None:
        with node.dump.asking():
            second.set()

    other = threading.Thread(target=ask)
    with node.dump.asking(Question("record", 10.0)):
        other.start()
        assert not second.wait(0.1) and channel._asks == Question("record", 10.0)
    assert second.wait(10.0)
    other.join()


def test_where_nobody_is_heard_nobody_is_asked(node: Together, channel: Unheard) -> None:
    channel.say(page={"nodes": 1, "covered": False})
    with node.dump.asking() as asked:
        assert not asked
    channel.seen = Seen(why="gone")
    with node.dump.asking() as asked:
        assert [asked, node.look_around()] == [False, False]


def test_what_is_known_of_all_nodes_has_to_be_new(node: Together, channel: Unheard) -> None:
    here = Neighbour("here", (0, 1), 7, "watching", here=True)
    channel.say(around=(5.0, (here,)))
    assert node.look_around()
    assert (node.around(4.0), node.around(5.0)) == ((here,), None)


# --- a crash ----------------------------------------------------------------------------------------------------------


def crashed(*ranks: int, raises: str = "Connection closed by peer") -> Evidence:
    exceptions = {rank: RankException("RuntimeError", raises, time.time() - 1.0) for rank in ranks}
    sides = tuple(RankEvidence(rank, "here", 10 + rank, exception=exceptions[rank]) for rank in ranks)
    return Evidence("crash", 4, sides, tuple(set(range(4)) - set(ranks)))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"CRASH_S": 1.0, "EFFECTS_S": 0.3, "HEAR_S": 0.2, "HOSTS_S": 0.0}.items():
        monkeypatch.setattr(joint_crash, name, seconds)


def test_who_failed_first_judges_what_all_know(node: Together, channel: Unheard, tmp_path: Path) -> None:
    channel.say(slot=1, page={"failed": (1, 2), "troubles": ((1, "rank 1 raised"),)})
    channel.say(halves={2: condensed(aged(crashed(2, 3), time.time())), 3: [b"garbage"]})
    node.tick(0.0)
    node.crash.trouble("rank 1 raised")
    told = node.crash.settle(crashed(0, 1, raises="no such batch"))
    assert channel.beat.crash == 1 and len(channel.verdicts) == 1
    assert told.verdict is not None and told.verdict.cause == "rank-exception"
    assert [culprit.rank for culprit in told.verdict.culprits] == [0, 1]
    assert told.verdict.bundle == BundlePlace("here", str(tmp_path / "bundles" / told.name), True)
    assert [rank.rank for other in told.others for rank in other.ranks] == [2, 3]


@pytest.mark.parametrize(
    ("page", "own", "excused"),
    [
        ({"anew": (2,)}, "", True),
        ({"anew": (1,)}, "", False),  # its own word
        ({"anew": (2,)}, "rank 1 raised", False),
        ({"anew": (2,), "troubles": ((3, "rank 5 raised"),)}, "", False),
    ],
)
@pytest.mark.usefixtures("brief")
def test_ranks_that_lost_those_of_a_node_that_starts_anew_have_not_failed(
    node: Together, channel: Unheard, page: dict[str, Any], own: str, excused: bool
) -> None:
    anew = any(slot != 1 for slot in page["anew"])
    word = Word(troubles=tuple(text for _, text in page.get("troubles", ())), anew=anew)
    channel.say(slot=1, page={"failed": (1,), **page}, word=word)
    node.tick(0.0)
    if own:
        node.crash.trouble(own)
    told = node.crash.settle(crashed(0, 1))
    assert bool(channel.verdicts) is not excused
    assert told.verdict is None or not excused


def test_another_node_takes_the_verdict_about_a_crash_as_it_is(node: Together, channel: Unheard) -> None:
    verdict = module.judged(crashed(0, 1, raises="no such batch"), node._about)
    node.tick(0.0)
    channel.say(slot=2, crash=(1, Decision(verdict, "dump", "there", "/there/bundle")))
    told = node.crash.settle(crashed(2, 3))
    assert told.verdict == replace(verdict, bundle=BundlePlace("there", "/there/bundle", False))
    assert (channel.verdicts, told.others) == ([], ())


def test_a_failure_of_ones_own_that_the_others_have_not_heard_of_is_judged_here(
    node: Together, channel: Unheard
) -> None:
    verdict = module.judged(crashed(2, 3), node._about)
    node.tick(0.0)
    node.crash.trouble("rank 1 raised")
    channel.say(slot=2, crash=(1, Decision(verdict, "dump", "there", "")))
    assert node.crash.settle(crashed(0, 1, raises="no such batch")).verdict is None


@pytest.mark.usefixtures("brief")
def test_where_nobody_failed_on_its_own_account_the_nodes_agree_all_the_same(node: Together, channel: Unheard) -> None:
    channel.say(slot=1, page={"failed": (1,)})
    node.tick(0.0)
    told = node.crash.settle(crashed(0, 1))
    assert told.verdict is not None and told.verdict.culprits == ()
    assert channel._crash.gathers and channel.verdicts[0].path.endswith(told.name)
    assert told.verdict.bundle == BundlePlace("here", channel.verdicts[0].path, False), "it lacks ranks 2-3"


def test_a_node_that_is_stopped_ends_the_search(node: Together, channel: Unheard) -> None:
    node.tick(0.0)
    channel.say(word=Word(stopping=True))
    assert node.crash.settle(crashed(0, 1)) == Told(Word(stopping=True))


def test_who_has_met_nobody_or_lost_them_judges_alone(node: Together, channel: Unheard) -> None:
    assert node.crash.settle(crashed(0, 1)) == Told(Word()), "the channel has never answered"
    node.tick(0.0)
    channel.seen = Seen(why="closed", lost="closed")
    assert node.crash.settle(crashed(0, 1)).verdict is None
    assert channel.verdicts == []


def test_a_crash_of_an_earlier_attempt_is_not_taken_for_this_one(node: Together, channel: Unheard) -> None:
    channel.say(page={"crash": 3})
    node.tick(0.0)
    node.crash.anew()
    channel.say(page={"crash": 4})
    node.tick(1.0)
    channel.say(word=Word(stopping=True))
    node.crash.settle(crashed(0, 1))
    assert channel.beat.crash == 5


# --- what is told -----------------------------------------------------------------------------------------------------


def test_what_becomes_of_the_others_is_told_once(
    node: Together, channel: Unheard, capfd: pytest.CaptureFixture[str]
) -> None:
    node.tick(0.0)
    channel.say(page={"silent": (2,), "covered": False})
    node.tick(1.0)
    node.tick(2.0)
    channel.seen = Seen(why="it has closed the connection")
    for second in range(3, 20):
        node.tick(float(second))
    assert node.last_words().lost, "a crash that comes later is told of it too"
    channel.seen = Seen(Page(leader=1, nodes=2, covered=True, world=4), why="")
    for second in range(20, 23):
        node.tick(float(second))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 3
    assert "no message from a node" in said[0] and "lost contact with the other nodes" in said[1]
    assert "is restored" in said[2]


def test_whose_ranks_have_ended_misses_nobody(
    node: Together, channel: Unheard, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a healthy end, the store goes with the node that has it, and the others' torchruns end later."""
    node.tick(0.0)
    monkeypatch.setattr(Watch, "has_ended", True)
    channel.say(page={"silent": (2,), "covered": False})
    node.tick(1.0)
    channel.seen = Seen(why="the store at h:1 has closed the connection", lost="closed")
    for second in range(2, 60):
        node.tick(float(second))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(Watch, "has_ended", False)  # torchrun has started ranks anew
    for second in range(60, 70):
        node.tick(float(second))
    assert capfd.readouterr().err.count("lost contact with the other nodes") == 1


def test_nodes_of_another_torch_are_told_of_once(
    node: Together, channel: Unheard, capfd: pytest.CaptureFixture[str]
) -> None:
    channel.say(nodes=(Node("b", "there", 1, "0.1", "2.9"),))
    for second in range(3):
        node.tick(float(second))
    assert capfd.readouterr().err.splitlines() == ["safelaunch: torch differs between nodes: 2.13 here, 2.9 on there"]


def test_a_failure_of_ones_own_is_told_and_a_consequence_is_not() -> None:
    lost = RankException("RuntimeError", "Connection closed by peer [10.0.0.1]:5", 1.0)
    own = RankException("ValueError", "no such batch", 1.0)
    assert own_failure("h", {0: 1, 1: 1}, {0: lost, 1: lost}) == ""
    assert own_failure("h", {}, {0: lost, 1: own}) == "rank 1 on h raised ValueError: no such batch"
    assert own_failure("h", {1: -9, 0: -15}, {}) == "rank 1 on h was ended by SIGKILL"
    assert own_failure("h", {1: 3}, {}) == "rank 1 on h ended with exit code 3"
    assert own_failure("h", {0: -15}, {}) == ""


def test_what_a_crash_is_told_about_other_nodes() -> None:
    assert notes_of(Word()) == ()
    assert notes_of(Word(troubles=("rank 3 on h was ended by SIGKILL",))) == (
        "on another node, rank 3 on h was ended by SIGKILL",
    )
    assert "2 nodes are no longer heard" in notes_of(Word(quiet=2))[0]
    assert "can no longer be reached" in notes_of(Word(quiet=1, lost=True))[0]


def test_who_has_come_to_a_rendezvous_that_does_not_complete(
    node: Together, channel: Unheard, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch.roster, "workers", {})
    channel.node = replace(channel.node, node_rank=0)
    channel.say(page={"nodes": 1, "covered": False})
    for second in range(100):
        node.tick(float(second))
    assert node._notices is not None
    node._notices._meeting = dataclasses.replace(node._notices._meeting, nodes=3)
    channel.say(page={"nodes": 2}, nodes=(Node("b", "there", 1, "0.1", "2.13", node_rank=2),))
    for second in range(100, 200):
        node.tick(float(second))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].endswith("no rank yet: 1 of 2 nodes have joined the rendezvous (here); node rank 1 has not")
    assert said[1].endswith("2 of 3 nodes have joined the rendezvous (here, there); node rank 1 has not")


def waits_for_nodes(
    node: Together, channel: Unheard, monkeypatch: pytest.MonkeyPatch, *, hosts: tuple[str, ...]
) -> None:
    """Two of three nodes have come."""
    monkeypatch.setattr(Watch.roster, "workers", {})
    assert node._notices is not None
    monkeypatch.setattr(node._notices, "_meeting", dataclasses.replace(node._notices._meeting, nodes=3))
    monkeypatch.setattr(node._notices, "_hosts", hosts)
    channel.node = replace(channel.node, node_rank=0)
    channel.say(page={"nodes": 2, "covered": False}, nodes=(Node("b", "there.lan", 1, "0.1", "2.13", node_rank=2),))
    node.tick(10.0)
    node.tick(13.0)


def test_who_has_not_come_is_known_after_the_others_have_left(
    node: Together, channel: Unheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.rendezvous is None
    waits_for_nodes(node, channel, monkeypatch, hosts=("here", "gone", "there"))
    channel.say(page={"nodes": 1}, nodes=())
    node.tick(14.0)
    channel.seen = Seen(why="closed")
    node.tick(15.0)
    told = node.rendezvous
    assert told is not None
    assert (told.wanted, told.come, told.hosts) == (3, 2, ("here", "there.lan"))
    assert (told.absent_ranks, told.absent_hosts, told.waited_s, told.store) == ((1,), ("gone",), 5.0, "")


@pytest.mark.parametrize("hosts", [(), ("here", "there")])
def test_a_list_of_other_hosts_than_the_jobs_names_nobody(
    node: Together, channel: Unheard, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    waits_for_nodes(node, channel, monkeypatch, hosts=hosts)
    assert node.rendezvous is not None
    assert node.rendezvous.absent_hosts == ()


def test_a_rendezvous_that_all_have_come_to_or_that_somebody_stops_is_complete(
    node: Together, channel: Unheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_nodes(node, channel, monkeypatch, hosts=())
    channel.say(word=Word(stopping=True))
    assert node.rendezvous is None
    channel.say(word=Word(), page={"nodes": 3})
    node.tick(14.0)
    assert node.rendezvous is None


def test_one_node_asks_nccl_for_all(node: Together, channel: Unheard) -> None:
    assert not node.asks_nccl
    channel.say(leads=True)
    assert node.asks_nccl
    channel.say(leads=False, silent_s=SILENT_S)
    assert node.asks_nccl, "alone, each asks"


def test_ranks_are_spared_until_the_nodes_have_agreed(node: Together, channel: Unheard) -> None:
    assert node.spares_the_ranks == "the nodes have yet to agree"
    channel.say(silent_s=SILENT_S)
    assert node.spares_the_ranks == ""
    node._action = "dump"
    assert node.spares_the_ranks == "the job continues"
