"""Staging, publication and retention of bundles."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from safelaunch.bundle import copier
from safelaunch.bundle.publication import (
    BundleOwner,
    Publication,
    Retention,
    check_directory,
    name_of,
    owner_under_sudo,
    publish,
)
from safelaunch.bundle.staging import Staging, cut
from safelaunch.model import Artifact, Culprit, EarlyLook, Place, Verdict
from safelaunch.supervise.hooks import Notifier, variables, variables_of_look
from safelaunch.supervise.hooks import run as run_command
from safelaunch.system.redaction.redactor import Redactor
from tests.support.staging import NAME, mounted, published, staged
from tests.support.waiting import until

# --- bundles are complete or absent, private, and nothing else is changed ---------------------------------------------

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
AS_USER = pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def modes(root: Path) -> set[tuple[bool, int]]:
    """Returns (is a directory, permissions) of each file in a tree."""
    paths = [root, *root.rglob("*")]
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in paths}


PRIVATE = {(True, 0o700), (False, 0o600)}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


# --- publishing -------------------------------------------------------------------------------------------------------


NOBODY = BundleOwner(65534, 65534)


@pytest.fixture
def of_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of another user who can run the copier."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "/nowhere"
    try:
        subprocess.run([python, "-c", ""], check=True, user=NOBODY.uid, cwd="/")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no Python that another user can run")
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        shutil.copy(copier.__file__, scratch)
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setattr("safelaunch.bundle.publication.__file__", f"{scratch}/publication.py")
        home = Path(scratch, "home")
        home.mkdir()
        os.chown(home, NOBODY.uid, NOBODY.gid)
        yield home


@AS_ROOT
def test_bundle_under_sudo_belongs_to_user(of_nobody: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)  # like the directory below which root assembles bundles
    source, place = staged(tmp_path / "staged"), of_nobody / "bundles"
    result = publish(source, place, NAME, tmp_path / "fallback", owner=NOBODY, deadline_s=30.0)
    assert result == Publication(place / NAME) and not source.exists()
    assert names(place) == ["latest", NAME] and modes(place / NAME) == PRIVATE
    assert {path.lstat().st_uid for path in (place, *place.rglob("*"))} == {NOBODY.uid}


@AS_ROOT
def test_bundle_under_sudo_in_root_only_directory_belongs_to_root(of_nobody: Path, tmp_path: Path) -> None:
    source, place = staged(tmp_path / "staged"), of_nobody.parent / "of-root"
    place.mkdir()
    result = publish(source, place, NAME, tmp_path / "fallback", owner=NOBODY, deadline_s=30.0)
    assert result == Publication(place / NAME)
    assert {path.lstat().st_uid for path in place.rglob("*")} == {0}


@pytest.mark.parametrize(
    ("user", "variables", "owner"),
    [
        (0, {"SUDO_UID": "4711", "SUDO_GID": "42"}, BundleOwner(4711, 42)),
        (1000, {"SUDO_UID": "4711", "SUDO_GID": "42"}, None),
        (0, {"SUDO_UID": "0", "SUDO_GID": "0"}, None),
        (0, {"SUDO_UID": "me", "SUDO_GID": "42"}, None),
        (0, {}, None),
    ],
)
def test_owner_under_sudo_is_never_root(
    user: int, variables: dict[str, str], owner: BundleOwner | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert owner_under_sudo(variables) == owner


def test_bundle_is_published_complete_and_private(tmp_path: Path) -> None:
    result = published(tmp_path / "new" / "bundles")
    assert result == Publication(tmp_path / "new/bundles" / NAME)
    assert names(tmp_path / "new/bundles") == ["latest", NAME]
    assert (result.path / "ranks/0/stack.txt").read_text() == "Thread 1\n"
    assert (tmp_path / "new/bundles/latest").readlink() == Path(NAME)
    assert modes(result.path) == PRIVATE


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o137, 0o277, 0o777])
def test_bundle_is_private_under_any_umask(mask: int, tmp_path: Path, umask: None) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    os.umask(mask)
    result = published(directory)
    assert result == Publication(directory / NAME)
    assert modes(result.path) == PRIVATE


def test_bundle_is_private_in_world_writable_directory(tmp_path: Path, umask: None) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    directory.chmod(0o3777)  # setgid and sticky, too
    everything = [(tag, 7, 0xFFFFFFFF) for tag in (1, 4, 16, 32)]  # owner, group, mask, others
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in everything)
    try:
        os.setxattr(directory, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")
    os.umask(0)
    (directory / "probe").write_text("")
    assert stat.S_IMODE((directory / "probe").stat().st_mode) == 0o666, "the default ACL counts"
    result = published(directory)
    assert modes(result.path) == PRIVATE


def test_bundle_with_taken_name_gets_number(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    (directory / NAME).mkdir(parents=True)
    (directory / f"{NAME}-2").write_text("somebody's")
    (directory / f"{NAME}-3").symlink_to("/nowhere")
    result = published(directory)
    assert result.path.name == f"{NAME}-4"
    assert list((directory / NAME).iterdir()) == []
    assert (directory / f"{NAME}-2").read_text() == "somebody's"
    assert (directory / f"{NAME}-3").is_symlink()


def test_bundles_published_at_once_get_distinct_names(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    helper = [sys.executable, "-I", "-S", copier.__file__]
    sources = [staged(tmp_path / f"staged-{n}") for n in range(8)]
    running = [
        subprocess.Popen([*helper, str(source), str(directory), NAME, "0", "0"], stdout=subprocess.PIPE)
        for source in sources
    ]
    paths = {process.communicate(timeout=120)[0].rstrip(b"\0").decode() for process in running}
    assert [process.returncode for process in running] == [0] * 8
    assert len(paths) == 8
    assert {Path(path).name for path in paths} == {NAME, *(f"{NAME}-{n}" for n in range(2, 9))}
    assert all((Path(path) / "ranks/0/stack.txt").is_file() for path in paths)
    assert [name for name in names(directory) if name.startswith(".")] == []


def test_latest_is_complete_bundle_not_node_part(tmp_path: Path) -> None:
    directory, whole = tmp_path / "bundles", "a-20260101T000000Z-hang"
    part = Retention(whole=whole)
    published(directory, "a-node2-20260101T000000Z-hang", part)
    assert (directory / "latest").readlink() == Path("a-node2-20260101T000000Z-hang"), "the whole is elsewhere"
    published(directory, whole)
    published(directory, "a-node3-20260101T000000Z-hang", part)
    assert (directory / "latest").readlink() == Path(whole)


def test_latest_is_replaced_atomically(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    published(directory, "a-20260101T000000Z-hang")
    watching = subprocess.Popen(
        [sys.executable, "-c", LOOK_AT_LATEST, str(directory / "latest")], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    watching.stdout.readline()
    for second in range(1, 4):
        published(directory, f"a-2026010{second}T000000Z-hang")
    watching.send_signal(signal.SIGTERM)
    looks = int(watching.communicate(timeout=120)[0].split()[-1])
    assert looks > 100, "it looked too seldom to have seen anything"
    assert watching.returncode == 0, "latest was missing for a moment"
    assert (directory / "latest").readlink() == Path("a-20260103T000000Z-hang")


LOOK_AT_LATEST = """
import os, signal, sys
over = []
signal.signal(signal.SIGTERM, lambda *_: over.append(1))
print("looking", flush=True)
seen = 0
while not over:
    os.readlink(sys.argv[1])
    seen += 1
