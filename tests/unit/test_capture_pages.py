"""Progress pages, the events of the agent, and workers without a beacon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from safelaunch.beacon import layout, page, server
from safelaunch.capture import without_beacon, worker_server
from safelaunch.capture.pages import ProgressPage, Roster
from safelaunch.capture.worker_server import Unanswered
from safelaunch.job.paths import RunPaths

# --- process that is the rank if several have claimed it --------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """Process that claimed rank 0 at ``at`` and left at ``exit``."""

    name: str
    at: int
    explicit: bool = True
    torch: bool = False
    steps: int = 0
    exit: int = 0


HELPER = Claim("helper", 1)
HELPER_WITH_TORCH = Claim("helper with torch", 1, torch=True)
STEPPED = Claim("stepped and left", 1, torch=True, steps=9, exit=5)


@pytest.mark.parametrize(
    ("claims", "rank"),
    [
        ((HELPER, Claim("training", 2, torch=True)), "training"),
        ((HELPER_WITH_TORCH, Claim("training", 2, steps=1)), "training"),
        ((Claim("training", 1, steps=3), Claim("monitor", 2, torch=True)), "training"),
        ((HELPER, Claim("training", 2, explicit=False, torch=True, steps=1)), "training"),
        ((HELPER, Claim("library", 2, explicit=False, torch=True)), "helper"),
        (
            (Claim("helper", 1, torch=True, exit=5), Claim("training", 6, explicit=False, torch=True, steps=1)),
            "training",
        ),
        ((STEPPED, Claim("next program", 6, torch=True)), "next program"),
        ((STEPPED, Claim("beside it", 4, torch=True)), "stepped and left"),
        ((STEPPED, Claim("upload of the results", 6)), "stepped and left"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(claim.name for claim in value),
)
def test_rank_page_is_of_process_that_trains(tmp_path: Path, claims: tuple[Claim, ...], rank: str) -> None:
    run = RunPaths(tmp_path)
    run.pages.mkdir()
    kept = []
    for pid, claim in enumerate(claims, 1000):
        mapped, words = page.create(os.fspath(run.pages / layout.page_name(0, 0, pid)))
        words[layout.PID], words[layout.CLAIMED_NS] = pid, claim.at
        words[layout.KIND] = layout.EXPLICIT if claim.explicit else layout.IMPLICIT
        words[layout.STATE] = layout.EXITED if claim.exit else layout.TORCH if claim.torch else layout.STARTED
        words[layout.SERVER_NS] = words[layout.STATE] == layout.TORCH or claim.torch
        words[layout.USER_STEPS], words[layout.EXIT_NS] = claim.steps, claim.exit
        words[layout.READY] = layout.MAGIC
        kept += [mapped, words]
    roster = Roster(run)
    roster.refresh()
    assert [claims[page.pid - 1000].name for page in roster.pages().values()] == [rank]


def test_program_started_by_exec_resets_page(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.pages.mkdir()
    name = layout.page_name(0, 0, os.getpid())
    first = page.create(os.fspath(run.pages / name))
    first[1][layout.STATE], first[1][layout.USER_STEPS] = layout.TORCH, 7
    first[1][layout.READY] = layout.MAGIC
    (run.pages / f"{name}.ring").touch()
    (run.pages / f"{name}0.ring").touch()
    roster = Roster(run)
    roster.refresh()
    second = page.create(os.fspath(run.pages / name))
    second[1][layout.USER_STEPS] = 1
    roster.refresh()
    assert roster.damaged() == ()
    progress = roster.pages()[0].read()
    assert (progress.state, progress.step) == ("started", 1)
    assert sorted(path.name for path in run.pages.iterdir()) == sorted([name, f"{name}0.ring"])


def test_exiting_rank_waits_only_for_running_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, words = page.create(str(tmp_path / f"0-0-{os.getpid()}"))
    asking = ProgressPage(tmp_path / f"0-0-{os.getpid()}")
    handle = server._counted(lambda request, response: None, words)
    monkeypatch.setattr(layout, "LAST_ANSWER_S", 0.05)

    def post(path: str, handler: str, *, deadline_s: float) -> bytes:
        raise Unanswered("no handler" if handler == "of_torch" else "timeout", "")

    monkeypatch.setattr(worker_server, "post", post)
    for handler in ("safelaunch_gil", "of_torch"):
        with pytest.raises(Unanswered):
            worker_server.post_to_python("", handler, asking, deadline_s=1.0)
    assert not page.wait_for_answers(words)  # the handler might still wait for the GIL
    handle(None, None)
    assert page.wait_for_answers(words)
    words[layout.STATE] = layout.EXITED
    with pytest.raises(Unanswered, match="exiting"):
        worker_server.post_to_python("", "safelaunch_gil", asking, deadline_s=1.0)
    assert page.wait_for_answers(words)


def test_exiting_rank_on_starved_machine_waits_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its sleeps takes a second while the handler waits for a core."""
    _, words = page.create(str(tmp_path / f"0-0-{os.getpid()}"))
    words[layout.ASKED] = 1
    slept: list[float] = []

    def starved(seconds: float) -> None:
        slept.append(seconds)
        words[layout.ANSWERED] = len(slept) > 9

    monkeypatch.setattr(page, "sleep", starved)
    monkeypatch.setattr(page, "monotonic_ns", lambda: len(slept) * 10**9)
    assert page.wait_for_answers(words)


