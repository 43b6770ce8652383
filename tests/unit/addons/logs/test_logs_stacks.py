"""Stacks that people have saved: whose they are, and what the verdict on them says."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.verdict.diagnose import diagnose
from tests.support.paths import DATA

LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
WAITS = (("all_reduce", "torch/distributed/distributed_c10d.py", 3252), ("main", "train.py", 10))
STANDS = (("wait", "threading.py", 320), ("load", "train.py", 6), ("main", "train.py", 9))
IDLE = (("wait", "threading.py", 320), ("run", "queue.py", 8), ("_bootstrap", "threading.py", 995))
SCRIPT = ("<module>", "train.py", 12)


def spied(pid: int, frames: tuple[tuple[str, str, int], ...], *, command: str = "python train.py") -> str:
    """Returns ``py-spy dump`` output for a rank with one helper thread."""
    lines = [f"Process {pid}: {command}", "Python v3.11.7 (/usr/bin/python3.11)", ""]
    for tid, name, stack in ((pid, "MainThread", (*frames, SCRIPT)), (pid + 1, "Thread-1 (pump)", IDLE)):
        lines += [
            f'Thread {tid} (idle): "{name}"',
            *(f"    {function} ({file}:{line})" for function, file, line in stack),
        ]
    return "\n".join([*lines, ""])


def whole(file: str) -> str:
    return f"/home/me/{file}" if file == "train.py" else f"/usr/lib/python3.11/site-packages/{file}"


def handled(frames: tuple[tuple[str, str, int], ...], *, number: int = 0, head: str = "") -> str:
    """Returns faulthandler's output at a signal: newest thread first, the signalled thread last."""
    lines = [head] if head else []
    for word, stack in (("Thread", IDLE), ("Current thread", (*frames, SCRIPT))):
        lines.append(f"{word} 0x00007f9b1281{number:04x} (most recent call first):")
        lines += [f'  File "{whole(file)}", line {line} in {function}' for function, file, line in stack]
    return "\n".join([*lines, ""])


def handled_by_three(prefix: str = "") -> str:
    """Returns the stacks of three processes; the second one differs."""
    texts = [handled(STANDS if number == 1 else WAITS, number=number) for number in range(3)]
    return "".join(
        f"{prefix.format(number)}{line}\n" for number, text in enumerate(texts) for line in text.splitlines()
    )


def spied_three(between: str = "", *, pids: tuple[int, int, int] = (100, 101, 102)) -> str:
    """``between`` stands before each of them, with its number."""
    texts = [spied(pid, STANDS if number == 1 else WAITS) for number, pid in enumerate(pids)]
    return "".join(f"{between.format(number)}{text}" for number, text in enumerate(texts))


def threads_of_three(between: str = "") -> str:
    """The same without ``Process`` lines."""
    lines = spied_three("@" + between + "\n").splitlines()
    return "".join(f"{line.removeprefix('@')}\n" for line in lines if not line.startswith(("Process ", "Python v")))


def told(found: EvidenceSource) -> tuple[str, list[tuple[int, int]]]:
    verdict = diagnose(found.evidence)
    return verdict.cause, [(one.rank, one.frame.line) for one in verdict.culprits if one.frame is not None]


def named(text: str, path: Path) -> tuple[list[int], list[str]]:
    """The ranks at fault, and what the processes at fault are called whose rank is unknown."""
    path.write_text(text)
    verdict = diagnose(locate.read(path).evidence)
    return [one.rank for one in verdict.culprits], [one.label for one in verdict.processes_at_fault]


STUCK = ("lock-deadlock", [(1, 6)])


def test_stack_file_per_rank_is_read(tmp_path: Path) -> None:
    for rank in (2, 1, 0):
        (tmp_path / f"stack_rank{rank}.txt").write_text(spied(100 + rank, STANDS if rank == 1 else WAITS))
    found = locate.read(tmp_path)
    assert told(found) == STUCK
    assert (found.files["ranks/1/stack.txt"], found.remarks) == ("stack_rank1.txt", ())


def test_stack_rank_is_read_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    words = ((100, 2, WAITS), (101, 1, STANDS), (102, 0, WAITS))
    path.write_text(
        "".join(spied(pid, stack, command=f"python t.py --local_rank={rank}") for pid, rank, stack in words)
    )
    assert told(locate.read(path)) == STUCK


