"""Common decisions of nodes about a hang, a crash or a request: real channels that meet in a store of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec import ValidationError
from msgspec.structs import replace

from safelaunch.model import BundlePlace, Evidence, Frame, Progress, RankEvidence, RankException
from safelaunch.supervise import rounds as module
from safelaunch.supervise import submissions
from safelaunch.supervise.cluster import channel as channels
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.exchange import PeerStatus
from safelaunch.supervise.cluster.messages import NodeCard, NodeQuestion
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import Address, NodeStoreError
from safelaunch.supervise.crash import own_failure, peer_notes
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.publishing import Agreement
from safelaunch.supervise.respond import JobView
from safelaunch.supervise.rounds import Rounds
from safelaunch.supervise.submissions import LARGEST_TEXT, distinct_name, read_evidence, read_parts, small_files
from tests.support.dict_store import DictStore
from tests.support.waiting import until


class Job:
    """Nodes of two ranks each."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.store, self.is_lost = place, DictStore(), False
        self.nodes: list[Rounds] = []
        self.channels: list[Channel] = []
        monkeypatch.setattr(channels, "StoreClient", self._connect)
        for name, seconds in {"IDLE_S": 0.02, "BUSY_S": 0.02}.items():
            monkeypatch.setattr(channels, name, seconds)
        for name, seconds in {"CRASH_S": 3.0, "EFFECTS_S": 0.6, "HEAR_S": 0.5, "HOSTS_S": 0.0}.items():
            monkeypatch.setattr(module, name, seconds)

    def _connect(self, address: Address, **_: object) -> DictStore:
        if self.is_lost:
            raise NodeStoreError("no store")
        return self.store

    def meet(self, number: int = 2) -> tuple[Rounds, ...]:
        """Starts nodes, and returns them with the leader first."""
        for one in range(number):
            channel = Channel(NodeCard("", f"host{one}", 1, "0.1", "2.13"))
            channel.update(ranks=(2 * one, 2 * one + 1), world=2 * number)
            channel.start(SharedStore(Address("h", 1), "safelaunch/1/test"))
            about = JobContext("train", self.place, self.place / "bundles", self.place, {}, host=f"host{one}")
            self.channels.append(channel)
            self.nodes.append(Rounds(channel, about, lambda: (), "kill"))
            until(lambda: self.channels[0].view.leads, "the leader")
        until(lambda: all(one.view.page and one.view.page.covered for one in self.channels), "all nodes")
        for rounds in self.nodes:
            rounds.note(rounds.page)
        return tuple(self.nodes)

    def collects(self) -> None:
        """Lets all nodes vote that nothing moves."""
        self.channels[0].update(doing="suspecting", suspects=0)
        until(lambda: all(one.view.page and one.view.page.incident for one in self.channels), "the call")
        for channel in self.channels:
            channel.update(incident=1, vote="unknown")
        until(lambda: {one.view.page and one.view.page.phase for one in self.channels} == {"collecting"}, "the votes")

    def lose(self) -> None:
        """Ends the store."""
        self.is_lost = True

        def closed(*_: object, **__: object) -> Any:
            raise NodeStoreError("closed", "closed")

        self.store.exchange = closed  # type: ignore[method-assign]
        until(lambda: not any(one.view.page for one in self.channels), "the loss")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path, monkeypatch)
    yield made
    for channel in made.channels:
        channel.close(at_once=True)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60.0) for one in [pool.submit(call) for call in calls]]


def half(*ranks: int, ends: bool = True) -> Evidence:
    progress = [Progress(rank, 0, 4, 0, 10 + rank, 1, "torch", step=7 + rank) for rank in ranks]
    sides = tuple(RankEvidence(rank=p.rank, host="here", pid=p.pid, progress=p) for p in progress)
    return Evidence("hang", 4, sides, tuple(set(range(4)) - set(ranks)), ends=ends)


# --- a hang -----------------------------------------------------------------------------------------------------------


def test_verdict_of_one_node_is_adopted_by_the_others(job: Job, tmp_path: Path) -> None:
    leader, other = job.meet()
    job.collects()
    led, followed = at_once(lambda: leader.decide_hang(1, half(0, 1)), lambda: other.decide_hang(1, half(2, 3)))
    assert [rank.rank for one in led.others.evidence for rank in one.ranks] == [2, 3]
    assert led.verdict.bundle == BundlePlace("host0", str(tmp_path / "bundles" / led.name), True)
    assert (led.action, led.step, led.outcome) == ("kill", 7, "hang")
    assert followed.verdict == replace(led.verdict, bundle=replace(led.verdict.bundle, whole=False))
    assert (followed.action, followed.step, followed.others.evidence) == ("kill", 7, ())
    assert followed.name.startswith("train-host1-")
    assert at_once(lambda: leader.all_agree(1), lambda: other.all_agree(1)) == [True, True]
    until(lambda: not any(key.split("/")[3] == "e" for key in job.store.kept), "the evidence to be removed")


