"""Targets of a thread's innermost line: the condition of a polling loop, a store key, a lock."""

from __future__ import annotations

from textwrap import dedent

import pytest

from safelaunch.model import Frame
from safelaunch.stacks.locks import LockTaken, lock_at
from safelaunch.stacks.polls import Poll, poll_at
from safelaunch.stacks.receivers import is_result_of
from safelaunch.stacks.store_keys import StoreKey, store_key_at

FILE = "/home/me/train.py"


def poll(text: str, *functions: str, asleep: bool = True) -> Poll | None:
    """Returns the poll of a stack whose lines are marked with ``# 1``, ``# 2`` in ``text``, innermost first."""
    lines = dedent(text).strip("\n").splitlines()
    marked = [
        next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {at}"))
        for at in range(1, 3)
        if f"# {at}" in text
    ]
    return poll_at([Frame(FILE, line, "f") for line in marked], lambda path: "\n".join(lines), asleep=asleep)


@pytest.mark.parametrize(
    ("test", "of"),
    [
        ("not os.path.exists(path)", "file"),
        ("not (root / 'done').is_file()", "file"),
        ("len(glob.glob(pattern)) < 4", "file"),
        ("not work.is_completed()", "work"),
        ("child.poll() is None", "process"),
        ("actors[0].is_alive()", "process"),
        ("not store.check(['ready'])", "key"),
        ("not self.ready", ""),
    ],
)
def test_poll_loop_condition_has_kind(test: str, of: str) -> None:
    target = poll(f"while {test}:\n    log('waiting')\n    time.sleep(1)  # 1")
    assert target is not None
    assert (target.line, target.of, target.text) == (1, of, f"while {test}")
    assert target.words == f"`while {test}` (train.py:1)"


@pytest.mark.parametrize(
    ("loop", "removal"),
    [
        ("while os.path.exists(lock):\n    time.sleep(1)  # 1", True),
        ("while not os.path.exists(lock):\n    time.sleep(1)  # 1", False),
        ("while True:\n    if not lock.is_file():\n        break\n    time.sleep(1)  # 1", True),
        ("while True:\n    if lock.is_file():\n        break\n    time.sleep(1)  # 1", False),
        ("while not os.path.exists(lock) or busy():\n    time.sleep(1)  # 1", False),
    ],
)
def test_poll_for_the_removal_of_a_file_names_no_line_that_creates_it(loop: str, *, removal: bool) -> None:
    target = poll(f"open(lock, 'x')\n{loop}")
    assert target is not None and (target.of, target.removal) == ("file", removal)
    assert bool(target.made_at) is not removal


def test_poll_in_for_loop_uses_returning_branch() -> None:
    target = poll(
        """
        def wait_for(path):
            for _ in range(10_000):
                if os.path.exists(path):
                    return
                time.sleep(0.2)  # 1
        """
    )
    assert target is not None and (target.line, target.text, target.of) == (3, "if os.path.exists(path)", "file")


@pytest.mark.parametrize("where", ["handler", "after"])
def test_poll_recognizes_retried_attempt(where: str) -> None:
    sleep = "time.sleep(1)  # 1"
    target = poll(
        f"""
        def fetch(url):
            while True:
                try:
                    with urlopen(url) as answer:
                        return answer.read()
                except OSError:
                    {sleep if where == "handler" else "log('again')"}
                {sleep if where == "after" else "pass"}
        """
    )
    assert target is not None and (target.line, target.text, target.of) == (4, "urlopen(url)", "attempt")


def test_poll_recognizes_sleep_in_called_function() -> None:
    target = poll(
        """
        def pause():
            time.sleep(0.5)  # 1

        def wait_for(path):
            while not path.exists():
                pause()  # 2
        """
    )
    assert target is not None and (target.line, target.of) == (5, "file")


