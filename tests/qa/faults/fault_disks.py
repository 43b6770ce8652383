"""Faults of disks: the bundle or run directory is full, read-only, hung, missing, or replaced."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.qa.faults.fault_processes import HANGS, kill
from tests.qa.faults.row import DIES, NAMED, RESTARTS, TRAINS, Promise, Row
from tests.qa.faults.scene import RESTARTING, TRAINING, Kind, Scene, Setting

REFUSED = Promise((2,), starts=False)
LOCAL = replace(NAMED, kept_locally=True, said=("could not be written to the requested directory",))
# The evidence is collected there. Removing it loses artifacts, but neither the job's end nor the verdict.
GONE = replace(NAMED, culprits=None, said=("the job hangs: ",))
SMALL_KB = 512


def _needs_mounts() -> str:
    """Returns why mounting is impossible, after trying it on a private directory. It takes root."""
    if os.getuid():
        return "needs root to mount a small file system"
    place = tempfile.mkdtemp(prefix="sd-", dir="/tmp")
    try:
        return "" if _mount(Path(place), "size=4k") and _unmount(Path(place)) else "file systems cannot be mounted here"
    finally:
        Path(place).rmdir()


def _needs_fuse() -> str:
    return _needs_mounts() or ("" if os.access("/dev/fuse", os.W_OK) else "needs /dev/fuse")


def _mount(place: Path, options: str) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", os.fspath(place)]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def _unmount(place: Path) -> bool:
    return subprocess.run(["umount", "--lazy", place], check=False, capture_output=True).returncode == 0


@contextmanager
def _small_disk() -> Iterator[Path]:
    """Provides a directory (0700, with a short name) on its own small file system."""
    place = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
    try:
        if not _mount(place, f"size={SMALL_KB}k"):
            raise OSError("the small file system could not be mounted")
        yield place
    finally:
        while _unmount(place):  # including what a fault has mounted over it
            pass
        place.rmdir()


@contextmanager
def bundles_on_a_disk(setting: Setting) -> Iterator[None]:
    with _small_disk() as place:
        setting.bundle_dir = place
        yield


@contextmanager
def run_on_a_disk(setting: Setting) -> Iterator[None]:
    with _small_disk() as place:
        setting.runtime = place
        yield


@contextmanager
def bundles_in_a_directory(setting: Setting) -> Iterator[None]:
    setting.bundle_dir = setting.scratch / "wanted"
    setting.bundle_dir.mkdir()
    yield


# --- what is done to the disk -----------------------------------------------------------------------------------------


def _fill(place: Path) -> None:
    with suppress(OSError), (place / "data").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fill_bundles(scene: Scene) -> None:
    _fill(scene.job.bundle_dir)


def fill_run(scene: Scene) -> None:
    _fill(scene.job.runtime)


def make_read_only(scene: Scene) -> None:
    subprocess.run(["mount", "-o", "remount,ro", scene.job.bundle_dir], check=True)


def let_die(place: Path) -> None:
    """Mounts a FUSE file system over ``place`` whose server never answers. Every access to it hangs.

    The server is this process, for as long as its descriptor is open.
    """
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"dead", os.fsencode(place), b"fuse", 0, options):
        os.close(server)
        raise OSError(ctypes.get_errno(), "the dead disk could not be mounted")
    _servers.append(server)


_servers: list[int] = []


def kill_the_disk(scene: Scene) -> None:
    let_die(scene.job.bundle_dir)


@contextmanager
def bundles_on_a_mortal_disk(setting: Setting) -> Iterator[None]:
    """Provides a bundle directory whose disk can hang. Releases all waiting processes at the end."""
    place = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
    setting.bundle_dir = place

    def release() -> None:
        while _servers:
            os.close(_servers.pop())
            _unmount(place)

    setting.release.append(release)
    try:
        yield
    finally:
        release()
        shutil.rmtree(place)


@contextmanager
def bundles_on_a_dead_disk(setting: Setting) -> Iterator[None]:
    with bundles_on_a_mortal_disk(setting):
        assert setting.bundle_dir is not None
        let_die(setting.bundle_dir)
        yield


def remove_bundles(scene: Scene) -> None:
    shutil.rmtree(scene.job.bundle_dir)


def replace_by_a_file(scene: Scene) -> None:
    remove_bundles(scene)
    scene.job.bundle_dir.write_text("in the way")


def replace_by_a_fifo(scene: Scene) -> None:
    """Replaces a file by a FIFO without readers and writers. Every open hangs."""
    remove_bundles(scene)
    os.mkfifo(scene.job.bundle_dir)


def remove_run(scene: Scene) -> None:
    """Removes the run directory, like a cleaner of /tmp. Files created during the removal can remain."""
    assert scene.run is not None
    shutil.rmtree(scene.run.root, ignore_errors=True)


@contextmanager
def bundles_below_a_file(setting: Setting) -> Iterator[None]:
    (setting.scratch / "file").write_text("")
    setting.bundle_dir = setting.scratch / "file" / "bundles"
    yield


@contextmanager
def bundles_on_a_read_only_disk(setting: Setting) -> Iterator[None]:
    with bundles_on_a_disk(setting):
        assert setting.bundle_dir is not None
        subprocess.run(["mount", "-o", "remount,ro", setting.bundle_dir], check=True)
        yield


@contextmanager
def full_run(setting: Setting) -> Iterator[None]:
    with run_on_a_disk(setting):
        assert setting.runtime is not None
        _fill(setting.runtime)
        yield


def _kind(moment: str) -> Kind:
    return RESTARTING if moment in ("restart", "new attempt") else TRAINING


def _promised(moment: str, otherwise: Promise) -> Promise:
    return {"training": TRAINS, "start-up": TRAINS, "restart": RESTARTS}.get(moment, otherwise)


def then(fault: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Injects the fault into a healthy job, then lets it hang."""

    def inject(scene: Scene) -> None:
        fault(scene)
        scene.steer("hang")

    return inject


