"""What a key does in the terminal of a job: Ctrl-C where it is frozen and where it is not, Ctrl-\\."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import Bundle, Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

CTRL_C, CTRL_BACKSLASH = b"\x03", b"\x1c"
AGAIN = "press Ctrl-C again to end the job now"
FROZEN = [PROGRAMS / "blocked.py", "--how=asleep", "--culprit=1"]
# Leads a session on the terminal named by its first argument, and becomes Python with the other ones.
ON_TERMINAL = """if True:
    import fcntl, os, sys, termios
    os.setsid()
    terminal = os.open(sys.argv[1], os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    os.dup2(terminal, 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Typed(Job):
    """A job whose safelaunch has a terminal of its own, in the foreground."""

    master: int

    def type(self, key: bytes) -> None:
        os.write(self.master, key)


@contextmanager
def on_terminal(words: list[str | Path], scratch: Path) -> Iterator[Typed]:
    master, slave = pty.openpty()
    try:
        interpreter = [sys.executable, "-c", ON_TERMINAL, os.ttyname(slave), "-m", "safelaunch"]
        with Typed(words, scratch, interpreter=interpreter) as job:
            job.master = master
            yield job
    finally:
        os.close(slave)
        os.close(master)


def verdict_is_shown(said: str, bundle: Bundle) -> bool:
    """Whether the verdict stands above its bundle's path."""
    before, path, _ = said.partition(f"bundle: {bundle.path}")
    return bool(path) and f"{bundle.verdict['cause']} (" in before


def test_a_frozen_job_is_asked_by_ctrl_backslash_and_goes_on_and_is_stopped_by_ctrl_c(tmp_path: Path) -> None:
    words = ["--nproc-per-node=2", *FROZEN, f"--scratch={tmp_path}"]
    with on_terminal(words, tmp_path) as job:
        job.until(lambda: "safelaunch: quiet for" in job.stderr, "a word that the job is quiet")
        ranks = job.ranks()
        job.type(CTRL_BACKSLASH)
        job.until(lambda: job.bundles() and "bundle: " in job.stderr, "a bundle")
        (dump,) = job.bundles()
        assert (dump.verdict["outcome"], dump.verdict["cause"]) == ("dump", "stuck-in-user-code"), job.stderr
        assert job.ranks() == ranks, "nobody was ended"
        job.type(CTRL_C)
        result = job.wait()
    assert result.code == 1 and not result.leftovers, "as torchrun ends"
    assert result.stderr.index("collecting evidence first (up to 2 s)") < result.stderr.index("Received 2 death signal")
    assert result.said.count(AGAIN) == 1
    (last,) = (bundle for bundle in result.bundles if bundle.path != dump.path)
    assert last.problems() == [] and verdict_is_shown(result.said, last), result.stderr
    # Where two seconds are not enough to see every rank twice, it says less, and nothing else.
    named = [culprit["rank"] for culprit in last.verdict["culprits"]]
    assert named == [1] if last.verdict["outcome"] == "hang" else named in ([], [1]), last.verdict


@pytest.mark.nightly
def test_ranks_that_do_not_end_by_ctrl_c_are_waited_for_until_the_next_one(tmp_path: Path) -> None:
    """In native code no rank handles the signal, and torchrun waits half a minute."""
    script = tmp_path / "apart.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('here', flush=True)\n"
        "dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(2))\n"
    )
    with on_terminal(["--nproc-per-node=2", script], tmp_path) as job:
        job.until(lambda: job.stdout.count("here") == 2, "both ranks")
        job.type(CTRL_C)
        job.until(lambda: AGAIN in job.stderr, "a word on what it waits for")
        assert "forcefully exiting" not in job.stderr and len(job.ranks()) == 2
        job.type(CTRL_C)
        result = job.wait()
    assert result.code and not result.leftovers and not result.bundles
    assert result.said.count("waiting for the ranks to end") == 1


@pytest.mark.nightly
def test_ctrl_c_while_the_bundle_of_a_hang_is_written(tmp_path: Path) -> None:
    words = ["--stall-timeout=3", "--nproc-per-node=2", *FROZEN, f"--scratch={tmp_path}"]
    with on_terminal(words, tmp_path) as job:
        job.until(lambda: "collecting evidence from every rank" in job.stderr, "the hang")
        job.type(CTRL_C)
        result = job.wait()
    assert result.code in (1, 124) and not result.leftovers
    assert result.verdict["outcome"] == "hang" and result.bundle.problems() == []
    assert [culprit["rank"] for culprit in result.verdict["culprits"]] == [1]
    assert verdict_is_shown(result.said, result.bundle), result.stderr


@pytest.mark.nightly
def test_an_interrupted_demo_ends_as_an_interrupted_run(tmp_path: Path) -> None:
    with on_terminal(["demo", "--bundle-dir", str(tmp_path / "bundles")], tmp_path) as job:
        job.until(lambda: len(job.ranks()) == 3, "its ranks")
        job.type(CTRL_BACKSLASH)
        job.until(lambda: job.bundles() and "bundle: " in job.stderr, "a bundle")
        job.type(CTRL_C)
        result = job.wait()
    assert result.code == 130 and not result.leftovers
    assert "the demo was stopped" in result.said and "FAILED" not in result.said
    assert "cli/demo.py" not in result.stderr, "no traceback but those of the ranks"


STUBBORN = """if True:
    import signal, torch, torch.distributed as dist
    dist.init_process_group('gloo')
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    print('here', flush=True)
    while True:
        signal.pause()
"""


def test_a_second_ctrl_c_ends_ranks_that_ignore_signals_at_once(tmp_path: Path) -> None:
    """torchrun would wait for half a minute, and then kill them."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    with on_terminal(["--nproc-per-node=2", script], tmp_path) as job:
        job.until(lambda: job.stdout.count("here") == 2, "both ranks")
        job.type(CTRL_C)
        job.until(lambda: AGAIN in job.stderr, "a word on what it waits for")
        job.type(CTRL_C)
        job.until(lambda: "safelaunch: ending the job now" in job.stderr, "the end")
        result = job.wait(25.0)
    assert result.code and not result.leftovers and not result.bundles


@pytest.mark.nightly
def test_a_verdict_that_torchruns_traceback_pushes_off_the_screen_is_repeated(tmp_path: Path) -> None:
    """The ranks outlive Ctrl-C for so long that the verdict is shown before the end of torchrun."""
    words = ["--nproc-per-node=2", PROGRAMS / "outliving.py", "--how=handler", "--raise-on=1"]
    with on_terminal(words, tmp_path) as job:
        job.until(lambda: "IndexError" in job.stderr, "the exception")
        job.until(lambda: "safelaunch: quiet for" in job.stderr, "a word that the job is quiet")
        job.type(CTRL_C)
        result = job.wait()
    assert result.code == 1 and not result.leftovers, result.stderr
    last = " ".join(result.stderr.rpartition("SignalException")[2].split())
    assert f"bundle: {result.bundle.path}" in last and "raised IndexError" in last, result.stderr
