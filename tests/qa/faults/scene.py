"""The job that a fault hits: its processes by role, its pages, and the moments of its life.

A moment is recognised by a sign of the job itself (a process, a step, a line on stderr, an answer of the control
socket), never by time alone. The files ``hang`` and ``finish`` steer ``programs/steered.py``.
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

from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from safelaunch.job.process import ProcessId, descendants, identify
from safelaunch.supervise.control.protocol import ControlRequest, ask
from safelaunch.system.errors import SafelaunchError
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

STEERED = PROGRAMS / "steered.py"
HOLDING = (sys.executable, os.fspath(Path(__file__).parent / "holding.py"))  # runs in place of safelaunch
CULPRIT = 1
POLL_S = 0.02
LONGER_S = 5.5  # longer than these jobs' stall timeout plus the closer look
FAST_S = 0.001  # for processes that live for milliseconds


@dataclass
class Setting:
    """The environment that is prepared before the job starts."""

    scratch: Path
    bundle_dir: Path | None = None
    runtime: Path | None = None
    interpreter: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    release: list[Callable[[], None]] = field(default_factory=list)  # before the checks


@dataclass(frozen=True)
class Kind:
    """A kind of job: the options of safelaunch and of the script, and the number of ranks."""

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


def wait_for(
    reached: Callable[[], object],
    what: str,
    remember: Callable[[], None],
    said: Callable[[], str],
    *,
    patience_s: float,
    poll_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until ``reached``. While it waits, ``remember`` records processes that come and go.

    Args:
        said: Returns the jobs' output, for the failure's message.
        check: Raises if there is nothing left to wait for.
    """
    deadline = time.monotonic() + patience_s
    next_look = 0.0
    while not reached():
        now = time.monotonic()
        if now >= next_look and poll_s > FAST_S:
            next_look = now + 0.25
            remember()
        assert now < deadline, f"waited {patience_s:g} s for {what}\n{said()}"
        check()
        time.sleep(poll_s)
    remember()


class MissedMoment(AssertionError):
    """The job ended before the moment was seen. A test that gets no core for seconds misses what lasts that long."""


class Scene:
    """A running job. ``until`` also records every process below safelaunch, so that each can be checked later."""

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
        def check() -> None:
            ended = self.job.process.poll()
            if ended is not None and not reached():
                raise MissedMoment(f"ended with {ended} before {what}\n{self.job.stderr}")

        wait_for(
            reached, what, self.remember, lambda: self.job.stderr, patience_s=patience_s, poll_s=poll_s, check=check
        )

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
        """Returns rank → step of the newest attempt, from the pages."""
        run = self.run
        if run is None:
            return {}
        roster = Roster(run)
        roster.refresh()
        return {rank: page.read().step or 0 for rank, page in roster.pages().items()}

    def watch_says(self) -> str:
        """Returns the watchdog's state (watching, confirming, undecided, hung); empty without an answer."""
        run = self.run
        try:
            return str(json.loads(ask(run.control, ControlRequest("status"), deadline_s=2.0))["watch"]) if run else ""
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
        """Returns torchrun, after its exec. Its parent is the guardian, or safelaunch once the guardian has died."""
        near = [pid for child in self._children(self.pid) for pid in (child, *self._children(child))]
        return next((pid for pid in near if b"torchrun" in command(pid)), None)

    def guardian(self) -> int | None:
        """Returns the guardian: a child of safelaunch with a known name, or its replacement."""
        return next((pid for pid in self._children(self.pid) if name_of(pid) == "sl-guardian"), None)

    def first(self) -> int | None:
        """Returns the first process of the job, before or after its exec."""
        guardian = self.guardian()
        return next(iter(self._children(guardian)), None) if guardian is not None else None

    def helper(self, word: str) -> int | None:
        """Returns a helper of safelaunch: ``py-spy`` or ``copier.py``."""
        found = (pid for pid in self._children(self.pid) if word.encode() in command(pid))
        return next((pid for pid in found if not _leads(pid)), None)

    def rank(self, number: int = CULPRIT) -> int | None:
        return self.job.ranks().get(min(number, self.kind.ranks - 1))

    def worker(self, number: int = CULPRIT) -> int | None:
        """Returns a DataLoader worker of the rank: a fork with the same command line."""
        rank = self.rank(number)
        if rank is None:
            return None
        return next((pid for pid in self._children(rank) if command(pid) == command(rank)), None)

    def wait_for(self, role: Callable[[], int | None], what: str, *, patience_s: float = 60.0) -> ProcessId:
        """Waits for the process in that role and returns it."""
        found: list[ProcessId] = []

        def there() -> bool:
            pid = role()
            identity = identify(pid) if pid is not None else None
            found.extend([identity] if identity is not None else [])
            return bool(found)

        self.until(there, what, patience_s=patience_s, poll_s=FAST_S)
        self.seen.add(found[0])
        return found[0]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


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
    """The first moment of the job: torchrun's process has just been created."""
    scene.until(scene.first, "the first process of the job", poll_s=FAST_S)


def at_start_up(scene: Scene) -> None:
    """All of safelaunch's processes run. Ranks can run, but have made no step."""
    scene.until(lambda: scene.guardian() and scene.agent(), "guardian and agent")


def at_ranks_start(scene: Scene) -> None:
    """All ranks run and have made no step."""
    scene.until(lambda: len(scene.job.ranks()) == scene.kind.ranks, "all ranks")


def at_training(scene: Scene) -> None:
    scene.until(lambda: len(list(scene.scratch.glob("training-*"))) == scene.kind.ranks, "steps of all ranks")


def at_suspicion(scene: Scene) -> None:
    """No step within the threshold: the closer look is in progress."""
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: scene.watch_says() == "confirming", "a suspicion")


def at_capture(scene: Scene) -> None:
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: "collecting evidence" in scene.job.stderr, "the capture", poll_s=FAST_S)


def at_writing(scene: Scene) -> None:
    """The copy to the bundle directory has begun and stops itself (``HOLDING``)."""
    at_training(scene)
    scene.steer("hang")
    copy = scene.wait_for(lambda: scene.helper("copier.py"), "the copy")
    scene.until(copy.is_stopped, "the copy to stop")
    assert list(scene.job.bundle_dir.glob(".*.partial")), "it stops once it has begun"


def at_restart(scene: Scene) -> None:
    """safelaunch is ending the hung attempt's ranks, and torchrun has not started new ones."""
    at_training(scene)
    scene.steer("hang")
    scene.until(lambda: "ending the ranks" in scene.job.stderr, "the restart", poll_s=FAST_S)


def at_new_attempt(scene: Scene) -> None:
    """torchrun has restarted a rank, which has made no step."""
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
    """Lets time pass while something is stopped."""
    end = time.monotonic() + seconds
    scene.until(lambda: time.monotonic() >= end, "time to pass")


def goes_on(scene: Scene) -> None:
    """Lets the job train for longer than safelaunch needs to detect a hang."""
    at_training(scene)
    pass_time(scene, LONGER_S)


def let_the_copy_go_on(scene: Scene) -> None:
    """Ends the hold of ``at_writing``."""
    for process in scene.seen:
        if b"copier.py" in command(process.pid):
            process.send(signal.SIGCONT)


def safelaunch_command(scene: Scene, words: Sequence[str]) -> list[str]:
    """Runs another safelaunch command, as a user would."""
    return [*(scene.setting.interpreter or (sys.executable, "-m", "safelaunch")), *words]
