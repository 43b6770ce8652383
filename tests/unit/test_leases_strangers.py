"""Lease directory with everything that another user can put there: no job is blocked, and no content is trusted."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from safelaunch.beacon import descriptors as beacon
from safelaunch.cli import gpus as command
from safelaunch.leases import gpus, holder, lease, ports
from safelaunch.leases.choose import GpuRequest, Inventory, LeasableGpu
from safelaunch.leases.gpus import LeaseRequest, Survey
from safelaunch.leases.holder import LeaseHolder, look, ourselves
from safelaunch.leases.lease import Lease, is_locked
from safelaunch.leases.queue import MOST_EACH
from safelaunch.leases.store import LeaseStore
from tests.support import strangers
from tests.support.strangers import MINE, STRANGER, stranger, words

A, B = "GPU-aaaa", "GPU-bbbb"
TICKET = "ticket.00000000000000000001.1"
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="takes root to be several users")


class Said(list[str]):
    """Messages of the store, which the user sees unchanged."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Directory that another user can enter as well."""
    with strangers.open_place() as place:
        yield place


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def store(tmp_path: Path, said: Said) -> LeaseStore:
    (tmp_path / "precious").write_text("precious")
    place = tmp_path / "leases"
    place.mkdir()
    place.chmod(0o1777)
    return LeaseStore(os.fspath(place), said.append)


def place(store: LeaseStore) -> Path:
    return Path(store.directory)


def take(store: LeaseStore, *keys: str) -> Lease | None:
    def pick(leases: Mapping[str, LeaseHolder]) -> Sequence[str] | None:
        return None if leases else keys

    return store.attempt(keys, pick, ourselves("", "mine.py")).lease


def is_stalled(store: LeaseStore, said: Said) -> None:
    """Checks that everything can be queried and B can be leased, with at most one message and no terminal sequences."""
    begin = time.monotonic()
    leases, waiting = store.look([A, B]), store.waiting()
    shown = [holder.lease_words(lease_holder) for lease_holder in (*leases.values(), *waiting)]
    rows = command.rows([LeasableGpu("0", A), LeasableGpu("1", B)], leases, {})
    shown += [*command.as_table(rows).lines(), *map(command.waiting_line, waiting)]
    assert len(said) <= 1 and all(line.isprintable() for line in (*said, *shown))
    lease = take(store, B)
    assert lease is not None and set(store.look([B])) == {B}
    lease.release()
    assert time.monotonic() - begin < 60.0


@pytest.mark.slow
@pytest.mark.parametrize("what", strangers.contents())
def test_hostile_ticket_does_not_block_leases(what: str, store: LeaseStore, said: Said) -> None:
    with stranger(lambda: strangers.locked(place(store) / TICKET, strangers.contents()[what])):
        if not store.waiting():  # otherwise the ticket is valid and is waited for
            is_stalled(store, said)
            assert len(said) == 1 and TICKET in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", strangers.contents())
def test_hostile_holder_is_shown_by_its_uid(what: str, store: LeaseStore, said: Said) -> None:
    text = strangers.contents()[what]
    with stranger(lambda: strangers.locked(place(store) / f"{A}.{STRANGER}", text)):
        assert store.look([A])[A].uid == STRANGER
        is_stalled(store, said)


@pytest.mark.parametrize("name", [*strangers.NAMES, *map(os.fsdecode, strangers.UNDECODABLE)])
def test_lease_file_with_hostile_name_does_not_block(name: str, store: LeaseStore, said: Said) -> None:
    text = strangers.encoded(words(candidates=[A], count=1))
    with stranger(lambda: strangers.locked(place(store) / name, text)):
        is_stalled(store, said)
        # The file has a name of A, so some user has A; the kernel knows which one.
        assert {lease_holder.uid for lease_holder in store.look([A]).values()} <= {STRANGER}


