"""Ownership of run directories by lock, never by pid, and their place if another user has taken the usual one."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.job import paths
from safelaunch.job.argv import CommandLine
from safelaunch.job.paths import (
    RunPaths,
    Unfinished,
    create_run,
    discard_unfinished,
    is_held,
    run_root,
    sweep,
    sweep_unfinished,
)
from safelaunch.job.plan import Plan, Surroundings, build, in_directory
from safelaunch.job.torchrun import TorchInstallation
from safelaunch.settings.options import EnvSetting, Settings
from safelaunch.supervise.control import discover

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="takes root to be several users")
UID = os.getuid()
NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that stands in for /tmp."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(paths, "TMP", os.fspath(place))
    return place


def dies(run: RunPaths) -> None:
    """Releases the lock, as the end of supervisor and guardian does."""
    os.close(run.lock)


def test_held_run_directory_is_not_swept_for_any_owner(root: Path) -> None:
    """In another pid namespace, the owner's pid belongs to no process, or to an unrelated one."""
    run = create_run(root, os.getpid(), UID)
    run.owner.write_text("999999999 1\n")
    assert (sweep(root), is_held(run.root), run.root.exists()) == (0, True, True)
    assert [live_run.alive for live_run in discover.find([root])] == [True]
    dies(run)
    assert [live_run.alive for live_run in discover.find([root])] == [False]
    assert (sweep(root), run.root.exists()) == (1, False)


def test_run_directory_with_living_owner_but_no_lock_is_swept(root: Path) -> None:
    """The owner's pid is this living process, but no process holds the directory."""
    run = create_run(root, os.getpid(), UID)
    dies(run)
    assert (is_held(run.root), sweep(root)) == (False, 1)


def test_run_directory_is_held_by_guardian(root: Path) -> None:
    run = create_run(root, os.getpid(), UID)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    dies(run)
    assert is_held(run.root) and sweep(root) == 0
    os.close(write)
    os.waitpid(pid, 0)
    assert sweep(root) == 1


def test_run_directory_without_owner_is_swept_after_an_hour(root: Path) -> None:
    made = root / "r5"
    made.mkdir(parents=True)
    assert sweep(root) == 0
    os.utime(made, (1, 1))
    assert sweep(root) == 1


def test_runs_with_same_pid_get_separate_directories(root: Path) -> None:
    runs = [create_run(root, os.getpid(), UID) for _ in range(3)]
    names = [run.root.name for run in runs]
    assert names == [f"r{os.getpid()}", f"r{os.getpid()}-1", f"r{os.getpid()}-2"]
    assert all(is_held(run.root) for run in runs) and sweep(root) == 0
    for run in runs:
        dies(run)