DEAD = "the bundle directory's disk dies"
ROWS = [
    Row("bundle directory below a file", "before", REFUSED, arrange=bundles_below_a_file),
    Row("bundle directory read-only", "before", REFUSED, arrange=bundles_on_a_read_only_disk, needs=_needs_mounts),
    Row(DEAD, "before", REFUSED, arrange=bundles_on_a_dead_disk, needs=_needs_fuse),
    *(
        Row(name, at, LOCAL, then(fault) if at == "training" else fault, arrange=arrange, needs=needs)
        for name, fault, arrange, needs, moments in (
            ("bundle directory becomes read-only", make_read_only, bundles_on_a_disk, _needs_mounts,
             ("training", "capture")),
            ("bundle directory fills up", fill_bundles, bundles_on_a_disk, _needs_mounts, ("training", *HANGS)),
            ("bundle directory becomes a FIFO", replace_by_a_fifo, bundles_in_a_directory, lambda: "",
             ("training", "writing")),
            ("bundle directory becomes a file", replace_by_a_file, bundles_in_a_directory, lambda: "", ("suspicion",)),
        )
        for at in moments
    ),
    *(
        Row("bundle directory is removed", at, NAMED, then(remove_bundles) if at == "training" else remove_bundles,
            arrange=bundles_in_a_directory)
        for at in ("training", "suspicion", "capture")
    ),
    Row("bundle directory is removed", "writing", NAMED, remove_bundles, arrange=bundles_in_a_directory),
    *(
        Row(DEAD, at, replace(LOCAL, partial_stays=True), then(kill_the_disk) if at == "training" else kill_the_disk,
            arrange=bundles_on_a_mortal_disk, needs=_needs_fuse)
        for at in ("training", "writing")
    ),
    Row("run directory full", "before", TRAINS, arrange=full_run, needs=_needs_mounts),
    *(
        Row("run directory fills up", at, _promised(at, NAMED), fill_run, _kind(at), run_on_a_disk, _needs_mounts)
        for at in ("start-up", "training", *HANGS, "restart")
    ),
    Row("run directory fills up, then a hang", "training", NAMED, then(fill_run), TRAINING, run_on_a_disk,
        _needs_mounts),
    Row("run directory fills up, kill -9 safelaunch", "training", DIES,
        lambda scene: (fill_run(scene), kill("safelaunch")(scene))[-1], TRAINING, run_on_a_disk, _needs_mounts),
    *(
        Row("run directory is removed", at, _promised(at, GONE if at in HANGS[1:] else NAMED), remove_run, _kind(at))
        for at in ("start-up", "training", *HANGS, "restart")
    ),
    Row("run directory is removed, then a hang", "training", NAMED, then(remove_run)),
]  # fmt: skip