# --- reasons for a worker without a beacon, from real processes, and python's options ---------------------------------

WAIT = "print(1, flush=True); input()"


@contextmanager
def worker(*words: str, path: str = without_beacon.INJECT) -> Iterator[int]:
    """Yields the pid of a process that prints a line and then waits."""
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("words", "path", "why"),
    [
        ((sys.executable, "-c", WAIT), without_beacon.INJECT, ""),
        ((sys.executable, "-c", WAIT), f"{without_beacon.INJECT}:/elsewhere", ""),
        ((sys.executable, "-uI", "-c", WAIT), without_beacon.INJECT, "python -I"),
        ((sys.executable, "-c", WAIT), "/elsewhere", "PYTHONPATH was replaced"),
        (("sh", "-c", "echo; read line"), without_beacon.INJECT, "sh is not Python"),
        (("sh", "-c", f"{sys.executable} -c '{WAIT}'; true"), without_beacon.INJECT, ""),
        (("sh", "-c", f"{sys.executable} -E -c '{WAIT}'; true"), without_beacon.INJECT, "python -E"),
    ],
)
def test_missing_beacon_reason_comes_from_process(words: tuple[str, ...], path: str, why: str) -> None:
    with worker(*words, path=path) as pid:
        assert without_beacon.why_without_beacon(pid) == why


def test_torch_process_without_page_has_failed_beacon(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    mapping = f"import mmap; file = open({str(library)!r}, 'rb'); kept = mmap.mmap(file.fileno(), 0, access=1); {WAIT}"
    with worker(sys.executable, "-c", mapping) as pid:
        assert without_beacon.why_without_beacon(pid) == "its beacon failed"
    with worker(sys.executable, "-c", mapping, "--multiprocessing-fork") as pid:
        assert without_beacon.why_without_beacon(pid) == "", "a spawned rank learns its number after the import"


def test_forked_process_gives_no_missing_beacon_reason() -> None:
    forking = "import os; os.fork() or (print(os.getpid(), flush=True), input()); os.wait()"
    with subprocess.Popen(
        (sys.executable, "-I", "-c", forking), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            assert without_beacon.why_without_beacon(int(parent.stdout.readline())) == ""
        finally:
            parent.communicate(b"\n")


def test_ended_process_gives_no_missing_beacon_reason() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert without_beacon.why_without_beacon(child.pid) == ""


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("python train.py -I", ""),
        ("python -u -E train.py", "E"),
        ("python -BS train.py", "S"),
        ("python -m I -E", ""),
        ("python -Wignore -I x", "I"),
        ("python -W I x", ""),
        ("python -X E -I x", "I"),
        ("python -Xdev x", ""),
        ("python --check-hash-based-pycs default -I x", "I"),
        ("python -", ""),
        ("python", ""),
    ],
)
def test_python_options_that_disable_beacon_are_recognized(words: str, option: str) -> None:
    assert without_beacon.isolation(words.split()) == option
