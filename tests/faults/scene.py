"""One job to which a fault is done: its processes by their roles, its pages, and the moments of its life.

A moment is recognised by a sign of the job's own (a process, a step, a line on stderr, what the control socket says),
never by time alone. ``hang`` and ``finish`` are files that steer ``programs/steered.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jobs import PROGRAMS, Job

from safelaunch.errors import SafelaunchError
from safelaunch.launch.paths import RunPaths
from safelaunch.launch.process import ProcessId, descendants, identify
from safelaunch.session.control import Request, ask
from safelaunch.watch.progress import Roster

STEERED = PROGRAMS / "steered.py"
CULPRIT = 1
POLL_S = 0.02
LONGER_S = 5.5  # than the stall timeout of these jobs and the closer look together
FAST_S = 0.001  # for what lives for milliseconds


@dataclass
class Setting:
    """What is arranged before the job is started: places, an interpreter, variables, more words."""

    scratch: Path
    bundle_dir: Path | None = None
    runtime: Path | None = None
    interpreter: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    release: list[Callable[[], None]] = field(default_factory=list)  # before anybody looks at what is left


@dataclass(frozen=True)
class Kind:
    """A kind of job: safelaunch's words, the script's, and how many ranks it has."""

    name: str
    ranks: int = 2
    own: tuple[str, ...] = ()
    script: tuple[str, ...] = ()

    def words(self, setting: Setting) -> list[str | Path]:
        own = ["--stall-timeout=2", *self.own, *setting.words, f"--nproc-per-node={self.ranks}"]
        culprit = min(CULPRIT, self.ranks - 1)
        return [*own, STEERED, f"--culprit={culprit}", f"--scratch={setting.scratch}", *self.script]


TRAINING = Kind("training")
LOADING = Kind("loading", script=("--workers=1",))
RESTARTING = Kind("restarting", ranks=1, own=("--on-stall=restart", "--max-restarts=3"))


class Scene:
    """A running job. ``until`` also remembers every process below safelaunch, so that none can be lost sight of."""

    def __init__(self, kind: Kind, setting: Setting) -> None:
        self.kind = kind
        self.setting = setting
        self.scratch = setting.scratch
        self.seen: set[ProcessId] = set()
        self.job = Job(
            kind.words(setting),
            setting.scratch,
            env=setting.env,
            bundle_dir=setting.bundle_dir,
            runtime=setting.runtime,
            interpreter=setting.interpreter,
        )
        self.pid = self.job.process.pid

    def until(
        self, reached: Callable[[], object], what: str, *, patience_s: float = 60.0, poll_s: float = POLL_S
    ) -> None:
        deadline = time.monotonic() + patience_s
        next_look = 0.0
        while not reached():
            now = time.monotonic()
            if now >= next_look and poll_s > FAST_S:
                next_look = now + 0.25
                self.remember()
            assert now < deadline, f"waited {patience_s:g} s for {what}\n{self.job.stderr}"
            ended = self.job.process.poll()
            assert ended is None or reached(), f"ended with {ended} before {what}\n{self.job.stderr}"
            time.sleep(poll_s)
        self.remember()

    def remember(self) -> None:
        self.seen.update(descendants([self.pid]))

    def steer(self, name: str) -> None:
        (self.scratch / name).touch()

    # --- what can be seen of it ----------------------------------------------------------------------------------

    @property
    def run(self) -> RunPaths | None:
        root = self.job.runtime / "safelaunch" / f"r{self.pid}"
        return RunPaths(root) if root.is_dir() else None

    def pages(self) -> list[Path]:
        run = self.run
        files = run.pages.iterdir() if run is not None else ()
        return sorted(path for path in files if path.name.count("-") == 2 and "." not in path.name)

    def steps(self) -> dict[int, int]:
        """rank → step of the newest attempt, as its page says."""
        run = self.run
        if run is None:
            return {}
        roster = Roster(run)
        roster.refresh()
        return {rank: page.read().step or 0 for rank, page in roster.pages().items()}

    def watch_says(self) -> str:
        """The state of the watch: watching, confirming, undecided, hung; empty when nobody answers."""
        run = self.run
        try:
            return str(json.loads(ask(run.control, Request("status"), deadline_s=2.0))["watch"]) if run else ""
        except SafelaunchError:
            return ""

    # --- processes by their roles --------------------------------------------------------------------------------

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
            for thread in threads:
                with suppress(OSError), open(f"{thread.path}/children") as file:
                    found += [int(word) for word in file.read().split()]
        return found

    def agent(self) -> int | None:
        """torchrun, as soon as it has become that."""
        return next((pid for pid in self._children(self.pid) if b"torchrun" in command(pid)), None)

    def guardian(self) -> int | None:
        """A fork of safelaunch's own that leads a session."""
        own = command(self.pid)
        return next((pid for pid in self._children(self.pid) if command(pid) == own and _leads(pid)), None)

    def helper(self, word: str) -> int | None:
        """A program that safelaunch runs for itself: ``py-spy``, or ``copier.py``."""
        found = (pid for pid in self._children(self.pid) if word.encode() in command(pid))
        return next((pid for pid in found if not _leads(pid)), None)

    def rank(self, number: int = CULPRIT) -> int | None:
        return self.job.ranks().get(min(number, self.kind.ranks - 1))

    def worker(self, number: int = CULPRIT) -> int | None:
        """A DataLoader worker of that rank: a fork of it, with its command line."""
        rank = self.rank(number)
        if rank is None:
            return None
        return next((pid for pid in self._children(rank) if command(pid) == command(rank)), None)

    def wait_for(self, role: Callable[[], int | None], what: str, *, patience_s: float = 60.0) -> ProcessId:
        """The process in that role, once there is one."""
        found: list[ProcessId] = []

        def there() -> bool:
            pid = role()
            identity = identify(pid) if pid is not None else None
            found.extend([identity] if identity is not None else [])
            return bool(found)

        self.until(there, what, patience_s=patience_s, poll_s=FAST_S)
        self.seen.add(found[0])
        return found[0]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