def test_unreadable_evidence_is_noted(job: Job) -> None:
    leader, _ = job.meet()
    job.collects()
    job.channels[1].submit("hang.1", [b"garbage"])
    agreed = leader.decide_hang(1, half(0, 1))
    assert agreed is not None and agreed.verdict is not None and agreed.verdict.bundle
    assert "could not be read (slot 2" in agreed.others.notes[0] and not agreed.verdict.bundle.whole


def test_job_that_resumes_gets_no_verdict(job: Job) -> None:
    leader, other = job.meet()
    job.collects()
    moved = Event()

    def steps() -> bool:
        moved.set()
        return True

    led, followed = at_once(
        lambda: leader.decide_hang(1, half(0, 1)), lambda: other.decide_hang(1, half(2, 3), None, steps)
    )
    assert moved.is_set()
    assert led is None or not leader.all_agree(1), "nobody acts"
    assert followed is None or not other.all_agree(1)


@pytest.mark.parametrize(("overdue", "action", "outcome"), [(True, "kill", "hang"), (False, "dump", "suspect")])
def test_node_that_lost_the_others_judges_alone(job: Job, overdue: bool, action: str, outcome: str) -> None:
    leader, _ = job.meet()
    job.collects()
    job.lose()
    agreed = leader.decide_hang(1, half(0, 1), overdue=overdue)
    assert agreed == Agreement(action=action, outcome=outcome)  # type: ignore[arg-type]
    assert leader.all_agree(1), "what was decided stands"


@pytest.mark.parametrize(("overdue", "outcome"), [(True, "hang"), (False, "suspect")])
def test_rank_without_evidence_is_unseen(job: Job, overdue: bool, outcome: str) -> None:
    leader, _ = job.meet()
    job.collects()
    job.channels[1].submit("hang.1", [b"garbage"])
    agreed = leader.decide_hang(1, half(0, 1), overdue=overdue)
    assert agreed is not None and (agreed.answer, agreed.outcome) == ("unseen", outcome)


def test_restart_before_the_action_voids_the_decision(job: Job) -> None:
    leader, other = job.meet()
    job.collects()
    led, waiting = Event(), Event()

    def decide() -> bool:
        assert leader.decide_hang(1, half(0, 1)) is not None
        led.set()
        return leader.all_agree(1)

    job.channels[1].submit("hang.1", [b""])

    def start_anew() -> None:
        assert led.wait(60.0)
        other.announce_restart()
        waiting.set()

    assert at_once(decide, start_anew)[0] is False


# --- a crash ----------------------------------------------------------------------------------------------------------


def crashed(*ranks: int, raises: str = "Connection closed by peer") -> Evidence:
    exceptions = {rank: RankException("RuntimeError", raises, time.time() - 1.0) for rank in ranks}
    sides = tuple(RankEvidence(rank=rank, host="here", pid=10 + rank, exception=exceptions[rank]) for rank in ranks)
    return Evidence("crash", 4, sides, tuple(set(range(4)) - set(ranks)))


def test_node_that_failed_first_judges_the_evidence_of_all(job: Job, tmp_path: Path) -> None:
    leader, other = job.meet()
    other.report_trouble("rank 2 raised")
    theirs, own = at_once(
        lambda: leader.decide_crash(crashed(0, 1)), lambda: other.decide_crash(crashed(2, 3, raises="no such batch"))
    )
    assert own.verdict.cause == "rank-exception"
    assert [culprit.rank for culprit in own.verdict.culprits] == [2, 3]
    assert own.verdict.bundle == BundlePlace("host1", str(tmp_path / "bundles" / own.name), True)
    ranks = [rank for one in own.others.evidence for rank in one.ranks]
    assert [rank.rank for rank in ranks] == [0, 1]
    assert all(abs(rank.exception.time_unix_s - time.time()) < 600.0 for rank in ranks), "by this node's clock"
    assert theirs.verdict == replace(own.verdict, bundle=replace(own.verdict.bundle, whole=False))
    until(lambda: all(one.page and one.page.crash == 1 for one in job.nodes), "its number")


def test_nodes_agree_without_a_root_failure(job: Job) -> None:
    leader, _ = job.meet()
    agreed = leader.decide_crash(crashed(0, 1))
    assert agreed.verdict is not None and agreed.verdict.culprits == ()
    assert agreed.verdict.bundle and not agreed.verdict.bundle.whole, "it lacks ranks 2-3"


def test_root_failure_unknown_to_the_others_is_judged_here(job: Job) -> None:
    leader, other = job.meet()
    assert leader.decide_crash(crashed(0, 1)).verdict is not None
    other.report_trouble("rank 2 raised")
    assert other.decide_crash(crashed(2, 3, raises="no such batch")).verdict is None


