"""Bundles in directories that other users can write to."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from safelaunch.bundle import copier
from safelaunch.bundle.publication import Publication, check_directory, publish
from safelaunch.cli.run import check
from safelaunch.model import Artifact
from safelaunch.settings.options import Settings
from safelaunch.system.errors import UsageError
from tests.support import strangers
from tests.support.staging import NAME, begun, mounted, published, staged

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="takes root to be several users")
STRANGER = 65534


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Directory that another user can enter as well."""
    with strangers.open_place() as place:
        yield place


def place(directory: Path, mode: int, uid: int = -1, gid: int = -1) -> Path:
    directory.mkdir()
    os.chown(directory, uid, gid)
    directory.chmod(mode)
    return directory


@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (0o755, {}, ""),
        (0o700, {}, ""),
        (0o775, {}, ""),
        (0o2775, {}, ""),
        (0o1777, {}, ""),
        (0o777, {}, "every user may replace files in it (mode 777)"),
        (0o2777, {}, "every user may replace files in it (mode 2777)"),
        (0o757, {}, "every user may replace files in it (mode 757)"),
        pytest.param(0o2775, {"uid": STRANGER, "gid": 4711}, "", marks=ROOT),
        pytest.param(0o1777, {"uid": STRANGER}, "every user may write to it, and its owner, user 65534", marks=ROOT),
        pytest.param(0o777, {"uid": STRANGER}, "every user may replace", marks=ROOT),
    ],
)
def test_bundle_directory_replaceable_by_others_is_refused(
    mode: int, owner: dict[str, int], reason: str, tmp_path: Path
) -> None:
    directory = place(tmp_path / "bundles", mode, **owner)
    problem = check_directory(directory)
    assert problem.startswith(reason) and bool(problem) == bool(reason) and "\n" not in problem
    settings = Settings(bundle_dir=directory, origins={"bundle-dir": "command line"})
    if reason:
        with pytest.raises(UsageError) as refused:
            check(settings)
        assert reason in str(refused.value) and refused.value.exit_code == 2
    else:
        check(settings)
    result = published(directory)
    assert result.path == (tmp_path / "fallback" if reason else directory) / NAME
    assert reason in result.problem and bool(result.problem) == bool(reason)
    assert bool(list(directory.iterdir())) == (not reason)


def test_bundle_directory_can_be_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "bundles").symlink_to("real")
    assert published(tmp_path / "bundles") == Publication(tmp_path / "bundles" / NAME)
    assert (tmp_path / "real" / NAME).is_dir()


# --- another user of the group, with the right to rename files --------------------------------------------------------

SWAPS = """
import os, sys
os.setgroups([]); os.setresgid(4711, 4711, 4711); os.setresuid({uid}, {uid}, {uid})
directory, what = sys.argv[1:]
os.chdir(directory)
print("ready", flush=True)
done = set()
while True:
    for name in os.listdir("."):
        partial = name.startswith(".train") and name.endswith(".partial")
        final = name.startswith("train") and not name.endswith(".gz")
        if name in done or not (partial if what == "partial" else final):
            continue
        try:
            os.rename(name, "taken-" + str(len(done)))
            os.mkdir(name)
            open(name + "/verdict.json", "w").write("theirs")
            open(name + "/manifest.json", "w").write("theirs")
            done.add(name)
        except OSError:
            pass
"""