RANK_1, PID_101 = ([1], list[str]()), (list[int](), ["process 101"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (spied_three(), PID_101),
        (threads_of_three(), PID_101),
        (spied_three("--- rank {} ---\n"), RANK_1),
        (threads_of_three("RANK={}\nLOCAL_RANK=0\nWORLD_SIZE=3"), RANK_1),
        (spied_three("=== Rank {}: http://gpu0:4123 ===\n"), RANK_1),
        (spied_three("LOCAL_RANK=0\n# {}\n"), PID_101),
        (spied_three("**rank {}**\n```\n"), RANK_1),
        (spied_three("\x1b[1mrank {}\x1b[0m:\n"), RANK_1),
        (spied_three("$ kubectl exec -n ml trainer-{} -- py-spy dump --pid 1\n", pids=(1, 1, 1)),
         ([], ["process 1 of trainer-1"])),
        (spied_three("gpu-{}:\n", pids=(7, 7, 7)), ([], ["process 7 of gpu-1"])),
        ("node-a:\n" + spied_three() + "node-b:\n" + spied_three().replace("threading.py:320", "threading.py:321"),
         ([], ["process 101 of node-a", "process 101 of node-b"])),
        ("".join(spied(70 + n, STANDS if n == 1 else WAITS, command=f"app::scheduler_DP{n}_TP{n}") for n in range(3)),
         RANK_1),
        ("".join(spied(70 + n, STANDS if n == 1 else WAITS, command=f"app::scheduler_DP1_TP{n + 2}") for n in range(3)),
         ([], ["process 71 (app::scheduler_DP1_TP3)"])),
        ("".join(spied(70 + n, STANDS if n == 1 else WAITS, command="python t.py --local-rank 0") for n in range(3)),
         ([], ["process 71"])),
        (spied(7, WAITS, command="python t.py --rank 0") + spied(8, STANDS, command="python t.py --rank 1"), RANK_1),
        (spied(7, WAITS, command="app::rank0") + spied(8, STANDS, command="app::rank1"), RANK_1),
        (spied(7, WAITS, command="t.py --lora-rank 0") + spied(8, STANDS, command="t.py --lora-rank 1"),
         ([], ["process 8"])),
        ("rank 1: ready\n" + "loading\n" * 4 + spied_three(), PID_101),
        ("rank 1 has loaded its data\n" + spied_three(), PID_101),
        ("".join(spied(70 + n, STANDS if n == 2 else WAITS, command=f"app::scheduler_PP0_TP{n}") for n in range(3)),
         ([], ["process 72 (app::scheduler_PP0_TP2)"])),
        (spied_three("==> trainer-{} <==\n", pids=(1, 1, 1)), ([], ["process 1 of trainer-1"])),
        ("This is it:\n\n" + "".join(f"> {line}\n" for line in spied_three("rank {}\n").splitlines()), RANK_1),
        (handled_by_three("[rank{}]: "), RANK_1),
        (handled_by_three("[default{}]:"), RANK_1),
        (handled_by_three("{}: "), RANK_1),
        (handled_by_three("worker-{}  | "), ([], ["worker-1"])),
        (handled_by_three(), ([], ["stack 2"])),
    ],
)  # fmt: skip
def test_stack_process_is_identified_from_the_text(
    text: str, expected: tuple[list[int], list[str]], tmp_path: Path
) -> None:
    assert named(text, tmp_path / "pasted.txt") == expected


@pytest.mark.parametrize("quote", ["", "    ", "> ", "> > ", ">", "| ", "\t"])
def test_quoted_or_piped_stacks_are_read_the_same(quote: str, tmp_path: Path) -> None:
    text = "This is what I see:\n\n" + spied_three("--- rank {} ---\n")
    text = "".join(f"{quote}{line}\n" if line else f"{quote.rstrip()}\n" for line in text.splitlines())
    assert named(text, tmp_path / "pasted.txt") == RANK_1
    words = [sys.executable, "-m", "safelaunch", "diagnose", "--json", "-"]
    piped = subprocess.run(words, input=text, stdout=subprocess.PIPE, text=True, check=True)
    assert [one["rank"] for one in json.loads(piped.stdout)["culprits"]] == [1]


def test_stacks_without_indentation_are_read(tmp_path: Path) -> None:
    text = "\n".join(line.strip() for line in spied_three().splitlines())
    assert named(text, tmp_path / "pasted.txt") == PID_101


SAVED = DATA / "stacks"


