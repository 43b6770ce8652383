"""Faults of time and of sharing: a wall clock that jumps, a suspended machine, many runs that share directories."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from safelaunch.job.process import identify
from tests.qa.faults.fault_processes import STOPPED_S
from tests.qa.faults.row import HUNG, KILLED, NAMED, RESTARTS, TRAINS, Promise, Row, nothing
from tests.qa.faults.scene import (
    RESTARTING,
    TRAINING,
    Kind,
    Scene,
    Setting,
    at_suspicion,
    at_training,
    goes_on,
    pass_time,
)
from tests.support.paths import PROGRAMS

HOUR_S = 3600.0
ALONE = Kind("alone", ranks=1)
AT_ONCE = 8


# --- the wall clock ---------------------------------------------------------------------------------------------------


@contextmanager
def clock_of_its_own(setting: Setting) -> Iterator[None]:
    """Gives the job and safelaunch a wall clock that the test can set, apart from the machine's clock."""
    library, offset = setting.scratch / "libclock.so", setting.scratch / "offset"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, PROGRAMS / "libclock.c"], check=True)
    offset.write_bytes(struct.pack("q", 0))
    setting.env |= {"LD_PRELOAD": os.fspath(library), "CLOCK_OFFSET": os.fspath(offset)}
    yield


def _needs_gcc() -> str:
    return "" if shutil.which("gcc") else "needs gcc"


def jump(seconds: float, then: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        with (scene.scratch / "offset").open("r+b") as file:
            file.write(struct.pack("q", int(seconds)))
        then(scene)

    return inject


def suspend(scene: Scene) -> None:
    """Stops and later continues every process of the job and of safelaunch, like a closed laptop."""
    scene.remember()
    own = identify(scene.pid)
    everybody = [process for process in (own, *scene.seen) if process is not None and process.is_alive()]
    for process in everybody:
        process.send(signal.SIGSTOP)
    pass_time(scene, STOPPED_S)
    for process in everybody:
        process.send(signal.SIGCONT)


# --- eight at once ----------------------------------------------------------------------------------------------------


def with_others(does: Callable[[list[Scene]], None]) -> Callable[[Scene], None]:
    """Runs seven more jobs of this kind in the same run root and bundle directory, and waits for all."""

    def inject(scene: Scene) -> None:
        with ExitStack() as stack:
            scenes = [scene]
            for number in range(1, AT_ONCE):
                place = scene.scratch / str(number)
                place.mkdir()
                setting = Setting(place, scene.job.bundle_dir, scene.job.runtime)
                scenes.append(Scene(scene.kind, setting))
                stack.enter_context(scenes[-1].job)
            for each in scenes:
                at_training(each)
            does(scenes)
            for each in scenes[1:]:
                each.until(lambda each=each: each.job.process.poll() is not None, "its end", patience_s=120.0)  # type: ignore[misc]

    return inject


def all_finish(scenes: list[Scene]) -> None:
    for scene in scenes:
        scene.steer("finish")
    _end_with(scenes, [0] * AT_ONCE)


def all_hang(scenes: list[Scene]) -> None:
    for scene in scenes:
        scene.steer("hang")
    _end_with(scenes, [HUNG] * AT_ONCE)


def one_is_killed(scenes: list[Scene]) -> None:
    """Kills one safelaunch. Its guardian must end its own job and no other."""
    scenes[1].job.process.kill()
    goes_on(scenes[0])
    for scene in scenes:
        scene.steer("finish")
    _end_with(scenes, [0, KILLED, *[0] * (AT_ONCE - 2)])


def one_hangs(scenes: list[Scene]) -> None:
    at_suspicion(scenes[1])
    scenes[1].until(lambda: scenes[1].job.process.poll() is not None, "the end of the hung one")
    for scene in scenes:
        scene.steer("finish")
    _end_with(scenes, [0, HUNG, *[0] * (AT_ONCE - 2)])


def _end_with(scenes: list[Scene], codes: list[int]) -> None:
    for scene in scenes:
        scene.until(lambda scene=scene: scene.job.process.poll() is not None, "its end", patience_s=120.0)  # type: ignore[misc]
    ended = [scene.job.process.returncode for scene in scenes]
    assert ended == codes, f"the jobs ended with {ended}, not {codes}"
    outputs = [scene.job.stdout for scene, code in zip(scenes, codes, strict=True) if code == 0]
    assert set(outputs) <= {"rank 0 trained\n"}, f"the jobs' output is {outputs}"


ROWS = [
    *(
        Row(f"clock jumps an hour {way}", at, promise, jump(seconds, then), kind, clock_of_its_own, _needs_gcc)
        for way, seconds, at, promise, then, kind in (
            ("ahead", HOUR_S, "ranks' start", TRAINS, goes_on, TRAINING),
            ("back", -HOUR_S, "training", TRAINS, goes_on, TRAINING),
            ("ahead", HOUR_S, "suspicion", NAMED, nothing, TRAINING),
            ("back", -HOUR_S, "capture", NAMED, nothing, TRAINING),
            ("ahead", HOUR_S, "writing", NAMED, nothing, TRAINING),
            ("back", -HOUR_S, "restart", RESTARTS, nothing, RESTARTING),
        )
    ),
    *(Row("all is suspended for a while", at, TRAINS, suspend) for at in ("ranks' start", "training")),
    *(Row("all is suspended for a while", at, NAMED, suspend) for at in ("suspicion", "writing")),
    Row("all is suspended for a while", "restart", RESTARTS, suspend, RESTARTING),
    Row("8 runs at once, all finish", "training", TRAINS, with_others(all_finish), ALONE),
    Row("8 runs at once, all hang", "training", Promise((HUNG,), (8, 8), (0,)), with_others(all_hang), ALONE),
    Row("8 runs at once, one is killed", "training", TRAINS, with_others(one_is_killed), ALONE),
    Row("8 runs at once, one hangs", "training", replace(TRAINS, bundles=(1, 1), culprits=(0,)), with_others(one_hangs),
        ALONE),
]  # fmt: skip