@pytest.mark.parametrize(
    ("own", "also", "excused"), [("", "", True), ("rank 1 raised", "", False), ("", "rank 5 raised", False)]
)
def test_ranks_with_peers_on_restarting_node_have_not_failed(job: Job, own: str, also: str, excused: bool) -> None:
    first, second, third = job.meet(3)
    second.announce_restart()
    for rounds, text in ((first, own), (third, also)):
        if text:
            rounds.report_trouble(text)
    until(lambda: job.channels[0].view.status.restarting, "the word of the second")
    until(lambda: bool(job.channels[0].view.status.troubles) is bool(also), "the third's evidence")
    first.decide_crash(replace(crashed(0, 1), world_size=6))
    assert ("crash.1" in job.channels[0].view.decisions) is not excused


def test_stop_of_a_node_ends_the_round(job: Job) -> None:
    leader, _ = job.meet()
    job.channels[1].update(doing="stopping")
    until(lambda: job.channels[0].view.status.stopping, "the word")
    assert leader.decide_crash(crashed(0, 1)) == Agreement(status=PeerStatus(stopping=True))


def test_node_without_contact_judges_its_crash_alone(job: Job) -> None:
    about = JobContext("train", job.place, job.place, job.place, {}, host="here")
    alone = Rounds(Channel(NodeCard("", "here", 1, "0.1", "2.13")), about, lambda: (), "kill")
    assert alone.decide_crash(crashed(0, 1)) == Agreement()
    leader, _ = job.meet()
    job.lose()
    assert leader.decide_crash(crashed(0, 1)).verdict is None


def test_crash_of_an_earlier_attempt_is_ignored(job: Job) -> None:
    leader, other = job.meet()
    assert leader.decide_crash(crashed(0, 1)).verdict is not None
    until(lambda: other.page and other.page.crash == 1, "its number")
    for rounds in (leader, other):
        rounds.reset()
        rounds.note(rounds.page)
    second = other.decide_crash(crashed(2, 3, raises="no such batch"))
    assert second.verdict is not None and [one.rank for one in second.verdict.culprits] == [2, 3]


OF_PEERS = RankException("RuntimeError", "[c10d] Connection closed by peer [127.0.0.1]:1", 1.0)

OF_A_CHECKPOINT = RankException(
    "CheckpointException",
    "CheckpointException ranks:dict_keys([1])\nTraceback (most recent call last): (RANK 1)\n"
    '  File "/home/me/train.py", line 9, in write\nOSError: full\n',
    1.0,
    (Frame("/usr/lib/python3/dist-packages/torch/distributed/checkpoint/utils.py", 263, "all_reduce"),),
)


