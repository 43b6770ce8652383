"""Supervisors that exchange records through one of torch's stores, in a separate process."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from safelaunch.model import Verdict
from safelaunch.supervise.cluster import channel as channels
from safelaunch.supervise.cluster import election, membership
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS, Submissions
from safelaunch.supervise.cluster.messages import Decision, NodeCard, NodeQuestion, ask_round
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import Address, StoreClient
from safelaunch.supervise.control.protocol import NodeStatus
from tests.support.waiting import until

pytestmark = pytest.mark.torch
VERDICT = Verdict(1, "hang", "busy-loop", "low", "It spins.", (), "", (), (), (), ())
SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


NUMBERS = itertools.count()


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    words = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Address("127.0.0.1", int(process.stdout.readline()))
        process.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """Serves one store for all tests, as its process imports torch. Each test has separate keys."""
    with serving() as (_, address):
        yield address


@pytest.fixture
def prefix() -> str:
    return f"safelaunch/1/test-{next(NUMBERS)}"


@pytest.fixture
def join(address: Address, prefix: str) -> Iterator[Callable[..., Channel]]:
    made: list[Channel] = []

    def start(*ranks: int, key: bytes = b"", world: int = 4, at: Address = address) -> Channel:
        one = Channel(NodeCard("", f"host{ranks[0]}", 1, "0.1", "2.13"))
        one.update(ranks=ranks, world=world)
        one.start(SharedStore(at, prefix), key)
        made.append(one)
        return one

    yield start
    for one in made:
        one.close()


def covered(*nodes: Channel) -> Callable[[], bool]:
    return lambda: all(one.view.page is not None and one.view.page.covered for one in nodes)


def phase(*nodes: Channel) -> set[str]:
    return {one.view.page.phase if one.view.page else "alone" for one in nodes}


def test_two_nodes_reach_a_decision_after_a_suspicion(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    until(lambda: [node.host for node in (*one.view.nodes, *other.view.nodes)] == ["host2", "host0"], "names")
    leader, follower = (one, other) if one.view.leads else (other, one)
    assert not follower.view.leads
    follower.update(doing="suspecting", suspects=0)
    until(lambda: phase(one, other) == {"looking"}, "the call")
    for node in (one, other):
        node.update(incident=1, vote="unknown")
    until(lambda: phase(one, other) == {"collecting"}, "the count of votes")
    for node, chunks in ((leader, []), (follower, [b"x" * 1000, b"y"])):
        node.submit("hang.1", chunks)
    leader.gather("hang.1")
    until(lambda: found(leader, "hang.1").is_complete, "the evidence")
    assert list(found(leader, "hang.1").chunks.values()) == [[b"x" * 1000, b"y"]]
    leader.decide("hang.1", Decision(VERDICT, "kill", "host0", "/bundle", 7))
    until(lambda: one.view.decisions and other.view.decisions, "the decision")
    assert follower.view.decisions == {"hang.1": Decision(VERDICT, "kill", "host0", "/bundle", 7)}
    for node in (one, other):
        node.update(agrees=True, doing="watching")
    until(lambda: phase(one, other) == {"agreed"}, "the agreement")


def found(one: Channel, round_: str) -> Submissions:
    return one.view.submissions.get(round_, NO_SUBMISSIONS)


def test_request_of_one_node_is_answered_by_all_others(join: Callable[..., Channel]) -> None:
    nodes = [join(0), join(1), join(2, 3)]
    until(covered(*nodes), "each other")
    for number, asks in enumerate(nodes):  # whether or not it leads
        others = [one for one in nodes if one is not asks]
        question = NodeQuestion(number, "record", b"10 s")
        round_ = ask_round(asks.view.slot, question)
        asks.update(asks=question)
        asks.gather(round_)
        until(lambda: all(one.view.page and one.view.page.questions for one in others), "the question")  # noqa: B023
        for one in others:
            assert one.view.page is not None and one.view.page.questions == {round_: question}
            one.submit(round_, [one.node.host.encode(), b"x"])
        until(lambda: found(asks, round_).is_complete, "the answers")  # noqa: B023
        assert sorted(found(asks, round_).chunks.values()) == sorted([one.node.host.encode(), b"x"] for one in others)
        asks.update(asks=None)
        asks.withdraw(round_)
        until(lambda: not any(one.view.page and one.view.page.asked for one in nodes), "the end")
        until(lambda: not any(one._outbox.submitted for one in nodes), "what is over to be removed")


def test_topic_values_are_exchanged_through_the_leader(join: Callable[..., Channel]) -> None:
    first, second = join(0, 1, key=b"k" * 32), join(2, 3, key=b"k" * 32)
    until(covered(first, second), "both to be there")
    leader, other = (first, second) if first.view.leads else (second, first)
    for edition in (1, 2):
        for node in (leader, other):
            node.gather("checks")
        other.submit(f"checks.{edition}", [b"checks"])
        until(lambda: [*found(leader, "checks").rounds.values()] == [f"checks.{edition}"], "the checks")  # noqa: B023
    assert [*found(leader, "checks").chunks.values()] == [[b"checks"]]
    leader.publish("checks", b"wrong")
    until(lambda: other.view.published == leader.view.published == {"checks": b"wrong"}, "what was found")
    assert other.view.page is not None and other.view.page.topics == ("checks",) and not other.view.submissions


def test_survey_on_each_node_lists_every_node(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    assert one.view.survey == (0.0, ())
    other.set_step(12)
    other.update(doing="suspecting", suspects=7, trouble="rank 3 was ended")
    for asks in (one, other):
        until(lambda: [found.step for found in again(asks)] == [None, 12], "both")  # noqa: B023
        first, second = asks.view.survey[1]
        assert (first.host, first.ranks, first.doing, first.here) == ("host0", "0-1", "watching", asks is one)
        assert (second.host, second.ranks, second.trouble) == ("host2", "2-3", "rank 3 was ended")
        assert (second.doing, second.state, second.here) == ("suspecting", "heard", asks is other)
        assert [first.leads, second.leads] == [one.view.leads, other.view.leads]
    other.close()
    until(lambda: again(one)[-1].doing == "ended", "its end")


def again(one: Channel) -> tuple[NodeStatus, ...]:
    """Returns every node by a new survey."""
    begin = time.monotonic()
    one.request_survey()
    until(lambda: one.view.survey[0] > begin, "the nodes")
    return one.view.survey[1]


def test_store_host_stays_until_the_others_left(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    one._host = Host()  # type: ignore[assignment]
    leaving = threading.Thread(target=one.close)
    leaving.start()
    until(lambda: any(node.doing == "ended" for node in again(other)), "its goodbye")
    assert leaving.is_alive() and not one._host.closed  # type: ignore[union-attr]
    other.close()
    leaving.join(channels.DRAIN_S / 2)
    assert one._host.closed  # type: ignore[union-attr]


class Host:
    """The host of a store that belongs to another process, so that its end is separate from the channel's."""

    has_started, closed, problem = True, False, ""

    def close(self) -> None:
        self.closed = True