def test_create_run_waits_for_lock_check_of_other_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes a shared lock for a moment."""
    asked: list[int] = []
    made = Path.mkdir

    def mkdir(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        made(self, mode, parents, exist_ok)
        if self.name.startswith("r") and not asked:
            asked.append(os.open(self, os.O_RDONLY))
            fcntl.flock(asked[0], fcntl.LOCK_SH)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(asked[0], fcntl.LOCK_UN))
    run = create_run(root, os.getpid(), UID)
    assert is_held(run.root)
    dies(run)
    os.close(asked[0])


# --- unfinished bundles -----------------------------------------------------------------------------------------------


def assembling(place: Path, run: str) -> tuple[Unfinished, Path]:
    unfinished = Unfinished()
    made = unfinished.name(place, Path(run), "hang")
    made.mkdir(parents=True)
    unfinished.hold(made)
    os.utime(made, (1, 1))
    return unfinished, made


def test_unfinished_bundle_in_use_is_not_swept(tmp_path: Path) -> None:
    unfinished, made = assembling(tmp_path, "r999999999")
    assert (sweep_unfinished(tmp_path), made.exists()) == (0, True)
    unfinished.let_go(made)
    young = tmp_path / ".r999999999-hang-2"
    young.mkdir()
    assert (sweep_unfinished(tmp_path), made.exists(), young.exists()) == (1, False, True)


def test_run_discards_only_its_unfinished_bundles(tmp: Path) -> None:
    """The bundles belong to r47 in this pid namespace, to r47 in another one, and to r47-1."""
    place = private(run_root({}, UID)) / "bundles"
    (first, own), (other, foreign), (third, later) = (assembling(place, run) for run in ("r47", "r47", "r47-1"))
    first.discard()
    assert [path.exists() for path in (own, foreign, later)] == [False, True, True]
    discard_unfinished("r47")  # as its guardian does if the run has been killed
    assert foreign.exists() and later.exists()
    other.let_go(foreign), third.let_go(later)
    discard_unfinished("r47")
    assert [path.exists() for path in (foreign, later)] == [False, True]


# --- place of run directories -----------------------------------------------------------------------------------------


def private(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def link(path: Path) -> None:
    path.symlink_to("/etc")


def foreign(path: Path) -> None:
    os.chown(private(path), NOBODY, NOBODY)


TAKEN: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text(""),
    "a link": link,
    "a dangling link": lambda path: path.symlink_to("/nonexistent/x"),
    "open to others": lambda path: private(path, 0o777),
}


@pytest.mark.parametrize("what", [*TAKEN, pytest.param("another user's", marks=ROOT)])
def test_run_root_with_taken_name_gets_random_suffix(what: str, tmp: Path) -> None:
    """Other users can't predict its name, but discovery finds it."""
    {**TAKEN, "another user's": foreign}[what](tmp / f"safelaunch-{UID}")
    own_root = run_root({}, UID)
    assert own_root.parent == tmp and own_root.name.startswith(f"safelaunch-{UID}-") and len(own_root.name) > 18
    assert stat.S_IMODE(own_root.stat().st_mode) == 0o700
    assert run_root({}, UID) == own_root, "one for all"
    assert own_root in discover.roots({}, UID)
    run = create_run(own_root, os.getpid(), UID)
    assert [live_run.id for live_run in discover.find(discover.roots({}, UID))] == [run.root.name]
    (tmp / f"safelaunch-{UID}").rename(tmp / "gone")
    assert run_root({}, UID).name == f"safelaunch-{UID}"
    assert [live_run.id for live_run in discover.find(discover.roots({}, UID))] == [run.root.name]
    dies(run)


@ROOT
def test_run_roots_of_other_users_are_ignored(tmp: Path) -> None:
    foreign(tmp / f"safelaunch-{UID}")
    foreign(tmp / f"safelaunch-{UID}-aaaaaaaa")
    link(tmp / f"safelaunch-{UID}-bbbbbbbb")
    private(tmp / f"safelaunch-{UID}-cccccccc", 0o755)
    assert paths.other_roots(UID) == ()
    assert run_root({}, UID).stat().st_uid == UID


# --- moving a plan to another directory -------------------------------------------------------------------------------


def planned(run_dir: Path, **exported: str) -> Plan:
    setting = EnvSetting("TORCH_FR_DUMP_TEMP_FILE", "{run_dir}/flight_recorder/trace_", "", "preset x")
    settings = replace(Settings(), env=(setting,))
    torch = TorchInstallation("/usr/bin/python3", Path("/torch"), "2.13")
    command = CommandLine(own=(), torchrun=(), script=("train.py",))
    return build(command, settings, torch, Surroundings(exported, run_dir, 7))


def test_plan_moves_to_other_run_directory() -> None:
    moved = in_directory(planned(Path("/tmp/s/r7")), Path("/tmp/s/r7-1"))
    assert moved == planned(Path("/tmp/s/r7-1"))
    assert moved.env["TORCH_FR_DUMP_TEMP_FILE"] == "/tmp/s/r7-1/flight_recorder/trace_"
    assert moved.env["SAFELAUNCH_RUN_DIR"] == "/tmp/s/r7-1"


def test_moved_plan_keeps_exported_variables() -> None:
    exported = {"TORCH_FR_DUMP_TEMP_FILE": "/tmp/s/r7/mine", "MINE": "/tmp/s/r7"}
    moved = in_directory(planned(Path("/tmp/s/r7"), **exported), Path("/tmp/s/r7-1"))
    assert {name: moved.env[name] for name in exported} == exported