@pytest.mark.parametrize("path", sorted(SAVED.iterdir()), ids=lambda path: path.stem)
def test_stacks_of_every_tool_give_the_same_verdict(path: Path) -> None:
    """Three ranks, of which one is in ``load_shard``; each has a DataLoader worker, and torchrun is their parent."""
    found = locate.read(path)
    verdict = diagnose(found.evidence)
    assert (verdict.culprits, verdict.confidence, len(found.evidence.ranks)) == ((), "medium", 3)
    (one,) = verdict.processes_at_fault
    assert one.frame is not None
    assert (one.frame.function, one.frame.line) == ("load_shard", 10)
    assert "wait in all_reduce at hang.py:14" in verdict.summary


def test_stacks_of_other_processes_are_excluded() -> None:
    found = locate.read(SAVED / "py-spy-every-process.txt")
    assert found.remarks == (
        "not compared: 1 process (torchrun's agent: 5449)",
        "not compared: 3 processes (dataloader worker: 5500, 5501, 5503)",
    )
    assert (found.evidence.world_size, found.evidence.world_guessed) == (3, False)


def test_dataloader_workers_are_assigned_to_their_parent() -> None:
    found = locate.read(SAVED / "py-spy-subprocesses.txt")
    assert [[child.role for child in one.children] for one in found.evidence.ranks] == [["dataloader worker"]] * 3


LOADS = (("_try_get_data", "torch/utils/data/dataloader.py", 1132), ("main", "train.py", 9))
WORKS = (
    ("read", "ssl.py", 1099),
    ("__getitem__", "data.py", 88),
    ("_worker_loop", "torch/utils/data/_utils/worker.py", 3),
)


