"""Shapes of hangs: what the script has to do so that each rank stands where it stood."""

from __future__ import annotations

from evidence import calls, in_c10d, in_user, job, past, rank, record, waiting
from replayed import replayed
from test_verdict_rules_groups import NEW_GROUP

from safelaunch.model import CallArguments, Evidence, GilTest
from safelaunch.reproduce import Extent, Wish, reproduction_of
from safelaunch.reproduce.program import returns

ALL = Wish(Extent(everything=True))


def script_of(evidence: Evidence) -> str:
    return reproduction_of(evidence, ALL).text


def test_groups_that_only_their_members_made_are_made_by_these() -> None:
    """Ranks 0 and 1 have made one more: now each waits in a group of another name than rank 2."""

    def made(number: int, count: int, groups: dict[str, tuple[int, ...]]) -> GilTest:
        return GilTest(True, True, groups={"0": (0, 1, 2), **groups}, groups_made=count)

    low = {"1": (0, 1)}
    ranks = [
        rank(n, NEW_GROUP, flight=record(*past(3)), gil=made(n, 2 if n == 2 else 3, {} if n == 2 else low))
        for n in range(3)
    ]
    text = script_of(job(*ranks))
    assert "if rank in (0, 1):\n    group_1 = dist.new_group([0, 1])\n" in text
    assert text.count("dist.new_group(") == 2


def test_a_receive_from_any_rank_names_none() -> None:
    frames = in_c10d("recv", 20)
    receiver = rank(0, frames, flight=record(*past(3)), call=CallArguments(tag=0))
    text = script_of(job(receiver, waiting(1), waiting(2)))
    assert "dist.recv(torch.zeros(1))" in text


def test_a_receive_from_one_rank_names_it() -> None:
    receiver = rank(0, in_c10d("recv", 20), flight=record(*past(3)), call=CallArguments(src=2, tag=0))
    text = script_of(job(receiver, waiting(1), waiting(2)))
    assert "dist.recv(torch.zeros(1), src=2)" in text


def test_a_wait_for_a_transfer_that_was_begun_earlier_is_one_here() -> None:
    """gloo records none, and the stack shows only ``work.wait()``: a barrier would be another call."""
    waits = rank(0, in_user(20), flight=record(*past(3)))
    source = "\n" * 19 + "work.wait()\n"
    text = reproduction_of(job(waits, waiting(1), waiting(2)), ALL, lambda path: source).text
    assert "works.append(dist.irecv(torch.zeros(1)))" in text
    assert "works[-1].wait()" in text


def test_a_send_whose_peer_is_not_known_names_none_in_the_script_either() -> None:
    """As ``group_dst``, it shows the watchdog as little as the recorded one did."""
    sender = rank(0, in_c10d("send", 20), flight=record(*past(3)), call=CallArguments(tag=0))
    made = reproduction_of(job(sender, waiting(1), waiting(2)), ALL)
    assert "dist.send(torch.zeros(1), group_dst=1)" in made.text
    assert any("the peer of its send is not known" in note for note in made.notes)


def test_the_root_of_a_broadcast_is_the_rank_that_gloo_keeps() -> None:
    """Of five, the last: rank 2 has left one out. The root waits for rank 2, and rank 1 has what it needs."""
    made = ("broadcast:0@7x4 broadcast:0@7*", "broadcast:0@7x5 0@9*", "broadcast:0@7x4 0@9*")
    frames = (in_c10d("broadcast", 7), in_c10d("all_reduce", 9), in_c10d("all_reduce", 9))
    ranks = [rank(n, frames[n], flight=record(*calls(text))) for n, text in enumerate(made)]
    found = replayed(script_of(job(*ranks)), 3)
    assert [one.root for one in found[0].calls if one.op == "broadcast"] == [0, 0, 0, 0, 0]


def test_a_rank_that_gloo_lets_go_does_not_fall_into_the_others_branch() -> None:
    """Another backend may hold all ranks in a gather; with gloo, one that has given its part goes on."""
    to_first = {"call": CallArguments(dst=0)}
    made = reproduction_of(job(waiting(0, "gather", **to_first), waiting(1, "gather", **to_first), waiting(2)), ALL)
    assert replayed(made.text, 3)[1].ended == "sleep"
    assert any("The last call of rank 1 would return with gloo" in note for note in made.notes)


def test_ranks_that_gather_to_different_ones_do_not_meet() -> None:
    """Rank 1 is one round ahead: rank 0, to which it gives its part, gathers to rank 2."""
    ranks = [waiting(n, "gather", call=CallArguments(dst=0 if n == 1 else 2)) for n in range(3)]
    notes = reproduction_of(job(*ranks), ALL).notes
    assert any("The last call of rank 0 would return" in note for note in notes), "rank 1 would not"


def test_calls_of_a_second_thread_are_made_in_the_recorded_order() -> None:
    """The main thread waits for one that is in a call: behind calls of its own, which were made at once."""
    groups = {"0": (0, 1), "1": (0, 1)}
    flight = record(*calls("0@50x2 all_gather:1@30* 0@50"), groups=groups)
    one = rank(0, in_c10d("all_gather", 30), flight=flight)
    other = rank(1, in_user(7), "sleep", flight=record(*calls("0@50x3"), groups=groups))
    text = script_of(job(one, other))
    assert [(call.op, call.waited_for) for call in replayed(text, 2)[0].calls] == [
        ("all_reduce", True),
        ("all_reduce", True),
        ("all_gather", False),
        ("all_reduce", True),
    ]
    assert "works[-1].wait()" in text


def test_who_comes_back_from_a_rooted_call_of_gloo() -> None:
    """As seen with torch 2.13 and three ranks."""
    seen = {
        ("broadcast", 0, (0, 1)): {1}, ("broadcast", 0, (0, 2)): {2}, ("broadcast", 0, (1, 2)): set(),
        ("broadcast", 0, (0, 1, 2)): {0, 1, 2}, ("scatter", 0, (0, 1)): {1}, ("gather", 0, (0, 1)): {1},
        ("gather", 0, (1, 2)): set(), ("reduce", 0, (0, 1)): set(),
    }  # fmt: skip
    for (op, root, entered), back in seen.items():
        assert {place for place in entered if returns(op, root, entered, place, 3)} == back, (op, entered)


def test_the_script_says_so_when_a_rank_comes_back() -> None:
    text = script_of(job(waiting(0), waiting(1), rank(2, in_user(7), "sleep", flight=record(*past(3)))))
    assert text.rstrip().splitlines()[-1].startswith('raise SystemExit(f"not as recorded: rank {rank} ')
    assert replayed(text, 3)[2].ended == "sleep"
