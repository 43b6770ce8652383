"""Reads the beacons' files in the run directory: progress pages, agent events and notes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from safelaunch.beacon import layout
from safelaunch.job.paths import RunPaths
from safelaunch.model import Progress
from safelaunch.system.decoding import from_json

_T = TypeVar("_T")

LARGEST_WORLD = 1 << 20
MAX_BYTES = 1 << 20  # of a note
MTIME_TICK_NS = 100_000_000  # the kernel's coarse clock ticks at least every 10 ms


class _PageField:
    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, page: ProgressPage, kind: object) -> int:
        return page._words[self._at]


class ProgressPage:
    """Maps the progress page of a rank or the agent. Raises OSError or ValueError if the file isn't a whole page."""

    pid = _PageField(layout.PID)
    start_ticks = _PageField(layout.START_TICKS)
    rank = _PageField(layout.RANK)
    kind = _PageField(layout.KIND)  # EXPLICIT, IMPLICIT or LAUNCHER
    claimed_ns = _PageField(layout.CLAIMED_NS)
    exited_ns = _PageField(layout.EXIT_NS)  # 0 if its process runs or was killed

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < layout.SIZE:
                raise ValueError(f"{path.name} is shorter than a page")
            self._map = mmap.mmap(descriptor, layout.SIZE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")
        self._asking = threading.Lock()
        self.name = path.name
        self._named = layout.parse_page_name(path.name)  # attempt, rank, pid

    @property
    def ready(self) -> bool:
        return self._words[layout.READY] == layout.MAGIC

    @property
    def intact(self) -> bool:
        """True unless the page has been overwritten and so is useless."""
        words = self._words
        named = self._named
        return words[layout.READY] == layout.MAGIC and (named is None or words[layout.PID] == named[2])

    @property
    def named(self) -> tuple[int, int, int]:
        """Parses (attempt, rank, pid) from the file name; (-1, -1, -1) if the name has another form."""
        return self._named or (-1, -1, -1)

    @property
    def server_up(self) -> bool:
        return self._words[layout.SERVER_NS] != 0

    @property
    def steps(self) -> bool:
        return bool(self._words[layout.LAST_STEP_NS] or self._words[layout.USER_STEPS])

    @property
    def has_torch(self) -> bool:
        return self.server_up or layout.TORCH <= self._words[layout.STATE] < layout.EXITED

    def acknowledge(self) -> None:
        """Notifies a waiting rank or the agent that the supervisor has looked at its peers."""
        self._words[layout.ACK] = 1

    def begin_question(self) -> bool:
        """Announces a request to a handler that needs the GIL. Returns False if the rank is exiting.

        The supervisor announces the request, then reads the rank's state. An exiting rank sets its state, then looks
        for requests. So at least one side notices the other.
        """
        with self._asking:
            self._words[layout.ASKED] += 1
        time.sleep(0.001)  # let both sides' stores arrive
        if self._words[layout.STATE] != layout.EXITED:
            return True
        self.withdraw_question()
        return False

    def withdraw_question(self) -> None:
        """Withdraws the announced request, because it reached no handler.

        After a timeout the request stays announced, because its handler might still be waiting for the GIL.
        """
        with self._asking:
            self._words[layout.ASKED] -= 1

    @property
    def owes_answer(self) -> bool:
        """True if an earlier request is still unanswered, so its handler might still be waiting for the GIL."""
        return self._words[layout.ANSWERED] < self._words[layout.ASKED]

    def announce_end(self) -> None:
        """Notifies the agent that safelaunch will send the next SIGTERM, so that it prints no traceback."""
        self._words[layout.ENDING] = 1

    @property
    def acknowledged(self) -> bool:
        return self._words[layout.ACK] != 0

    def marks(self) -> tuple[int, int, int, int]:
        """Returns the progress fields: (last step ns, user steps, state, last mark ns)."""
        w = self._words
        return w[layout.LAST_STEP_NS], w[layout.USER_STEPS], w[layout.STATE], w[layout.MARKED_NS]

    def read(self) -> Progress:
        """Reads the page with every value bounded, because a damaged page can hold anything."""
        w = self._words
        state = w[layout.STATE]
        optimizers = min(w[layout.OPTIMIZERS], layout.MAX_OPTIMIZERS)
        counts = tuple(w[layout.FIRST_OPTIMIZER : layout.FIRST_OPTIMIZER + optimizers])
        user = w[layout.USER_STEPS]
        length = min(w[layout.PHASE_LENGTH], layout.PHASE_MAX)
        phase = (
            self._map[layout.PHASE_OFFSET : layout.PHASE_OFFSET + length].decode("utf-8", "replace") if length else ""
        )
        return Progress(
            rank=w[layout.RANK],
            local_rank=w[layout.LOCAL_RANK],
            world_size=w[layout.WORLD_SIZE],
            attempt=w[layout.ATTEMPT],
            pid=w[layout.PID],
            start_ticks=w[layout.START_TICKS],
            state=layout.STATES[state] if state < len(layout.STATES) else "started",
            step=user or (max(counts) if counts else None),
            optimizer_steps=counts,
            claimed_ns=w[layout.CLAIMED_NS],
            first_step_ns=w[layout.FIRST_STEP_NS],
            last_step_ns=w[layout.LAST_STEP_NS],
            phase=phase,
            phase_since_ns=w[layout.PHASE_SINCE_NS],
            marked_ns=w[layout.MARKED_NS],
            phase_timeout_s=w[layout.PHASE_TIMEOUT_NS] / 1e9,
            paused=w[layout.PAUSED] != 0,
            exception_ns=w[layout.EXCEPTION_NS],
            exit_ns=w[layout.EXIT_NS],
            returned_ns=w[layout.RETURNED_NS],
            sets_timers=w[layout.TIMERS] != layout.NO_TIMER,
        )


class Worker(msgspec.Struct, frozen=True):
    rank: int
    local_rank: int
    pid: int
    attempt: int


class AgentEvent(msgspec.Struct, frozen=True):
    """A line of ``agent.events`` (see ``beacon/agent.py``). ``world_size`` is 0 if unknown."""

    event: str
    time_unix_s: float
    attempt: int = 0
    master_port: str = ""
    world_size: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WORLD)] = 0
    workers: dict[int, tuple[int, int, int]] = {}
    exits: dict[int, int] = {}
    error: str = ""
    message: str = ""


class EventReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = os.fspath(path)
        self._offset = 0

    def read(self) -> list[AgentEvent]:
        """Returns the events since the last call. Skips damaged lines."""
        try:
            if os.stat(self._name).st_size <= self._offset:  # noqa: PTH116 - several times a second
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            try:
                events.append(from_json(line, AgentEvent))
            except (msgspec.DecodeError, RecursionError):
                continue  # cut off by a full disk; later lines can be whole
        return events


def bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""


def read_note(path: Path, kind: type[_T]) -> _T | None:
    try:
        return from_json(bytes_of(path), kind)
    except (msgspec.DecodeError, RecursionError):
        return None


_PageNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Meta(msgspec.Struct, frozen=True):
    """Facts about a rank's interpreter, recorded when its beacon claims a page."""

    executable: str = ""
    python: str = ""
    cwd: str = ""
    argv: tuple[str, ...] = ()
    code_roots: tuple[str, ...] = ()
    gpu: str = ""


def read_meta(path: Path) -> Meta:
    return read_note(path, Meta) or Meta()


class RankContract(msgspec.Struct, frozen=True):
    """Facts about a rank's work, recorded at its first step; None if unknown."""

    batch: _PageNumber | None = None  # of its DataLoader
    device: _PageNumber | None = None  # its current CUDA device, if it has several


def read_contract(base: Path) -> RankContract | None:
    return read_note(base.with_name(base.name + layout.CONTRACT_SUFFIX), RankContract)


