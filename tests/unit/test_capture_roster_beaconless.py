"""Why a worker has no beacon, asked of real processes; and the table of Python's options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from safelaunch.capture.roster import beaconless

WAIT = "print(1, flush=True); input()"


@contextmanager
def worker(*words: str, path: str = beaconless.INJECT) -> Iterator[int]:
    """The pid of a process that prints a line and then waits."""
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
        ((sys.executable, "-c", WAIT), beaconless.INJECT, ""),
        ((sys.executable, "-c", WAIT), f"{beaconless.INJECT}:/elsewhere", ""),
        ((sys.executable, "-uI", "-c", WAIT), beaconless.INJECT, "python -I"),
        ((sys.executable, "-c", WAIT), "/elsewhere", "PYTHONPATH was replaced"),
        (("sh", "-c", "echo; read line"), beaconless.INJECT, "sh is not Python"),
        (("sh", "-c", f"{sys.executable} -c '{WAIT}'; true"), beaconless.INJECT, ""),
        (("sh", "-c", f"{sys.executable} -E -c '{WAIT}'; true"), beaconless.INJECT, "python -E"),
    ],
)
def test_the_reason_is_a_fact_about_the_process(words: tuple[str, ...], path: str, why: str) -> None:
    with worker(*words, path=path) as pid:
        assert beaconless.why(pid) == why


def test_torch_without_a_page_means_that_the_beacon_has_failed(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    mapping = f"import mmap; file = open({str(library)!r}, 'rb'); kept = mmap.mmap(file.fileno(), 0, access=1); {WAIT}"
    with worker(sys.executable, "-c", mapping) as pid:
        assert beaconless.why(pid) == "its beacon has failed"
    with worker(sys.executable, "-c", mapping, "--multiprocessing-fork") as pid:
        assert beaconless.why(pid) == "", "a spawned rank learns its number after the import"


def test_a_fork_is_not_judged_by_what_its_parent_is() -> None:
    forking = "import os; os.fork() or (print(os.getpid(), flush=True), input()); os.wait()"
    with subprocess.Popen(
        (sys.executable, "-I", "-c", forking), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            assert beaconless.why(int(parent.stdout.readline())) == ""
        finally:
            parent.communicate(b"\n")


def test_a_process_that_is_gone_gives_no_reason() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert beaconless.why(child.pid) == ""


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
def test_the_options_that_keep_a_beacon_out(words: str, option: str) -> None:
    assert beaconless.isolation(words.split()) == option
