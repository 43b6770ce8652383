"""What a job computes with: world size, batch of a rank, devices. Changes since the last run of its name are said.

A run of fewer ranks or with another batch is another experiment, and nothing else tells so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from safelaunch.launch.paths import RunPaths
from safelaunch.model import format_ranks
from safelaunch.roster.progress import Noted, read_contract
from safelaunch.supervise.watch import Watch
from safelaunch.system.console import say
from safelaunch.system.decoding import from_json
from safelaunch.system.private_file import PrivateFile
from safelaunch.system.task import Task

MOST_NAMES = 256
MAX_BYTES = 256 << 10
PATIENCE_S = 10.0  # from the first rank's first step to the last one's
DEADLINE_S = 5.0  # of the bundle directory's disk


class Contract(msgspec.Struct, frozen=True, omit_defaults=True):
    """``batch``: of a rank, as its DataLoader tells; None: not known, or not the same on all ranks."""

    world_size: int
    batch: int | None = None
    unix_s: float = 0.0

    @property
    def of_step(self) -> int | None:
        return self.batch * self.world_size if self.batch is not None else None


def changes(before: Contract, now: Contract) -> str:
    """``batch of a rank 32 → 16, world size 2 → 4; 64 a step as before, if ...``; empty where nothing has changed."""
    parts = []
    if None not in (before.batch, now.batch) and before.batch != now.batch:
        parts.append(f"batch of a rank {before.batch} → {now.batch}")
    if before.world_size != now.world_size:
        parts.append(f"world size {before.world_size} → {now.world_size}")
    if not parts or before.of_step is None or now.of_step is None:
        return ", ".join(parts)
    same = before.of_step == now.of_step
    step = f"{now.of_step} a step as before" if same else f"{before.of_step} → {now.of_step} a step"
    return f"{', '.join(parts)}: {step}, if all ranks are data-parallel"


def elsewhere(noted: Mapping[int, Noted], local_ranks: Mapping[int, int]) -> str:
    """The ranks that compute on another device than their local rank's, in words; empty without such."""
    wrong = {rank: one.device for rank, one in noted.items() if one.device not in (None, local_ranks.get(rank))}
    if not wrong:
        return ""
    devices = sorted({f"cuda:{device}" for device in wrong.values()})
    who = format_ranks(list(wrong))
    text = f"{'rank' if who.isdigit() else 'ranks'} {who} {'computes' if who.isdigit() else 'compute'} on "
    text += f"{', '.join(devices)}, which is not the device of the rank's LOCAL_RANK"
    return f"{text}: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"


class Contracts:
    """Call ``tick`` on every tick: at the first step of each attempt it says what is different, once. Never raises.

    ``remembers``: whether the run leaves a note in ``bundle_dir`` for the next one of its name.
    """

    def __init__(self, run: RunPaths, watch: Watch, bundle_dir: Path, name: str, *, remembers: bool) -> None:
        self._run, self._watch = run, watch
        self._bundle_dir, self._name, self._remembers = bundle_dir, name, remembers
        self._attempt = -1
        self._due_s: float | None = None
        self._task: Task[str] | None = None

    def tick(self, now: float) -> None:
        try:
            self._tick(now)
        except Exception:  # noqa: BLE001 - it costs these words alone
            self._attempt, self._task = self._watch.attempt[0], None

    def _tick(self, now: float) -> None:
        if self._task is not None and self._task.done:
            said, self._task = self._task.result(), None
            if said:
                say(said)
        attempt = self._watch.attempt[0]
        if attempt == self._attempt or self._task is not None:
            return
        pages = self._watch.roster.pages()
        noted = {rank: read_contract(self._run.pages / page.name) for rank, page in pages.items()}
        known = {rank: one for rank, one in noted.items() if one is not None}
        if not known:
            return
        self._due_s = self._due_s or now + PATIENCE_S
        if len(known) < len(pages) and now < self._due_s:
            return
        self._attempt, self._due_s = attempt, None
        progress = {rank: page.read() for rank, page in pages.items()}
        wrong = elsewhere(known, {rank: one.local_rank for rank, one in progress.items()})
        if wrong:
            say(wrong)
        if 0 in known:  # of several nodes, one says it
            batches = {one.batch for one in known.values()}
            batch = next(iter(batches)) if len(batches) == 1 else None
            self._task = self._compare(Contract(progress[0].world_size, batch, round(time.time(), 3)))

    def _compare(self, now: Contract) -> Task[str]:
        def work() -> str:
            if not self._remembers and not self._bundle_dir.is_dir():
                return ""
            before, whole = remember(self._bundle_dir, self._name, now)
            if not whole:
                return f"{path_in(self._bundle_dir)} was damaged: what earlier runs computed with is forgotten"
            text = changes(before, now) if before is not None else ""
            return f"since the last run of the name {self._name}: {text}" if text else ""

        return Task("contract", work)

    def finish(self) -> None:
        """Before the end: a short job may be over before its note is written."""
        self.tick(time.monotonic() + 2 * PATIENCE_S)
        if self._task is not None:
            self._task.wait(DEADLINE_S)
            self.tick(time.monotonic())


# --- the note in the bundle directory ---------------------------------------------------------------------------------


class _File(msgspec.Struct):
    runs: dict[str, Contract] = msgspec.field(default_factory=dict)


_Run = tuple[str, Contract]


def path_in(directory: Path) -> Path:
    """Hidden, so that nothing takes it for a bundle; with the user's number, as people share a directory."""
    return directory / f".safelaunch-runs-{os.geteuid()}.json"


def remember(directory: Path, name: str, now: Contract) -> tuple[Contract | None, bool]:
    """Replaces the note of ``name``. Returns the note before, and whether the file was whole. Raises OSError."""
    before: list[Contract] = []

    def change(runs: tuple[_Run, ...]) -> tuple[_Run, ...]:
        before.extend(one for known, one in runs if known == name)
        return (*(run for run in runs if run[0] != name), (name, now))

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = _file(directory).update(change)
    return (before[-1] if before else None), whole


def _file(directory: Path) -> PrivateFile[_Run]:
    return PrivateFile(path_in(directory), _decode, _encode, MOST_NAMES, MAX_BYTES)


def _decode(data: bytes) -> tuple[_Run, ...]:
    return tuple(from_json(data, _File).runs.items())


def _encode(runs: tuple[_Run, ...]) -> bytes:
    return msgspec.json.encode(_File(dict(runs)))
