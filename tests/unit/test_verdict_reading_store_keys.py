"""The key of a store that a line waits for."""

from __future__ import annotations

import pytest

from safelaunch.model import Frame
from safelaunch.verdict.reading.innermost import StoreKey, store_key_at

FILE = "/home/me/train.py"
LOCALS = {"step": "15", "name": "'run/7'"}


def key_of(line: str, **values: str) -> StoreKey | None:
    source = f"def wait(self, step):\n    {line}\n"
    assert store_key_at(Frame(FILE, 2, "wait"), lambda path: None) is None
    return store_key_at(Frame(FILE, 2, "wait"), lambda path: source, values)


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ('return self.store.get(f"export/{step}").decode()', "f'export/{step}'", "export/15"),
        ('store.wait(["ready"], timedelta(seconds=5))', "'ready'", "ready"),
        ('store.wait(["ready", "set"])', "['ready', 'set']", ""),
        ("dist.PrefixStore('a', store).get(name)", "name", "run/7"),
        ("_get_default_store().get('epoch/' + str(step))", "'epoch/' + str(step)", ""),
        ("store.get('epoch/' + name)", "'epoch/' + name", "epoch/run/7"),
        ("store.get(other)", "other", ""),
        ("st = dist.TCPStore(host, 1); st.wait(['go'])", "'go'", "go"),
    ],
)
def test_the_key_of_a_store(line: str, text: str, value: str) -> None:
    found = key_of(line, **LOCALS)
    assert found is not None and (found.text, found.value) == (text, value)
    unknown = key_of(line)
    assert unknown is not None and unknown.text == text


@pytest.mark.parametrize(
    "line", ["self.cache.get('ready')", "store.set('ready', '1')", "store.get()", "broken(", "q = Queue(); q.get(9)"]
)
def test_what_waits_for_no_key(line: str) -> None:
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
def test_the_lines_that_set_it(setter: str, set_at: tuple[int, ...]) -> None:
    found = key_of(f'store.get(f"export/{{step}}")\ndef write(store, number):\n    {setter}')
    assert found is not None and tuple(frame.line for frame in found.set_at) == set_at