def test_node_that_leaves_is_gone_at_once(join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (election, membership):
        monkeypatch.setattr(module, "SILENT_S", 1000.0)
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    leader, follower = (one, other) if one.view.leads else (other, one)
    follower.close()
    until(lambda: not covered(leader)(), "its absence")


def test_incident_ends_unseen_if_the_leader_dies(join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (election, membership):
        monkeypatch.setattr(module, "SILENT_S", 4.0)
    monkeypatch.setattr(election, "PROVING_S", 1.0)
    nodes = [join(0), join(1), join(2, 3)]
    until(covered(*nodes), "each other")
    leader = next(one for one in nodes if one.view.leads)
    left = [one for one in nodes if one is not leader]
    left[0].update(doing="suspecting", suspects=0)
    until(lambda: phase(*nodes) == {"looking"}, "the call")
    leader.close()
    for node in left:
        node.update(incident=1, vote="unknown")
    until(lambda: any(one.view.leads for one in left), "another leader")
    until(lambda: phase(*left) == {"idle"}, "the end: nothing is known of the ranks of the dead")
    assert {one.view.page.result for one in left if one.view.page} == {"unseen"}


def test_node_without_a_store_is_alone_and_reports_why(join: Callable[..., Channel]) -> None:
    with serving() as (process, address):
        one, other = join(0, 1, at=address), join(2, 3, at=address)
        until(covered(one, other), "each other")
        process.kill()
    until(lambda: phase(one, other) == {"alone"}, "the loss")
    assert "closed the connection" in one.view.why or "refused" in one.view.why or "reset" in one.view.why


def test_garbage_in_the_store_ends_only_the_channel(
    address: Address, prefix: str, join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (election, membership):
        monkeypatch.setattr(module, "SILENT_S", 4.0)
    monkeypatch.setattr(election, "PROVING_S", 1.0)
    hostile = StoreClient(address)
    for name in ("head", "m/1", "b/1", "b/3", "m/3"):
        hostile.set(f"{prefix}/{name}", b"\xff" * 5000, deadline_s=15.0)
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    for value in (b"\xdd\xff\xff\xff\xff", b"", b"\x91" * 60_000):
        hostile.set(f"{prefix}/head", value, deadline_s=15.0)
        hostile.set(f"{prefix}/n", b"99999999999", deadline_s=15.0)
        until(lambda: one.view.leads or other.view.leads, "a leader again")
        until(covered(one, other), "each other again")
    hostile.close()


@contextmanager
def scribbling(address: Address, prefix: str, value: Callable[[int], bytes]) -> Iterator[None]:
    """Writes ``value`` of a growing number over each page of the leader, soon after it."""
    ended = threading.Event()

    def scribble() -> None:
        hostile, number = StoreClient(address), 0
        while not ended.wait(0.02):
            if hostile.get(f"{prefix}/head", deadline_s=60.0) not in (None, value(number)) and not ended.wait(0.1):
                number += 1
                hostile.set(f"{prefix}/head", value(number), deadline_s=60.0)
        hostile.close()

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "size", [pytest.param(40, id="small"), pytest.param(5000, id="too large to compare", marks=pytest.mark.nightly)]
)
def test_foreign_pages_do_not_separate_nodes_with_a_key(
    address: Address,
    prefix: str,
    join: Callable[..., Channel],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    monkeypatch.setattr(membership, "SILENT_S", 6.0)
    monkeypatch.setattr(membership, "LARGEST_VALUE", 4096)  # more than any page of these two
    with scribbling(address, prefix, lambda number: bytes([number % 256]) * size):
        one, other = join(0, 1, key=b"k"), join(2, 3, key=b"k")
        until(covered(one, other), "each other")
        first = next(node.view.page for node in (one, other) if node.view.page)
        newer = first.epoch, first.count + 5  # on a busy machine the lead might change, and the count with it
        pages = lambda: [node.view.page for node in (one, other)]  # noqa: E731
        until(lambda: all(page and (page.epoch, page.count) > newer for page in pages()), "newer pages")
        until(
            lambda: covered(one, other)() and sum(node.view.leads for node in (one, other)) == 1, "one leader of both"
        )


def test_slot_survives_a_broken_connection(join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "AGAIN_S", (1.0,))
    nodes = [join(0, key=b"k"), join(1, key=b"k"), join(2, 3, key=b"k")]
    until(covered(*nodes), "each other")
    slots = [node.view.slot for node in nodes]
    for node in sorted(nodes, key=lambda node: node.view.leads):  # the leader last: it continues to lead
        led = node.view.leads
        break_connection(node)
        until(lambda node=node: node.view.page is None, "the loss")  # type: ignore[misc]
        assert node.view.address == "127.0.0.1", "known without a connection, too: is its interface up?"
        until(covered(*nodes), "its return")
        assert [node.view.page and node.view.page.nodes for node in nodes] == [3, 3, 3]
        assert (node.view.leads, node.view.page and node.view.page.epoch) == (led, 0)
    assert [node.view.slot for node in nodes] == slots


def break_connection(node: Channel) -> None:
    assert node._membership is not None
    node._membership._store._socket.shutdown(socket.SHUT_RDWR)


def test_slot_is_not_resumed_in_another_store(
    join: Callable[..., Channel], address: Address, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "AGAIN_S", (1.0,))
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    before = other.view.slot
    store = StoreClient(address)
    store.set(f"{prefix}/m/{before}", b"somebody else's", deadline_s=15.0)
    store.close()
    break_connection(other)
    until(lambda: other.view.slot not in (0, before), "another slot")


def test_late_messages_of_an_old_connection_are_ignored(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    leader, follower = (one, other) if one.view.leads else (other, one)
    session = leader._membership
    assert session is not None
    old = session._newest[follower.view.slot]
    until(lambda: session._newest[follower.view.slot].count > old.count, "its next beat")
    data = session._codec.encode(f"b/{follower.view.slot}", replace(old, count=old.count - 1, doing="stopping"))
    assert session._decode_beats([follower.view.slot], [data])[follower.view.slot].doing == "watching"


def test_unused_slots_do_not_hide_used_ones(join: Callable[..., Channel], address: Address, prefix: str) -> None:
    store = StoreClient(address)
    store.add(f"{prefix}/n", 150, deadline_s=15.0)
    one = join(0, 1)
    store.add(f"{prefix}/n", 400, deadline_s=15.0)
    other = join(2, 3)
    until(covered(one, other), "each other")
    store.close()


def test_messages_without_the_key_are_ignored(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1, key=b"secret"), join(2, 3, key=b"secret")
    until(covered(one, other), "each other")
    stranger = join(0, 1)
    until(lambda: "different key" in stranger.view.why, "the stranger's connection")
    time.sleep(1.5)
    assert (stranger.view.page, stranger.view.leads) == (None, False)
    assert covered(one, other)() and (one.view.leads or other.view.leads)


# --- a crash, and silent nodes ----------------------------------------------------------------------------------------


def test_first_verdict_about_a_crash_counts_for_all(join: Callable[..., Channel]) -> None:
    one, other = join(0, 1), join(2, 3)
    until(covered(one, other), "each other")
    one.submit("crash.1", [b"a" * 1000, b"b"])
    other.submit("crash.1", [])
    until(lambda: all(node.view.page and len(node.view.page.failed) == 2 for node in (one, other)), "both to fail")
    other.gather("crash.1")
    until(lambda: [*found(other, "crash.1").chunks.values()] == [[b"a" * 1000, b"b"]], "the evidence")
    verdicts = [Decision(replace(VERDICT, summary=text), "dump", "h", "") for text in ("first", "second")]
    for node, decision in zip((one, other), verdicts, strict=True):
        node.decide("crash.1", decision)
    until(lambda: one.view.decisions and other.view.decisions, "the verdict")
    assert one.view.decisions == other.view.decisions
    until(lambda: all(node.view.page and node.view.page.crash == 1 for node in (one, other)), "its number")
    other.withdraw("crash")
    one.withdraw("crash")
    other.submit("crash.2", [b"c"])
    until(lambda: one.view.page and one.view.page.failed, "the next one")
    other.decide("crash.2", verdicts[0])
    until(lambda: one.view.decisions.get("crash.2") == verdicts[0], "its verdict, even if no rank has failed")


def test_silent_node_is_reported_with_its_ranks(join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "QUIET_S", 1.0)
    monkeypatch.setattr(membership, "QUIET_S", 1.0)
    nodes = [join(0), join(1), join(2, 3)]
    until(covered(*nodes), "each other")
    leader, *followers = sorted(nodes, key=lambda node: not node.view.leads)
    gone, left = followers
    monkeypatch.setattr(gone, "_converse", lambda session: None)
    monkeypatch.setattr(membership.Membership, "leave", lambda *_: None)
    gone.close()
    for node in (leader, left):
        until(lambda node=node: any(peer.silent_s > 1.0 for peer in node.view.peers), "the silence")  # type: ignore[misc]
        (peer,) = (peer for peer in node.view.peers if peer.silent_s)
        assert peer.node.host == gone.node.host
        assert peer.beat is not None and peer.beat.ranks == gone.beat.ranks
