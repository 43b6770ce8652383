"""States in which safelaunch judges no rank: each has a bound, after which the watch resumes or a word is said.

The bounds are minutes, so these jobs run with shorter ones.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

STEPPING = """
import os, signal, sys, time
import safelaunch, torch, uncompiled
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(20):
    optimizer.step()
"""


def bounded(**bounds: float) -> list[str]:
    """The command that runs safelaunch with other constants; ``MODULE__NAME=seconds``."""
    lines = ["import importlib", "from safelaunch.cli import entry"]
    for name, seconds in bounds.items():
        module, _, constant = name.partition("__")
        lines.append(f"importlib.import_module('safelaunch.supervise.{module}').{constant} = {seconds}")
    return [sys.executable, "-c", "; ".join([*lines, "entry()"])]


def script(scratch: Path, text: str) -> Path:
    path = scratch / "script.py"
    path.write_text(
        STEPPING.replace("import os", f"import sys; sys.path.append({str(PROGRAMS)!r})\nimport os", 1) + text
    )
    return path


@pytest.mark.nightly
def test_a_job_that_hangs_after_it_was_asked_to_stop_is_ended(tmp_path: Path) -> None:
    """Its handler of SIGTERM waits for a lock that nothing releases; no launcher kills it."""
    text = """
import threading
lock = threading.Lock()
def stop(*_):
    with lock, lock:
        pass
signal.signal(signal.SIGTERM, stop)
print('here', flush=True)
while True:
    optimizer.step()
    time.sleep(0.05)
"""
    words = ["exec", "--stall-timeout=3", "--", sys.executable, script(tmp_path, text)]
    with Job(words, tmp_path, interpreter=bounded(loop__STOP_S=6.0)) as job:
        job.until(lambda: "here" in job.stdout, "the rank")
        job.process.send_signal(signal.SIGTERM)
        result = job.wait()
    assert "and still runs: safelaunch watches it again" in result.said
    assert (result.code, result.verdict["outcome"], result.verdict["cause"]) == (124, "hang", "lock-deadlock")
    assert not result.leftovers


def test_ranks_that_torchrun_never_starts_again_end_the_job(tmp_path: Path) -> None:
    own = ["--on-stall", "restart", "--stall-timeout=2", "--nproc-per-node=1", "--max-restarts=3"]
    with Job([*own, PROGRAMS / "attempts.py", "always"], tmp_path, interpreter=bounded(loop__RESTART_S=6.0)) as job:
        job.until(lambda: "no progress for" in job.stderr, "the hang")
        (rank,) = job.ranks().values()
        agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGSTOP)
        result = job.wait()
    assert "torchrun has not started the ranks again for " in result.said
    assert (result.code, result.verdict["outcome"]) == (124, "hang"), result.said
    assert not result.leftovers


@pytest.mark.nightly
def test_a_pause_that_lasts_has_a_bundle_and_reminders_and_goes_on(tmp_path: Path) -> None:
    text = """
with safelaunch.pause():
    while not os.path.exists('go'):
        time.sleep(0.05)
print('resumed', flush=True)
"""
    words = ["--max-stall=4", "--stall-timeout=2", "--nproc-per-node=1", script(tmp_path, text)]
    with Job(words, tmp_path) as job:
        job.until(lambda: job.stderr.count("rank 0 has paused the watch for") >= 2, "two reminders")
        job.until(lambda: job.bundles(), "a bundle")
        (tmp_path / "go").touch()
        result = job.wait()
    assert (result.code, result.verdict["outcome"]) == (0, "dump"), result.said
    assert "resumed" in result.stdout and not result.leftovers


@pytest.mark.nightly
def test_a_hang_that_was_only_dumped_and_ended_by_itself_is_followed_by_the_watch(tmp_path: Path) -> None:
    """Under --on-stall dump, the second hang has its bundle as well, and that of the first says that it ended."""
    text = """
for mark in ('first', 'second'):
    while not os.path.exists(mark):
        time.sleep(0.05)
    for _ in range(20):
        optimizer.step()
"""
    words = ["--on-stall=dump", "--stall-timeout=2", "--nproc-per-node=1", script(tmp_path, text)]
    with Job(words, tmp_path) as job:
        for number, mark in enumerate(("first", "second"), 1):
            job.until(lambda number=number: job.stderr.count("bundle: ") == number, f"the {mark} bundle")
            (tmp_path / mark).touch()
        result = job.wait()
    assert [bundle.verdict["outcome"] for bundle in result.bundles] == ["hang", "hang"], result.said
    assert all(bundle.verdict["recovered"] for bundle in result.bundles)
    assert (result.code, result.leftovers) == (0, ()), result.said


@pytest.mark.nightly
def test_a_launcher_that_outlives_its_ranks_is_told_of(tmp_path: Path) -> None:
    text = "print('here', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n"
    interpreter = bounded(reminders__IDLE_S=4.0, reminders__IDLE_EVERY_S=0.5)
    with Job(["--nproc-per-node=1", script(tmp_path, text)], tmp_path, interpreter=interpreter) as job:
        job.until(lambda: "here" in job.stdout, "the rank")
        (rank,) = job.ranks().values()
        agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGSTOP)
        (tmp_path / "go").touch()
        job.until(lambda: f"py-spy dump --pid {agent}" in job.stderr, "a word")
        os.kill(agent, signal.SIGCONT)
        result = job.wait()
    assert (result.code, result.bundles, result.leftovers) == (0, (), ())
    assert "all ranks of this node have ended, but torchrun has neither ended nor started new ones" in result.said


@pytest.mark.nightly
def test_a_job_whose_first_process_survives_sigkill_is_given_up(tmp_path: Path) -> None:
    """As if it were stuck in the kernel: its end is never reported, and no signal ends it."""
    code = (
        "from safelaunch.job import job, process; from safelaunch.cli import entry; "
        "job.JobProcesses.end_all = lambda self, grace_s=0.0: (self.agent,); entry()"
    )
    words = ["--stall-timeout=2", "--nproc-per-node=1", PROGRAMS / "attempts.py", "always"]
    with Job(words, tmp_path, interpreter=[sys.executable, "-c", code]) as job:
        result = job.wait(grace_s=0.0)
    assert result.code == 124, result.said
    assert "could not be killed (stuck in the kernel): pid " in result.said