# --- moments ----------------------------------------------------------------------------------------------------------


def at_launch(scene: Scene) -> None:
    """The first moment at which there is a job at all: torchrun's process has just been made."""
    scene.until(lambda: scene._children(scene.pid), "the first process of the job", poll_s=FAST_S)


def at_start_up(scene: Scene) -> None:
    """Everything of safelaunch's own is there; ranks may be, none has made a step."""
    scene.until(lambda: scene.guardian() and scene.agent(), "guardian and agent")


def at_ranks_start(scene: Scene) -> None:
    """All ranks are there and none has made a step."""
    scene.until(lambda: len(scene.job.ranks()) == scene.kind.ranks, "all ranks")


def at_training(scene: Scene) -> None:
    scene.until(lambda: len(list(scene.scratch.glob("training-*"))) == scene.kind.ranks, "steps of all ranks")


def at_suspicion(scene: Scene) -> None:
    """No step for the threshold; the closer look is under way."""
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: scene.watch_says() == "confirming", "a suspicion")


def at_capture(scene: Scene) -> None:
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: "collecting evidence" in scene.job.stderr, "the capture", poll_s=FAST_S)


def at_writing(scene: Scene) -> None:
    """The copy into the bundle directory has begun. It is held there, as it may take less than a tenth of a second."""
    at_training(scene)
    scene.steer("hang")
    copy = scene.wait_for(lambda: scene.helper("copier.py"), "the copy")
    while True:  # a millisecond at a time
        copy.send(signal.SIGSTOP)
        scene.until(copy.is_stopped, "the copy to stop", poll_s=FAST_S)
        if list(scene.job.bundle_dir.glob(".*.partial")):
            return
        copy.send(signal.SIGCONT)
        time.sleep(FAST_S)


def at_restart(scene: Scene) -> None:
    """The ranks of the hung attempt are being ended; torchrun has not started new ones."""
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: "ending the ranks" in scene.job.stderr, "the restart", poll_s=FAST_S)


def at_new_attempt(scene: Scene) -> None:
    """torchrun has started a rank again, and it has made no step."""
    at_training(scene)
    first = scene.rank()
    scene.steer("hang")
    scene.until(lambda: scene.rank() not in (None, first), "a rank of the next attempt")


MOMENTS: dict[str, Callable[[Scene], None]] = {
    "launch": at_launch,
    "start-up": at_start_up,
    "ranks' start": at_ranks_start,
    "training": at_training,
    "suspicion": at_suspicion,
    "capture": at_capture,
    "writing": at_writing,
    "restart": at_restart,
    "new attempt": at_new_attempt,
}


def pass_time(scene: Scene, seconds: float) -> None:
    """Time that passes while something is stopped."""
    end = time.monotonic() + seconds
    scene.until(lambda: time.monotonic() >= end, "time to pass")


def goes_on(scene: Scene) -> None:
    """The job trains on, for longer than a hang would take to be found."""
    at_training(scene)
    pass_time(scene, LONGER_S)


def let_the_copy_go_on(scene: Scene) -> None:
    """Ends the hold of ``at_writing``."""
    for process in scene.seen:
        if b"copier.py" in command(process.pid):
            process.send(signal.SIGCONT)


def safelaunch_command(scene: Scene, words: Sequence[str]) -> list[str]:
    """Another safelaunch beside the job, as a user types it."""
    return [*(scene.setting.interpreter or (sys.executable, "-m", "safelaunch")), *words]