def test_worker_without_parent_belongs_to_the_waiting_process(tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(spied(100, WAITS) + spied(101, LOADS) + spied(102, WORKS))
    verdict = diagnose(locate.read(path).evidence)
    (one,) = verdict.processes_at_fault
    assert (verdict.cause, one.label, one.process) == ("data-loading", "process 101", "dataloader worker (pid 102)")


CUT = "\n".join(spied_three().splitlines()[5:-6])


def test_stacks_cut_at_both_ends_are_read(tmp_path: Path) -> None:
    assert CUT.startswith("    main (train.py:10)"), "the first stack has lost its innermost frame"
    assert named(CUT, tmp_path / "pasted.txt") == PID_101
    path = tmp_path / "pasted.txt"
    assert len(locate.read(path).evidence.ranks) == 2
    assert "has ended its script" not in diagnose(locate.read(path).evidence).summary


@pytest.mark.parametrize("rank", ["", "--- rank 0 ---\n"])
def test_single_saved_stack_is_not_compared(rank: str, tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(rank + spied(100, WAITS))
    verdict = diagnose(locate.read(path).evidence)
    assert (verdict.cause, verdict.confidence) == ("no-rank-stands-out", "low")
    assert "waits in all_reduce at train.py:10 (main)" in verdict.summary
    assert "cannot be compared with its peers" in verdict.summary
    assert "safelaunch dump --all" in verdict.suggestions[0]


def test_stack_without_a_module_frame_is_still_running(tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text("\n".join(line for line in spied(100, STANDS).splitlines() if "<module>" not in line))
    assert "ended" not in diagnose(locate.read(path).evidence).summary


@pytest.mark.parametrize(
    ("world", "says"), [("", "every rank that was seen"), ("WORLD_SIZE=2\n", "every rank has arrived"),
                        ("WORLD_SIZE=3\n", "rank 2 was not seen")]
)  # fmt: skip
def test_all_arrived_is_reported_only_with_known_world_size(world: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text("".join(f"RANK={rank}\n{world}{spied(100 + rank, WAITS)}" for rank in range(2)))
    verdict = diagnose(locate.read(path).evidence)
    assert says in verdict.summary
    assert any("suspect the transport" in one for one in verdict.suggestions) == (world == "WORLD_SIZE=2\n")


def test_repeated_dumps_of_a_process_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(spied(100, STANDS) + spied(100, WAITS) + "".join(handled(WAITS) for _ in range(3)))
    found = locate.read(path)
    assert [len(one.main.stacks) for one in found.evidence.ranks if one.main is not None] == [2, 3]


def test_differing_samples_show_their_common_calls(tmp_path: Path) -> None:
    stack = "<module> (train.py:12);main (train.py:9);load (data.py:6)"
    path = tmp_path / "raw.txt"
    path.write_text(f"{stack};a (data.py:1) 30\n{stack};b (data.py:2) 30\n{stack};c (data.py:3) 30\n")
    (one,) = locate.read(path).evidence.ranks
    assert one.main is not None
    assert one.main.stacks[0].threads[0].frames[0].function == "load"


def test_stacks_without_python_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "bt.txt"
    frames = "#0  0x00007f in futex_wait () from /lib/libc.so.6\n#1  Py_RunMain () at main.c:680\n"
    path.write_text(f'Thread 1 (Thread 0x7f0 (LWP 31) "python"):\n{frames}')
    found = locate.read(path)
    assert (found.evidence.ranks, found.what) == ((), "saved stacks")
    assert found.remarks == ("not compared: 1 process (without Python lines, which py-spy shows: 31)",)


def test_labelled_log_process_stays_separate_from_ranked_stacks(tmp_path: Path) -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "RuntimeError: bad")
    (tmp_path / "job.log").write_text("".join(f"(Worker pid=77) {line}\n" for line in lines))
    (tmp_path / "stack_rank0.txt").write_text(spied(100, WAITS))
    found = locate.read(tmp_path)
    ((number, _),) = found.evidence.labels.items()
    by_number = {one.rank: one for one in found.evidence.ranks}
    assert (number, len(by_number), found.evidence.missing_ranks) == (1, 2, ())
    assert by_number[0].main is not None
    assert by_number[1].exception is not None
    assert found.files["ranks/1/exception.json"].startswith("job.log")


@pytest.mark.parametrize(
    ("caller", "says"),
    [
        (("fetch", "torch/utils/data/_utils/fetch.py", 52), False),
        (("__next__", "torch/utils/data/dataloader.py", 7), True),
    ],
)
def test_loader_without_workers_is_reported_only_with_frames(
    caller: tuple[str, str, int], says: bool, tmp_path: Path
) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(spied(100, WAITS) + spied(101, (("read", "ssl.py", 9), ("__getitem__", "data.py", 88), caller)))
    assert ("a DataLoader without workers" in diagnose(locate.read(path).evidence).summary) == says


def test_compressed_stack_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt.gz"
    path.write_bytes(gzip.compress(spied_three("--- rank {} ---\n").encode()))
    assert told(locate.read(path)) == STUCK


def test_equal_pids_in_different_files_stay_separate(tmp_path: Path) -> None:
    for number, stack in enumerate((WAITS, STANDS, WAITS)):
        (tmp_path / f"{'abc'[number]}.txt").write_text(spied(7, stack))
    verdict = diagnose(locate.read(tmp_path).evidence)
    assert [one.label for one in verdict.processes_at_fault] == ["process 7 in b.txt"]


def test_py_spy_json_is_read(tmp_path: Path) -> None:
    for rank in range(3):
        frames = [
            {"name": name, "filename": f"{LIBRARY}/distributed_c10d.py" if "c10d" in file else file, "line": line}
            for name, file, line in (*(STANDS if rank == 1 else WAITS), SCRIPT)
        ]
        thread = {"pid": 9, "thread_id": 1, "thread_name": None, "os_thread_id": 9, "active": False, "frames": frames}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps([thread]))
    assert told(locate.read(tmp_path)) == STUCK


def test_faulthandler_stacks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    assert named("step 3\n" + handled_by_three(), path) == ([], ["stack 2"])


def test_fatal_error_stack_is_a_crash_not_a_hang(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(handled(STANDS, head="Fatal Python error: Segmentation fault\n"))
    assert told(locate.read(path))[0] == "rank-killed"


def test_other_threads_of_a_crash_dump_are_ignored(tmp_path: Path) -> None:
    script = "import ctypes, threading as t; one = t.Thread(target=ctypes.string_at, args=[0]); one.start(); one.join()"
    ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stderr.index("Current thread") < ended.stderr.index("\nThread")
    path = tmp_path / "job.log"
    path.write_text(ended.stderr)
    assert told(locate.read(path))[0] == "rank-killed"
    assert named(ended.stderr + handled_by_three(), path) == ([], ["stack 2"])


def test_stacks_next_to_a_log_need_a_rank(tmp_path: Path) -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 9, in f', "RuntimeError: bad")
    (tmp_path / "job.log").write_text("".join(f"[rank0]: {line}\n" for line in lines))
    (tmp_path / "pasted.txt").write_text(spied(100, STANDS))
    assert [one.rank for one in locate.read(tmp_path).evidence.ranks] == [0]
    (tmp_path / "pasted.txt").rename(tmp_path / "stack_rank1.txt")
    found = locate.read(tmp_path)
    assert [one.rank for one in found.evidence.ranks] == [0, 1]
    assert found.evidence.ranks[1].main is not None


@pytest.mark.parametrize("text", ["[]", "[1]", '[{"frames": 3}]', "Process 1: x\nThread 5 (idle)\n    no frame\n"])
def test_text_without_stacks_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(Unreadable, match="neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log"):
        locate.read(path)
