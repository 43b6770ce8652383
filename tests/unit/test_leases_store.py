"""Leases with real locks: what frees them, queues, and obstacles made by other users."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from safelaunch.beacon import descriptors as beacon
from safelaunch.job.plan import HELD_LEASES
from safelaunch.leases import store as store_module
from safelaunch.leases.holder import MAGIC, LeaseHolder, decode, ourselves
from safelaunch.leases.lease import Lease, inherited
from safelaunch.leases.store import LeaseStore
from safelaunch.system.errors import StoreError

A, B = "GPU-aaaa", "GPU-bbbb"
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="takes root to be several users")


@pytest.fixture
def store(tmp_path: Path) -> LeaseStore:
    return LeaseStore(os.fspath(tmp_path / "leases"))


def about(command: str = "train.py") -> LeaseHolder:
    return ourselves("", command)


def all_of(*keys: str) -> Callable[[Mapping[str, LeaseHolder]], Sequence[str] | None]:
    return lambda leases: None if leases else keys


def take(store: LeaseStore, *keys: str) -> Lease | None:
    return store.attempt(keys, all_of(*keys), about()).lease


def taken(store: LeaseStore, *keys: str) -> Lease:
    lease = take(store, *keys)
    assert lease is not None
    return lease


@contextmanager
def elsewhere(function: Callable[[], object]) -> Iterator[int]:
    """Yields the pid of a child that has called ``function`` and stays until the block ends."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ready[0])
        os.close(go[1])
        try:
            kept = function()
            os.write(ready[1], b"!")
            os.read(go[0], 1)
            del kept
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(go[0])
    try:
        assert os.read(ready[0], 1) == b"!", "the child failed"
        yield pid
    finally:
        os.close(ready[0])
        os.close(go[1])
        try:
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def in_child(function: Callable[[], object]) -> object:
    """Returns the JSON value that ``function`` returns in a child process."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# --- taking and freeing -----------------------------------------------------------------------------------------------


def test_leased_key_is_taken_until_released(store: LeaseStore) -> None:
    lease = taken(store, A)
    assert lease.keys == (A,)
    leases = store.look([A, B])
    assert list(leases) == [A]
    assert (leases[A].pid, leases[A].command, leases[A].by, leases[A].uid) == (
        os.getpid(), "train.py", "supervisor", os.getuid(),
    )  # fmt: skip
    assert leases[A].since_unix_s > 1e9
    assert take(store, A) is None
    assert take(store, A, B) is None, "all or nothing"
    assert B not in store.look([B])
    lease.release()
    assert store.look([A]) == {}
    again = taken(store, A, B)
    again.release()


def test_lease_look_creates_no_directory(store: LeaseStore) -> None:
    assert (store.look([A]), store.waiting()) == ({}, [])
    assert not Path(store.directory).exists()


def test_lease_directory_is_shared_under_any_umask(store: LeaseStore) -> None:
    before = os.umask(0o077)
    try:
        lease = take(store, A)
    finally:
        os.umask(before)
    assert lease is not None
    assert stat.S_IMODE(Path(store.directory).stat().st_mode) == 0o1777
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(store.directory).iterdir()}
    assert set(modes.values()) == {0o644} and len(modes) == 2
    lease.release()


def test_lease_of_killed_holder_is_free(store: LeaseStore) -> None:
    with elsewhere(lambda: take(store, A, B)) as pid:
        assert {lease_holder.pid for lease_holder in store.look([A, B]).values()} == {pid}
        end(pid)
        assert store.look([A, B]) == {}


def test_lease_lasts_until_last_sharer_ends(store: LeaseStore) -> None:
    """The guardian is forked with the lock."""
    lease = taken(store, A)
    with elsewhere(lambda: None) as pid:
        lease.forget()
        assert A in store.look([A])
        end(pid)
        assert store.look([A]) == {}


def test_lease_release_frees_inherited_locks(store: LeaseStore) -> None:
    lease = taken(store, A)
    with elsewhere(lambda: None):
        lease.release()
        assert store.look([A]) == {}


def test_lease_is_held_by_ranks_after_supervisor(store: LeaseStore) -> None:
    lease = taken(store, A)
    paths = os.pathsep.join(lease.rank_files)
    with elsewhere(lambda: (lease.forget(), beacon.hold(paths))) as rank:
        with elsewhere(lambda: (lease.forget(), beacon.hold(paths))) as other:
            lease.release()
            assert store.look([A])[A].by == "ranks"
            assert take(store, A) is None
            end(rank)
            assert store.look([A])[A].by == "ranks"
            end(other)
        assert store.look([A]) == {}


def test_lease_survives_script_that_closes_descriptors(store: LeaseStore) -> None:
    lease = taken(store, A)
    paths = os.pathsep.join(lease.rank_files)

    def daemonize() -> None:
        beacon.hold(paths)
        keep = [fd for fd in range(3, 200) if _is_pipe(fd)]
        for low in range(3, 200):
            if low not in keep:
                try:
                    os.close(low)
                except OSError:
                    pass
        os.closerange(200, 4096)

    with elsewhere(daemonize):
        lease.release()
        assert store.look([A])[A].by == "ranks"


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_beacon_ignores_lease_files_it_cannot_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    beacon.hold(os.pathsep.join(["", "/nonexistent/x", str(tmp_path / "fifo"), str(tmp_path / "link"), str(tmp_path)]))
    assert beacon._protected == {}


# --- handover ---------------------------------------------------------------------------------------------------------

ADOPT = """
import os, sys
from safelaunch.leases.lease import inherited
lease = inherited(os.environ, sys.argv[1])
print(",".join(lease.keys) if lease else "nothing", flush=True)
sys.stdin.read()
if lease: lease.release()
"""


def child(store: LeaseStore, variables: Mapping[str, str], fds: tuple[int, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ADOPT, store.directory],
        env={**os.environ, **variables},
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_lease_is_handed_over_to_child(store: LeaseStore) -> None:
    lease = taken(store, A, B)
    with child(store, *lease.hand_over()) as process:
        assert process.stdout is not None
        lease.forget()
        assert process.stdout.readline() == f"{A},{B}\n"
        assert set(store.look([A, B])) == {A, B}
        process.communicate("")
    assert store.look([A, B]) == {}


def test_lease_is_not_inherited_without_its_lock(store: LeaseStore, tmp_path: Path) -> None:
    lease = taken(store, A)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    same = os.open(Path(store.directory) / f"{A}.{os.getuid()}", os.O_RDWR)  # the file without its lock
    free = os.open(Path(store.directory) / f"{A}.{os.getuid()}.ranks", os.O_RDWR)
    for word in (f"{other}:{A}", f"{same}:{A}", f"{free}:{A}", f"999:{A}", "x", f"{os.dup(lease.descriptors[0])}:{B}"):
        assert inherited({HELD_LEASES: word}, store.directory) is None, word
    assert A in store.look([A])
    lease.release()
    os.close(other), os.close(same), os.close(free)


# --- obstacles made by other users ------------------------------------------------------------------------------------


def plant(store: LeaseStore, kind: str, tmp_path: Path) -> Path:
    directory = Path(store.directory)
    directory.mkdir(mode=0o1777)
    victim = tmp_path / "precious"
    victim.write_text("precious")
    for name in (f"{A}.{os.getuid()}", f"{A}.{os.getuid()}.ranks"):
        if kind == "link":
            (directory / name).symlink_to(victim)
        elif kind == "dangling link":
            (directory / name).symlink_to(tmp_path / "new")
        elif kind == "hard link":
            (directory / name).hardlink_to(victim)
        elif kind == "FIFO":
            os.mkfifo(directory / name)
        elif kind == "directory":
            (directory / name).mkdir()
        else:
            (directory / name).write_text("theirs")
            os.chown(directory / name, 12345, 12345)
    return victim


@pytest.mark.parametrize(
    "kind",
    ["link", "dangling link", "hard link", "FIFO", "directory", pytest.param("another user's file", marks=ROOT)],
)
def test_planted_lease_files_are_skipped(store: LeaseStore, tmp_path: Path, kind: str) -> None:
    victim = plant(store, kind, tmp_path)
    lease = taken(store, A)
    assert set(store.look([A])) == {A} and take(store, A) is None
    paths = os.pathsep.join(lease.rank_files)
    with elsewhere(lambda: (lease.forget(), beacon.hold(paths))):
        lease.release()
        assert store.look([A])[A].by == "ranks"
    assert store.look([A]) == {}
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()


@ROOT
def test_lease_of_other_user_cannot_be_taken_or_removed(store: LeaseStore, tmp_path: Path) -> None:
    """No user can take another user's lease, or remove its files."""
    for parent in (tmp_path, *tmp_path.parents):
        if stat.S_IMODE(parent.stat().st_mode) & 0o005 != 0o005 and parent.stat().st_uid == 0:
            parent.chmod(0o755)

    def as_user(uid: int, function: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return function()

        return call

    def is_taken() -> bool:
        lease = take(store, A)
        return lease is None

    def sabotage() -> list[str]:
        done = []
        for path in Path(store.directory).iterdir():
            for deed in (path.unlink, lambda path=path: path.write_text("x"), lambda path=path: path.rename("/tmp/x")):
                try:
                    deed()
                    done.append(str(path))
                except PermissionError:
                    continue
        return done

    take_b = taken(store, B)  # root creates the directory
    with elsewhere(as_user(2001, lambda: take(store, A))) as pid:
        assert in_child(as_user(2002, is_taken)) is True
        assert in_child(as_user(2002, sabotage)) == []
        assert (store.look([A])[A].uid, store.look([A])[A].pid) == (2001, pid)
        end(pid)
        assert in_child(as_user(2002, is_taken)) is False
    take_b.release()


@ROOT
@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_lease_directory_of_other_user_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "leases"
    place.mkdir()
    place.chmod(mode)
    os.chown(place, 12345, 12345)
    with pytest.raises(StoreError, match="cannot share it safely"):
        take(LeaseStore(os.fspath(place)), A)


def test_lease_directory_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(store_module, "DIRECTORY", os.fspath(tmp_path / "link"))
    with pytest.raises(StoreError, match="no leases can be taken"):
        take(LeaseStore(os.fspath(tmp_path / "link")), A)
    assert not list((tmp_path / "real").iterdir())


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff\xfe", b"[1]", b"[" * 3000, b'{"pid": -1, "command": 7, "since_unix_s": "x", "name": null}',
     b'{"pid": 1e300, "since_unix_s": NaN, "command": "\\u001b[31mred\\u0007"}'],
)  # fmt: skip
def test_lease_file_content_is_sanitized(said: bytes) -> None:
    holder = decode(said, 0)
    assert (holder.pid, holder.since_unix_s, holder.uid) == (0, 0.0, 0)
    assert holder.command.isprintable()