class Roster:
    """Ranks of the newest attempt, from their beacons' pages and the agent's events.

    ``attempt`` is TORCHELASTIC_RESTART_COUNT; ``starts`` counts how often torchrun has started workers. The two differ
    on several nodes: if a node joins or leaves, torchrun restarts the workers with other ranks and the same attempt.
    """

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        self._directory = os.fspath(run.pages)
        self._events = EventReader(run.agent_events)
        self._pages: dict[str, ProgressPage] = {}
        self._ignored: set[str] = set()
        self._damaged: list[int] = []
        self._seen_ns = 0
        self.workers: dict[int, Worker] = {}
        self.attempt = 0
        self.starts = 0
        self._oldest_ticks = 0  # of the oldest current worker
        self.master_port = ""
        self.world_size = 0  # as torchrun set it for its workers
        self.agent_error = ""  # the agent's own failure
        self.agent_page: ProgressPage | None = None

    def refresh(self) -> list[AgentEvent]:
        """Finds new pages, and returns new agent events."""
        events = self._events.read()
        for event in events:
            if event.event == "started":
                self.attempt = max(self.attempt, event.attempt)
                self.starts += 1
                self._oldest_ticks = min((ticks for _, _, ticks in event.workers.values()), default=0)
                self.master_port = event.master_port
                self.world_size = event.world_size
                self.agent_error = ""
                self.workers = {
                    rank: Worker(rank, local, pid, event.attempt) for rank, (local, pid, _) in event.workers.items()
                }
            self.agent_error = event.error or self.agent_error
        self._drop_damaged_pages()
        self._find_pages()
        if self.agent_page is None:
            self.agent_page = self._open(self._run.agent_page)
        return events

    def _drop_damaged_pages(self) -> None:
        for name in [name for name, page in self._pages.items() if not page.intact]:
            del self._pages[name]
            self._ignored.add(name)
            attempt, rank, _ = layout.parse_page_name(name) or (-1, -1, -1)
            if attempt == self.attempt:
                self._damaged.append(rank)

    def damaged(self) -> tuple[int, ...]:
        """Returns the ranks whose pages were found damaged since the last call."""
        damaged, self._damaged = self._damaged, []
        return tuple(damaged)

    def _find_pages(self) -> None:
        """Finds new pages. Reads the directory only if its files changed, or if a page wasn't ready."""
        try:
            changed_ns = os.stat(self._directory).st_mtime_ns  # noqa: PTH116 - several times a second
            if changed_ns == self._seen_ns:
                return
            names = {entry.name for entry in os.scandir(self._directory)}
        except OSError:
            return
        # Two changes can fall into one tick of the file system's clock.
        settled = time.time_ns() - changed_ns > MTIME_TICK_NS
        self._seen_ns = changed_ns if settled else 0
        for name in names - self._pages.keys() - self._ignored:
            parsed = layout.parse_page_name(name)
            if parsed is None:
                self._ignored.add(name)
            elif (page := self._open(self._run.pages / name)) is not None:
                self._pages[name] = page
                self.attempt = max(self.attempt, parsed[0])
            else:
                self._seen_ns = 0

    @staticmethod
    def _open(path: Path) -> ProgressPage | None:
        try:
            page = ProgressPage(path)
        except (OSError, ValueError):
            return None
        return page if page.ready else None

    def pages(self) -> dict[int, ProgressPage]:
        """Returns one page per rank of the newest attempt.

        Several processes can claim a rank, for example if a shell first runs a helper. Processes are then preferred, in
        this order, if they mark steps, have the rank in their environment, imported torch, haven't exited, are the
        worker itself, or made the latest claim. If some process has a rank in its environment, processes without one
        count only if they mark steps.
        """
        claims: dict[int, list[ProgressPage]] = {}
        for page in self._pages.values():
            if (
                page.named[0] == self.attempt
                and page.kind != layout.LAUNCHER
                and page.start_ticks >= self._oldest_ticks
            ):
                claims.setdefault(page.rank, []).append(page)
        chosen = [
            pages[0] if len(pages) == 1 else max(_not_succeeded(pages), key=self._score)
            for _, pages in sorted(claims.items())
        ]
        explicit = any(page.kind == layout.EXPLICIT for page in chosen)
        return {page.rank: page for page in chosen if not explicit or page.kind == layout.EXPLICIT or page.steps}

    def _score(self, page: ProgressPage) -> tuple[int, ...]:
        worker = self.workers.get(page.rank)
        return (
            int(page.steps),
            int(page.kind == layout.EXPLICIT),
            int(page.has_torch),
            int(not page.exited_ns),
            int(worker is not None and worker.pid == page.named[2]),
            page.claimed_ns,
        )

    def companion(self, page: ProgressPage, suffix: str) -> Path:
        return self._run.of_page(page.name, suffix)


def _not_succeeded(pages: list[ProgressPage]) -> list[ProgressPage]:
    newest_ns = max((page.claimed_ns for page in pages if page.has_torch or page.steps), default=0)
    return [page for page in pages if not 0 < page.exited_ns < newest_ns]
