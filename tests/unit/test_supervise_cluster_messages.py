"""Records between supervisors, and what a foreign process could write to the store."""

from __future__ import annotations

import random
import zlib
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from safelaunch.model import (
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    GroupStatus,
    NodeEvidence,
    Progress,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.model.entries import Entries, Kinds
from safelaunch.model.evidence import all_nodes
from safelaunch.supervise.cluster.codec import (
    CHUNK_BYTES,
    LEAST_SHARE,
    MOST_CHUNKS,
    MOST_EVIDENCE,
    MOST_MESSAGE,
    BadMessage,
    Codec,
    pack,
    share_of,
    unpack,
)
from safelaunch.supervise.cluster.evidence import MOST_LOG, MOST_STEPS, SharedColumns, condense, unpack_evidence
from safelaunch.supervise.cluster.merge import merge, with_relative_times
from safelaunch.supervise.cluster.messages import Beat, Decision, LeaderPage, NodeCard

BEAT = Beat("a1", 7, (0, 1), 4, (0, 1), "suspecting", 3, 2.5, False, 4, "unknown", submitted=(("hang.4", 2),))
PLAIN, SIGNED = Codec("run"), Codec("run", b"a key of the job")


@pytest.mark.parametrize("codec", [PLAIN, SIGNED], ids=["plain", "signed"])
def test_message_survives_encoding(codec: Codec) -> None:
    verdict = Verdict(1, "hang", "busy-loop", "low", "", (), "", (), (), (), ())
    for message in (
        BEAT,
        LeaderPage(3, 1, 9),
        NodeCard("a", "host", 1, "0.1", "2.13"),
        Decision(verdict, "kill", "h", "/p", 5),
    ):
        assert codec.decode("b/1", codec.encode("b/1", message), type(message)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        Beat("a", -1),
        Beat("a", 1, tuple(range(5000))),
        Beat("a", 1, (70_000,)),
        Beat("x" * 300, 1),
        Beat("a", 1, vote="yes"),  # type: ignore[arg-type]
        Beat("a", 1, window_s=1e9),
        Beat("a", 1, submitted=(("hang.4", 1000),)),
        Beat("a", 1, submitted=(("../head", 1),)),
        Beat("a", 1, decided="hang"),
    ],
)
def test_values_out_of_bounds_are_refused(wrong: Beat) -> None:
    with pytest.raises(BadMessage):
        PLAIN.decode("b/1", PLAIN.encode("b/1", wrong), Beat)


def test_message_of_another_version_is_refused() -> None:
    for body in ([7, 1, 9], ["v1", 7, 1, 9]):
        with pytest.raises(BadMessage):
            PLAIN.decode("head", PLAIN.seal("head", msgspec.msgpack.encode(body)), LeaderPage)


def test_record_of_another_kind_is_refused() -> None:
    with pytest.raises(BadMessage):
        PLAIN.decode("head", PLAIN.encode("head", BEAT), LeaderPage)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=200), st.sampled_from([Beat, LeaderPage, NodeCard, Decision]), st.sampled_from([PLAIN, SIGNED])
)
def test_garbage_is_refused(data: bytes, kind: type[msgspec.Struct], codec: Codec) -> None:
    try:
        codec.decode("b/1", data, kind)
    except BadMessage:
        return
    assert codec is PLAIN, "what is signed with the key cannot be met by chance"


def test_damaged_messages_are_refused_or_within_bounds() -> None:
    dice = random.Random(5)
    whole = PLAIN.encode("b/1", BEAT)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            found = PLAIN.decode("b/1", bytes(data[: dice.randint(0, len(data))]), Beat)
        except BadMessage:
            continue
        assert 0 <= found.count < 1 << 48 and len(found.ranks) <= 4096


def test_too_large_or_too_deep_messages_are_refused() -> None:
    with pytest.raises(BadMessage):
        PLAIN.decode("b/1", b"\x91" * (MOST_MESSAGE + 1), Beat)
    with pytest.raises(BadMessage):
        PLAIN.decode("b/1", b"\x91" * 100_000, Beat)


def test_signature_is_valid_only_for_its_key() -> None:
    data = SIGNED.encode("b/1", BEAT)
    for codec, place in (
        (SIGNED, "b/2"),
        (Codec("other run", b"a key of the job"), "b/1"),
        (Codec("run", b"x"), "b/1"),
    ):
        with pytest.raises(BadMessage):
            codec.decode(place, data, Beat)
    with pytest.raises(BadMessage):
        SIGNED.decode("b/1", PLAIN.encode("b/1", BEAT), Beat)


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_chunks_are_reassembled() -> None:
    data = random.Random(1).randbytes(3 * CHUNK_BYTES)
    chunks = pack(data)
    assert chunks is not None and len(chunks) == 4
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert unpack(chunks) == data
    assert pack(random.Random(1).randbytes((MOST_CHUNKS + 1) * CHUNK_BYTES)) is None