@contextmanager
def swapping(directory: Path, what: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", SWAPS.format(uid=STRANGER), directory, what], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


@ROOT
@pytest.mark.parametrize("what", ["partial", "final"])
def test_bundle_swapped_by_another_user_is_never_reported_as_ours(what: str, tmp_path: Path) -> None:
    """The name is swapped in a loop. Either the reported path holds the own bundle, or the loss is reported."""
    directory = place(tmp_path / "bundles", 0o2775, gid=4711)
    with swapping(directory, what):
        for _ in range(5):
            result = published(directory)
            if result.problem:
                assert "another user who may write there has replaced the bundle" in result.problem, result
            if result.problem or what == "partial":  # a published bundle can be renamed by the group
                assert (result.path / "ranks/0/stack.txt").read_text() == "Thread 1\n"
    for path in tmp_path.rglob("verdict.json"):
        is_own = path.stat().st_uid == os.getuid()
        assert ("theirs" in path.read_text()) != is_own, "nothing of ours was written where others are"


@ROOT
def test_sweep_spares_directory_that_others_may_rename(tmp_path: Path) -> None:
    """Another user can give this name to any directory."""
    directory = place(tmp_path / "bundles", 0o2775, gid=4711)
    precious = directory / f".{NAME}.1-1.partial"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    os.utime(precious, (1, 1))
    assert published(directory).problem == ""
    assert (precious / "thesis.tex").is_file()
    directory.chmod(0o755)
    assert published(directory).problem == ""
    assert not precious.exists()


@ROOT
def test_retention_spares_directory_swapped_for_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another directory takes the name of an old bundle between the check and its removal."""
    monkeypatch.chdir(tmp_path)
    staged(tmp_path / NAME)
    real = copier._is_bundle

    def and_swaps(name: str) -> bool:
        answer = real(name)
        Path(name).rename("elsewhere")
        Path(name).mkdir()
        (Path(name) / "thesis.tex").write_text("years")
        return answer

    monkeypatch.setattr(copier, "_is_bundle", and_swaps)
    copier._remove(NAME)
    assert (tmp_path / NAME / "thesis.tex").is_file() and (tmp_path / "elsewhere" / "verdict.json").is_file()


# --- staging directories that were removed or do not fit --------------------------------------------------------------


def test_staging_directory_removed_while_filled_is_recreated(tmp_path: Path) -> None:
    staging = begun(tmp_path / "deep" / "staged")
    shutil.rmtree(tmp_path / "deep")
    staging.add(Artifact("ranks/1/stack.txt", "py-spy dump", 0.1), "Thread 2\n")
    listed = {artifact.path: artifact for artifact in staging.settle()}
    assert "something removed it" in listed["ranks/0/stack.txt"].missing and not listed["ranks/0/stack.txt"].bytes
    assert not listed["ranks/1/stack.txt"].missing
    assert stat.S_IMODE(staging.root.stat().st_mode) == 0o700
    result = publish(staging.root, tmp_path / "bundles", NAME, tmp_path / "fallback", deadline_s=30.0)
    assert (result.problem, result.lost) == ("", False)
    assert (result.path / "ranks/1/stack.txt").read_text() == "Thread 2\n"


def test_publish_of_removed_staging_directory_is_lost(tmp_path: Path) -> None:
    staging = begun(tmp_path / "staged")
    shutil.rmtree(staging.root)
    result = publish(staging.root, tmp_path / "bundles", NAME, tmp_path / "fallback", deadline_s=30.0)
    assert result.lost and result.shown == "lost" and "removed" in result.problem
    assert list(tmp_path.glob("bundles/*")) == []


def test_artifact_written_again_is_listed_once(tmp_path: Path) -> None:
    staging = begun(tmp_path / "staged")
    shutil.rmtree(staging.root)
    staging.settle()
    staging.add_json(Artifact("verdict.json", "safelaunch", 0.0), {"outcome": "hang"})
    listed = [(artifact.path, bool(artifact.missing)) for artifact in staging.settle()]
    assert listed == [("ranks/0/stack.txt", True), ("verdict.json", False)]


@ROOT
def test_full_disks_are_reported_on_one_line(tmp_path: Path) -> None:
    """Neither the bundle directory nor the fallbacks have room; each is a separate disk."""
    staging = begun(tmp_path / "staged")
    (staging.root / "ranks/0/large.bin").write_bytes(os.urandom(2_000_000))
    (staging.root / "ranks/0/larger.bin").write_bytes(os.urandom(2_000_000))
    disks = [tmp_path / "bundles", tmp_path / "fallback", tmp_path / "tmp"]
    with ExitStack() as mounts, pytest.MonkeyPatch.context() as patch:
        for disk in disks:
            mounts.enter_context(mounted(disk, "size=1m"))
        patch.setattr("tempfile.tempdir", os.fspath(disks[2]))
        result = publish(staging.root, disks[0], NAME, disks[1], deadline_s=30.0)
        left = [list(disk.rglob("*.bin")) for disk in disks]
    assert result.path == staging.root and not result.lost
    assert left == [[], [], []]
    assert result.problem.count("No space left on device") == 3
    assert not any(mark in result.problem for mark in ("\n", "[", "(", "Errno", "'"))


@ROOT
def test_bundle_directory_of_other_user_in_shared_one_is_refused(tmp_path: Path) -> None:
    shared = place(tmp_path / "shared", 0o1777)
    foreign = place(shared / "bundles", 0o755, uid=STRANGER)
    assert check_directory(foreign) == f"it belongs to user {STRANGER}, who may replace files in it"
    assert check_directory(place(tmp_path / "project", 0o2775, uid=STRANGER)) == ""


@ROOT
def test_bundle_directory_link_made_by_another_user_is_refused(tmp_path: Path) -> None:
    shared = place(tmp_path / "shared", 0o1777)
    link = shared / "bundles"
    link.symlink_to(place(tmp_path / "mine", 0o700))
    assert check_directory(link) == ""
    os.lchown(link, STRANGER, STRANGER)
    assert check_directory(link) == f"it is a link of user {STRANGER}, who may point it anywhere"


def test_bundle_directory_dangling_link_is_reported_by_check(tmp_path: Path) -> None:
    (tmp_path / "bundles").symlink_to("/" + "a" * 300)
    assert "is a link that leads nowhere" in check_directory(tmp_path / "bundles")
