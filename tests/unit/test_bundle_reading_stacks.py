"""Stacks that people have saved: whose they are, and what the verdict on them says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.guard import Found, Unreadable
from safelaunch.verdict.diagnose import diagnose

LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
WAITS = (("all_reduce", "torch/distributed/distributed_c10d.py", 3252), ("main", "train.py", 10))
STANDS = (("wait", "threading.py", 320), ("load", "train.py", 6), ("main", "train.py", 9))
IDLE = (("wait", "threading.py", 320), ("run", "queue.py", 8), ("_bootstrap", "threading.py", 995))
SCRIPT = ("<module>", "train.py", 12)


def spied(pid: int, frames: tuple[tuple[str, str, int], ...], *, command: str = "python train.py") -> str:
    """As ``py-spy dump`` of a rank and a helper thread of its prints them."""
    lines = [f"Process {pid}: {command}", "Python v3.11.7 (/usr/bin/python3.11)", ""]
    for tid, name, stack in ((pid, "MainThread", (*frames, SCRIPT)), (pid + 1, "Thread-1 (pump)", IDLE)):
        lines += [
            f'Thread {tid} (idle): "{name}"',
            *(f"    {function} ({file}:{line})" for function, file, line in stack),
        ]
    return "\n".join([*lines, ""])


def whole(file: str) -> str:
    return f"/home/me/{file}" if file == "train.py" else f"/usr/lib/python3.11/site-packages/{file}"


def handled(frames: tuple[tuple[str, str, int], ...], *, head: str = "") -> str:
    """As faulthandler prints it at a signal: the newest thread first, the one that got the signal last."""
    lines = [head] if head else []
    for word, stack in (("Thread", IDLE), ("Current thread", (*frames, SCRIPT))):
        lines.append(f"{word} 0x00007f9b12814b80 (most recent call first):")
        lines += [f'  File "{whole(file)}", line {line} in {function}' for function, file, line in stack]
    return "\n".join([*lines, ""])


def told(found: Found) -> tuple[str, list[tuple[int, int]]]:
    verdict = diagnose(found.evidence)
    return verdict.cause, [(one.rank, one.frame.line) for one in verdict.culprits if one.frame is not None]


STUCK = ("lock-deadlock", [(1, 6)])


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    for rank in (2, 1, 0):
        (tmp_path / f"stack_rank{rank}.txt").write_text(spied(100 + rank, STANDS if rank == 1 else WAITS))
    found = locate.read(tmp_path)
    assert told(found) == STUCK
    assert (found.files["ranks/1/stack.txt"], found.remarks) == ("stack_rank1.txt", ())


def test_all_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text("".join(spied(100 + rank, STANDS if rank == 1 else WAITS) for rank in range(3)))
    found = locate.read(path)
    assert told(found) == STUCK
    assert "counted in their order" in found.remarks[0]
    words = ((100, 2, WAITS), (101, 1, STANDS), (102, 0, WAITS))
    path.write_text(
        "".join(spied(pid, stack, command=f"python t.py --local_rank={rank}") for pid, rank, stack in words)
    )
    assert (told(locate.read(path)), locate.read(path).remarks) == (STUCK, ())


def test_the_json_of_py_spy(tmp_path: Path) -> None:
    for rank in range(3):
        frames = [
            {"name": name, "filename": f"{LIBRARY}/distributed_c10d.py" if "c10d" in file else file, "line": line}
            for name, file, line in (*(STANDS if rank == 1 else WAITS), SCRIPT)
        ]
        thread = {"pid": 9, "thread_id": 1, "thread_name": None, "os_thread_id": 9, "active": False, "frames": frames}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps([thread]))
    assert told(locate.read(tmp_path)) == STUCK


def test_what_faulthandler_prints(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("step 3\n" + "".join(handled(STANDS if rank == 1 else WAITS) for rank in range(3)))
    assert told(locate.read(path))[1] == [(1, 6)]


def test_where_a_process_ended_is_no_place_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(handled(STANDS, head="Fatal Python error: Segmentation fault\n"))
    assert told(locate.read(path))[0] == "rank-killed"


def test_the_threads_beside_the_one_that_ended_a_process(tmp_path: Path) -> None:
    script = "import ctypes, threading as t; one = t.Thread(target=ctypes.string_at, args=[0]); one.start(); one.join()"
    ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stderr.index("Current thread") < ended.stderr.index("\nThread")
    path = tmp_path / "job.log"
    path.write_text(ended.stderr)
    assert told(locate.read(path))[0] == "rank-killed"
    path.write_text(ended.stderr + "".join(handled(STANDS if rank == 1 else WAITS) for rank in range(3)))
    assert told(locate.read(path))[1] == [(1, 6)]


def test_beside_a_log_only_stacks_that_name_their_rank_count(tmp_path: Path) -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "RuntimeError: bad")
    (tmp_path / "job.log").write_text("".join(f"[rank0]: {line}\n" for line in lines))
    (tmp_path / "pasted.txt").write_text(spied(100, STANDS))
    assert [one.rank for one in locate.read(tmp_path).evidence.ranks] == [0]
    (tmp_path / "pasted.txt").rename(tmp_path / "stack_rank1.txt")
    found = locate.read(tmp_path)
    assert [one.rank for one in found.evidence.ranks] == [0, 1]
    assert found.evidence.ranks[1].main is not None


@pytest.mark.parametrize("text", ["[]", "[1]", '[{"frames": 3}]', "Process 1: x\nThread 5 (idle)\n    no frame\n"])
def test_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(Unreadable, match="neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log"):
        locate.read(path)
