"""What the source says of the lines at which ranks are."""

from __future__ import annotations

import pytest
from evidence import C10D, MODULE, at

from safelaunch.model import Frame
from safelaunch.verdict.reading.innermost import LockTaken, is_given_by, lock_at
from safelaunch.verdict.reading.parting import loop_left
from safelaunch.verdict.reading.source import Loop

LOOP = """
def train():
    setup()
    for batch in loader:
        if rank == 0:
            log(batch)
        step(batch)
    finish()

def other():
    finish()
"""


@pytest.mark.parametrize(
    ("ahead", "behind", "loop"),
    [(8, 7, 4), (6, 7, None), (7, 8, None), (3, 7, None), (11, 7, None), (7, 7, None)],
)
def test_loop_left(ahead: int, behind: int, loop: int | None) -> None:
    stacks = [(Frame(C10D, 1, "barrier"), at(line, "train"), MODULE) for line in (ahead, behind)]
    assert loop_left(stacks[0], stacks[1], lambda path: LOOP) == (Loop(loop, False, MODULE) if loop else None)


@pytest.mark.parametrize(
    ("source", "ahead", "behind", "caller"),
    [
        ("for epoch in e:\n    for x in y:\n        step()\n    barrier()\n", 4, 3, None),
        ("for x in y:\n    step()\nbarrier()\nwhile more:\n    main()\n", 3, 2, 5),
    ],
)
def test_a_loop_in_a_loop(source: str, ahead: int, behind: int, caller: int | None) -> None:
    callers = (at(caller, "<module>"),) if caller else ()
    found = loop_left((at(ahead, "f"), *callers), (at(behind, "f"), *callers), lambda path: source)
    assert found is not None and found.enclosed


def test_loop_left_without_a_source() -> None:
    stacks = [(at(line, "train"), MODULE) for line in (8, 7)]
    assert loop_left(stacks[0], stacks[1], lambda path: None) is None
    assert loop_left(stacks[0], stacks[1], lambda path: "def broken(:") is None


LOCKS = """\
def twice():
    lock.acquire()
    with lock:
        pass

def released():
    lock.acquire()
    lock.release()
    with lock:
        pass

def nested(self):
    with self.lock, other:
        self.lock.acquire(timeout=3)

def two():
    with a, b:
        pass

def called():
    with open("x"):
        pass

def down(node):
    node.lock.acquire()
    node = node.next
    node.lock.acquire()
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (3, LockTaken("lock", 2)),
        (2, LockTaken("lock")),
        (9, LockTaken("lock")),
        (14, LockTaken("self.lock", 13)),
        (17, None),
        (21, None),
        (27, LockTaken("node.lock")),
        (4, None),
    ],
)
def test_the_lock_that_a_line_takes(line: int, found: LockTaken | None) -> None:
    assert lock_at(Frame("/x.py", line, "f"), lambda path: LOCKS) == found
    assert lock_at(Frame("/x.py", line, "f"), lambda path: None) is None


GIVEN = """\
def of_torch(ops, group):
    dist.irecv(x).wait()
    one = dist.isend(x, 1)
    one.wait()
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    works = []
    works.append(dist.isend(x, 1))
    works += [dist.irecv(x, peer) for peer in ops]
    for each in works:
        each.wait()
    works[0].wait()
    [w.wait() for w in works]
def of_others(ops, group, given):
    group.recv(x).wait()
    one = dist.isend(x, 1) if ops else group.send(x)
    one.wait()
    two = dist.isend(x, 1)
    two = group.send(x)
    two.wait()
    works = [dist.isend(x, 1)]
    works.append(group.send(x))
    works[0].wait()
    given = dist.isend(x, 1)
    given.wait()
    items = [dist.isend(x, 1)]
    items[0] = group.send(x)
    items[0].wait()
    none = []
    none[0].wait()
    first, rest = dist.isend(x, 1), group.send(x)
    rest.wait()
    wait(one)
"""


def test_what_only_calls_of_some_names_can_have_given() -> None:
    names = ("isend", "irecv", "batch_isend_irecv")
    waits = [number for number, line in enumerate(GIVEN.splitlines(), 1) if "wait(" in line]
    found = [line for line in waits if is_given_by(Frame("/x.py", line, "f"), names, lambda path: GIVEN)]
    assert found == [line for line in waits if line <= GIVEN.splitlines().index("def of_others(ops, group, given):")]
    assert not is_given_by(Frame("/x.py", 2, "f"), names, lambda path: None)
