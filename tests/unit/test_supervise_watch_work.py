"""Work between two readings of the counters, in windows of ten seconds unless stated otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.supervise.watch.work import Background, ObservedWork, find_work, learn

RANK, CHILD, THREAD = (10, 100), (20, 120), 11
IDLE = {
    RANK: ProcessCounters(10, threads={10: CpuTime(0), THREAD: CpuTime(0)}, sockets={7: 0}),
    CHILD: ProcessCounters(10, threads={20: CpuTime(0)}),
}


def at(seconds: float, processes: Mapping[Any, ProcessCounters], **more: Any) -> Counters:
    return Counters(seconds, 1000 + int(100 * seconds), processes, **more)


def using(
    processes: Mapping[Any, ProcessCounters] = IDLE, key: Any = RANK, **changes: Any
) -> dict[Any, ProcessCounters]:
    return {**processes, key: replace(processes.get(key, ProcessCounters(10)), **changes)}


def cpu(tid: int, ms: float, queued_ms: float = 0.0, key: Any = RANK) -> dict[Any, ProcessCounters]:
    return using(key=key, threads={**IDLE[key].threads, tid: CpuTime(ms, queued_ms)})


def kinds(work: tuple[ObservedWork, ...]) -> list[tuple[str, int, int | None]]:
    return [(one.kind, one.pid, one.tid) for one in work]


START = at(0.0, IDLE)
NEW = using(key=(30, 1500), threads={30: CpuTime(900.0)}, io_bytes=1 << 20)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (IDLE, []),
        (cpu(10, 250), []),
        (cpu(10, 350), [("cpu", 10, 10)]),
        (cpu(THREAD, 350), [("cpu", 10, THREAD)]),
        (cpu(20, 350, key=CHILD), [("cpu", 20, 20)]),
        (cpu(10, 1, queued_ms=2000), []),  # little of its time, on a busy node
        (cpu(10, 1, queued_ms=3000), [("cpu", 10, 10)]),
        (using(io_bytes=16_000), []),
        (using(io_bytes=17_000), [("io", 10, None)]),
        (using(io_bytes=17_000, main_io_bytes=17_000), [("io", 10, 10)]),
        (using(sockets={7: 10_000}), []),
        (using(sockets={7: 11_000}), [("network", 10, None)]),
        (using(sockets={8: 11_000}), [("network", 10, None)]),  # a new connection
        (using(sockets={}), []),
        (using(faults=256), []),
        (using(faults=257), [("faults", 10, None)]),
        (NEW, [("children", 10, None), ("io", 30, None), ("cpu", 30, 30)]),
        (using(key=(30, 900), threads={30: CpuTime(900.0)}), []),  # it was there before, and not seen
        ({RANK: IDLE[RANK]}, [("children", 10, None)]),
    ],
)
def test_work_without_background_is_all_above_the_floor(
    after: Mapping[Any, ProcessCounters], expected: list[tuple[str, int, int | None]]
) -> None:
    assert sorted(kinds(find_work(START, at(10.0, after), Background())), key=str) == sorted(expected, key=str)


BUSY = using(
    cpu(THREAD, 500),
    sockets={7: 1 << 20},
    io_bytes=2 << 20,
    faults=10_000,
    threads={10: CpuTime(900), THREAD: CpuTime(500)},
)  # of one second
BUSY = using(BUSY, CHILD, threads={20: CpuTime(990)}, io_bytes=1 << 20)
LEARNED = learn(Background(), START, at(1.0, BUSY))


@pytest.mark.parametrize(
    ("after", "more", "expected"),
    [
        (cpu(THREAD, 7000), {}, []),
        (cpu(THREAD, 8000), {}, [("cpu", 10, THREAD)]),
        (cpu(10, 350), {}, [("cpu", 10, 10)]),  # a rank's main thread is never background
        (cpu(10, 9900), {"waiting": [10]}, []),  # unless it waits for its peers
        (cpu(THREAD, 8000), {"waiting": [10]}, [("cpu", 10, THREAD)]),
        (cpu(THREAD, 350), {"foreground": [10]}, [("cpu", 10, THREAD)]),
        (cpu(20, 9900, key=CHILD), {}, []),
        (cpu(20, 350, key=CHILD), {"foreground": [20]}, [("cpu", 20, 20)]),
        (cpu(20, 350, key=CHILD), {"foreground": [20], "waiting": [10]}, [("cpu", 20, 20)]),
        (using(key=CHILD, io_bytes=1 << 20), {"foreground": [20]}, [("io", 20, None)]),
        (using(key=CHILD, io_bytes=1 << 20), {}, []),
        (using(sockets={7: 14 << 20}), {"waiting": [10]}, []),
        (using(sockets={7: 16 << 20}), {"waiting": [10]}, [("network", 10, None)]),
        (using(sockets={7: 0, 8: 1 << 20}), {}, [("network", 10, None)]),  # another connection
        (using(io_bytes=2 << 20, main_io_bytes=1 << 20), {}, [("io", 10, 10)]),
        (using(io_bytes=2 << 20, main_io_bytes=1 << 20), {"waiting": [10]}, [("io", 10, 10)]),
    ],
)
def test_work_is_what_exceeds_the_learned_background(
    after: Mapping[Any, ProcessCounters], more: dict[str, Any], expected: list[tuple[str, int, int | None]]
) -> None:
    assert kinds(find_work(START, at(10.0, after), LEARNED, **more)) == expected


@pytest.mark.parametrize(
    ("after", "more", "expected"),
    [
        (using(key=CHILD, io_bytes=12_000), {"foreground": [20]}, [("io", 20, None)]),  # 6 kB/s
        (using(key=CHILD, io_bytes=3_000), {"foreground": [20]}, []),
        (using(key=CHILD, io_bytes=12_000), {}, []),  # possibly a burst that no rank waits for
        (using(io_bytes=12_000, main_io_bytes=12_000), {}, [("io", 10, 10)]),
        (using(io_bytes=12_000, main_io_bytes=12_000), {"waiting": [10]}, []),
        (using(io_bytes=3_000, main_io_bytes=3_000), {}, []),
        (using(key=CHILD, sockets={9: 3_000}), {"foreground": [20]}, [("network", 20, None)]),
        (using(key=CHILD, faults=200), {"foreground": [20]}, []),
    ],
)
def test_awaited_work_counts_proportionally_in_a_short_window(
    after: Mapping[Any, ProcessCounters], more: dict[str, Any], expected: list[tuple[str, int, int | None]]
) -> None:
    assert kinds(find_work(START, at(2.0, after), Background(), **more)) == expected


def test_background_burst_can_fill_a_short_window() -> None:
    after = cpu(THREAD, 500)
    assert find_work(START, at(0.6, after), Background()) != ()
    assert find_work(START, at(0.6, after), LEARNED) == ()


def test_burst_of_new_connections_hides_no_transfer() -> None:
    """One of 100 kB/s on a connection that was there before, or over new ones."""
    began = at(0.0, using(sockets={}))
    background = learn(Background(), began, at(1.5, using(sockets={7: 138_000, 8: 0})))
    for second in range(3, 12):
        began, ended = (
            at(second - 1.5, using(sockets={7: 138_000, 8: 0})),
            at(second, using(sockets={7: 139_000, 8: 0})),
        )
        background = learn(background, began, ended)

    def moved(seconds: float, **sockets: int) -> list[tuple[str, int, int | None]]:
        quiet = at(20.0, using(sockets={7: 0, 8: 0}))
        after = using(sockets={int(name[1:]): count for name, count in sockets.items()})
        return kinds(find_work(quiet, at(20.0 + seconds, after), background))

    assert moved(2, s7=200_000, s8=0) != [] and moved(2, s7=1500, s8=0) == []
    assert moved(2, s7=0, s8=200_000) == [("network", 10, None)]
    assert moved(8, s7=0, s8=0, s9=800_000) == [("network", 10, None)]
    assert moved(8, s7=0, s8=0, s9=138_000) == []  # as it did before
    many = {f"s{100 + number}": 9000 for number in range(50)}
    assert moved(2, s7=0, s8=0, **many) == [("network", 10, None)]


def test_usual_helper_processes_are_background() -> None:
    """A health check every ten seconds, seen in one second of ten."""
    background, began = Background(), at(0.0, IDLE)
    for second in range(1, 31):
        helper = {(1000 + second, began.at_ticks + 5): NEW[30, 1500]} if second % 10 == 0 else {}
        ended = at(float(second), {**IDLE, **helper})
        background, began = learn(background, began, ended), ended
    began = at(40.0, IDLE)

    def one_more(number: int) -> dict[Any, ProcessCounters]:
        return {**IDLE, **{(2000 + n, began.at_ticks + 5): NEW[30, 1500] for n in range(number)}}

    assert find_work(began, at(41.0, one_more(1)), background) == ()
    assert kinds(find_work(began, at(41.0, one_more(1)), background, foreground=[2000])) != []
    assert ("children", 10, None) in kinds(find_work(began, at(41.0, one_more(3)), background))
    assert ("cpu", 2000, 30) in kinds(find_work(began, at(41.0, one_more(3)), background))
    stays = {**one_more(1)}
    later = using(stays, (2000, began.at_ticks + 5), threads={30: CpuTime(5000)})
    assert ("cpu", 2000, 30) in kinds(find_work(at(41.0, stays), at(51.0, later), background))


def test_ended_processes_are_forgotten() -> None:
    left = learn(LEARNED, at(1.0, BUSY), at(2.0, {RANK: BUSY[RANK]}))
    assert {what[1] for what in left.peaks} == {0, 10}
    assert (left.changes, left.seconds) == (1, 2.0)


def test_rdma_traffic_is_work_and_equal_readings_are_not() -> None:
    (work,) = find_work(START, at(10.0, IDLE, rdma_bytes=1 << 30), Background())
    assert (work.kind, work.words) == ("rdma", "the node's RDMA ports carry 107.4 MB/s")
    assert find_work(START, START, Background()) == () and learn(LEARNED, START, START) is LEARNED


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (ObservedWork(1, 2, None, "io", 3.1e6), "process 2 reads and writes 3.1 MB/s"),
        (ObservedWork(1, 2, 2, "io", 3100), "the main thread of process 2 reads and writes 3.1 kB/s"),
        (ObservedWork(1, 2, 3, "cpu", 450), "thread 3 of process 2 uses 45% of a core, or waits for one"),
        (ObservedWork(1, 2, None, "network", 5e3), "process 2 sends and receives 5.0 kB/s"),
        (ObservedWork(1, 2, None, "faults", 900), "process 2 touches 900 new pages per second"),
        (ObservedWork(1, 1, None, "children", 0.25), "processes below 1 start or end, 0.25 per second"),
    ],
)
def test_work_is_described_in_words(work: ObservedWork, words: str) -> None:
    assert work.words == words