def test_lease_holder_survives_round_trip() -> None:
    holder = LeaseHolder(7, 9, "name", "train.py --x 'ä\n'", 12.5, 3)
    assert holder.encode().startswith(MAGIC)
    assert decode(holder.encode(), 3) == LeaseHolder(7, 9, "name", "train.py --x 'ä '", 12.5, 3)


# --- gate -------------------------------------------------------------------------------------------------------------


def test_lease_gate_that_stays_locked_is_bypassed(store: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call waits for the gate, the next one doesn't."""
    monkeypatch.setattr(store_module, "GATE_DEADLINE_S", 0.05)
    messages: list[str] = []
    store = LeaseStore(store.directory, messages.append)
    lease = taken(store, A)
    gate = os.open(store.directory, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_EX)
    assert list(store.look([A, B])) == [A]
    monkeypatch.setattr(store_module, "GATE_DEADLINE_S", 1000.0)
    assert take(store, A) is None
    other = taken(store, B)
    assert set(store.look([A, B])) == {A, B}
    assert (
        len(messages) == 1
        and f"fuser {store.directory} shows it" in messages[0]
        and "continuing without it" in messages[0]
    )
    os.close(gate)
    lease.release(), other.release()


def test_lease_without_gate_is_never_held_twice(store: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes take and release the same keys as fast as possible; each key is a byte of the file."""
    monkeypatch.setattr(store_module, "SHUT_S", 1000.0)
    monkeypatch.setattr(store_module, "GATE_DEADLINE_S", 0.0)
    Path(store.directory).mkdir(mode=0o1777)
    gate = os.open(store.directory, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_EX)

    def compete() -> list[int]:
        counts = [0, 0]
        own = LeaseStore(store.directory, lambda text: None)
        while sum(counts) < 50:
            lease = take(own, A, B)
            if lease is None:
                continue
            witness = os.open(f"{store.directory}/../witness", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
                counts[0] += 1
            except BlockingIOError:
                counts[1] += 1
            time.sleep(0.0005)
            os.close(witness)
            lease.release()
        return counts

    read, write = os.pipe()
    pids = []
    for _ in range(4):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                os.write(write, (json.dumps(compete()) + "\n").encode())
            finally:
                os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        taken, twice = (sum(column) for column in zip(*map(json.loads, file), strict=True))
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(gate)
    assert (taken, twice) == (200, 0)


def _has_open(pid: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the process closes some of them at the same time
        return path in map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_lease_directory_removed_during_gate_wait_is_recreated(store: LeaseStore, tmp_path: Path) -> None:
    first = taken(store, A)
    gate = os.open(store.directory, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_EX)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(gate)  # an open descriptor would hold the lock
            os.write(write, b"-")
            os.write(write, b"taken" if take(store, B) else b"not")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"-"
    while not _has_open(pid, store.directory):
        time.sleep(0.001)
    Path(store.directory).rename(tmp_path / "old")
    os.close(gate)
    assert os.read(read, 5) == b"taken"
    os.waitpid(pid, 0)
    assert {path.name.partition(".")[0] for path in Path(store.directory).iterdir()} == {B}
    os.close(read)
    first.release()


# --- queue ------------------------------------------------------------------------------------------------------------


def test_lease_queue_is_first_come_first_served(store: LeaseStore) -> None:
    lease = taken(store, A)
    first = store.queue([A, B], 1, about("first"))
    second = store.queue([A, B], 1, about("second"))
    assert [waiter.command for waiter in store.waiting()] == ["first", "second"]
    lease.release()
    late = store.attempt([A], all_of(A), about())
    assert late.lease is None and late.ahead is not None and late.ahead.command == "first"
    assert store.attempt([A], all_of(A), about(), second).lease is None
    queued_lease = store.attempt([A], all_of(A), about(), first).lease
    assert queued_lease is not None
    assert [waiter.command for waiter in store.waiting()] == ["second"]
    queued_lease.release()
    queued_lease = store.attempt([A], all_of(A), about(), second).lease
    assert queued_lease is not None and store.waiting() == []
    queued_lease.release()
    assert not list(Path(store.directory).glob("ticket.*"))


def test_waiter_reserves_only_the_key_it_needs(store: LeaseStore) -> None:
    """GPU A is held for days, and a waiter wants only A. A job that can use B doesn't wait for it."""
    lease = taken(store, A)
    ticket = store.queue([A], 1, about("wants A"))

    def any_of(leases: Mapping[str, LeaseHolder]) -> Sequence[str] | None:
        return next(([key] for key in (A, B) if key not in leases), None)

    other = store.attempt([A, B], any_of, about()).lease
    assert other is not None and other.keys == (B,)
    lease.release()
    promised = store.attempt([A, B], any_of, about())
    assert promised.lease is None and (promised.held[A].by, promised.held[A].command) == ("waiter", "wants A")
    queued_lease = store.attempt([A], all_of(A), about(), ticket).lease
    assert queued_lease is not None
    queued_lease.release(), other.release()


def test_lease_of_other_key_does_not_wait_for_queue(store: LeaseStore) -> None:
    ticket = store.queue([A], 1, about())
    lease = taken(store, B)
    assert take(store, A, B) is None
    store.leave(ticket)
    lease.release()


def test_killed_waiter_does_not_block_queue(store: LeaseStore) -> None:
    with elsewhere(lambda: store.queue([A, B], 1, about("killed"))) as pid:
        assert take(store, A) is None
        end(pid)
        lease = taken(store, A)
        lease.release()
    assert not list(Path(store.directory).glob("ticket.*")), "its ticket is removed by the next"


def test_stopped_waiter_does_not_block_queue(store: LeaseStore) -> None:
    with elsewhere(lambda: store.queue([A, B], 1, about("stopped"))) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        lease = taken(store, A)
        lease.release()
        os.kill(pid, signal.SIGCONT)
        os.waitid(os.P_PID, pid, os.WCONTINUED)
        assert take(store, A) is None, "it has its place again"