@pytest.mark.parametrize("what", strangers.things())
@pytest.mark.parametrize("name", [TICKET, f"{A}.{MINE}", f"{B}.{MINE}", f"{B}.{MINE}.ranks"])
def test_lease_entries_that_are_no_files_do_not_block(
    what: str, name: str, store: LeaseStore, said: Said, tmp_path: Path
) -> None:
    if name.startswith(B) and "file" in what and "link" not in what:
        name = name.replace(B, A)  # a locked file of the other user is a valid lease
    with stranger(lambda: strangers.things()[what](place(store) / name)):
        is_stalled(store, said)
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "new").exists()


def test_thousands_of_lease_files_do_not_block(store: LeaseStore, said: Said) -> None:
    def flood() -> list[int]:
        for number in range(10_000):
            (place(store) / f"{(A, B, 'ticket')[number % 3]}.{number:020d}.1").touch()
        return [strangers.locked(place(store) / f"ticket.{number:020d}.2", b"[") for number in range(500)]

    with stranger(flood):
        is_stalled(store, said)


@ROOT
def test_queue_entries_per_user_are_limited(store: LeaseStore, said: Said) -> None:
    """Only a limited number of a user's tickets counts."""
    text = strangers.encoded(words(candidates=["GPU-cccc"]))

    def flood() -> list[int]:
        return [strangers.locked(place(store) / f"ticket.{n:020d}.1", text) for n in range(MOST_EACH + 50)]

    with stranger(flood):
        ticket = store.queue([A, B], 1, ourselves("", "mine.py"))
        assert [waiter.command for waiter in store.waiting()] == ["theirs.py"] * MOST_EACH + ["mine.py"]
        assert len(said) == 1 and "more than" in said[0]
        store.leave(ticket)


def test_lease_files_changing_during_read_are_sanitized(store: LeaseStore, said: Said) -> None:
    descriptors: list[int] = []

    def plant() -> None:
        descriptors.append(strangers.locked(place(store) / TICKET, strangers.encoded(words(count=float("inf")))))
        descriptors.append(strangers.locked(place(store) / f"{A}.{STRANGER}-3", b""))

    def rewrite() -> None:
        for fd in descriptors:
            os.truncate(fd, 0)
            os.pwrite(fd, strangers.encoded(words(command="\x1b[2J" * 100)), os.getpid() % 7)
            os.truncate(fd, 1 << 30)

    with stranger(plant, again=rewrite):
        for _ in range(20):
            held_by, _ = store.look([A, B]), store.waiting()
            assert [lease_holder.uid for lease_holder in held_by.values()] == [STRANGER]
            assert all(holder.lease_words(lease_holder).isprintable() for lease_holder in held_by.values())


# --- locks ------------------------------------------------------------------------------------------------------------


@ROOT
def test_lease_lock_of_other_user_on_own_file_does_not_count(store: LeaseStore, said: Said) -> None:
    """The other user can read the file and so can lock it. This lock holds nothing, and the next name is used."""
    lease = take(store, A)
    assert lease is not None
    lease.release()
    of_ours = [path for path in place(store).iterdir() if path.name.startswith(A)]
    with stranger(lambda: [strangers.lock_for_reading(path) for path in of_ours]):
        assert store.look([A]) == {}
        lease = take(store, A)
        assert lease is not None and store.look([A])[A].uid == MINE
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(write)
            lease.forget()
            beacon.hold(os.pathsep.join(lease.rank_files))
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        while not beacon_holds(lease):
            time.sleep(0.001)
        lease.release()
        assert store.look([A])[A].by == "ranks"
        os.close(write)
        os.waitpid(pid, 0)
        assert store.look([A]) == {}
    assert said == []


def beacon_holds(lease: Lease) -> bool:
    path = Path(lease.rank_files[0])
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        return is_locked(path.name, directory)
    finally:
        os.close(directory)


