"""The leader's decisions over replayed beats, and the election of the leader."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import JobCondition
from safelaunch.supervise.cluster.election import LINE_S, SILENT_S, Liveness, Succession
from safelaunch.supervise.cluster.leader import (
    ACKNOWLEDGE_S,
    DECIDE_S,
    EVIDENCE_S,
    LOOKS_S,
    Leader,
    LeaderInput,
    covers,
)
from safelaunch.supervise.cluster.messages import Beat, LeaderPage, NodeQuestion, Vote


def end_of(page: LeaderPage) -> tuple[str, str]:
    return page.phase, page.result


class Job:
    """Some nodes of two ranks, and their leader. Time passes only if a test says so."""

    def __init__(self, nodes: int = 2) -> None:
        self.now = 100.0
        self.beats = {
            slot: Beat(f"i{slot}", 1, (2 * slot - 2, 2 * slot - 1), 2 * nodes) for slot in range(1, nodes + 1)
        }
        self.leader = Leader(LeaderPage(leader=1), self.now)
        self.decided = False

    def say(self, slot: int, **changes: Any) -> Job:
        self.beats[slot] = replace(self.beats[slot], **changes)
        return self

    def page(self, after_s: float = 0.5) -> LeaderPage:
        self.now += after_s
        return self.leader.next(LeaderInput(dict(self.beats), (), self.decided, latest=dict(self.beats)), self.now)

    def open(self, by: int = 1, **more: Any) -> Job:
        self.say(by, doing="suspecting", suspects=self.leader.page.incident, **more)
        assert self.page().phase == "looking"
        for slot in self.beats:
            self.say(slot, incident=self.leader.page.incident, vote="", agrees=False)
        return self

    def vote(self, *votes: Vote) -> LeaderPage:
        for slot, vote in zip(sorted(self.beats), votes, strict=True):
            self.say(slot, vote=vote)
        return self.page()


def test_incident_is_not_opened_without_a_suspicion() -> None:
    job = Job()
    pages = [job.page() for _ in range(100)]
    assert {(page.phase, page.incident, page.covered, page.nodes) for page in pages} == {("idle", 0, True, 2)}
    assert [page.count for page in pages] == list(range(1, 101)), "every node can see that the leader lives"


def test_suspicions_open_one_incident_with_the_longest_window() -> None:
    job = Job(3).say(2, doing="suspecting", suspects=0, window_s=4.0).say(3, doing="suspecting", suspects=0)
    page = job.page()
    assert (page.phase, page.incident, page.window_s) == ("looking", 1, 4.0)


@pytest.mark.parametrize(
    ("votes", "phase", "result"),
    [
        (("unknown", "unknown", "unknown"), "collecting", ""),
        (("unknown", "stopped", "unknown"), "collecting", ""),
        (("stopped", "stopped", "stopped"), "idle", "stopped"),
        (("unknown", "alive", "unknown"), "idle", "alive"),
        (("unknown", "moving", ""), "idle", "alive"),
        (("moving", "unknown", ""), "idle", "moving"),
        (("unknown", "paused", ""), "idle", "paused"),
        (("unknown", "unseen", "unknown"), "collecting", ""),
        (("unknown", "", "unknown"), "looking", ""),
    ],
    ids=lambda value: "-".join(word or "none" for word in value) if isinstance(value, tuple) else value or "none",
)
def test_votes_decide_the_phase_and_result(votes: tuple[Vote, ...], phase: str, result: str) -> None:
    assert end_of(Job(3).open().vote(*votes)) == (phase, result)


CONDITIONS: dict[JobCondition, tuple[str, ...]] = {
    # Phase or result by the condition at the node that opened the incident (row) and at another node (column).
    #           dead          unknown       unseen        stopped       alive    moving
    "dead":    ("collecting", "collecting", "collecting", "collecting", "alive", "alive"),
    "unknown": ("collecting", "collecting", "collecting", "collecting", "alive", "alive"),
    "unseen":  ("collecting", "collecting", "collecting", "collecting", "alive", "alive"),
    "stopped": ("collecting", "collecting", "collecting", "stopped",    "alive", "alive"),
    "alive":   ("alive",      "alive",      "alive",      "alive",      "alive", "alive"),
    "moving":  ("moving",     "moving",     "moving",     "moving",     "moving", "moving"),
}  # fmt: skip


@pytest.mark.parametrize("opener", CONDITIONS)
@pytest.mark.parametrize("other", CONDITIONS)
@pytest.mark.parametrize("at_limit", [False, True])
def test_each_pair_of_conditions_leads_to_one_decision(
    opener: JobCondition, other: JobCondition, at_limit: bool
) -> None:
    job = Job(2).open(at_limit=at_limit)
    expected = CONDITIONS[opener][list(CONDITIONS).index(other)]
    if at_limit and opener == "alive" and other != "moving":
        expected = "collecting"  # the user's limit ends a job that works
    page = job.vote(opener, other)
    assert (page.result or page.phase) == expected


def test_missing_vote_leaves_each_node_to_decide_alone() -> None:
    job = Job(3).open()
    assert job.vote("unknown", "", "unknown").phase == "looking"
    assert end_of(job.page(LOOKS_S + 3.0)) == ("idle", "unseen")


def test_node_that_falls_silent_leaves_each_to_decide_alone() -> None:
    job = Job(3).open()
    del job.beats[2]
    page = job.vote("unknown", "unknown")
    assert (page.phase, page.result, page.covered) == ("idle", "unseen", False)


@pytest.mark.parametrize("missing", [2, 3])
def test_incident_is_not_opened_with_an_unsupervised_rank(missing: int) -> None:
    job = Job(3).say(1, doing="suspecting", suspects=0)
    del job.beats[missing]
    assert [job.page().phase for _ in range(3)] == ["idle"] * 3


def test_limit_ends_the_wait_for_work_not_for_pauses() -> None:
    assert Job(3).open().say(2, at_limit=True).vote("unknown", "alive", "unseen").phase == "collecting"
    assert Job(3).open(at_limit=True).vote("unknown", "alive", "unseen").result == "alive", "another one's limit"
    assert end_of(Job(3).open(at_limit=True).vote("unknown", "paused", "unknown")) == ("idle", "paused")


def test_limit_counts_only_for_the_node_that_reports_it() -> None:
    """Together with the other nodes, its limit might be --stall-timeout; alone, it is --max-stall."""
    job = Job(3).open().say(1, at_limit=True).say(3, at_limit=True)
    assert job.vote("unknown", "", "unknown").phase == "looking"
    assert job.page(LOOKS_S + 3.0).result == "unseen"
    job = Job(3).open().say(1, at_limit=True).say(3, at_limit=True)
    del job.beats[2]
    assert job.vote("unknown", "unknown").result == "unseen"


def test_progress_during_the_collection_ends_the_incident() -> None:
    job = Job().open()
    assert job.vote("unknown", "unknown").phase == "collecting"
    job.say(2, vote="moving")
    assert end_of(job.page()) == ("idle", "alive")


def test_progress_before_any_action_voids_the_decision() -> None:
    job = Job().open()
    job.vote("unknown", "unknown")
    job.decided = True
    assert job.page().phase == "decided"
    job.say(2, vote="moving")
    assert end_of(job.page()) == ("idle", "moving")


def test_stop_of_a_node_ends_the_incident() -> None:
    job = Job().open().say(2, doing="stopping")
    assert job.vote("unknown", "unknown").phase == "idle"


def test_incident_phases_lead_to_an_agreement() -> None:
    job = Job().open()
    assert job.vote("unknown", "unknown").phase == "collecting"
    assert job.page().phase == "collecting"
    job.decided = True
    assert job.page().phase == "decided"
    job.decided = False
    job.say(1, agrees=True)
    assert job.page().phase == "decided"
    job.say(2, agrees=True)
    assert job.page().phase == "agreed"


def test_missing_acknowledgements_are_awaited_for_a_limited_time() -> None:
    job = Job().open()
    job.vote("unknown", "unknown")
    job.decided = True
    assert job.page().phase == "decided"
    assert job.page(ACKNOWLEDGE_S + 0.1).phase == "agreed"
    stuck = Job().open()
    stuck.vote("unknown", "unknown")
    assert stuck.page(EVIDENCE_S + DECIDE_S + 0.1).phase == "decided", "its own part of the work failed"


def test_suspicion_before_the_last_incident_is_ignored() -> None:
    job = Job().open()
    assert job.vote("unknown", "alive").phase == "idle"
    assert job.page().phase == "idle", "the node has not read the outcome yet"
    job.say(1, suspects=1)
    page = job.page()
    assert (page.phase, page.incident) == ("looking", 2)


def test_next_leader_continues_the_incident() -> None:
    job = Job().open()
    job.leader = Leader(replace(job.leader.page, leader=2, epoch=1), job.now)
    assert job.vote("unknown", "unknown").phase == "collecting"
    job.leader = Leader(replace(job.leader.page, leader=1, epoch=2), job.now)
    job.decided = True
    assert job.page().phase == "decided"


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([((0, 1), 4), ((2, 3), 4)], True),
        ([((0,), 4), ((1, 2, 3), 4)], True),
        ([((0, 1), 4), ((2, 3), 4), ((), 0)], True),
        ([((0, 1), 4)], False),
        ([((0, 1), 2), ((2, 3), 4)], False),
        ([((0, 1), 4), ((1, 2), 4)], False),
        ([((0, 1), 4), ((0, 1), 4)], False),
        ([((), 0)], False),
        ([], False),
    ],
)
def test_ranks_are_covered_if_every_rank_beats(beats: list[tuple[tuple[int, ...], int]], expected: bool) -> None:
    assert covers([Beat("i", 1, ranks, world) for ranks, world in beats]) is expected


# --- liveness and succession ------------------------------------------------------------------------------------------


def test_node_responds_while_its_count_changes() -> None:
    liveness = Liveness()
    for second in range(60):
        liveness.observe({1: ("a", second), 2: ("b", min(second, 10)), 3: ("c", 5)}, float(second))
    assert [round(liveness.silent_s(slot, 59.0)) for slot in (1, 2, 3)] == [0, 49, 59]
    assert set(liveness.proven) == {1, 2}


def test_new_incarnation_responds_although_its_count_restarts() -> None:
    liveness = Liveness()
    liveness.observe({1: ("a", 900)}, 0.0)
    liveness.observe({1: ("b", 1)}, 4.0)
    assert liveness.silent_s(1, 5.0) == 1.0


def test_own_suspension_does_not_make_nodes_silent() -> None:
    liveness = Liveness()
    liveness.observe({1: ("a", 1)}, 0.0)
    liveness.observe({1: ("a", 1)}, 1000.0)
    assert liveness.silent_s(1, 1000.0) < SILENT_S
    for second in range(1001, 1001 + int(SILENT_S)):
        liveness.observe({1: ("a", 1)}, float(second))
    assert liveness.silent_s(1, 1000.0 + SILENT_S) >= SILENT_S


def after_the_leaders_death(slot: int, living: set[int]) -> float | None:
    """Returns when ``slot`` takes over, in seconds; None: not within a minute."""
    succession = Succession()
    for half in range(120):
        now = half / 2
        page = LeaderPage(leader=1, count=min(half, 4))
        if succession.is_orphaned(page, now):
            beats = {other: Beat(f"i{other}", half if other in living else 9) for other in (1, 2, 3, 4)}
            if succession.takes_over(slot, beats, now):
                return now
    return None


def test_lowest_living_slot_alone_takes_over() -> None:
    assert after_the_leaders_death(2, {2, 3, 4}) is not None
    assert after_the_leaders_death(3, {2, 3, 4}) is None
    assert after_the_leaders_death(3, {3, 4}) is not None
    when = after_the_leaders_death(4, {4})
    assert when is not None and SILENT_S <= when <= SILENT_S + 10.0


def test_new_leader_counts_the_old_one_as_silent() -> None:
    succession = Succession()
    for half in range(60):
        now = half / 2
        beats = {slot: Beat(f"i{slot}", 5 if slot == 1 else half) for slot in (1, 2, 3)}
        if succession.is_orphaned(LeaderPage(leader=1, count=min(half, 4)), now) and succession.takes_over(
            2, beats, now
        ):
            break
    liveness = succession.liveness(1, now)
    assert [liveness.silent_s(slot, now) >= SILENT_S for slot in (1, 2, 3)] == [True, False, False]
    liveness.observe({1: ("i1", 6)}, now + 1)
    assert liveness.silent_s(1, now + 1) == 0.0, "it is heard again"


def test_takeover_is_refused_while_the_leader_responds() -> None:
    succession = Succession()
    assert not any(succession.is_orphaned(LeaderPage(leader=1, count=half), half / 2) for half in range(200))


def test_next_leaders_are_due_at_once_others_later() -> None:
    job = Job(nodes=20)
    page = job.page()
    assert page.line == (2, 3, 4, 5)
    succession = Succession()
    now = next(float(second) for second in range(60) if succession.is_orphaned(page, float(second)))
    assert now >= SILENT_S
    due = [slot for slot in range(1, 21) if succession.is_due(slot, page, now)]
    assert due == [1, 2, 3, 4, 5], "the leader itself may have lost the store's answer"
    assert all(succession.is_due(slot, page, now + LINE_S) for slot in range(1, 21))


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"attempt": (0, 2)}, {"restarting": True}, {"restarting": True, "ranks": ()}])
@pytest.mark.parametrize("slot", [1, 2])
def test_restart_voids_an_incident_before_any_action(slot: int, change: dict[str, Any]) -> None:
    for phase in ("looking", "collecting", "decided", "agreed"):
        job = Job().open()
        if phase != "looking":
            assert job.vote("unknown", "unknown").phase == "collecting"
        if phase in ("decided", "agreed"):
            job.decided = True
            assert job.page().phase == "decided"
        if phase == "agreed":
            job.say(1, agrees=True).say(2, agrees=True)
            assert job.page().phase == "agreed"
        job.say(1, doing="watching", agrees=False).say(2, agrees=False)
        job.say(slot, **change)
        page = job.page()
        expected = ("agreed", "") if phase == "agreed" else ("idle", "moving")
        assert (page.phase, page.result) == expected, phase
        assert page.restarting == ((slot,) if "restarting" in change else ())


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_page_names_failing_nodes_until_there_is_a_verdict() -> None:
    job = Job(nodes=3).say(2, submitted=(("hang.7", 3), ("crash.1", 1)))
    assert (job.page().failed, job.page().crash) == ((2,), 0)
    job.say(2, decided="crash.1")
    assert (job.page().failed, job.page().crash) == ((), 1)
    job.say(3, submitted=(("crash.2", 0),))
    assert (job.page().failed, job.page().crash) == ((3,), 1)


@pytest.mark.parametrize("decided", ["crash.7", "hang.1", ""])
def test_decision_with_a_wrong_number_is_ignored(decided: str) -> None:
    assert Job().say(1, decided=decided).page().crash == 0


def test_page_carries_open_questions() -> None:
    job = Job(nodes=3).say(2, asks=NodeQuestion(5)).say(3, asks=NodeQuestion(1, "record", b"10 s"))
    assert job.page().questions == {"ask.2.5": NodeQuestion(5), "ask.3.1": NodeQuestion(1, "record", b"10 s")}
    job.say(2, asks=None)
    page = job.page()
    assert page.is_over("ask.2.5") and not page.is_over("ask.3.1")
