"""A small file that several processes change: private, bounded, whole, and nobody else's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from safelaunch.system.private_file import NotOurs, PrivateFile


def decode(data: bytes) -> tuple[str, ...]:
    found = json.loads(data)
    if not isinstance(found, list):
        raise ValueError("no list")
    return tuple(found)


def encode(entries: tuple[str, ...]) -> bytes:
    return json.dumps(entries).encode()


def file_in(directory: Path, **bounds: int) -> PrivateFile[str]:
    return PrivateFile(directory / "names.json", decode, encode, **bounds, lock_patience_s=60.0)


def add(file: PrivateFile[str], name: str) -> bool:
    return file.update(lambda names: (*names, name))


def test_what_is_added_is_read_again_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    file, before = file_in(tmp_path), os.umask(0)
    try:
        assert file.read() == ()
        assert add(file, "a") and add(file, "b")
    finally:
        os.umask(before)
    assert file.read() == ("a", "b")
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "names.json": 0o600,
        "names.lock": 0o600,
    }


def test_it_is_bounded_by_entries_and_by_bytes(tmp_path: Path) -> None:
    for number in range(8):
        add(file_in(tmp_path, most_entries=5), str(number))
    assert file_in(tmp_path).read() == ("3", "4", "5", "6", "7")
    small = file_in(tmp_path, most_bytes=26)
    add(small, "8")
    assert small.path.stat().st_size <= 26
    assert small.read()[-1] == "8"
    add(small, "much longer than the file may be")
    assert small.read() == (), "and it is no reason to fail"


def test_what_has_not_changed_is_not_written(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    written = file.path.stat().st_ino
    assert file.update(lambda names: names)
    assert file.path.stat().st_ino == written


@pytest.mark.parametrize(
    "content", [b"", b"[", b"\xff\xfe", b"{}", b'["a", "b', b"[" * 100_000, b"\0" * 4096, b" " * (2 << 20) + b"[]"]
)
def test_a_damaged_file_holds_nothing_is_replaced_and_told_of(tmp_path: Path, content: bytes) -> None:
    file = file_in(tmp_path)
    file.path.write_bytes(content)
    assert file.read() == ()
    assert not add(file, "a")
    assert add(file, "b")
    assert file.read() == ("a", "b")


@pytest.mark.parametrize("length", range(11))
def test_a_file_cut_anywhere_is_damaged_not_half_read(tmp_path: Path, length: int) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    add(file, "b")
    whole = file.path.read_bytes()
    assert len(whole) > length or length == 10
    os.truncate(file.path, min(length, len(whole) - 1))
    assert file.read() == ()


@pytest.mark.parametrize("what", ["names.json", "names.lock"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "directory", "foreign"])
def test_what_others_put_there_is_neither_read_nor_replaced(tmp_path: Path, what: str, kind: str) -> None:
    file, path, elsewhere = file_in(tmp_path), tmp_path / what, tmp_path / "elsewhere"
    add(file, "a")
    path.rename(elsewhere)
    before = elsewhere.read_bytes()
    if kind == "foreign":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(elsewhere, 12345, -1)
    make = {
        "link": lambda: path.symlink_to(elsewhere),
        "hard link": lambda: path.hardlink_to(elsewhere),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "foreign": lambda: elsewhere.rename(path),
    }
    make[kind]()
    with pytest.raises(OSError):
        add(file, "b")
    if what == "names.json":
        with pytest.raises(OSError):
            file.read()
    else:
        assert file.read() == ("a",)
    kept = path if kind == "foreign" else elsewhere
    assert kept.read_bytes() == before
    assert not (tmp_path / "names.json.partial").exists()


def test_a_link_in_the_way_of_the_write_is_not_followed(tmp_path: Path) -> None:
    file, elsewhere = file_in(tmp_path), tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (tmp_path / "names.json.partial").symlink_to(elsewhere)
    assert add(file, "a")
    assert elsewhere.read_bytes() == b"precious"
    assert file.read() == ("a",)


def test_what_the_reader_wants_left_alone_stays(tmp_path: Path) -> None:
    def newer(data: bytes) -> tuple[str, ...]:
        raise NotOurs("a newer safelaunch wrote it")

    add(file_in(tmp_path), "a")
    with pytest.raises(NotOurs, match="newer"):
        add(PrivateFile(tmp_path / "names.json", newer, encode), "b")
    assert file_in(tmp_path).read() == ("a",)


def test_a_change_that_fails_leaves_the_file_and_frees_the_lock(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    with pytest.raises(ZeroDivisionError):
        file.update(lambda names: names[: 1 // 0])
    assert add(file, "b")


def test_somebody_who_holds_the_lock_is_waited_for(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    with (tmp_path / "names.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="holds its lock"):
            add(PrivateFile(file.path, decode, encode, lock_patience_s=0.05), "never")
        thread = threading.Thread(target=lambda: add(file, "b"))
        thread.start()
        fcntl.flock(held, fcntl.LOCK_UN)
        thread.join(60)
    assert file.read() == ("a", "b")


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_system_private_file import add, file_in
for number in range(10):
    assert add(file_in(Path(sys.argv[2])), f"{sys.argv[3]}.{number}")
"""
READER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_system_private_file import file_in
seen = 0
while seen < 80:
    now = len(file_in(Path(sys.argv[2])).read())
    assert now >= seen, (now, seen)  # a file that is half written holds nothing
    seen = now
"""


def start(program: str, directory: Path, *words: str) -> subprocess.Popen[bytes]:
    here = os.fspath(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", program, here, os.fspath(directory), *words], stderr=subprocess.PIPE)


def test_eight_writers_at_once_lose_nothing_and_a_reader_sees_whole_files(tmp_path: Path) -> None:
    running = [start(READER, tmp_path), *(start(WRITER, tmp_path, str(number)) for number in range(8))]
    for process in reversed(running):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    assert sorted(file_in(tmp_path).read()) == sorted(f"{one}.{number}" for one in range(8) for number in range(10))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_system_private_file import add, file_in
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
add(file_in(Path(sys.argv[2])), "b")
"""


def test_a_writer_killed_before_its_rename_costs_only_its_entry(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    killed = start(KILLED, tmp_path)
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    assert (tmp_path / "names.json.partial").exists()
    assert add(file, "c")
    assert file.read() == ("a", "c")
    assert len(list(tmp_path.iterdir())) == 2


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_system_private_file import add, file_in
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
try:
    add(file_in(Path(sys.argv[2])), "b" * 100)
except OSError as error:
    print(error.errno)
"""


def test_a_disk_that_takes_no_more_costs_the_new_entry_alone(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    add(file, "a")
    full = subprocess.run(
        [sys.executable, "-c", FULL, os.fspath(Path(__file__).parent), os.fspath(tmp_path)],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert int(full.stdout) == errno.EFBIG, full.stderr
    assert file.read() == ("a",)
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left of the write"


@pytest.mark.skipif(bool(os.geteuid()), reason="needs root, to mount a tmpfs")
def test_a_full_disk_costs_the_new_entry_alone(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        file = file_in(tmp_path)
        add(file, "a")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(b"x" * 65536)
        with pytest.raises(OSError, match="No space left"):
            add(file, "b")
        assert file.read() == ("a",)
        assert not (tmp_path / "names.json.partial").exists()
        (tmp_path / "filler").unlink()
        assert add(file, "c")
        assert file.read() == ("a", "c")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