@ROOT
def test_lease_holder_text_comes_only_from_its_own_file(store: LeaseStore) -> None:
    """The other user holds ``GPU-aaaa.0.ranks``, next to an own file that has the last command."""
    lease = take(store, A)
    assert lease is not None
    lease.release()
    (place(store) / f"{A}.{MINE}.ranks").unlink()
    with stranger(lambda: strangers.locked(place(store) / f"{A}.{MINE}.ranks")):
        (holder,) = store.look([A]).values()
    assert (holder.uid, holder.command, holder.pid) == (STRANGER, "", 0)


@ROOT
def test_holder_that_claims_own_pid_is_still_shown(store: LeaseStore) -> None:
    inventory = Inventory((LeasableGpu("0", A),))
    text = strangers.encoded(words(pid=os.getpid()))
    with stranger(lambda: strangers.locked(place(store) / f"{A}.{STRANGER}", text)):
        claim = LeaseRequest(
            store,
            GpuRequest(inventory.gpus, 1, "--gpus 1"),
            ourselves("", ""),
            Survey(inventory, lambda: inventory, lambda: 0.0),
        )
        assert claim.advance() is None
        assert "theirs.py" in gpus.table(claim, {os.getpid()})


def test_gate_locked_by_other_user_delays_once(store: LeaseStore, said: Said) -> None:
    def keep() -> int:
        gate = os.open(store.directory, os.O_RDONLY)
        fcntl.flock(gate, fcntl.LOCK_EX)
        return gate

    with stranger(keep):
        begin = time.monotonic()
        for _ in range(20):
            store.look([A])
            lease = take(store, B)
            assert lease is not None
            lease.release()
        assert time.monotonic() - begin < 18.0, "a second each time would take 40 s"
    assert len(said) == 1 and "fuser" in said[0]


def test_queue_can_be_left_if_directory_is_unusable(store: LeaseStore, tmp_path: Path) -> None:
    ticket = store.queue([A], 1, ourselves("", "mine.py"))
    place(store).rename(tmp_path / "gone")
    place(store).write_text("in the way")
    store.leave(ticket)
    assert ticket.descriptor == -1
    assert LeaseStore(os.fspath(tmp_path / "gone")).waiting() == []


# --- ports and processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@ROOT
def test_thousands_of_ports_leased_by_other_user_are_skipped(store: LeaseStore, said: Said) -> None:
    """One look skips them all."""
    wanted = list(ports.candidates("", ""))[:5000]

    def lease() -> list[int]:

        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        descriptors = []
        with suppress(OSError):  # as many as the limit allows
            for port in wanted:
                descriptors.append(strangers.locked(place(store) / f"port-{port}.{STRANGER}"))
        return descriptors

    with stranger(lease):
        begin = time.monotonic()
        taken = ports.take(store, 2, ourselves("", "mine.py"))
        assert time.monotonic() - begin < 60.0 and len(set(taken.ports)) == 2
        taken.release()


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "", "x", "1e9", "99999999999999"])
def test_process_with_invalid_supervisor_pid_is_not_left_over(number: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={"SAFELAUNCH_SUPERVISOR_PID": number},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    user = look(process.pid)
    process.communicate(b"\n")
    assert user.command and not user.left_over


@ROOT
def test_lease_file_with_taken_names_gets_another(store: LeaseStore) -> None:
    where = Path(store.directory)
    base = "port-20000"

    def deed() -> list[Path]:
        taken = [where / f"{base}.{MINE}", *(where / f"{base}.{MINE}-{number}" for number in range(1, 100))]
        for path in taken:
            path.mkdir()
        return taken

    with stranger(deed):
        directory = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            descriptor, name = lease.take_own(base, directory)
        finally:
            os.close(directory)
        os.close(descriptor)
    assert name.startswith(f"{base}.{MINE}-")


@ROOT
def test_lease_file_with_kernel_lease_is_skipped(store: LeaseStore) -> None:
    where = Path(store.directory)

    def deed() -> int:
        descriptor = os.open(where / f"port-20000.{MINE}", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return descriptor

    with stranger(deed):
        directory = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            descriptor, name = lease.take_own("port-20000", directory)
        finally:
            os.close(directory)
        os.close(descriptor)
    assert name == f"port-20000.{MINE}-1"