@pytest.mark.parametrize(
    "text",
    [
        "for batch in loader:\n    train(batch)\n    library.call()  # 1",  # sleeps inside a library
        "while True:\n    time.sleep(1)  # 1",
        "time.sleep(1)  # 1",
        "for step in range(9):\n    time.sleep(1)  # 1\n    train()",
        "try:\n    train()\nexcept OSError:\n    time.sleep(1)  # 1",
        "while not (:\n    time.sleep(1)  # 1",
    ],
)
def test_other_sleep_is_no_poll(text: str) -> None:
    assert poll(text) is None


def test_spinning_loop_is_poll_by_condition() -> None:
    spins = poll("while not work.is_completed():\n    pass  # 1", asleep=False)
    assert spins is not None and spins.of == "work"


def test_poll_needs_source() -> None:
    assert poll_at([Frame(FILE, 2, "f")], lambda path: None) is None
    assert poll_at([], lambda path: "x = 1") is None


# --- store keys -------------------------------------------------------------------------------------------------------

LOCALS = {"step": "15", "name": "'run/7'"}


def key_of(line: str, **values: str) -> StoreKey | None:
    source = f"def wait(self, step):\n    {line}\n"
    assert store_key_at(Frame(FILE, 2, "wait"), lambda path: None) is None
    return store_key_at(Frame(FILE, 2, "wait"), lambda path: source, values)


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ('return self.store.get(f"export/{step}").decode()', 'f"export/{step}"', "export/15"),
        ('store.wait(["ready"], timedelta(seconds=5))', '"ready"', "ready"),
        ('store.wait(["ready", "set"])', '["ready", "set"]', ""),
        ("dist.PrefixStore('a', store).get(name)", "name", "run/7"),
        ("_get_default_store().get('epoch/' + str(step))", "'epoch/' + str(step)", ""),
        ("store.get('epoch/' + name)", "'epoch/' + name", "epoch/run/7"),
        ("store.get(other)", "other", ""),
        ("st = dist.TCPStore(host, 1); st.wait(['go'])", "'go'", "go"),
    ],
)
def test_store_key_and_value_are_read_from_line(line: str, text: str, value: str) -> None:
    key = key_of(line, **LOCALS)
    assert key is not None and (key.text, key.value) == (text, value)
    unknown = key_of(line)
    assert unknown is not None and unknown.text == text


@pytest.mark.parametrize(
    "line", ["self.cache.get('ready')", "store.set('ready', '1')", "store.get()", "broken(", "q = Queue(); q.get(9)"]
)
def test_line_without_store_wait_has_no_key(line: str) -> None:
    assert key_of(line) is None


@pytest.mark.parametrize(
    ("setter", "set_at"),
    [
        ('store.set(f"export/{number}", path)', (4,)),
        ('self.store.compare_set(f"export/{step}", "", path)', (4,)),
        ('store.set("export", path)', ()),
        ('cache.set(f"export/{step}", path)', ()),
    ],
)
def test_store_key_lists_lines_that_set_it(setter: str, set_at: tuple[int, ...]) -> None:
    key = key_of(f'store.get(f"export/{{step}}")\ndef write(store, number):\n    {setter}')
    assert key is not None and tuple(frame.line for frame in key.set_at) == set_at


# --- locks, and receivers of calls ------------------------------------------------------------------------------------

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
def test_lock_of_line_is_recognized(line: int, found: LockTaken | None) -> None:
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


def test_value_is_traced_to_named_calls_only() -> None:
    names = ("isend", "irecv", "batch_isend_irecv")
    waits = [number for number, line in enumerate(GIVEN.splitlines(), 1) if "wait(" in line]
    result_lines = [line for line in waits if is_result_of(Frame("/x.py", line, "f"), names, lambda path: GIVEN)]
    assert result_lines == [
        line for line in waits if line <= GIVEN.splitlines().index("def of_others(ops, group, given):")
    ]
    assert not is_result_of(Frame("/x.py", 2, "f"), names, lambda path: None)
