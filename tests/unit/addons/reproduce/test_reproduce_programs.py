"""The script makes each rank's recorded calls in order, and each rank stalls where it stalled.

Finished calls that would wait for each other are asynchronous.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.addons.reproduce import Extent, ScriptOptions, reproduction_of
from safelaunch.addons.reproduce.gloo import can_return
from safelaunch.addons.reproduce.recorded import RecordedEntry, recorded
from safelaunch.bundle.reading import locate
from safelaunch.model import CallArguments, Evidence, GilTest
from safelaunch.verdict.c10d import op_name
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import NEW_GROUP, in_c10d, in_user, job, past, record, waiting
from tests.support.evidence import rank as rank_of
from tests.support.nccl_formats import Recorder, write
from tests.support.replayed import Called, replayed
from tests.support.synthetic import KINDS, generated
from tests.support.verdict_cases import calls_in

VARIANTS = ("plain", "no stacks", "sends", "window", "sends, no stacks", "window, no stacks")
LAYOUTS = ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (8, 8, 1))
ALL = ScriptOptions(Extent(everything=True))
FEW = Extent(rounds=4)
EXTENTS = (FEW, Extent(everything=True), Extent(last=5))


def expected(facts: CaseFacts, one: RecordedEntry) -> tuple[object, ...]:
    entry = one.entry
    ranks = tuple(sorted(facts.alignment.members(entry.group)[0]))
    peer = ranks.index(one.transfer.peer) if one.transfer is not None else None
    return op_name(entry).split(" ")[0], ranks, entry.input_sizes[:1], peer


def called(one: Called) -> tuple[object, ...]:
    sizes = tuple(tensor.shape for tensor in one.tensors[-1:])  # what it gives stands last, or alone
    return one.op, one.ranks, sizes, one.peer


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_script_makes_recorded_calls_on_each_rank(kind: str, variant: str) -> None:
    for seed, layout in enumerate(LAYOUTS):
        evidence = generated(kind, variant, layout, seed)
        if evidence is None or ("sends" in variant and layout[2] == 1):
            continue
        extent = EXTENTS[seed % len(EXTENTS)]
        facts = CaseFacts.of(evidence)
        text = reproduction_of(evidence, ScriptOptions(extent)).text
        ranks = replayed(text, len(facts.ranks))
        sized = "times as many elements" not in text  # gloo would not notice sizes that differ
        for rank, calls in recorded(facts, extent).items():
            wanted = [expected(facts, one) for one in calls]
            made = [called(one) for one in ranks[rank].calls[: len(wanted)]]
            assert [(*one[:2], sized and one[2], one[3]) for one in made] == [
                (*one[:2], sized and one[2], one[3]) for one in wanted
            ], (layout, rank)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stalled_rank_stalls_after_its_last_call(variant: str) -> None:
    evidence = generated("stop", variant, (4, 1, 1) if "sends" not in variant else (2, 2, 2), 1)
    assert evidence is not None
    (odd,) = {one.rank for one in diagnose(evidence).culprits}
    facts = CaseFacts.of(evidence)
    ranks = replayed(reproduction_of(evidence, ScriptOptions(FEW)).text, len(facts.ranks))
    stands = {rank for rank, one in ranks.items() if one.ended}
    assert odd in stands
    assert len(ranks[odd].calls) == len(recorded(facts, FEW)[odd])


@pytest.mark.parametrize("extent", EXTENTS)
def test_matching_calls_are_kept_or_left_out_together(extent: Extent) -> None:
    for seed in range(12):
        evidence = generated("stop", "window, no stacks" if seed % 2 else "no stacks", (2, 2, 2), seed)
        assert evidence is not None
        facts = CaseFacts.of(evidence)
        kept = recorded(facts, extent)
        for rank, calls in kept.items():
            for one in calls:
                members, _ = facts.alignment.members(one.entry.group)
                if one.entry.completed:
                    assert all(one.key in {other.key for other in kept[peer]} for peer in members), (seed, rank)


# --- the order of completed calls -------------------------------------------------------------------------------------

GROUPS = {"0": (0, 1), "1": (0, 1)}


def script_of_dumps(folder: Path, *ranks: Recorder) -> str:
    return reproduction_of(locate.read(write(folder, ranks)).evidence, ALL).text


def test_finished_sends_of_both_ranks_are_asynchronous(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one in pair:
        one.send(1 - one.rank).recv(1 - one.rank)
    pair[0].collective(state="started")
    text = script_of_dumps(tmp_path, *pair)
    assert "dist.isend(" in text
    assert "dist.recv(" in text


def test_alternating_sends_are_synchronous(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    pair[0].send(1).recv(1).collective(state="started")
    pair[1].recv(0).send(0)
    text = script_of_dumps(tmp_path, *pair)
    assert "dist.send(" in text
    assert "isend" not in text


def test_groups_called_in_different_orders_are_asynchronous(tmp_path: Path) -> None:
    """Two threads or streams could have made them: the calls have finished on all ranks."""
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one, order in zip(pair, (("0", "1"), ("1", "0")), strict=True):
        for group in order:
            one.collective(group=group)
    pair[0].collective(state="started")
    assert "async_op=True" in script_of_dumps(tmp_path, *pair)


def test_order_that_hangs_is_kept(tmp_path: Path) -> None:
    pair = [Recorder(number, GROUPS) for number in range(2)]
    for one, order in zip(pair, (("0", "1"), ("1", "0")), strict=True):
        one.collective().collective(group=order[0], state="started")
    assert "async_op" not in script_of_dumps(tmp_path, *pair)


# --- shapes of hangs --------------------------------------------------------------------------------------------------


def script_of(evidence: Evidence) -> str:
    return reproduction_of(evidence, ALL).text


def test_groups_created_by_members_only_are_created_so() -> None:
    """Ranks 0 and 1 have made one more: now each waits in a group of another name than rank 2."""

    def made(number: int, count: int, groups: dict[str, tuple[int, ...]]) -> GilTest:
        return GilTest(True, True, groups={"0": (0, 1, 2), **groups}, groups_made=count)

    low = {"1": (0, 1)}
    ranks = [
        rank_of(n, NEW_GROUP, flight=record(*past(3)), gil=made(n, 2 if n == 2 else 3, {} if n == 2 else low))
        for n in range(3)
    ]
    text = script_of(job(*ranks))
    assert "if rank in (0, 1):\n    group_1 = dist.new_group([0, 1])\n" in text
    assert text.count("dist.new_group(") == 2


def test_receive_from_any_rank_names_no_peer() -> None:
    frames = in_c10d("recv", 20)
    receiver = rank_of(0, frames, flight=record(*past(3)), call=CallArguments(tag=0))
    text = script_of(job(receiver, waiting(1), waiting(2)))
    assert "dist.recv(torch.zeros(1))" in text


def test_receive_from_one_rank_names_peer() -> None:
    receiver = rank_of(0, in_c10d("recv", 20), flight=record(*past(3)), call=CallArguments(src=2, tag=0))
    text = script_of(job(receiver, waiting(1), waiting(2)))
    assert "dist.recv(torch.zeros(1), src=2)" in text


def test_wait_for_earlier_transfer_is_kept() -> None:
    """gloo records none, and the stack shows only ``work.wait()``: a barrier would be another call."""
    waits = rank_of(0, in_user(20), flight=record(*past(3)))
    source = "\n" * 19 + "work.wait()\n"
    text = reproduction_of(job(waits, waiting(1), waiting(2)), ALL, lambda path: source).text
    assert "works.append(dist.irecv(torch.zeros(1)))" in text
    assert "works[-1].wait()" in text


def test_send_to_unknown_peer_names_no_peer() -> None:
    """``group_dst`` reveals as little to the watchdog as the recorded call did."""
    sender = rank_of(0, in_c10d("send", 20), flight=record(*past(3)), call=CallArguments(tag=0))
    made = reproduction_of(job(sender, waiting(1), waiting(2)), ALL)
    assert "dist.send(torch.zeros(1), group_dst=1)" in made.text
    assert any("the peer of its send is unknown" in note for note in made.notes)


def test_unrecorded_broadcast_root_fits_waiting_ranks() -> None:
    """Rank 2 skipped the last of five broadcasts. The root waits for rank 2, and rank 1 has what it needs."""
    made = ("broadcast:0@7x4 broadcast:0@7*", "broadcast:0@7x5 0@9*", "broadcast:0@7x4 0@9*")
    frames = (in_c10d("broadcast", 7), in_c10d("all_reduce", 9), in_c10d("all_reduce", 9))
    ranks = [rank_of(n, frames[n], flight=record(*calls_in(text))) for n, text in enumerate(made)]
    found = replayed(script_of(job(*ranks)), 3)
    assert [one.root for one in found[0].calls if one.op == "broadcast"] == [0, 0, 0, 0, 0]


def test_rank_returning_from_gather_stalls_in_own_branch() -> None:
    """Other backends can hold all ranks in a gather; with gloo, a rank that has sent its part continues."""
    to_first = {"call": CallArguments(dst=0)}
    made = reproduction_of(job(waiting(0, "gather", **to_first), waiting(1, "gather", **to_first), waiting(2)), ALL)
    assert replayed(made.text, 3)[1].ended == "sleep"
    assert any("The last call of rank 1 would return with gloo" in note for note in made.notes)


def test_gathers_to_different_roots_do_not_match() -> None:
    """Rank 1 is one round ahead: rank 0, to which it gives its part, gathers to rank 2."""
    ranks = [waiting(n, "gather", call=CallArguments(dst=0 if n == 1 else 2)) for n in range(3)]
    notes = reproduction_of(job(*ranks), ALL).notes
    assert any("The last call of rank 0 would return" in note for note in notes), "rank 1 would not"


def test_calls_of_second_thread_keep_recorded_order() -> None:
    """The main thread waits for a call of the second thread, after calls that it made asynchronously itself."""
    groups = {"0": (0, 1), "1": (0, 1)}
    flight = record(*calls_in("0@50x2 all_gather:1@30* 0@50"), groups=groups)
    one = rank_of(0, in_c10d("all_gather", 30), flight=flight)
    other = rank_of(1, in_user(7), "sleep", flight=record(*calls_in("0@50x3"), groups=groups))
    text = script_of(job(one, other))
    assert [(call.op, call.waited_for) for call in replayed(text, 2)[0].calls] == [
        ("all_reduce", True),
        ("all_reduce", True),
        ("all_gather", False),
        ("all_reduce", True),
    ]
    assert "works[-1].wait()" in text


def test_ranks_return_from_rooted_gloo_call_as_measured() -> None:
    """Measured with torch 2.13 and three ranks."""
    seen = {
        ("broadcast", 0, (0, 1)): {1}, ("broadcast", 0, (0, 2)): {2}, ("broadcast", 0, (1, 2)): set(),
        ("broadcast", 0, (0, 1, 2)): {0, 1, 2}, ("scatter", 0, (0, 1)): {1}, ("gather", 0, (0, 1)): {1},
        ("gather", 0, (1, 2)): set(), ("reduce", 0, (0, 1)): set(),
    }  # fmt: skip
    for (op, root, entered), back in seen.items():
        assert {place for place in entered if can_return(op, root, entered, place, 3)} == back, (op, entered)


def test_script_reports_rank_that_returns() -> None:
    text = script_of(job(waiting(0), waiting(1), rank_of(2, in_user(7), "sleep", flight=record(*past(3)))))
    assert text.rstrip().splitlines()[-1].startswith('raise SystemExit(f"not as recorded: rank {rank} ')
    assert replayed(text, 3)[2].ended == "sleep"