print(seen)
"""


def test_stale_partial_copy_is_removed_after_a_day(tmp_path: Path) -> None:
    """Only old copies of safelaunch are removed, because another node might be writing now."""
    directory = tmp_path / "bundles"
    old, young = directory / ".a-hang.1-1.partial", directory / ".b-hang.2-2.partial"
    other = directory / "notes.partial"
    for folder in (old, young):
        (folder / "ranks").mkdir(parents=True)
    other.write_text("x")
    for path in (old, other):
        os.utime(path, (0, 0))
    published(directory)
    assert {".b-hang.2-2.partial", "notes.partial"} <= set(names(directory))
    assert not old.exists()


def test_latest_link_of_another_user_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, the sticky bit has the same effect."""

    def replace(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "replace", replace)
    Path("latest").symlink_to("/etc")
    assert copier._link_latest(NAME) == "no link to the newest bundle: latest: Operation not permitted\n"
    assert names(tmp_path) == ["latest"]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_latest_that_is_user_file_or_folder_stays(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    latest = directory / "latest"
    if kind == "file":
        latest.write_text("mine")
    elif kind == "folder":
        (latest / "mine").mkdir(parents=True)
    else:
        latest.symlink_to("gone")
    result = published(directory)
    assert result.problem == ""
    if kind == "dangling link":
        assert (latest.readlink(), result.note) == (Path(NAME), "")
        return
    assert latest.read_text() == "mine" if kind == "file" else names(latest) == ["mine"]
    assert result.note == "latest is not safelaunch's: there is no link to the newest bundle"


@AS_ROOT
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_latest_of_another_user_is_set_aside(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    latest = directory / "latest"
    if kind == "file":
        latest.write_text("theirs")
    else:
        (latest / "theirs").mkdir(parents=True)
    os.chown(latest, 12345, 12345)
    result = published(directory)
    assert (latest.readlink(), result.note) == (Path(NAME), "")
    assert len([name for name in names(directory) if name.startswith("latest.of-user-12345-")]) == 1


def test_partial_copy_of_killed_publisher_does_not_block_publishing(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    left = directory / f".{NAME}.123-456.partial"
    left.mkdir(parents=True)
    (left / "verdict.json").write_text("half of")
    assert published(directory, keeping=Retention(newest=1)).path == directory / NAME
    assert (left / "verdict.json").read_text() == "half of"


@AS_USER
def test_unwritable_bundle_directory_uses_fallback(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir(mode=0o500)
    result = published(directory)
    assert result.path == tmp_path / "fallback" / NAME
    assert "Permission denied" in result.problem


@AS_ROOT
def test_read_only_bundle_directory_uses_fallback(tmp_path: Path) -> None:
    with mounted(tmp_path / "bundles", "ro"):
        result = published(tmp_path / "bundles")
    assert result.path == tmp_path / "fallback" / NAME
    assert "Read-only file system" in result.problem


def test_unusable_directory_and_fallback_use_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bundles", "fallback"):
        (tmp_path / name).write_text("a file")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    result = published(tmp_path / "bundles")
    assert result.path.parent.parent == tmp_path / "tmp"
    assert str(tmp_path / "fallback") in result.problem
    assert (result.path / "verdict.json").is_file()


def test_hanging_bundle_directory_uses_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a dead network disk. The helper is abandoned, and the bundle is kept elsewhere."""
    stopped = tmp_path / "python"
    stopped.write_text("#!/bin/sh\nexec sleep 600\n")
    stopped.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stopped))
    result = publish(staged(tmp_path / "s"), tmp_path / "bundles", NAME, tmp_path / "fallback", deadline_s=0.5)
    assert result.path == tmp_path / "fallback" / NAME
    assert "no answer" in result.problem


def test_killed_copy_leaves_no_partial_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "python"
    killed.write_text(f"#!/bin/sh\nmkdir -p {tmp_path}/bundles/.{NAME}.$$-1.partial/ranks\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(killed))
    result = publish(staged(tmp_path / "s"), tmp_path / "bundles", NAME, tmp_path / "fallback", deadline_s=30.0)
    assert (result.path, result.problem) == (tmp_path / "fallback" / NAME, "the copy failed with exit code -9")
    assert names(tmp_path / "bundles") == []


def test_copy_whose_parent_was_killed_publishes_nothing(tmp_path: Path) -> None:
    """The copy's source is removed with its parent's run directory, perhaps before the copy has finished."""
    source, directory = staged(tmp_path / "staged"), tmp_path / "bundles"
    (source / "large.bin").write_bytes(bytes(64 << 20))  # there is time to stop the copy
    done = subprocess.run(
        [sys.executable, "-c", STOPS_THE_COPY, copier.__file__, str(source), str(directory), NAME, "0", "0"],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert [name for name in names(directory) if not name.startswith(".")] == []
    os.kill(int(done.stdout), signal.SIGCONT)
    until(lambda: names(directory) == [])


def test_emptied_copy_is_never_published(tmp_path: Path) -> None:
    """The bundle directory is emptied while a bundle is being written, so the rest isn't the whole bundle."""
    source, directory = staged(tmp_path / "staged"), tmp_path / "bundles"
    (source / "large.bin").write_bytes(bytes(64 << 20))
    for _ in range(5):  # on a busy machine, the copy might finish before it can be stopped
        done = subprocess.run(
            [sys.executable, "-c", EMPTIES_IT, copier.__file__, str(source), str(directory), NAME, "0", "0"],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.stdout != "too late\n":
            break
    assert done.stdout == "1\n"
    assert not directory.exists() or names(directory) == []


def test_copy_that_finishes_during_sweep_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f".{NAME}.1-1.partial").mkdir()
    (tmp_path / f".{NAME}.2-2.partial").mkdir()
    os.utime(tmp_path / f".{NAME}.2-2.partial", (0, 0))
    scandir = os.scandir

    def and_one_is_renamed(path: str) -> list[os.DirEntry[str]]:
        entries = sorted(scandir(path), key=lambda entry: entry.name)
        (tmp_path / f".{NAME}.1-1.partial").rename(tmp_path / NAME)
        return entries

    monkeypatch.setattr("safelaunch.bundle.copier.os.scandir", and_one_is_renamed)
    copier._remove_stale(str(tmp_path))
    monkeypatch.undo()
    assert names(tmp_path) == [NAME]


EMPTIES_IT = """
import os, shutil, signal, subprocess, sys, time
copy = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdout=-3, stderr=-3)
while not any(files for _, _, files in os.walk(sys.argv[3])):
    time.sleep(0.0005)
copy.send_signal(signal.SIGSTOP)
while copy.poll() is None and open(f"/proc/{copy.pid}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.0005)
shutil.rmtree(sys.argv[3])
copy.send_signal(signal.SIGCONT)
print("too late" if copy.poll() == 0 else copy.wait())
"""
STOPS_THE_COPY = """
import os, signal, subprocess, sys, time
copy = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdout=subprocess.DEVNULL)
while copy.poll() is None and not (os.path.isdir(sys.argv[3]) and os.listdir(sys.argv[3])):
    time.sleep(0.0005)
copy.send_signal(signal.SIGSTOP)
print(copy.pid)
"""


def test_hanging_retention_does_not_lose_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle is published although retention hangs."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\nmkdir {tmp_path}/bundles\nprintf '%s\\0' {tmp_path}/bundles/{NAME}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    result = publish(staged(tmp_path / "s"), tmp_path / "bundles", NAME, tmp_path / "fallback", deadline_s=1.0)
    assert (result.path, result.problem) == (tmp_path / "bundles" / NAME, "")
    assert "no answer" in result.note


def test_bundle_directory_name_can_be_any_bytes(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"caf\xe9 \n x")
    assert published(directory).path == directory / NAME


@AS_ROOT
def test_full_disk_uses_fallback_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "small"
    source = staged(tmp_path / "staged")
    (source / "large.bin").write_bytes(os.urandom(2_000_000))
    with mounted(directory, "size=1m"):
        result = publish(source, directory, NAME, tmp_path / "fallback", deadline_s=30.0)
        assert result.path == tmp_path / "fallback" / NAME
        assert "No space left on device" in result.problem
        assert names(directory) == []
        assert (result.path / "large.bin").stat().st_size == 2_000_000


def test_bundle_name_has_run_time_and_outcome() -> None:
    assert name_of("train", 0.0, "crash") == "train-19700101T000000Z-crash"


# --- retention --------------------------------------------------------------------------------------------------------


def bundle(directory: Path, day: int, run: str = "train", suffix: str = "hang") -> Path:
    path = directory / f"{run}-202601{day:02}T000000Z-{suffix}"
    staged(path)
    return path


def test_retention_keeps_newest_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    for day in (2, 3, 4):
        path = bundle(directory, day, suffix="hang" if day % 2 else "crash")
        os.utime(path, (day, 100 - day))  # the name says how old it is, not the file system
    result = published(directory, "eval-20260105T000000Z-dump", Retention(newest=2))
    assert result.note == ""
    assert names(directory) == ["eval-20260105T000000Z-dump", "latest", "train-20260104T000000Z-crash"]


def test_retention_keeps_all_by_default(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    for day in range(2, 12):
        bundle(directory, day)
    published(directory)
    assert len(names(directory)) == 12


def test_retention_orders_numbered_names(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    for _ in range(12):
        published(directory, NAME)
    published(directory, NAME, Retention(newest=2))
    assert names(directory) == ["latest", f"{NAME}-12", f"{NAME}-13"]


def test_retention_never_removes_new_bundle_or_latest(tmp_path: Path) -> None:
    """The clock went back, so the new bundle looks old."""
    directory = tmp_path / "bundles"
    directory.mkdir()
    for day in (10, 11):
        bundle(directory, day)
    result = published(directory, "train-20260101T000000Z-hang", Retention(newest=1))
    assert result.path.is_dir()
    assert names(directory) == ["latest", "train-20260101T000000Z-hang", "train-20260111T000000Z-hang"]
    # If latest is a folder of the user, only the new bundle is spared.
    (directory / "latest").unlink()
    (directory / "latest").mkdir()
    published(directory, "train-20260103T000000Z-hang", Retention(newest=1))
    kept = ["train-20260103T000000Z-hang", "train-20260111T000000Z-hang"]
    assert names(directory) == ["latest", *kept]


def test_retention_removes_only_bundles(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "bundles", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    target = bundle(elsewhere, 2)
    (directory / target.name).symlink_to(target)  # a link to a bundle
    kept = bundle(directory, 3)
    kept.rename(directory / "the-one-for-the-issue")  # renamed by its owner
    (directory / "train-20260104T000000Z-hang").write_text("a file of that name")
    (bundle(directory, 5) / "manifest.json").unlink()  # not whole
    half = bundle(directory, 6)
    (half / "verdict.json").unlink()
    (half / "verdict.json").symlink_to(target / "verdict.json")
    bundle(directory, 7, suffix="hangup")
    bundle(directory, 8, run=".hidden")
    (directory / "train-20260109T000000Z-hang.tar.gz").write_text("an archive alone")
    (directory / "train-20260110T000000Z-hang").mkdir()
    nested = directory / "more"
    nested.mkdir()
    bundle(nested, 2)
    before = sorted(directory.rglob("*"))
    old = bundle(directory, 11)
    (old / "way-out").symlink_to(elsewhere)  # removing it must not go through the link
    published(directory, "train-20260120T000000Z-hang", Retention(newest=1))
    new = directory / "train-20260120T000000Z-hang"
    after = [path for path in sorted(directory.rglob("*")) if path != new and new not in path.parents]
    assert after == sorted([*before, directory / "latest"])
    assert (target / "verdict.json").is_file()


@AS_ROOT
def test_retention_keeps_bundles_of_other_users(tmp_path: Path) -> None:
    directory = tmp_path / "bundles"
    directory.mkdir()
    foreign = bundle(directory, 2)
    os.chown(foreign, 12345, 12345)
    published(directory, "train-20260105T000000Z-hang", Retention(newest=1))
    assert foreign.is_dir()


# --- limit for each artifact ------------------------------------------------------------------------------------------


def listed(staging: Staging) -> dict[str, Artifact]:
    return {artifact.path: artifact for artifact in staging.artifacts}


@pytest.mark.parametrize(
    ("content", "limit", "tail", "expected"),
    [
        (b"one\ntwo\nthree\n", 10, False, b"one\ntwo\n"),
        (b"one\ntwo\nthree\n", 10, True, b"three\n"),
        (b"one\ntwo\nthree\n", 6, True, b"three\n"),
        (b"x" * 20, 10, False, b"x" * 10),
        (b"x" * 20, 10, True, b"x" * 10),
        ("é".encode() * 10, 5, False, "é".encode() * 2),
        ("é".encode() * 10, 5, True, "é".encode() * 2),
        (b"one\n" + b"x" * 20, 10, True, b"x" * 10),
    ],
)
def test_cut_keeps_whole_lines_within_limit(content: bytes, limit: int, tail: bool, expected: bytes) -> None:
    assert cut(content, limit, tail) == expected


def test_too_large_artifacts_are_cut_or_missing(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "b", limit_bytes=100)
    lines = "".join(f"line {n:03}\n" for n in range(100))
    staging.add(Artifact("ranks/0/stack.txt", "py-spy dump", 0.0, note="inexact"), lines)
    staging.add(Artifact("ranks/0/log_tail.txt", "output ring", 0.0), lines)
    staging.add(Artifact("ranks/0/flight_recorder.pickle", "worker server", 0.0), b"\x80" * 101)
    staging.add_json(Artifact("ranks/0/stack.json", "py-spy dump", 0.0), [lines])
    staging.add_json(Artifact("verdict.json", "safelaunch", 0.0), {"summary": lines})
    staging.add(Artifact("exact.txt", "test", 0.0), "x" * 100)
    artifacts = listed(staging)
    assert (tmp_path / "b/ranks/0/stack.txt").read_text() == lines[:99]
    assert artifacts["ranks/0/stack.txt"].note == "inexact; cut: the first 100 of 900 bytes"
    assert artifacts["ranks/0/stack.txt"].bytes == 99
    assert (tmp_path / "b/ranks/0/log_tail.txt").read_text() == lines[-99:]
    assert artifacts["ranks/0/log_tail.txt"].note == "cut: the last 100 of 900 bytes"
    for name in ("ranks/0/flight_recorder.pickle", "ranks/0/stack.json"):
        assert not (tmp_path / "b" / name).exists()
        assert artifacts[name].missing.endswith("more than 100")
        assert artifacts[name].bytes == 0
    assert msgspec.json.decode((tmp_path / "b/verdict.json").read_bytes()) == {"summary": lines}
    assert artifacts["exact.txt"].note == ""


def test_job_files_are_staged_cut_or_missing(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "nccl.log").write_text("".join(f"line {n:03}\n" for n in range(100)) + "the end\n")
    (job / "nccl_trace_rank_0").write_bytes(b"\x80\x04" + b"x" * 50)
    (job / "nccl_trace_rank_1").write_bytes(b"\x80\x04" + b"x" * 500)
    (job / "core").write_bytes(b"\x7fELF\0" + b"x" * 500)
    (job / "short.log").write_bytes(b"fine \xff\n")
    os.mkfifo(job / "fifo")
    (job / "link").symlink_to("/etc/passwd")
    staging = Staging(tmp_path / "b", limit_bytes=100)
    for path in sorted(job.iterdir()):
        staging.add_file(Artifact(path.name, "written by the job", 0.0), path, dump="trace_rank" in path.name)
    staging.add_file(Artifact("gone", "written by the job", 0.0), job / "gone")
    artifacts = listed(staging)
    assert (tmp_path / "b/nccl.log").read_text().splitlines()[-1] == "the end"
    assert (tmp_path / "b/nccl.log").stat().st_size <= 100
    assert artifacts["nccl.log"].note == "cut: the last 100 of 908 bytes"
    assert (tmp_path / "b/short.log").read_text() == "fine \\xff\n"
    assert (tmp_path / "b/nccl_trace_rank_0").read_bytes() == (job / "nccl_trace_rank_0").read_bytes()
    assert {name for name, artifact in artifacts.items() if artifact.missing} == {
        "nccl_trace_rank_1", "core", "fifo", "link", "gone",
    }  # fmt: skip
    assert names(tmp_path / "b") == ["nccl.log", "nccl_trace_rank_0", "short.log"]


# --- secrets in artifacts ---------------------------------------------------------------------------------------------


def test_staged_artifacts_are_redacted(tmp_path: Path) -> None:
    secret = "horse battery staple"
    staging = Staging(tmp_path / "b", Redactor((secret,)))
    (tmp_path / "nccl.log").write_text(f"it is {secret}\n")
    (tmp_path / "dump").write_bytes(b"\x80" + secret.encode() + b".")
    staging.add(Artifact("a.txt", "test", 0.0), f"a {secret} b")
    staging.add(Artifact("a.bin", "test", 0.0, note=secret), b"\x80" + secret.encode() + b".")
    staging.add_json(Artifact("a.json", "test", 0.0), {"deep": [{"x": f"<{secret}>", "y": 1}]})
    staging.add_report(Artifact("a.html", "test", 0.0), f"<p>{secret}</p>")
    staging.add_file(Artifact("nccl.log", "test", 0.0), tmp_path / "nccl.log")
    staging.add_file(Artifact("dump", "test", 0.0), tmp_path / "dump", dump=True)
    staging.add(Artifact("gone", "test", 0.0, f"no {secret}"), None)
    assert [path for path in (tmp_path / "b").iterdir() if secret.encode() in path.read_bytes()] == []
    assert secret not in str(staging.artifacts)
    assert (tmp_path / "b/a.txt").read_text() == "a [redacted] b"
    assert (tmp_path / "b/a.html").read_text() == "<p>[redacted]</p>"
    assert (tmp_path / "b/a.bin").read_bytes() == b"\x80" + b"*" * len(secret) + b"."
    assert msgspec.json.decode((tmp_path / "b/a.json").read_bytes()) == {"deep": [{"x": "<[redacted]>", "y": 1}]}


# --- --on-bundle ------------------------------------------------------------------------------------------------------

VERDICT = Verdict(
    schema=1,
    outcome="hang",
    cause="collective-mismatch",
    confidence="high",
    summary="Rank 1 waits\nfor 'it'; $(touch x)\0",
    culprits=tuple(Culprit(rank, "node", 1, "main", None, None, "") for rank in (1, 3)),
    victims="0,2",
    evidence=(),
    ruled_out=(),
    missing=(),
    suggestions=(),
)


def tell(command: str, bundle: Path, *, deadline_s: float = 60.0) -> list[str]:
    """Returns the messages that the user gets when the command has ended."""
    messages: list[str] = []
    notifier = Notifier(command, deadline_s=deadline_s, report=messages.append)
    notifier.notify(VERDICT, bundle, "train")
    until(lambda: not notifier.busy)
    return messages


def test_on_bundle_command_gets_variables(tmp_path: Path) -> None:
    assert tell(f"env | grep ^SAFELAUNCH_ | sort > '{tmp_path}/env'; cat >> '{tmp_path}/env'", tmp_path / "b") == []
    assert (tmp_path / "env").read_text().splitlines() == [
        f"SAFELAUNCH_BUNDLE={tmp_path}/b",
        "SAFELAUNCH_CAUSE=collective-mismatch",
        "SAFELAUNCH_CONFIDENCE=high",
        "SAFELAUNCH_CULPRITS=1,3",
        "SAFELAUNCH_OUTCOME=hang",
        "SAFELAUNCH_RUN_NAME=train",
        "SAFELAUNCH_SUMMARY=Rank 1 waits for 'it'; $(touch x)",
        f"SAFELAUNCH_VERDICT={tmp_path}/b/verdict.json",
    ]
    assert not Path("x").exists()


def test_on_bundle_culprits_variable_is_empty_without_culprits() -> None:
    nobody = msgspec.structs.replace(VERDICT, culprits=())
    assert variables(nobody, Path("/b"), "train")["SAFELAUNCH_CULPRITS"] == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("true", ""),
        ("echo fine; echo also fine >&2", ""),
        ("echo one; printf 'tw\\033o\\n' >&2; exit 3", "--on-bundle failed with exit code 3: one | tw o"),
        ("exit 1", "--on-bundle failed with exit code 1"),
        ("no-such-program-here", "--on-bundle failed with exit code 127: "),
        ("kill -9 $$", "--on-bundle was ended by signal 9"),
        ("exec >&- 2>&-; sleep 0.2", ""),
        ("head -c 1000000 /dev/zero | tr '\\0' x", ""),
        ("sleep 30 & echo started", ""),
    ],
)
def test_on_bundle_command_is_reported_only_if_it_fails(command: str, said: str, tmp_path: Path) -> None:
    messages = tell(command, tmp_path)
    assert len(messages) == bool(said)
    assert not said or messages[0].startswith(said)


def test_on_bundle_command_past_deadline_is_killed_with_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"trap '' TERM; sleep 600 & echo $! $$ > {pids}; echo waiting; wait"
    for deadline_s in (0.5, 5.0, 40.0):  # a busy machine might take longer to start it
        messages = tell(command, tmp_path, deadline_s=deadline_s)
        if messages[0].endswith("waiting"):
            break
    assert messages == [f"--on-bundle did not end within {deadline_s:g} s and was killed: waiting"]
    killed = [int(pid) for pid in pids.read_text().split()]
    until(lambda: not any(map(runs, killed)))  # a process on a busy machine takes time to die


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_on_suspect_command_gets_variables(tmp_path: Path) -> None:
    look = EarlyLook(1e9, 7.4, 0.048, "still", "rank 1 is asleep\0", "stuck-in-user-code", (Place(1), Place(3)))
    messages: list[str] = []
    notifier = Notifier(
        f"env | grep ^SAFELAUNCH_ | sort > '{tmp_path}/env'; exit 3", option="--on-suspect", report=messages.append
    )
    notifier.start(variables_of_look(look, "train"))
    until(lambda: not notifier.busy)
    assert messages == ["--on-suspect failed with exit code 3"]
    assert (tmp_path / "env").read_text().splitlines() == [
        "SAFELAUNCH_CAUSE=stuck-in-user-code",
        "SAFELAUNCH_QUIET_S=7",
        "SAFELAUNCH_RANKS=1,3",
        "SAFELAUNCH_RUN_NAME=train",
        "SAFELAUNCH_SUMMARY=rank 1 is asleep",
        "SAFELAUNCH_USUAL_S=0.048",
    ]


def test_on_bundle_command_is_ended_when_job_stops(tmp_path: Path) -> None:
    messages: list[str] = []
    notifier = Notifier("sleep 600", report=messages.append)
    notifier.notify(VERDICT, tmp_path, "train")
    notifier.end()
    assert not notifier.busy
    notifier.notify(VERDICT, tmp_path, "train")
    assert not notifier.busy
    assert messages == []


def test_on_bundle_command_has_no_blocked_signals(tmp_path: Path) -> None:
    """The command has its own process group, so that it can be killed with its children, and default signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        command = f"grep ^Sig /proc/self/status > {tmp_path}/s; cut -d' ' -f5,6 /proc/$$/stat > {tmp_path}/g; echo $$"
        problem = run_command(command, os.environ, deadline_s=60.0, is_cancelled=lambda: False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert problem == ""
    status = dict(line.split(":\t") for line in (tmp_path / "s").read_text().splitlines())
    assert int(status["SigBlk"], 16) == 0
    assert int(status["SigIgn"], 16) & (1 << (signal.SIGPIPE - 1)) == 0
    group, session = map(int, (tmp_path / "g").read_text().split())
    assert session == os.getsid(0)
    assert group != os.getpgid(0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/nowhere/at/all"), "is a link to /nowhere/at/all, which does not exist: create"),
        (os.mkfifo, "is a FIFO, not a directory: move it away"),
        (lambda path: path.write_text("x"), "is a file, not a directory: move it away"),
    ],
)
@pytest.mark.parametrize("below", ["", "below/it"])
def test_obstacle_at_bundle_directory_is_named_with_next_step(
    tmp_path: Path, make: Callable[[Path], object], says: str, below: str
) -> None:
    """The check reports it in advance, and so does publishing if it appears while the job runs."""
    make(tmp_path / "b")
    assert f"{tmp_path}/b {says}" in check_directory(tmp_path / "b" / below)
    published = publish(staged(tmp_path / "s"), tmp_path / "b" / below, NAME, tmp_path / "fallback", deadline_s=20.0)
    assert f"{tmp_path}/b {says}" in published.problem and "File exists" not in published.problem
    assert published.path == tmp_path / "fallback" / NAME
    assert (published.path / "ranks/0/stack.txt").is_file() and modes(published.path) == PRIVATE


def test_artifact_after_staging_close_is_dropped(tmp_path: Path) -> None:
    """An abandoned thread of the supervisor might continue."""
    staging = Staging(tmp_path / "b")
    staging.add(Artifact("early.txt", "a test", 0.0), "early")
    listed = staging.close()
    staging.add(Artifact("late.txt", "a test", 0.0), "late")
    staging.finish({"artifacts": listed})
    assert [artifact.path for artifact in listed] == ["early.txt"]
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"early.txt", "manifest.json"}
