"""The graph of waits: walks and circles, and what they lead to over files and background threads."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from safelaunch.model import FileLock, Frame, ProcessEvidence, RankEvidence
from safelaunch.report.rank_rows import row_of
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.graph import Edge, Graph
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import (
    C10D,
    SCRIPT,
    SITE,
    STDLIB,
    WRAPPER,
    at,
    behind,
    decided,
    entry,
    in_init,
    in_user,
    job,
    past,
    process,
    rank,
    record,
    waiting,
)


def graph(text: str) -> Graph:
    """``"a>bc b>c"``: a waits for b and c, b for c."""
    parts = (word.split(">") for word in text.split())
    return Graph(Edge(of, tuple(on), "call") for of, on in parts)


@pytest.mark.parametrize(
    ("edges", "sinks"),
    [
        ("a>b", ["b"]),
        ("a>bc b>c", ["c"]),
        ("a>b b>a", ["ab"]),
        ("a>b b>c c>b", ["bc"]),
        ("a>b b>ac", ["c"]),
        ("a>b c>d d>c", ["b", "cd"]),
        ("a>a", ["a"]),
        ("", []),
    ],
)
def test_every_wait_leads_to_a_sink_or_cycle(edges: str, sinks: list[str]) -> None:
    assert ["".join(sorted(map(str, sink))) for sink in graph(edges).sinks] == sinks


@pytest.mark.parametrize(("edges", "path"), [("a>b b>c", "bc"), ("b>c", ""), ("a>b b>a", "ba"), ("a>cb", "c")])
def test_path_ends_at_a_sink_or_closed_cycle(edges: str, path: str) -> None:
    assert "".join(str(edge.on[0]) for edge in graph(edges).path("a")) == path


def test_long_wait_chain_needs_no_recursion() -> None:
    chain = Graph(Edge(n, (n + 1,), "call") for n in range(20_000))
    assert chain.sinks == ((20_000,),)
    assert len(chain.path(0)) == 20_000


# --- files ------------------------------------------------------------------------------------------------------------

DATABASE = "/data/cache.db"


def with_locks(one: ProcessEvidence, *locks: FileLock) -> ProcessEvidence:
    return structs.replace(one, states=tuple(structs.replace(state, locks=locks) for state in one.states))


def has_locked(one: RankEvidence, path: str = DATABASE) -> RankEvidence:
    assert one.main is not None
    return structs.replace(one, main=with_locks(one.main, FileLock(path, one.pid)))


def asks_again(number: int, holder: int, native: tuple[Frame, ...] = (), **fields: Any) -> RankEvidence:
    """Waits for rank 1's database as sqlite does: short sleeps, in C."""
    one = rank(number, in_user(9, "write"), fields.pop("kernel", "nap"), flight=behind(), native=native, **fields)
    assert one.main is not None
    return structs.replace(one, main=with_locks(one.main, FileLock(DATABASE, holder)))


SQLITE = (Frame("/usr/lib/libc.so.6", 0, "clock_nanosleep"), Frame("/usr/lib/libsqlite3.so.0", 0, "sqlite3_step"))


@pytest.mark.parametrize("kernel", ["flock", "nap"])
def test_lock_held_across_init_process_group_is_a_deadlock(kernel: str) -> None:
    """Rank 1 waits in init for rank 0, which waits for the lock of rank 1: the number of a process says nothing."""
    source = "\n" * 6 + "while True:\n    try: fcntl.flock(file, LOCK_EX | LOCK_NB)\n    except OSError: sleep(0.05)\n"
    waits = rank(0, in_user(9, "lock"), kernel)
    assert waits.main is not None
    if kernel == "nap":
        waits = structs.replace(waits, main=with_locks(waits.main, FileLock(DATABASE, 1010, " (python, since 9:00)")))
    verdict = diagnose(job(waits, has_locked(rank(1, in_init(11)))), lambda path: source if path == SCRIPT else None)
    assert decided(verdict)[:2] == ("lock-deadlock", [(1, 11)])
    assert "Rank 0 waits for a file lock at train.py:9 (lock) that rank 1 holds" in verdict.summary
    assert "rank 1 waits in init_process_group at train.py:11 (setup)" in verdict.summary
    assert verdict.suggestions[0].startswith("Release the lock before `init_process_group`")
    assert "pid 1010" not in str(structs.asdict(verdict))


def with_child(number: int, frames: tuple[Frame, ...], kernel: str) -> RankEvidence:
    """A rank that waits in the barrier, with a child whose pid is 77."""
    return waiting(number, "barrier", line=23, children=[process(77, frames, kernel, role="child")])


def test_lock_held_by_a_child_process_names_the_child() -> None:
    """The barrier is not what keeps the file locked: the child is named, with its line."""
    verdict = diagnose(job(asks_again(0, 77, SQLITE), with_child(1, in_user(31), "sleep"), asks_again(2, 77, SQLITE)))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 31)], "high")
    assert (verdict.culprits[0].process, verdict.culprits[0].pid, verdict.victims) == ("child (pid 77)", 77, "0,2")


# --- background threads -----------------------------------------------------------------------------------------------

JOIN = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), *in_user(20, "save"))
RUN = Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
SYNC = (Frame(C10D, 3252, "all_reduce"), WRAPPER, at(31, "sync"), RUN)
GROUPS = {"0": (0, 1, 2), "5": (0, 1)}


def side(number: int, *more: Any) -> Any:
    """The record of a rank that has done three steps in the world and two rounds in group 5."""
    rounds = [structs.replace(entry("all_reduce", n, group="5", line=31, done=True)) for n in (1, 2)]
    return record(*past(3), *rounds, *more, groups={"0": GROUPS["0"], **({"5": GROUPS["5"]} if number < 2 else {})})


PENDING = entry("all_reduce", 3, group="5", line=31)


def joins(number: int, frames: tuple[Frame, ...] = JOIN, thread: tuple[Frame, ...] = SYNC) -> RankEvidence:
    """Its main thread waits for a thread that is in the third round of group 5."""
    return rank(number, frames, flight=side(number, PENDING), threads=[("sync", thread, "futex")])


def test_overview_reports_wait_in_a_separate_thread() -> None:
    rows = [row_of(one) for one in CaseFacts.of(job(joins(0), joins(1))).ranks.values()]
    assert [row.doing for row in rows] == ["waits in all_reduce at train.py:31 (sync) in a separate thread"] * 2


def test_stale_extension_build_lock_is_reported_with_its_file() -> None:
    stack = (
        Frame(f"{SITE}/torch/utils/file_baton.py", 50, "FileBaton.wait"),
        Frame(f"{SITE}/torch/utils/cpp_extension.py", 1800, "_jit_compile"),
        *in_user(9, "build"),
    )
    ranks = []
    for number in range(2):
        one = rank(number, stack, "nap")
        assert one.main is not None
        stacks = tuple(
            structs.replace(
                sample, threads=tuple(structs.replace(thread, lock_file="/ext/m/lock") for thread in sample.threads)
            )
            for sample in one.main.stacks
        )
        ranks.append(structs.replace(one, main=structs.replace(one.main, stacks=stacks)))
    verdict = diagnose(job(*ranks))
    assert verdict.cause == "no-rank-stands-out" and "the lock file /ext/m/lock is still there" in verdict.summary
    assert verdict.suggestions[0].startswith("Delete that lock file if no process is building the extension")
    beside = diagnose(job(ranks[0], waiting(1)))
    assert (beside.cause, beside.suggestions[0]) == ("stuck-in-user-code", verdict.suggestions[0])