@pytest.mark.parametrize(
    ("exits", "exceptions", "said"),
    [
        ({1: 3}, {1: RankException("ValueError", "no\nsuch batch", 1.0)}, "rank 1 on here raised ValueError: no such"),
        ({0: -9}, {}, "rank 0 on here was ended by SIGKILL"),
        ({0: -11}, {1: OF_PEERS}, "rank 0 on here was ended by SIGSEGV"),
        ({0: 7}, {}, "rank 0 on here ended with exit code 7"),
        ({0: 1}, {0: OF_PEERS}, ""),
        ({0: 1}, {0: OF_A_CHECKPOINT}, "rank 0 on here raised CheckpointException"),
        ({0: -15, 1: -6, 2: 0}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_root_failure_of_this_node_is_described(
    exits: dict[int, int], exceptions: dict[int, RankException], said: str
) -> None:
    found = own_failure("here", exits, exceptions)
    assert found.startswith(said) and bool(found) is bool(said)


@pytest.mark.parametrize(
    ("status", "note"),
    [
        (PeerStatus(troubles=("rank 3 raised",)), "on another node, rank 3 raised"),
        (PeerStatus(lost=True), "the node that hosts the store of torchrun's agents can no longer be reached"),
        (PeerStatus(quiet=2), "2 nodes no longer respond"),
    ],
)
def test_status_of_the_others_is_noted(status: PeerStatus, note: str) -> None:
    (found,) = peer_notes(status)
    assert found.startswith(note)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_request_is_answered_once_by_all(job: Job) -> None:
    leader, other, third = job.meet(3)
    for asks in (leader, other):  # each question is a new one
        others = [one for one in job.nodes if one is not asks]
        with asks.asking(NodeQuestion()) as answers:
            for number, node in enumerate(others):
                until(lambda node=node: node._new(), "the question")  # type: ignore[misc]
                now = time.monotonic() + 1000.0 * (job.nodes.index(asks) + 1)
                wanted = node.next_question(now)
                assert wanted is not None and node.next_question(now + 100.0) is None
                node.answer(wanted[0], half(2 + number))
            assert asks.next_question(1e9) is None, "it is its own"
            found = read_evidence(answers(Event()), "host0")
        assert sorted(rank.rank for one in found.evidence for rank in one.ranks) == [2, 3]
        until(lambda: not any(one.page and one.page.asked for one in job.nodes), "the end")
    assert third.page is not None and not third.has_pending_dump


def test_dump_comes_first_and_questions_are_spaced(job: Job) -> None:
    leader, other, third = job.meet(3)
    recording = NodeQuestion(0, "record", b"10 s")
    with leader.asking(recording), other.asking(NodeQuestion()):
        until(lambda: len(third._new()) == 2, "the questions")
        assert third.has_pending_dump
        first, soon, then = (third.next_question(now) for now in (100.0, 102.0, 110.0))
    assert first is not None and first[1].kind == "dump"
    assert soon is None and then is not None and then[1] == replace(recording, number=1)


class OpenFiles:
    """A service that counts the open files of each rank."""

    name, noun, ask, part = "files", "count", int, dict[int, int]

    def here(self, ask: int, job: JobView, stop: Event) -> dict[int, int]:
        return {}

    def check(self, part: dict[int, int]) -> None:
        if min(part, default=0) < 0:
            raise ValidationError("no such rank")

    def merged(self, ask: int, parts: Sequence[dict[int, int]], notes: Sequence[str]) -> dict[int, int]:
        return {}

    def bounded(self, part: dict[int, int], fits: Callable[[dict[int, int]], bool]) -> dict[int, int]:
        return part if fits(part) else {}


def test_service_parts_are_read_and_unusable_ones_noted(job: Job) -> None:
    leader, *others = job.meet(5)
    with leader.asking(NodeQuestion(0, "files", b"1")) as answers:
        until(lambda: all(one.page and one.page.asked for one in job.nodes), "the question")
        (round_,) = leader.page.questions if leader.page else ()
        others[0].answer_part(round_, OpenFiles(), {2: 40})
        others[1].answer_part(round_, OpenFiles(), {-2: 40})
        others[2].answer_nothing(round_)
        job.channels[4].submit(round_, [b"garbage"])
        found, notes = read_parts(answers(Event()), OpenFiles())
    assert found == [{2: 40}]
    assert len(notes) == 3 and all(note.startswith("a node's count could not be read (slot ") for note in notes)


def test_stop_ends_the_wait_and_questions_stay_sequential(job: Job) -> None:
    leader, _ = job.meet()
    stop, second = Event(), threading.Event()
    stop.set()

    def ask() -> None:
        with leader.asking(NodeQuestion()):
            second.set()

    thread = threading.Thread(target=ask)
    with leader.asking(NodeQuestion(0, "record")) as answers:
        assert answers(stop).chunks == {}
        thread.start()
        assert not second.wait(0.1)
    assert second.wait(30.0)
    thread.join()


def test_lone_node_queries_no_other(job: Job) -> None:
    (alone,) = job.meet(1)
    with alone.asking(NodeQuestion()) as answers:
        assert answers(Event()).is_complete and job.channels[0].beat.asks is None
    job.lose()
    assert not alone.has_peers


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in {
        "node/a/resources.json": "{}",
        "node/a/kernel_log.txt": "x" * LARGEST_TEXT + "end",
        "node/a/gpus.json": "x" * (LARGEST_TEXT + 1),
        "node/a/beacon.log": "no",
        "ranks/3/flight_recorder.pickle": "p" * 10,
        "ranks/4/flight_recorder.pickle": "q" * 10,
        "ranks/3/stack.txt": "no",
        "verdict.json": "{}",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_small_files_and_log_tails_are_sent(root: Path) -> None:
    found = small_files(root, records=True)
    recorders = {f"ranks/{rank}/flight_recorder.pickle" for rank in (3, 4)}
    assert set(found) == {"node/a/resources.json", "node/a/kernel_log.txt", *recorders}
    assert len(found["node/a/kernel_log.txt"]) == LARGEST_TEXT
    assert found["node/a/kernel_log.txt"].endswith(b"end")
    assert set(small_files(root, records=False)) == {"node/a/resources.json", "node/a/kernel_log.txt"}
    assert small_files(root / "none", records=True) == {}


def test_recorder_dumps_are_sent_within_the_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "MOST_PICKLES", 15)
    assert [name for name in small_files(root, records=True) if "pickle" in name] == ["ranks/3/flight_recorder.pickle"]


def test_nodes_with_the_same_host_name_are_kept_apart() -> None:
    assert distinct_name("node/a/x.json", 2, {"a"}) == "node/a-2/x.json"
    assert distinct_name("node/b/x.json", 2, {"a"}) == "node/b/x.json"
    assert distinct_name("ranks/1/flight_recorder.pickle", 2, {"a", "1"}) == "ranks/1/flight_recorder.pickle"