@pytest.mark.parametrize(
    "chunks",
    [[], [b""], [b"garbage"], [zlib.compress(b"x" * 1000)[:-3]], [zlib.compress(b"x"), b"more"]],
    ids=["none", "empty", "garbage", "cut", "more"],
)
def test_data_that_was_never_packed_is_refused(chunks: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        unpack(chunks)


def test_compression_bomb_is_refused_within_memory() -> None:
    engine = zlib.compressobj()
    small = b"".join(engine.compress(bytes(1 << 20)) for _ in range(256)) + engine.flush()
    with pytest.raises(BadMessage):
        unpack([small])


def record(count: int = 50) -> FlightRecord:
    kinds = Kinds()
    frames = (Frame("/job/train.py", 7, "main"),)
    for op in ("gloo:all_reduce", "gloo:broadcast"):
        kinds.number_of(Collective("0", 0, op, True, state="scheduled", input_sizes=((2, 3),), frames=frames))
    entries = Entries(
        kinds,
        array("I", [number % 2 for number in range(count)]),
        seqs=list(range(count)),
        p2p_seqs=[0] * count,
        record_ids=list(range(5, 5 + count)),
        created_ns=[1_000_000 + 17 * number * number for number in range(count)],
    )
    return FlightRecord("2.10", entries, {"0": (0, 1)}, {"0": GroupStatus(50, -1, 49)})


def node(*ranks: int, world: int = 4, count: int = 50) -> Evidence:
    sides = tuple(
        RankEvidence(rank=rank, host="h", pid=10 + rank, flight_record=record(count), log_tail="x" * 99_999)
        for rank in ranks
    )
    return Evidence("hang", world, sides, tuple(set(range(world)) - set(ranks)), stall_s=float(ranks[0]))


def test_evidence_survives_the_wire() -> None:
    sent = node(2, 3)
    found = unpack_evidence(condense(sent))[0]
    assert found.ranks[0].flight_record == sent.ranks[0].flight_record
    assert found.ranks[1].log_tail == "x" * MOST_LOG
    assert (found.world_size, found.missing_ranks, found.stall_s) == (4, (), 2.0)  # the leader adds the missing ranks


@pytest.mark.parametrize(
    "members",
    [(), (5,), (0, 1), (5, 2), tuple(range(4096)), tuple(range(3, 4096, 8)), (0, 1, 2, 8, 9, 10, 7), (4, 4, 4)],
)
def test_group_members_are_sent_once_and_compactly(members: tuple[int, ...]) -> None:
    sent = node(2, 3)
    ranks = tuple(
        replace(rank, flight_record=replace(rank.flight_record, groups={"7": members}))
        for rank in sent.ranks
        if rank.flight_record is not None
    )
    chunks = condense(replace(sent, ranks=ranks))
    assert len(msgspec.msgpack.decode(unpack(chunks))["groups"]) == 1
    shared = SharedColumns()
    one, other = (unpack_evidence(chunks, shared)[0] for _ in range(2))
    groups = [side.flight_record.groups["7"] for side in (*one.ranks, *other.ranks) if side.flight_record is not None]
    assert groups == [members] * 4
    assert all(found is groups[0] for found in groups), "the leader keeps it once"


def test_group_of_too_many_ranks_is_refused() -> None:
    with pytest.raises(BadMessage):
        SharedColumns().members(((0, 1, 65_536), (0, 1, 1)))


def test_evidence_of_many_nodes_fits_its_share() -> None:
    assert (share_of(2), share_of(0)) == (MOST_CHUNKS * CHUNK_BYTES, MOST_CHUNKS * CHUNK_BYTES)
    assert 1024 * share_of(1024) <= MOST_EVIDENCE
    noise = random.Random(1).randbytes(LEAST_SHARE // 2).hex()
    sent = replace(node(2, 3), notes=(noise,))
    small = condense(sent, {"ranks/2/flight_recorder.pickle": noise.encode()}, LEAST_SHARE)
    assert sum(map(len, small)) <= LEAST_SHARE
    assert unpack_evidence(small)[1] == {}


def test_long_records_are_cut_to_the_newest_entries() -> None:
    found = unpack_evidence(condense(node(0, count=9000)))[0]
    assert found.ranks[0].flight_record is not None
    entries = found.ranks[0].flight_record.entries
    assert (len(entries), entries[0].seq, entries[-1].seq) == (4096, 9000 - 4096, 8999)


def test_long_step_history_is_thinned_and_keeps_the_newest() -> None:
    sent = node(0)
    history = tuple((step * 1000, step) for step in range(1, 101))
    paged = Progress(sent.ranks[0].rank, 0, 4, 0, 10, 5, "torch", 100, history=history)
    ranks = (replace(sent.ranks[0], progress=paged), *sent.ranks[1:])
    found = unpack_evidence(condense(replace(sent, ranks=ranks)))[0].ranks[0].progress
    assert found is not None
    assert len(found.history) <= MOST_STEPS and found.history[-1] == history[-1]
    assert set(found.history) <= set(history)


def test_evidence_of_all_nodes_is_merged() -> None:
    whole = merge(node(0, 1), [node(2, 3), node(1, 2)])
    assert [rank.rank for rank in whole.ranks] == [0, 1, 2, 3]
    assert (whole.missing_ranks, whole.stall_s) == ((), 2.0)
    assert merge(node(0, 1), [node(3)]).missing_ranks == (2,)
    assert [rank.rank for rank in merge(node(0, 1), [node(9, world=16)]).ranks] == [0, 1], "a rank of no such job"


def test_contradictory_evidence_is_refused() -> None:
    good = msgspec.msgpack.decode(unpack(condense(node(2, 3))))
    for damage in (
        lambda e: e["records"][2]["kind_of"].append(0),
        lambda e: e["records"][2]["kind_of"].__setitem__(0, 99),
        lambda e: e["records"][2]["kind_of"].__setitem__(0, -1),
        lambda e: e["rest"]["ranks"].append(e["rest"]["ranks"][0]),
        lambda e: e["rest"]["ranks"][0].__setitem__("rank", -1),
        lambda e: e["rest"]["ranks"][0].__setitem__("rank", "2"),
    ):
        bad = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
        bad["records"] = {int(rank): value for rank, value in bad["records"].items()}
        damage(bad)
        chunks = pack(msgspec.msgpack.encode(bad))
        assert chunks is not None
        with pytest.raises(BadMessage):
            unpack_evidence(chunks)


def test_failure_times_are_sent_as_ages() -> None:
    lost = RankEvidence(rank=3, host="b", pid=1, exception=RankException("E", "x", 1000.0), exit=RankExit(1, 1002.0))
    (rank,) = with_relative_times(replace(node(2), ranks=(lost,)), 1010.0).ranks
    assert rank.exception is not None and rank.exit is not None
    assert (rank.exception.time_unix_s, rank.exit.time_unix_s) == (-10.0, -8.0)


def test_nodes_own_report_counts_together_with_its_silence() -> None:
    a, b = NodeEvidence("a", 1, (0,), here=True), NodeEvidence("b", 2, (1,), here=True)
    heard, gone = replace(b, here=False, ranks=()), replace(b, here=False, silent_s=20.0)
    third = NodeEvidence("c", 3, (2,), silent_s=5.0)
    halves = [replace(node(0), nodes=nodes) for nodes in ((a, heard, third), (b, replace(third, silent_s=9.0)))]
    assert all_nodes(halves) == (a, b, replace(third, silent_s=9.0))
    assert all_nodes([replace(node(0), nodes=nodes) for nodes in ((a, gone), (b,))]) == (a, b, gone)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("node/a.b/resources.json", True),
        ("ranks/12/flight_recorder.pickle", True),
        ("node/../verdict.json", False),
        ("node/a/.hidden", False),
        ("node/a/b/c.json", False),
        ("/etc/passwd", False),
        ("ranks/1/stack.txt", False),
        ("verdict.json", False),
        ("ranks/../ranks/1/flight_recorder.pickle", False),
        ("node/a/x\n", False),
    ],
)
def test_files_of_other_nodes_stay_inside_the_bundle(name: str, fits: bool) -> None:
    chunks = condense(node(2), {name: b"x"})
    if fits:
        assert unpack_evidence(chunks)[1] == {name: b"x"}
        return
    with pytest.raises(BadMessage):
        unpack_evidence(chunks)


def test_files_are_sent_only_if_they_fit() -> None:
    large = {f"node/a/{number}.json": random.Random(number).randbytes(1 << 20) for number in range(9)}
    evidence, files = unpack_evidence(condense(node(2), large))
    assert (len(evidence.ranks), files) == (1, {})
