"""Faults of processes: ``kill -9`` and SIGSTOP of each process, at each moment of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

from safelaunch.job.paths import sweep
from safelaunch.job.process import ProcessId
from tests.qa.faults.row import CRASHES, DIES, HUNG, KILLED, NAMED, RESTARTS, TRAINS, Promise, Row
from tests.qa.faults.scene import LOADING, RESTARTING, TRAINING, Kind, Scene, pass_time, safelaunch_command

STOPPED_S = 6.5  # longer than the gap that the watchdog takes for a suspended machine
IMPATIENT = replace(TRAINING, own=("--startup-timeout=3",))
RESTARTING_IMPATIENTLY = replace(RESTARTING, own=(*RESTARTING.own, "--startup-timeout=3"))
LIVE = Promise((0,), (1, 1), (), trains=True)  # a requested bundle of a job that continues
HANGS = ("suspicion", "capture", "writing")


def _victim(scene: Scene, role: str) -> ProcessId:
    """Returns the process in a role. ``peer`` is a rank that waits for the culprit."""
    roles: dict[str, Callable[[], int | None]] = {
        "safelaunch": lambda: scene.pid,
        "guardian": scene.guardian,
        "agent": scene.agent,
        "rank": scene.rank,
        "peer": lambda: scene.rank(0),
        "worker": scene.worker,
        "py-spy": lambda: scene.helper("py-spy"),
        "copy": lambda: scene.helper("copier.py"),
    }
    return scene.wait_for(roles[role], role)


def kill(*roles: str) -> Callable[[Scene], None]:
    """Kills these processes with ``kill -9``, in this order."""

    def inject(scene: Scene) -> None:
        scene.remember()
        for victim in [_victim(scene, role) for role in roles]:
            victim.send(signal.SIGKILL)

    return inject


def kill_both(scene: Scene) -> None:
    """Kills both. The next run must remove the run directory."""
    kill("guardian", "safelaunch")(scene)
    scene.setting.release.append(lambda: sweep(scene.job.runtime / "safelaunch"))


def stop(*roles: str) -> Callable[[Scene], None]:
    """Sends SIGSTOP without a later SIGCONT."""

    def inject(scene: Scene) -> None:
        for victim in [_victim(scene, role) for role in roles]:
            victim.send(signal.SIGSTOP)

    return inject


def stop_a_while(*roles: str) -> Callable[[Scene], None]:
    """Sends SIGSTOP, and SIGCONT once the gap is long enough."""

    def inject(scene: Scene) -> None:
        victims = [_victim(scene, role) for role in roles]
        for victim in victims:
            victim.send(signal.SIGSTOP)
        pass_time(scene, STOPPED_S)
        for victim in victims:
            victim.send(signal.SIGCONT)

    return inject


def stop_beyond_the_end(role: str) -> Callable[[Scene], None]:
    """Stops a process, lets the job end, then continues the process."""

    def inject(scene: Scene) -> None:
        victim = _victim(scene, role)
        victim.send(signal.SIGSTOP)
        scene.steer("finish")
        scene.until(lambda: not scene.job.ranks(), "the ranks' end")
        pass_time(scene, 1.0)
        victim.send(signal.SIGCONT)

    return inject


def stop_and_kill(scene: Scene) -> None:
    """Stops the guardian, kills safelaunch, and continues the guardian a while later."""
    guardian = _victim(scene, "guardian")
    guardian.send(signal.SIGSTOP)
    kill("safelaunch")(scene)
    time.sleep(1.0)
    guardian.send(signal.SIGCONT)


def hold_the_copy(scene: Scene) -> None:
    """Keeps the copier stopped, like a hung disk, until safelaunch gives up on it."""
    scene.until(lambda: scene.helper("copier.py") is None, "the end of the copy", patience_s=100.0)


def dump_with_py_spy(signum: int) -> Callable[[Scene], None]:
    """Runs ``safelaunch dump`` on a training job. The signal hits py-spy while it might hold a rank."""

    def inject(scene: Scene) -> None:
        before = scene.steps()
        asked = subprocess.Popen(
            safelaunch_command(scene, ["dump", "--bundle-dir", str(scene.job.bundle_dir)]),
            env={**os.environ, "XDG_RUNTIME_DIR": str(scene.job.runtime)},
            cwd=scene.scratch,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            scene.wait_for(lambda: scene.helper("py-spy"), "py-spy").send(signum)
            scene.until(lambda: asked.poll() is not None, "the answer to dump")
        finally:
            asked.kill()
            asked.wait()
        assert asked.returncode == 0, f"dump ended with {asked.returncode}"
        scene.until(lambda: all(scene.steps()[rank] > step for rank, step in before.items()), "more steps")

    return inject


def _kind_at(moment: str, kind: Kind = TRAINING) -> Kind:
    return RESTARTING if moment in ("restart", "new attempt") else kind


def _promised(moment: str, *, otherwise: Promise = NAMED) -> Promise:
    # The fault harms no rank: the job continues to train, and a hang is found and ended.
    if moment in ("restart", "new attempt"):
        return RESTARTS
    return otherwise if moment in HANGS else TRAINS


def _killed() -> list[Row]:
    dies = {"restart": Promise((KILLED,), (1, 1), (0,))}
    agent = {moment: replace(NAMED, codes=(KILLED,)) for moment in ("capture", "writing")}
    agent["restart"] = Promise((KILLED, HUNG), (1, 1), (0,))  # nothing follows the hang
    hung_or_crashed = Promise((1, HUNG), (1, 2), (1,))
    crash_at_suspicion = Promise((1,), (1, 2), (1,))
    before, after = ("start-up", "training"), ("suspicion", "capture", "writing", "restart")
    return [
        *(Row("kill -9 safelaunch", at, dies.get(at, DIES), kill("safelaunch"), _kind_at(at))
          for at in ("launch", *before, *after)),
        *(Row("kill -9 guardian", at, _promised(at), kill("guardian"), _kind_at(at)) for at in (*before, *after)),
        Row("kill -9 guardian, then safelaunch", "training", DIES, kill_both),
        *(Row("kill -9 torchrun agent", at, agent.get(at, DIES), kill("agent"), _kind_at(at))
          for at in (*before, *after)),
        Row("kill -9 agent, then safelaunch", "training", DIES, kill("agent", "safelaunch")),
        Row("kill -9 rank", "ranks' start", CRASHES, kill("rank")),
        Row("kill -9 rank", "training", replace(CRASHES, causes=("rank-killed",)), kill("rank")),
        Row("kill -9 rank", "suspicion", crash_at_suspicion, kill("rank")),
        Row("kill -9 rank", "capture", hung_or_crashed, kill("rank")),
        Row("kill -9 rank", "writing", hung_or_crashed, kill("rank")),
        Row("kill -9 rank", "new attempt", Promise((0,), (2, 2), (0,), trains=True), kill("rank"), RESTARTING),
        # Its Flight Recorder, which could have distinguished the two ranks, is lost.
        Row("kill -9 waiting rank", "capture", replace(hung_or_crashed, culprits=None), kill("peer")),
        Row("kill -9 DataLoader worker", "ranks' start", CRASHES, kill("worker"), LOADING),
        Row("kill -9 DataLoader worker", "training", CRASHES, kill("worker"), LOADING),
        Row("kill -9 DataLoader worker", "suspicion", crash_at_suspicion, kill("worker"), LOADING),
        Row("kill -9 DataLoader worker", "writing", hung_or_crashed, kill("worker"), LOADING),
        Row("kill -9 py-spy", "suspicion", NAMED, kill("py-spy")),
        Row("kill -9 py-spy", "training", LIVE, dump_with_py_spy(signal.SIGKILL)),
        Row("kill -9 copy of the bundle", "writing", replace(NAMED, kept_locally=True), kill("copy")),
    ]  # fmt: skip


def _stopped() -> list[Row]:
    stopped_rank = replace(NAMED, causes=("rank-stopped",))
    stuck_worker = replace(NAMED, causes=("data-loading",))
    before = ("start-up", "training")
    return [
        *(Row("SIGSTOP safelaunch, SIGCONT", at, _promised(at), stop_a_while("safelaunch"), _kind_at(at))
          for at in (*before, "suspicion", "writing", "restart")),
        Row("SIGSTOP safelaunch beyond the end", "training", TRAINS, stop_beyond_the_end("safelaunch")),
        *(Row("SIGSTOP guardian", at, _promised(at), stop("guardian"), _kind_at(at))
          for at in ("training", "suspicion", "writing", "restart")),
        Row("SIGSTOP guardian, kill -9 safelaunch", "training", DIES, stop_and_kill),
        *(Row("SIGSTOP torchrun agent, SIGCONT", at, _promised(at), stop_a_while("agent"), _kind_at(at))
          for at in ("training", "restart")),
        Row("SIGSTOP torchrun agent beyond the end", "training", TRAINS, stop_beyond_the_end("agent")),
        *(Row("SIGSTOP torchrun agent", at, NAMED, stop("agent")) for at in HANGS),
        Row("SIGSTOP rank", "ranks' start", NAMED, stop("rank"), IMPATIENT),
        Row("SIGSTOP rank", "training", stopped_rank, stop("rank")),
        Row("SIGSTOP rank, SIGCONT", "training", TRAINS, stop_a_while("rank", "peer")),
        *(Row("SIGSTOP rank", at, NAMED, stop("rank")) for at in ("suspicion", "writing")),
        Row("SIGSTOP waiting rank", "suspicion", replace(NAMED, culprits=None), stop("peer")),
        # Its Flight Recorder, which could have distinguished the two ranks, is unreachable.
        Row("SIGSTOP waiting rank", "capture", replace(NAMED, culprits=None), stop("peer")),
        # The only rank isn't blamed, as on a suspended machine.
        Row("SIGSTOP rank, SIGCONT", "new attempt", RESTARTS, stop_a_while("rank"), RESTARTING_IMPATIENTLY),
        Row("SIGSTOP DataLoader worker", "training", stuck_worker, stop("worker"), LOADING),
        *(Row("SIGSTOP DataLoader worker", at, stuck_worker, stop("worker"), LOADING)
          for at in ("suspicion", "writing")),
        Row("SIGSTOP py-spy", "suspicion", NAMED, stop("py-spy")),
        Row("SIGSTOP py-spy", "training", LIVE, dump_with_py_spy(signal.SIGSTOP)),
        Row("SIGSTOP copy of the bundle", "writing", replace(NAMED, kept_locally=True), hold_the_copy),
    ]  # fmt: skip


ROWS = [*_killed(), *_stopped()]
