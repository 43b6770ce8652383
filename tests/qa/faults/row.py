"""A row of the fault matrix: one fault at one moment of one job, the promise, and the check of the promise."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import safelaunch
from safelaunch.job.paths import run_root
from tests.qa.faults.scene import HOLDING, MOMENTS, TRAINING, Kind, MissedMoment, Scene, Setting, let_the_copy_go_on
from tests.support.jobs import Bundle, Result

KILLED = -9
HUNG = 124
TRIES = 3  # of a row whose moment was missed
LEAVES_S = 30.0  # for the guardian to end the processes of a killed safelaunch


@dataclass(frozen=True)
class Promise:
    """Conditions at the end, in addition to those that ``judge`` checks in every row.

    Attributes:
        bundles: Minimum and maximum count.
        culprits: Ranks that the verdict must name; None if the evidence itself is damaged.
        trains: Every rank reports at its end that it has trained.
        kept_locally: The bundle is in a local directory that safelaunch has named, with the reason.
        said: Required words of safelaunch's output.
    """

    codes: tuple[int, ...]
    bundles: tuple[int, int] = (0, 0)
    culprits: tuple[int, ...] | None = None
    causes: tuple[str, ...] = ()
    trains: bool = False
    kept_locally: bool = False
    said: tuple[str, ...] = ()
    partial_stays: bool = False  # on a disk that hung; the next bundle there removes it a day later
    starts: bool = True  # False: refused before the start


TRAINS = Promise((0,), trains=True)
NAMED = Promise((HUNG,), (1, 1), (1,))  # the hang is found and its rank named, despite the fault
CRASHES = Promise((1,), (1, 1), (1,))
DIES = Promise((KILLED,), (0, 1))
RESTARTS = Promise((0,), (1, 1), (0,), trains=True)


def nothing(_: Any) -> None:
    return


@dataclass(frozen=True)
class Row:
    """One row. ``arrange`` is a context around the whole run (disks, tools). ``inject`` is the fault at ``moment``.

    ``needs`` returns why the row cannot run here, or an empty string.
    """

    fault: str
    moment: str
    promise: Promise
    inject: Callable[[Scene], None] = nothing
    kind: Kind = TRAINING
    arrange: Callable[[Setting], AbstractContextManager[object]] = field(default=lambda setting: nullcontext())
    needs: Callable[[], str] = field(default=lambda: "")

    @property
    def where(self) -> str:
        return self.kind.name

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.moment}, {self.where}"


class Named(Protocol):
    """The table's columns for a row. ``where`` is the kind of job, or the node."""

    @property
    def fault(self) -> str: ...
    @property
    def moment(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """The result of a row.

    Attributes:
        wrong: Broken promises.
        skipped: Reason why it didn't run.
        code: Exit code, or the codes of all nodes.
    """

    row: Named
    wrong: tuple[str, ...] = ()
    skipped: str = ""
    code: int | str | None = None
    left: int = 0
    bundle: str = "-"
    verdict: str = "-"
    seconds: float = 0.0
    stderr: str = ""

    def cells(self) -> tuple[str, ...]:
        """Returns one line of the table, in the columns of ``HEAD``."""
        result = f"{_NOT_RUN}: {self.skipped}" if self.skipped else "; ".join(self.wrong) or _KEPT
        exit_code = "-" if self.code is None else str(self.code)
        what = (self.row.fault, self.row.moment, self.row.where)
        return (*what, exit_code, str(self.left), self.bundle, self.verdict, f"{self.seconds:.1f}", result)


HEAD = ("fault", "moment", "job or node", "exit", "left", "bundle", "verdict", "seconds", "promise")


_KEPT, _NOT_RUN = "kept", "not run"


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([*map(str.ljust, cells, widths), cells[-1]]).rstrip()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats all rows (from ``Outcome.cells``) and their count."""
    widths = [max(len(cells[column]) for cells in (HEAD, *rows)) for column in range(len(HEAD) - 1)]
    return "\n".join([*(line(cells, widths) for cells in (HEAD, *rows)), total(rows)])


def total(rows: Sequence[Sequence[str]]) -> str:
    ran = [cells[-1] for cells in rows if not cells[-1].startswith(_NOT_RUN)]
    text = f"{len(ran)} rows, {sum(promise != _KEPT for promise in ran)} of them lost a job, a process or a bundle"
    return text + (f"; {len(rows) - len(ran)} could not run here" if len(ran) < len(rows) else "")


def run(row: Row, scratch: Path) -> Outcome:
    """Runs one row in the empty directory ``scratch``; again if its moment was missed."""
    if skipped := row.needs():
        return Outcome(row, skipped=skipped)
    missed = ""
    for number in range(TRIES):
        place = scratch / str(number)
        place.mkdir()
        try:
            return _once(row, place)
        except MissedMoment as error:
            missed = str(error)
    first, _, rest = missed.partition("\n")
    return Outcome(row, (first,), stderr=rest)


def _once(row: Row, scratch: Path) -> Outcome:
    setting = Setting(scratch, interpreter=HOLDING if row.moment == "writing" else ())
    begin = time.monotonic()
    decoy = subprocess.Popen(["sleep", "3605"], env={"SAFELAUNCH_RUN_DIR": "/tmp/x"}, cwd="/")
    try:
        with row.arrange(setting):
            scene = Scene(row.kind, setting)
            with scene.job:
                outcome = _through(row, scene)
        wrong = outcome.wrong if decoy.poll() is None else (*outcome.wrong, "another's process was ended")
    finally:
        decoy.kill()
        decoy.wait()
    return Outcome(**{**vars(outcome), "wrong": wrong, "seconds": time.monotonic() - begin})


def _through(row: Row, scene: Scene) -> Outcome:
    """Runs from the moment of the fault to the checks. A wait that times out is a broken promise.

    Raises MissedMoment if the job ended too early.
    """
    try:
        if row.moment in MOMENTS:
            MOMENTS[row.moment](scene)
        row.inject(scene)
        let_the_copy_go_on(scene)
        if row.promise.trains and scene.job.process.poll() is None:
            scene.steer("finish")
        result = _end_of(scene)
    except MissedMoment:
        raise
    except (AssertionError, OSError) as error:
        first, _, rest = str(error).partition("\n")
        return Outcome(row, (first,), code=scene.job.process.poll(), stderr=rest)
    return judge(row, scene, result)


def _end_of(scene: Scene) -> Result:
    """Returns the result, once safelaunch has ended and its guardian has had time to act."""
    scene.until(lambda: scene.job.process.poll() is not None, "the end of safelaunch", patience_s=150.0)
    deadline = time.monotonic() + LEAVES_S
    while (scene.job.pids() or _alive(scene)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for release in scene.setting.release:
        release()
    return scene.job.wait()


def _alive(scene: Scene) -> list[str]:
    return [f"pid {process.pid}" for process in sorted(scene.seen, key=lambda p: p.pid) if process.is_alive()]


# --- the judgement ----------------------------------------------------------------------------------------------------


def judge(row: Row, scene: Scene, result: Result) -> Outcome:
    """Checks every row: no process or directory remains, every bundle is whole, safelaunch prints no own traceback."""
    promise = row.promise
    left = sorted({*result.leftovers, *_alive(scene)})
    wrong = [f"left behind: {what}" for what in left]
    if result.code not in promise.codes:
        wrong.append(f"exit code {result.code}, not {' or '.join(map(str, promise.codes))}")
    wrong += own_faults(result.stderr)
    wrong += [f"safelaunch did not say {words!r}" for words in promise.said if words not in result.said]
    if not promise.starts and (list(scene.scratch.glob("t*-?")) or not result.said or result.stdout):
        wrong.append("the job was started, or nothing was said")
    trained = len(list(scene.scratch.glob("trained-*")))
    if promise.trains and trained != scene.kind.ranks:
        wrong.append(f"{trained} of {scene.kind.ranks} ranks trained to their end")
    if promise.trains and sorted(result.stdout.splitlines()) != [f"rank {n} trained" for n in range(scene.kind.ranks)]:
        wrong.append("the ranks' output is not complete")
    bundles, where = _bundles(scene, result, promise)
    wrong += _of_bundles(promise, bundles)
    halves = _halves(scene, result.bundles)
    wrong += [half for half in halves if not (promise.partial_stays and half.endswith(".partial"))]
    verdict = _said_by(bundles)
    for bundle in bundles if where == "local" else []:
        shutil.rmtree(bundle.path)
    shown = f"{len(bundles)} {where}".strip() if bundles else "0"
    return Outcome(row, tuple(wrong), "", result.code, len(left), shown, verdict, 0.0, result.stderr)


def own_faults(stderr: str) -> list[str]:
    """Returns the reports in safelaunch's output about its own faults."""
    wrong = []
    if any(str(Path(safelaunch.__file__).parent) in frame for frame in _innermost_frames(stderr)):
        wrong.append("a traceback of safelaunch's own")
    if "an internal error" in stderr or "a source of evidence failed" in stderr:
        wrong.append("an internal error of safelaunch")
    return wrong


def _innermost_frames(stderr: str) -> list[str]:
    # The place where each printed exception was raised; the launcher's and the script's exceptions are allowed.
    shown = stderr.split("Traceback (most recent call last):")[1:]
    return [next((line for line in reversed(text.splitlines()) if line.startswith('  File "')), "") for text in shown]


def _bundles(scene: Scene, result: Result, promise: Promise) -> tuple[list[Bundle], str]:
    named = [Path(line.removeprefix("bundle: ")) for line in result.said.splitlines() if line.startswith("bundle: ")]
    local = [Bundle(path) for path in named if path.parent != scene.job.bundle_dir and path.is_dir()]
    return (local, "local") if local else (list(result.bundles), "")


def _of_bundles(promise: Promise, bundles: list[Bundle]) -> list[str]:
    least, most = promise.bundles
    if not least <= len(bundles) <= most:
        return [f"{len(bundles)} bundles, not {least} to {most}"]
    wrong = [problem for bundle in bundles for problem in bundle.problems()]
    if promise.kept_locally and not bundles:
        wrong.append("no bundle was kept locally")
    if bundles and promise.culprits is not None:
        named = [[one["rank"] for one in bundle.verdict["culprits"]] for bundle in bundles]
        if list(promise.culprits) not in named:
            wrong.append(f"culprits {named}, not {list(promise.culprits)}")
    if bundles and promise.causes and not any(bundle.verdict["cause"] in promise.causes for bundle in bundles):
        wrong.append(f"the cause is not {' or '.join(promise.causes)}")
    return wrong


def _halves(scene: Scene, whole: tuple[Bundle, ...]) -> list[str]:
    # Files in the bundle directory or the local one that are neither bundles nor links to one.
    names = {bundle.path.name for bundle in whole} | {"latest", "data"}
    places = [scene.job.bundle_dir] if scene.job.bundle_dir.is_dir() else []
    found = [str(p) for place in places for p in place.iterdir() if p.name not in names]
    found += [str(path) for path in run_root({}, 0).parent.glob(f"safelaunch-*/bundles/.r{scene.pid}-*")]
    return [f"half of a bundle: {path}" for path in found]


def _said_by(bundles: list[Bundle]) -> str:
    said = []
    for bundle in bundles:
        verdict = bundle.verdict
        said.append(f"{verdict['outcome']}: {verdict['cause']} {[one['rank'] for one in verdict['culprits']]}")
    return ", ".join(said) or "-"
