"""Logs of any job as evidence: whose each line is under any launcher, and what the verdict on them says.

The logs in ``tests/data/logs`` are what torchrun of torch 2.13 printed of jobs whose rank 1 failed or did not come.
NCCL messages are worded as in torch's sources.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest

import safelaunch
from safelaunch.addons.logs.assignment import UNNAMED_PROCESS
from safelaunch.addons.logs.lines import CHUNK_BYTES
from safelaunch.addons.logs.reader import read_logs
from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.cli.diagnose import main
from safelaunch.model import Verdict
from safelaunch.system.errors import UsageError
from safelaunch.verdict.diagnose import diagnose
from tests.support.paths import DATA

LOGS = DATA / "logs"
CAUSES = {
    "raise": "rank-exception",
    "worker": "rank-exception",
    "kill": "rank-killed",
    "segv": "rank-killed",
    "exit": "rank-exited",
    "sleep": "missing-from-collective",
    "op-detail": "collective-mismatch",
    "checkpoint": "rank-exception",
}
LINES = {"raise": 9, "worker": 36, "op-detail": 30, "checkpoint": 11}
LAUNCHERS_OWN = re.compile(r"[WE]\d{4} ")


def signed(line: str) -> tuple[int | None, str]:
    found = re.match(r"\[rank(\d+)\]: ?(.*)", line)
    return (int(found[1]), found[2]) if found else (None, line)


def under(prefix: Callable[[int], str], *, all_lines: bool = False) -> Callable[[list[str]], str]:
    """Another launcher's prefix in place of torch's."""

    def dress(lines: list[str]) -> str:
        told = [signed(line) for line in lines]
        return "\n".join(prefix(rank or 0) + text if rank is not None or all_lines else text for rank, text in told)

    return dress


def of_turns(lines: list[str]) -> str:
    """The ranks' tracebacks in each other's midst."""
    dice, queues = random.Random(1), dict[int | None, list[str]]()
    for line in lines:
        queues.setdefault(signed(line)[0], []).append(line)
    last, found = queues.pop(None, []), []
    while any(queues.values()):
        found.append(queues[dice.choice([rank for rank, queue in queues.items() if queue])].pop(0))
    return "\n".join([*found, *last])


DRESSES: dict[str, Callable[[list[str]], str]] = {
    "torch": "\n".join,
    "none": under(lambda rank: ""),
    "tee": under(lambda rank: f"[default{rank}]:"),
    "both": lambda lines: "\n".join(
        f"[default{7 - rank}]:{line}" if (rank := signed(line)[0]) is not None else line for line in lines
    ),
    "srun": under(lambda rank: f"{rank:2}: ", all_lines=True),
    "mpirun": under(lambda rank: f"[1,{rank}]<stderr>:", all_lines=True),
    "ray": under(lambda rank: f"(RayTrainWorker pid={900 + rank}, ip=10.0.0.{rank}) "),
    "kubectl": under(lambda rank: f"[pod/train-worker-{rank}/pytorch] 2026-11-25T10:00:00.123456789Z "),
    "docker": lambda lines: "\n".join(f"2026-11-25T10:00:00.123456789Z {line}" for line in lines),
    "containerd": lambda lines: "\n".join(f"2026-11-25T10:00:00.123456789Z stderr F {line}" for line in lines),
    "colours": lambda lines: "\n".join(f"\x1b[31m{line}\x1b[0m" for line in lines),
    "progress": lambda lines: "\n".join(f"Epoch 1: {at}%|##\r{line}" for at, line in enumerate(lines)),
    "windows": "\r\n".join,
    "pdsh": lambda lines: "\n".join(["cmd = pdsh -S -w node-7", *(f"node-7: {line}" for line in lines)]),
    "compose": lambda lines: "\n".join(f"worker-1  | {line}" for line in lines),
    "parallel": lambda lines: "\n".join(f"gpu3\t{line}" for line in lines),
    "a clock": lambda lines: "\n".join(f"18:11:06.680 {line}" for line in lines),
    "horovodrun": under(lambda rank: f"Fri Sep 25 16:52:53 2020[{rank}]<stderr>:", all_lines=True),
    "determined": under(lambda rank: f"[2026-11-25T10:00:00.123456Z] fa88a9df [rank={rank}] || "),
    "a console's table": lambda lines: "\n".join(f"  | 2026-11-25T10:00:00.484Z | {line}" for line in lines),
    "head lost": lambda lines: "\n".join(lines)[300:],
    "turns": of_turns,
}


def log_of(text: str, folder: Path, *, encoding: str = "utf-8") -> Path:
    path = folder / "job.log"
    path.write_text(text, encoding=encoding)
    return path


def verdict_of(text: str, folder: Path, *, encoding: str = "utf-8") -> Verdict:
    return diagnose(read_logs([log_of(text, folder, encoding=encoding)]).evidence)


def at_fault(verdict: Verdict) -> list[int | str]:
    """The ranks, and the labels of processes whose rank the log does not give: ``?`` for one without any name."""
    labels = (one.label for one in verdict.processes_at_fault)
    return [*(one.rank for one in verdict.culprits), *("?" if label == UNNAMED_PROCESS else label for label in labels)]


def named(verdict: Verdict) -> tuple[str, list[int | str]]:
    return verdict.cause, at_fault(verdict)


def frame_of(verdict: Verdict) -> int | None:
    """The line of the first that is at fault."""
    one = next(iter((*verdict.culprits, *verdict.processes_at_fault)))
    return one.frame.line if one.frame is not None else None


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", CAUSES)
def test_failed_rank_is_named_under_any_launcher(name: str, dress: str, tmp_path: Path) -> None:
    text = DRESSES[dress]((LOGS / f"{name}.log").read_text().splitlines())
    verdict = verdict_of(text, tmp_path)
    known = {"ray": "RayTrainWorker pid=901, ip=10.0.0.1", "kubectl": "pod/train-worker-1/pytorch"}
    by_launcher = name in ("kill", "segv", "exit")  # torchrun's own lines have the rank
    if name == "sleep" and dress in known:  # the one that is missing printed nothing with its name
        assert named(verdict) == (CAUSES[name], [])
        return
    by_launcher |= name == "checkpoint"  # whose exception names rank 1
    assert named(verdict) == (CAUSES[name], [1 if by_launcher else known.get(dress, 1)])
    assert frame_of(verdict) == LINES.get(name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_log_is_read(encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    text = mark + (LOGS / "raise.log").read_text()
    assert named(verdict_of(text, tmp_path, encoding=encoding)) == ("rank-exception", [1])


def test_compressed_piped_and_multiple_logs_are_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress((LOGS / "kill.log").read_bytes()))
    assert main([str(packed)]) == 0
    assert "Rank 1 was killed by SIGKILL" in capfd.readouterr().out
    lines = (LOGS / "raise.log").read_text().splitlines()
    for rank in range(2):
        mine = [text for who, text in map(signed, lines) if who == rank]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(mine))
    assert main([str(tmp_path / "rank_0.log"), str(tmp_path / "rank_1.log")]) == 0
    shown = capfd.readouterr()
    assert "train.py:9 (compute)" in shown.out
    assert "rank_1.log:1" in shown.out
    assert main([str(tmp_path), "--json"]) == 0  # the packed one is another job's, of which the same rank failed
    assert '"rank-' in capfd.readouterr().out


_CUDA = (
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    "Exception raised from c10_cuda_check at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):\n"
    + "".join(f"frame #{at}: c10::Error::Error(std::string) + 0x98 (0x7f6e in libc10.so)\n" for at in range(9))
)
_OF_SEVERAL_LINES = (
    "ValueError: the batch has NaN\ninputs: min nan max nan\ntargets: min 0 max 9\nfile: shard-0012.tar\n"
)
_STEPS = "".join(f"step {at} loss {at / 7}\n" for at in range(3))


@pytest.mark.parametrize(
    ("before", "message", "after", "culprits"),
    [
        ("", _CUDA, "", ["?"]),
        (_STEPS, _OF_SEVERAL_LINES, "", ["?"]),
        (_STEPS, _OF_SEVERAL_LINES, "step 3 loss 0.5\n", []),  # the script caught it and continues
        (_STEPS, "ValueError: bad\n", "".join(f"{'n' * at} is new\n" for at in range(30)), []),
    ],
)
def test_multiline_error_message_is_not_later_output(
    before: str, message: str, after: str, culprits: list[int | str], tmp_path: Path
) -> None:
    path = log_of(before + HEAD.replace("ValueError: bad\n", message) + after, tmp_path)
    assert at_fault(diagnose(locate.read(path).evidence)) == culprits


_FRAMES = '  File "/home/me/train.py", line 41, in main\n    loss.backward()\n'
_LAUNCHED = (
    'Traceback (most recent call last):\n  File "/opt/venv/bin/accelerate", line 8, in <module>\n'
    "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.\n"
)


@pytest.mark.parametrize(
    ("text", "culprits", "line"),
    [
        ("    return self._call(*args)\n" + _FRAMES + "torch.OutOfMemoryError: CUDA out of memory.\n", ["?"], 41),
        ("RuntimeError: Expected to have finished reduction.\nIf you have done that, then report it\n", ["?"], None),
        ("Traceback (most recent call last):\n" + _FRAMES + "ValueError: bad\n" + _LAUNCHED, ["?"], 41),
        (_LAUNCHED, ["a process of the launcher's"], None),
        (_FRAMES + "that was a stack, and no error: nothing was raised\n", [], None),
        ("".join(f"ConnectionError: try {at} of 9\n" for at in range(9)), [], None),
        ("(Worker pid=7) env:// [rank=1, world_size=2]\n"
         "ray.exceptions.RayTaskError(ValueError): ray::f() (pid=7, ip=10.0.0.5)\n" + _FRAMES + "ValueError: bad\n",
         [1], 41),
        ("ConnectionError: no answer\nretry 1 of 3\nstep 3 loss 0.5\n", [], None),
        ("Traceback (most recent call last):\n\n" + _FRAMES + "ValueError: bad\n", ["?"], 41),
        ("-- Process 3 terminated with the following error:\nTraceback (most recent call last):\n", [3], None),
        (_FRAMES + "AssertionError: not mine\nException ignored in: <function f at 0x7f>\n"
         "Traceback (most recent call last):\n" + _FRAMES + "AssertionError: not mine\n", [], None),
        ("".join(f"stderr: {text}\n" for text in (*_FRAMES.splitlines(), "ValueError: bad")), ["?"], 41),
    ],
    ids=["no head", "one line", "launcher's", "launcher's alone", "a stack", "retried", "passed on by Ray",
         "goes on", "empty line", "of spawn", "ignored", "captured"],
)  # fmt: skip
def test_log_excerpt_gives_the_failed_rank(
    text: str, culprits: list[int | str], line: int | None, tmp_path: Path
) -> None:
    path = log_of(text, tmp_path)
    verdict = diagnose(locate.read(path).evidence)
    assert at_fault(verdict) == culprits
    assert not culprits or frame_of(verdict) == line


def test_repeated_kernel_assertion_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    text = "../aten/Indexing.cu:1284: select: block: [1,0,0], thread: [{},0,0] Assertion `at < size` failed.\n"
    path.write_text("".join(text.format(at) for at in range(64)))
    assert locate.read(path).remarks == ("Assertion `at < size` failed [job.log:1]",)


@pytest.mark.parametrize("at", [30, 2000])
@pytest.mark.parametrize("name", ["job.log.gz", "bundle.tar.gz"])
def test_damaged_compressed_file_is_an_error(name: str, at: int, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"".join(b"step %d loss 0.5\n" % n for n in range(9999))))
    packed[at : at + 100] = b"\xff" * 100
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UsageError, match="cannot diagnose"):
        main([str(tmp_path / name)])


@pytest.mark.parametrize(
    "text",
    [
        "step 1 loss 2.5\nstep 2 loss 2.25\n",
        "\n".join(f"2026-11-25 10:00:00 INFO retry {at}: error 0, killed 0 of 9 tasks" for at in range(999)),
        "Traceback (most recent call last):\n" + 3 * '  File "a.py", line 1, in f\n' + "ValueError: caught\n"
        + "".join(f"step {at}\n" for at in range(99)),
        "slurmstepd: error: *** STEP 4711.0 ON node3 CANCELLED AT 2026-11-25T10:00:00 DUE TO TIME LIMIT ***\n"
        "srun: error: node3: tasks 0-3: Terminated\n",
    ],
    ids=["healthy", "chatty", "caught", "time limit"],
)  # fmt: skip
def test_log_without_a_failure_blames_no_rank(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = log_of(text, tmp_path)
    code = main([str(path)])
    shown = capfd.readouterr()
    assert not shown.out
    said = "DUE TO TIME LIMIT" if "TIME LIMIT" in text else "the job worked on after" if HEAD[:9] in text else "nothing"
    assert said in shown.err
    assert code == (0 if "TIME LIMIT" in text else 1)


PASSWD = "root:x:0:0:root:/root:/bin/bash\ngames:x:5:60:games:/usr/games:/usr/sbin/nologin\n"


@pytest.mark.parametrize(
    "text",
    [
        PASSWD,
        "127.0.0.1 localhost\n::1 ip6-localhost\n",
        'NAME="Debian"\nVERSION_ID="12"\n',
        "numpy==1.26.4\npyyaml>=6\n",
    ],
)
def test_text_without_job_output_is_not_a_log(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On the command line, from Python, alone or in a folder."""
    path = log_of(text, tmp_path)
    for words in ([str(path)], [str(path), "--json"], [str(path), str(path)]):
        with pytest.raises(UsageError, match="neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log"):
            main(words)
    assert UsageError.exit_code == 2
    with pytest.raises(UsageError, match="It holds no bundle, no run directory, no log"):
        main([str(tmp_path)])
    assert not capfd.readouterr().out


def test_python_api_rejects_a_file_without_job_output(tmp_path: Path) -> None:
    with pytest.raises(safelaunch.UsageError, match="nor the log of a job"):
        safelaunch.diagnose(log_of(PASSWD, tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3: loss 0.21",
        "step=100",
        "Iter [10/200]",
        "acc: 0.93",
        "val_acc=9e-1 lr = 1.5e-05",
        " 45%|####      | 9/20 [00:03<00:04, 2.50it/s]",
        "[rank1]: hello",
        "[default0]:hello",
        "2026-11-25 10:00:00,000 hello",
        "10:00:01 hello",
        "INFO:root:hello",
        "W1125 10:00:00.000000 140 torch/distributed/run.py:792] hello",
        "a.py:3: UserWarning: hello",
        "ValueError: hello",
        "bash: python: command not found",
        "Segmentation fault (core dumped)",
        "Killed",
        "Using 8 GPUs on cuda:0",
    ],
)
def test_single_job_line_makes_a_text_a_log(line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = log_of(PASSWD + line + "\n" + PASSWD, tmp_path)
    assert main([str(path)]) in (0, 1)
    assert "nor the log of a job" not in capfd.readouterr().err


def test_repeated_launcher_kill_lines_are_shown_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    lines = [f"[2026-11-25 10:00:00,000] [INFO] [launch.py:428:sigkill_handler] Killing subprocess {n}" for n in (7, 8)]
    path.write_text("\n".join(lines))
    assert main([str(path)]) == 0
    assert capfd.readouterr().err.count("Killing subprocess [job.log:1]") == 1


@pytest.mark.parametrize(("known", "said"), [("", "2 of at least 8 ranks"), ("world_size=8\n", "2 of 8 ranks")])
def test_rank_count_is_reported_exact_or_at_least(
    known: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = log_of(known + "\n".join(summary({7: 1, 6: 1})), tmp_path)
    assert main([str(path)]) == 0
    assert said in capfd.readouterr().err


def test_failure_before_a_restart_is_not_the_cause(tmp_path: Path) -> None:
    first, second = ((LOGS / f"{name}.log").read_text() for name in ("raise", "kill"))
    again = "I1126 torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. "
    again += "1/2 attempts left; will restart worker group\n"
    assert named(verdict_of(first + again + second, tmp_path)) == ("rank-killed", [1])


def test_large_log_is_read_in_chunks(tmp_path: Path) -> None:
    filler = "".join(f"step {at} loss {at / 7:.6f}\n" for at in range(60_000))
    assert len(filler) > CHUNK_BYTES
    found = read_logs([log_of(filler + (LOGS / "raise.log").read_text() + filler[:5000], tmp_path)])
    assert found.files["ranks/1/exception.json"] == "job.log:60011"
    assert named(diagnose(found.evidence)) == ("rank-exception", [1])


def test_image_file_is_not_a_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(Unreadable):
        locate.read(tmp_path / "a.log")


# --- NCCL -------------------------------------------------------------------------------------------------------------


def watchdog(
    rank: int,
    seq: int,
    op: str = "ALLREDUCE",
    *,
    queued: int = 99,
    group: str = "0(default_pg)",
    place: int | None = None,
) -> list[str]:
    """Returns a watchdog timeout as torch 2.5 and later print it."""
    whose = f"[PG ID {group[0]} PG GUID {group} Rank {rank if place is None else place}]"
    head = f"[rank{rank}]:[E1125 10:00:00.123456789 ProcessGroupNCCL.cpp:616] {whose}"
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000)"
    return [
        f"{head} Watchdog caught collective operation timeout: {work} ran for 600012 milliseconds before timing out.",
        f"{head} Timeout at NCCL work: {seq}, last enqueued NCCL work: {queued}, last completed NCCL work: {seq - 1}.",
    ]


def in_old_words(rank: int, seq: int, op: str = "ALLREDUCE") -> list[str]:
    """Returns a watchdog timeout as torch 2.1 prints it."""
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
    text = f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600012 milliseconds"
    return [f"[rank{rank}]:[E ProcessGroupNCCL.cpp:475] {text} before timing out."]


def summary(codes: dict[int, int], later_s: dict[int, int] | None = None) -> list[str]:
    """Returns torchrun's summary, in which the first failure counts as the root cause."""
    blocks = [
        [
            f"  time      : 2026-11-25_10:00:{5 + (later_s or {}).get(rank, 0):02}",
            "  host      : node0",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {100 + rank})",
        ]
        for rank, code in codes.items()
    ]
    root, *rest = ([f"[{at}]:", *block] for at, block in enumerate(blocks))
    return ["=" * 60, "Failures:", *chain(*rest), "Root Cause (first observed failure):", *root, "=" * 60]


ABORTED = dict.fromkeys(range(4), -6)


def all_of(calls: Sequence[list[str]], codes: dict[int, int] = ABORTED) -> str:
    return "\n".join([*chain(*calls), *summary(codes)]) + "\n"


@pytest.mark.parametrize("said", [watchdog, in_old_words])
def test_watchdog_timeouts_name_the_missing_rank(said: Callable[[int, int], list[str]], tmp_path: Path) -> None:
    verdict = verdict_of(all_of([said(rank, 31) for rank in (0, 1, 3)], {0: -6, 1: -6, 3: -6, 2: -15}), tmp_path)
    assert (*named(verdict), verdict.confidence) == ("missing-from-collective", [2], "low")
    assert "all_reduce #31" in verdict.summary


def test_watchdog_timeouts_name_the_mismatched_call_and_line(tmp_path: Path) -> None:
    calls = [watchdog(rank, 31, "BROADCAST" if rank == 2 else "ALLREDUCE") for rank in range(4)]
    calls[2] += ["Stack trace of the timed-out collective operation: "]
    library = "/usr/lib/python3.10/site-packages/torch/distributed"
    calls[2] += [f"#0 broadcast from {library}/distributed_c10d.py:2140", "#1 evaluate from /home/me/train.py:88"]
    verdict = verdict_of(all_of(calls), tmp_path)
    assert named(verdict) == ("collective-mismatch", [2])
    assert verdict.culprits[0].frame is not None
    assert verdict.culprits[0].frame.line == 88


def test_rank_behind_its_peers_in_log_is_gpu_kernel(tmp_path: Path) -> None:
    verdict = verdict_of(all_of([watchdog(rank, 30 if rank == 1 else 31) for rank in range(4)]), tmp_path)
    assert named(verdict) == ("gpu-kernel", [1])


def test_timeouts_in_two_groups_name_the_common_rank(tmp_path: Path) -> None:
    calls = [watchdog(3, 7, "ALLGATHER", group="2(tp)", place=1), watchdog(0, 31), watchdog(1, 31)]
    assert named(verdict_of(all_of(calls, {0: -6, 1: -6, 3: -6, 2: -15}), tmp_path))[1] == [2]


def test_log_with_all_ranks_in_one_call_names_none(tmp_path: Path) -> None:
    assert named(verdict_of(all_of([watchdog(rank, 31) for rank in range(4)]), tmp_path)) == ("no-rank-stands-out", [])


def test_slurm_out_of_memory_task_is_the_killed_rank(tmp_path: Path) -> None:
    text = "".join(f"{rank}: step 1\n" for rank in range(4))
    text += "srun: error: node3: task 2: Out Of Memory\nsrun: error: node3: tasks 0-1,3: Terminated\n"
    assert named(verdict_of(text, tmp_path)) == ("rank-killed", [2])


def test_deepspeed_exit_line_names_no_rank(tmp_path: Path) -> None:
    """It names the command of its last process, whichever has failed."""
    ended = (
        "[2026-11-25 10:00:07,123] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 123\n"
        "[2026-11-25 10:00:08,123] [ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'ds.py', '--local_rank=3']"
        " exits with return code = -9\n"
    )
    verdict = verdict_of(ended, tmp_path)
    assert named(verdict) == ("rank-killed", ["a process of DeepSpeed's"])
    error = 'Traceback (most recent call last):\n  File "/home/me/ds.py", line 12, in <module>\nValueError: nan\n'
    verdict = verdict_of(error + ended, tmp_path)
    assert (verdict.cause, verdict.confidence) == ("rank-exception", "medium")
    assert "Killing" not in verdict.summary


HEAD = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 41, in main\nValueError: bad\n'


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        (f"  0%|          | 0/4878 [00:00<?, ?it/s]{HEAD}", ["?"]),
        ("  0%|   | 0/4878 [00:00<?, ?it/s]" + "".join(f"[rank1]: {line}\n" for line in HEAD.splitlines()), [1]),
        ("{'loss': 2.5}\n" + HEAD, ["?"]),
        ("".join(json.dumps({"log": f"[rank3]: {line}\n"}) + "\n" for line in HEAD.splitlines()), [3]),
        ("[rank1]: step\0\n" + "".join(f"[rank1]: {line}\n" for line in HEAD.splitlines()), [1]),
        ("".join(f"[1,mpirank:11,algo-2]<stderr>:{line}\n" for line in HEAD.splitlines()), [11]),
        ("".join(f"[rank: 3] {line}\n" for line in HEAD.splitlines()), [3]),
        ("[rank: 1] Child process with PID 4711 terminated with code 1. Forcefully terminating all others\n", [1]),
        ("ERROR:composer.cli.launcher:Rank 5 crashed with exit code 1.\n", [5]),
        ("mpirun noticed that process rank 1 with PID 77 on node n1 exited on signal 4 (Illegal instruction).\n", [1]),
        ("RuntimeError: x\n" + HEAD + "retry 1/3 ok\nstep 100 loss 1.2\nTraining completed.\n", []),
        (HEAD.replace("ValueError: bad", "KeyboardInterrupt"), []),
    ],
)  # fmt: skip
def test_common_log_line_format_is_understood(text: str, culprits: list[int | str], tmp_path: Path) -> None:
    path = tmp_path / "seed_42.log"
    path.write_text(text)
    assert at_fault(diagnose(locate.read(path).evidence)) == culprits


def test_monitored_barrier_error_names_the_missing_ranks(tmp_path: Path) -> None:
    error = "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000000 ms"
    verdict = verdict_of(HEAD.replace("ValueError: bad", error), tmp_path)
    assert named(verdict) == ("missing-from-collective", [2, 3])


def test_cuda_error_from_the_watchdog_names_its_rank(tmp_path: Path) -> None:
    head = "[rank3]:[E512 10:11:12.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group"
    text = f"{head} watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
    verdict = verdict_of(text + "\n".join(summary({3: -6})), tmp_path)
    assert named(verdict) == ("rank-exception", [3])
    assert "illegal memory access" in verdict.summary


def test_local_rank_and_rank_of_one_process_are_merged(tmp_path: Path) -> None:
    """torchrun names the local rank first, and the rank in its summary."""
    first = "E1126 api.py:874] failed (exitcode: 1) local_rank: 2 (pid: 106) of binary: /usr/bin/python3\n"
    assert named(verdict_of(first + "\n".join(summary({6: 1})), tmp_path)) == ("rank-exited", [6])


@pytest.mark.parametrize(
    ("summaries", "named_ranks"),
    [
        ([summary({0: -7, 1: -7})], [0, 1]),  # in the same second: a fatal signal ended both
        ([summary({0: 1, 1: 1}, {1: 2})], [0]),
        ([summary({0: 1, 1: 1, 2: -11})], [2]),  # a rank that exits might have lost its peer
        ([summary({0: 1}, {0: 51}), summary({4: 1})], [4]),
    ],
)
def test_earliest_failure_time_in_summaries_names_the_culprit(
    summaries: list[list[str]], named_ranks: list[int], tmp_path: Path
) -> None:
    verdict = verdict_of("\n".join(chain(*summaries)) + "\n", tmp_path)
    assert [culprit.rank for culprit in verdict.culprits] == named_ranks
    cited = " ".join(claim.file for claim in verdict.evidence)
    lines = (tmp_path / "job.log").read_text().splitlines()
    assert all(f"job.log:{1 + at_of(lines, rank)}" in cited for rank in named_ranks)


def at_of(lines: list[str], rank: int) -> int:
    """Returns the index of the summary line with the rank's exit code."""
    return next(at for at, line in enumerate(lines) if line.endswith(f"(pid: {100 + rank})"))


@pytest.mark.parametrize(
    "said", ["train.py: error: unrecognized arguments: --local-rank=1", "Error: No such option: --lr"]
)
def test_rejected_script_options_give_advice(said: str, tmp_path: Path) -> None:
    end = "E1126 api.py:874] failed (exitcode: 2) local_rank: 0 (pid: 106) of binary: /usr/bin/python3"
    verdict = verdict_of(f"usage: train.py [-h]\n{said}\n{end}\n", tmp_path)
    assert named(verdict) == ("rank-exited", [0]) and said in verdict.summary
    assert verdict.suggestions[0].startswith("The script rejected its options")


def test_guessed_rank_is_never_high_confidence(tmp_path: Path) -> None:
    """Two errors of two ranks without a rank prefix."""
    tracebacks = "".join(
        f'Traceback (most recent call last):\n  File "/home/me/train.py", line {line}, in f\nValueError: {line}\n\n'
        for line in (3, 4)
    )
    verdict = verdict_of(tracebacks + "\n".join(summary({1: 1, 0: 1})), tmp_path)
    assert verdict.confidence != "high"


def test_corrupted_log_is_read_without_an_error(tmp_path: Path) -> None:
    dice = random.Random(7)
    text = (LOGS / "op-detail.log").read_bytes() + "\n".join(all_of([watchdog(1, 3)]).splitlines()).encode()
    path = tmp_path / "job.log"
    for _ in range(150):
        data = bytearray(text)
        for _ in range(dice.randrange(1, 60)):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(40)] = dice.randbytes(dice.randrange(40)).replace(b"\0", b"")
        path.write_bytes(data)
        diagnose(read_logs([path]).evidence)


def test_old_watchdog_formats_are_understood(tmp_path: Path) -> None:
    """The formats of torch 2.4 and 1.13, after a progress bar."""

    def timeout(rank: int, seq: int) -> str:
        work = f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800012 milliseconds"
        return f"[E ProcessGroupNCCL.cpp:458] [Rank {rank}] Watchdog caught collective operation timeout: {work}"

    def later(rank: int, seq: int) -> str:
        head = f"[rank{rank}]:[E321 02:07:08.408271257] [PG 1 Rank {rank}] Exception (either"
        head += (
            f" an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: 90, last completed"
        )
        return f"{head} NCCL work: {seq - 1}."

    behind = [31, 30, 31, 31]
    lines = [text for r, seq in enumerate(behind) for text in (f"[rank{r}]:{timeout(r, seq)}", later(r, seq))]
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert named(verdict) == ("gpu-kernel", [1])
    assert "group '1'" in verdict.evidence[0].claim
    bare = "\n".join(f"Epoch 0:   6%|#  | 32040/500150 [6:28:43<94:39:17]{timeout(r, 31)}" for r in (0, 1, 3))
    verdict = verdict_of(f"{bare}\nworld_size=4\n", tmp_path)
    assert "Ranks 0-1,3 wait" in verdict.summary
    assert verdict.missing == ("ranks not seen: 2",)


def test_spawn_failure_names_the_child_rank(tmp_path: Path) -> None:
    text = """Traceback (most recent call last):
  File "/home/me/train.py", line 50, in <module>
    mp.spawn(main, nprocs=2)
  File "/usr/lib/python3.10/site-packages/torch/multiprocessing/spawn.py", line 119, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/usr/lib/python3.10/site-packages/torch/multiprocessing/spawn.py", line 20, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 41, in main
    raise ValueError("bad")
ValueError: bad
"""
    verdict = verdict_of(text, tmp_path)
    assert (*named(verdict), verdict.culprits[0].frame.line) == ("rank-exception", [1], 41)  # type: ignore[union-attr]
    head, _, _ = text.partition("ProcessRaisedException:")
    ended = f"{head}ProcessExitedException: process 1 terminated with signal SIGKILL\n"
    assert named(verdict_of(ended, tmp_path)) == ("rank-killed", [1])


def test_traceback_in_the_torchrun_summary_is_read(tmp_path: Path) -> None:
    lines = summary({1: 1, 0: -15})
    at = lines.index("  exitcode  : 1 (pid: 101)")
    lines[at + 1 : at + 1] = [
        "  error_file: /tmp/torchelastic_x/none_y/attempt_0/1/error.json",
        "  traceback : Traceback (most recent call last):",
        '    File "/usr/lib/python3.10/site-packages/torch/distributed/elastic/x.py", line 346, in wrapper',
        "      return f(*args, **kwargs)",
        '    File "/home/me/train.py", line 41, in main',
        "      raise ValueError(7)",
        "  ValueError: 7",
        "  ",
    ]
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert (*named(verdict), verdict.culprits[0].frame.line) == ("rank-exception", [1], 41)  # type: ignore[union-attr]


def test_rich_traceback_is_read(tmp_path: Path) -> None:
    text = """╭─────────────── Traceback (most recent call last) ───────────────╮
│ /home/me/train.py:50 in <module>                                │
│                                                                 │
│   47                                                            │
│ ❱ 50 │   main()                                                 │
│                                                                 │
│ /home/me/train.py:41 in main                                    │
│ ❱ 41 │   raise ValueError("bad")                                │
╰─────────────────────────────────────────────────────────────────╯
ValueError: bad
"""
    verdict = verdict_of(text, tmp_path)
    assert (*named(verdict), frame_of(verdict)) == ("rank-exception", ["?"], 41)


CRASH = """step 5
Fatal Python error: Segmentation fault

Thread 0x00007f3a1c0f9740 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f3a2d7f8740 (most recent call first):
  File "/home/u/train.py", line 12 in step
  File "/home/u/train.py", line 30 in <module>

Extension modules: numpy, torch._C (total: 20)
"""


@pytest.mark.parametrize(("prefix", "rank"), [("[rank3]: ", 3), ("", "?")])
def test_log_ending_with_faulthandler_output_names_the_crash(tmp_path: Path, prefix: str, rank: int | str) -> None:
    path = log_of("".join(prefix + line for line in CRASH.splitlines(keepends=True)), tmp_path)
    verdict = diagnose(read_logs([path]).evidence)
    assert (*named(verdict), frame_of(verdict)) == ("rank-killed", [rank], 12)
    assert "SIGSEGV" in verdict.summary and not any("exit status" in str(claim) for claim in verdict.evidence)


@pytest.mark.parametrize("goes_on", [True, False])
def test_output_after_a_crash_dump_clears_the_rank(tmp_path: Path, goes_on: bool) -> None:
    path = log_of("world_size: 2\n" + CRASH + "epoch 4\nepoch 5\n" * goes_on, tmp_path)
    assert bool(read_logs([path]).evidence.ranks) != goes_on


def test_crash_stack_belongs_to_the_rank_the_launcher_reports(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    ended = "E1126 torch/elastic/multiprocessing/api.py:9] failed (exitcode: -11) local_rank: 1 (pid: 77) of binary: py"
    path.write_text(CRASH + ended + "\n")
    culprit = diagnose(read_logs([path]).evidence).culprits[0]
    assert (culprit.rank, culprit.frame.line) == (1, 12)


# --- several nodes, cause before effect -------------------------------------------------------------------------------

TORCH = "/usr/lib/python3.10/site-packages/torch"
STEPS = [f"step {at} loss {9 - at}" for at in range(6)]
FROM = ["", "The above exception was the direct cause of the following exception:", ""]
MEANWHILE = ["", "During handling of the above exception, another exception occurred:", ""]
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there"
NCCL += " was a network error, NCCL version 2.20.5"
OLD_NCCL = "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:784, unhandled system error, NCCL version 2.7.8"
HOROVOD = (
    "RuntimeError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to"
)
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def own(error: str = "ValueError: bad", line: int = 41) -> list[str]:
    return ["Traceback (most recent call last):", f'  File "/home/me/train.py", line {line}, in main', error]


def lost(error: str = NCCL) -> list[str]:
    inside = f'  File "{TORCH}/distributed/distributed_c10d.py", line 9, in all_reduce'
    return ["Traceback (most recent call last):", '  File "/home/me/train.py", line 60, in main', inside, error]


def on(prefix: str, *lines: list[str]) -> list[str]:
    return [prefix + line for line in chain(*lines)]


def in_turn(*streams: list[str]) -> list[str]:
    queues = [list(one) for one in streams]
    return [queue.pop(0) for _ in range(max(map(len, queues))) for queue in queues if queue]


def ray_task(name: str, pid: int, error: str = "ValueError") -> str:
    return f"ray.exceptions.RayTaskError({error}): ray::{name}() (pid={pid}, ip=10.0.0.1, actor_id=1)"


TORCHRUN = (
    "E0505 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: 1) local_rank: {} (pid: {}) of x"
)
DEEPSPEED = "[2026-11-25 10:00:08,1] [ERROR] [launch.py:322:sigkill_handler] ['python'] exits with return code = 1"
MPIRUN = ["mpirun detected that one or more processes exited with non-zero status", "  Process name: [[50371,1],1]"]
STUCK = (
    "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives."
)
FIELD: dict[str, tuple[list[str], str, list[int], int | None]] = {
    "each node has its torchrun": (
        in_turn(
            on("worker-1  | ", STEPS, lost(), [TORCHRUN.format(0, 100)], summary({0: 1})),
            on("worker-2  | ", STEPS, own(), lost(), [TORCHRUN.format(1, 103)], summary({3: 1})),
        ),
        "rank-exception", [3], 41,
    ),
    "pods with a torchrun each": (
        in_turn(on("[pod/w-0/t] ", lost(), summary({0: 1})), on("[pod/w-1/t] ", own(), summary({2: 1}))),
        "rank-exception", [2], 41,
    ),
    "DeepSpeed's nodes": (
        in_turn(
            on("node-0: ", STEPS, lost(OLD_NCCL), [DEEPSPEED]), on("node-3: ", STEPS, own(MEMORY), lost(), [DEEPSPEED])
        ),
        "rank-exception", ["a process of node-3"], 41,
    ),
    "nodes that all lost a peer": (
        in_turn(on("10.0.0.1: ", lost(), lost(), [DEEPSPEED]), on("10.0.0.2: ", lost(), lost(), [DEEPSPEED])),
        "rank-exited", [], None,
    ),
    "Horovod, whose victim ended first": (
        [*on("[1,1]<stderr>:", lost(HOROVOD)), *on("[1,0]<stderr>:", own()), *MPIRUN, "  Exit code:    1"],
        "rank-exception", [0], 41,
    ),
    "what Slurm kills after the first": (
        [
            "srun: error: b: task 5: Out Of Memory", "srun: Terminating StepId=9.0",
            "srun: error: a: tasks 0,3: Exited with exit code 1", "srun: error: b: tasks 4,6-7: Killed",
        ],
        "rank-killed", [5], None,
    ),
    "a watchdog that got stuck": (
        [*(f"[rank{r}]:[F ProcessGroupNCCL.cpp:1169] [PG 0] {STUCK}" for r in (0, 1)), *summary({1: -6, 0: -6})],
        "no-rank-stands-out", [], None,
    ),
    "an error after its own timeout": (
        [*chain(*(watchdog(rank, 88) for rank in range(4))), *on("[rank3]: ", own(MEMORY)), *summary({3: 1, 0: -6})],
        "no-rank-stands-out", [], None,
    ),
    "an error, then a barrier in its handler": (
        [*on("[rank0]: ", lost()), *on("[rank3]: ", own(MEMORY), MEANWHILE, lost())], "rank-exception", [3], 41,
    ),
    "a lookup that fails as a rule, then a lost peer": (
        [*on("[rank0]: ", own("KeyError: 7"), MEANWHILE, lost()), *on("[rank1]: ", own(line=43))],
        "rank-exception", [1], 43,
    ),
    "a lost peer in the words of a framework": (
        [*on("[rank0]: ", lost(), FROM, own("RuntimeError: step failed", 66)), *on("[rank1]: ", own())],
        "rank-exception", [1], 41,
    ),
    "a cleanup that fails after a lost peer": (
        [*on("[rank0]: ", lost(), MEANWHILE, own("AttributeError: close", 66)), *on("[rank1]: ", own())],
        "rank-exception", [1], 41,
    ),
    "what Ray passes on": (
        [
            "(TorchTrainer pid=900) - (ip=10.0.0.1, pid=912) world_rank=1, local_rank=1",
            *own(ray_task("Runner.run", 900)), '  File "/w/runner.py", line 9, in run',
            ray_task("Worker.next", 912), '  File "/w/main.py", line 41, in train_func', "ValueError: bad",
        ],
        "rank-exception", [1], 41,
    ),
    "a CUDA error, and watchdogs of an old torch": (
        [
            *own("RuntimeError: CUDA error: unspecified launch failure"), "CUDA kernel errors might be reported later.",
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
            *(
                f"[E ProcessGroupNCCL.cpp:566] [Rank {r}] Watchdog caught collective operation timeout: "
                "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1801060 milliseconds before timing out."
                for r in (0, 2)
            ),
        ],
        "rank-exception", ["?"], 41,
    ),
    "warnings of the one process that failed": (
        [
            "pod:97:183 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
            *lost(OLD_NCCL),
        ],
        "rank-exception", ["?"], 60,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELD)
def test_field_log_gives_cause_rank_and_line(name: str, tmp_path: Path) -> None:
    lines, cause, ranks, line = FIELD[name]
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert named(verdict) == (cause, ranks), verdict.summary
    if ranks and line is not None:
        assert frame_of(verdict) == line
    if name == "DeepSpeed's nodes":
        assert (verdict.processes_at_fault[0].host, verdict.confidence) == ("node-3", "medium")


def test_pod_number_is_not_a_rank(tmp_path: Path) -> None:
    lines = in_turn(*(on(f"[pod/w-{at}/t] ", own() if at == 10 else lost()) for at in (10, 2, 0)))
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert (at_fault(verdict), verdict.confidence) == (["pod/w-10/t"], "medium")
    assert not verdict.culprits


def of_node(first: int, prefix: str, own_rank: int, *, ends: bool = True) -> list[str]:
    """Returns the output of torchrun and its four ranks, of which ``own_rank`` fails by itself."""
    ranks = range(first, first + 4)
    tracebacks = {rank: own() if rank == own_rank else lost() for rank in ranks}
    said = [on(prefix.format(rank=r, local=r - first), STEPS, lines) for r, lines in tracebacks.items()]
    failed = own_rank if own_rank in ranks else first
    end = [TORCHRUN.format(failed - first, 100 + failed), *summary({failed: 1})] if ends else []
    return [line.replace(f"(local_rank: {failed})", f"(local_rank: {failed - first})") for line in chain(*said, end)]


@pytest.mark.parametrize(
    ("outer", "prefix", "ends", "sure"),
    [
        ("{node}: ", "[rank{rank}]: ", True, True),
        ("{node}: ", "[default{local}]:[rank{rank}]: ", True, True),
        ("{node}: ", "[default{local}]:", True, True),
        ("{node}: ", "[default{local}]:", False, False),
        ("{node}: ", "", True, True),
        ("", "r12i0n8:{rank}: ", True, True),
        ("", "r12i0n8:{rank}: [rank{rank}]: ", False, True),
        ("", "[trainer{local}|{rank}]: ", True, True),
        ("n{node}: ", "<{rank}/8> ", False, True),
    ],
)  # fmt: skip
def test_local_ranks_of_several_nodes_are_resolved(
    outer: str, prefix: str, ends: bool, sure: bool, tmp_path: Path
) -> None:
    """Under ``srun -l`` a torchrun on each, or with a prefix of its ``--log-line-prefix-template``."""
    nodes = [on(outer.format(node=at), of_node(4 * at, prefix, 5, ends=ends)) for at in range(2)]
    verdict = verdict_of("\n".join(in_turn(*nodes) if outer else chain(*nodes)), tmp_path)
    assert named(verdict) == ("rank-exception", [5 if sure else "local rank 1 of 1"])
    assert frame_of(verdict) == 41


@pytest.mark.parametrize(
    ("number", "told"),
    [("1", "torchrun got SIGHUP, which a terminal sends"), ("Signals.SIGTERM", "got SIGTERM, which a scheduler")],
)
def test_job_ended_by_a_signal_blames_no_rank(number: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(
        "W1126 12:00:00 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 42 closing signal\n"
        'Traceback (most recent call last):\n  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        f"torch.distributed.elastic.multiprocessing.api.SignalException: Process 41 got signal: {number}\n"
    )
    found = read_logs([path])
    assert (found.evidence.ranks, told in found.remarks[0]) == ((), True)


def test_slurm_task_of_a_launcher_is_not_a_rank(tmp_path: Path) -> None:
    ended = ["srun: error: n3: task 1: Exited with exit code 1", "srun: error: n2: task 0: Terminated"]
    lines = [*of_node(0, "[rank{rank}]: ", 5), *of_node(4, "[rank{rank}]: ", 5), *ended]
    found = read_logs([log_of("\n".join(lines), tmp_path)])
    assert named(diagnose(found.evidence)) == ("rank-exception", [5])
    assert {one.rank for one in found.evidence.ranks if one.exit is not None} == {0, 5}
    assert "task 1: Exited" in found.remarks[0]


@pytest.mark.parametrize("end", [HEAD, CRASH])
def test_stdout_of_failed_rank_in_separate_file_does_not_clear_it(end: str, tmp_path: Path) -> None:
    """The folder layout of torchrun's ``--redirects``."""
    for rank in range(2):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("\n".join(STEPS))
        (folder / "stderr.log").write_text(end if rank else "\n".join(lost()))
    assert [one.rank for one in diagnose(locate.read(tmp_path).evidence).culprits] == [1]


# --- by what libraries say of processes and ranks ---------------------------------------------------------------------

SYSTEM = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"
ECC = "NCCL WARN Cuda failure 'uncorrectable ECC error encountered'"


def by_nccl(rank: int, *, world: int = 4, of: int = 4) -> list[str]:
    """NCCL's lines of a process of 4 in its communicators: of all, and one of ``of`` ranks."""
    head = f"gpu-1:{100 + rank}:{300 + rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm 0x5639"
    tail = f"cudaDev {rank} nvmlDev {rank} busId a8000 commId 0x7b6d - Init COMPLETE"
    return [f"{head} rank {rank % of} nranks {of} {tail}", *([f"{head} rank {rank} nranks 4 {tail}"] * (world == 4))]


@pytest.mark.parametrize("of", [4, 2])
def test_nccl_warning_is_assigned_to_its_rank(of: int, tmp_path: Path) -> None:
    began = [*chain(*(by_nccl(rank, of=of) for rank in range(4))), *STEPS]
    warning = [f"gpu-1:102:102 [2] enqueue.cc:1446 {ECC}", "gpu-1:102:102 [2] NCCL INFO group.cc:418 -> 1"]
    raised = [on(f"[rank{rank}]: ", lost(SYSTEM)) for rank in range(4)]
    verdict = verdict_of("\n".join([*began, *warning, *chain(*raised)]), tmp_path)
    assert named(verdict) == ("rank-exception", [2]) and "uncorrectable ECC" in verdict.summary
    verdict = verdict_of("\n".join([*began, *warning, *chain(*(raised[rank] for rank in (0, 1, 3)))]), tmp_path)
    assert named(verdict) == ("rank-exception", [2]) and not verdict.missing
    verdict = verdict_of("\n".join([*STEPS, *warning, *chain(*raised)]), tmp_path)  # nothing says whose
    assert verdict.culprits == ()


def test_ambiguous_nccl_process_blames_no_rank(tmp_path: Path) -> None:
    lines = [*chain(*(by_nccl(rank, world=0, of=2) for rank in range(4))), f"gpu-1:102:102 [2] enqueue.cc:1446 {ECC}"]
    lines += chain(*(on(f"[rank{rank}]: ", lost(SYSTEM)) for rank in range(4)))
    assert verdict_of("\n".join(lines), tmp_path).culprits == ()


STALL = (
    "[2021-02-02 21:19:07.345988: W /b/horovod/common/stall_inspector.cc:105] One or more tensors were submitted to be "
)
STALL += (
    "reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 s. "
)
GRADS = "[grads/Allreduce_0, grads/Allreduce_1 ...]"
OLD_STALL = ["Stalled ops:HorovodBroadcast_bias_0 [missing ranks: 1, 2]", "Allreduce_1 [missing ranks: 1, 2]"]
SHUTDOWN = 'One or more rank (marked by "!") is stalled for longer than 120 seconds. Will shutdown.'


@pytest.mark.parametrize(
    ("lines", "cause", "ranks"),
    [
        (["Missing ranks:", f"2: {GRADS}"], "missing-from-collective", [2]),
        (["Stalled ranks:", f"1: {GRADS}", f"2: {GRADS}"], "missing-from-collective", [1, 2]),
        (OLD_STALL, "missing-from-collective", [1, 2]),
        (["Missing ranks:", "0: [a]", "1: [b]"], "group-order", [0, 1]),
        (["Missing ranks:", f"2!: {GRADS}", SHUTDOWN, *lost(HOROVOD)], "missing-from-collective", [2]),
    ],
)
@pytest.mark.parametrize("prefix", ["[1,0]<stderr>:", ""])
def test_horovod_stall_warning_names_the_missing_ranks(
    lines: list[str], cause: str, ranks: list[int], prefix: str, tmp_path: Path
) -> None:
    text = "\n".join([*STEPS, *on(prefix, [STALL, *lines])])
    verdict = verdict_of(text, tmp_path)
    assert named(verdict) == (cause, ranks) and verdict.confidence != "high"
    error = on("[1,2]<stderr>:", own())
    if 2 in ranks:
        assert named(verdict_of("\n".join([text, *error]), tmp_path)) == ("rank-exception", [2])
    if HOROVOD not in text:
        path = tmp_path / "job.log"
        path.write_text("\n".join([text, *STEPS, *STEPS, *STEPS]))  # it has come
        assert not read_logs([path]).evidence.ranks


CUT = "Worker unexpectedly exits with a connection error code 2. End of file. (1) The process is killed by SIGKILL."
FAULT = [line for line in CRASH.splitlines()[1:] if line]


@pytest.mark.parametrize(
    ("before", "how", "cause", "said"),
    [
        ([], CUT, "rank-killed", "an unknown signal"),
        ([], "Task was killed due to the node running low on memory.", "rank-killed", "SIGKILL"),
        ([], "Worker exits unexpectedly. Worker exits with an exit code 7.", "rank-exited", "code 7"),
        (FAULT, CUT, "rank-killed", "SIGSEGV at train.py:12"),
    ],
)
def test_dead_ray_worker_is_the_culprit(before: list[str], how: str, cause: str, said: str, tmp_path: Path) -> None:
    place = (
        "(TorchTrainer pid=800) - (node_id=d742, ip=10.0.0.1, pid=90{0}) world_rank={0}, local_rank={0}, node_rank=0"
    )
    dead = f"Worker IP address: 10.0.0.1 Worker port: 45555 Worker PID: 902 Worker exit type: SYSTEM_ERROR {how}"
    dead = dead.replace("SYSTEM_ERROR", "SYSTEM_ERROR Worker exit detail:")
    lines = [place.format(rank) for rank in range(4)]
    lines += chain(*(on(f"(RayTrainWorker pid=90{rank}) ", STEPS) for rank in range(4)))
    lines += [*on("(RayTrainWorker pid=902) ", before), f"(raylet) A worker died or was killed. {dead}"]
    lines += chain(*(on(f"(RayTrainWorker pid=90{rank}) ", lost()) for rank in (0, 1, 3)))
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert (*named(verdict), verdict.victims) == (cause, [2], "0-1,3") and said in verdict.summary


def test_nccl_invalid_usage_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268\nncclInvalidUsage: invalid usage"
    told = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000"
    path = log_of("\n".join([*lost(error), "Last error:", told]), tmp_path)
    assert main([str(path)]) == 0 and told[:40] in " ".join(capfd.readouterr().out.split())


CLOSED = "misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer n1<55133>"
LEFT = "slurmstepd: error: *** STEP 4.0 ON n3 CANCELLED AT 2026-05-05T10:00:00 DUE TO PREEMPTION ***"


@pytest.mark.parametrize(
    ("lines", "said", "code"),
    [
        ([*STEPS, f"n1:7:9 [2] {CLOSED}"], "a warning of NCCL alone is no failure", 1),
        ([f"n1:7:9 [2] {CLOSED}", "n1:7:7 [2] NCCL INFO group.cc:418 -> 3"], "NCCL failed: socketProgress", 0),
        (["n1:7:9 [2] NCCL WARN Failed to open libibverbs.so[.1]", *STEPS], "no failure seen; the first warnings", 1),
        (["NCCL error: unhandled system error", "ncclSystemError: System call failed."], "NCCL failed [job.log:1]", 0),
        (in_turn(on("n1: ", STEPS, own(), STEPS), on("n2: ", STEPS, STEPS)), "the job worked on after", 1),
        ([*in_turn(on("app.v1: ", STEPS), on("io.v2: ", STEPS)), *own(), *on("app.v1: ", STEPS)], "worked on", 1),
        ([LEFT, *own(), "srun: error: n3: tasks 0-1: Exited with exit code 1"], "DUE TO PREEMPTION", 0),
        ([*own(ray_task("Runner.run", 9, "Died")), *own("ray.exceptions.ActorDiedError: x")[1:]], "ActorDied", 0),
        (
            [
                "Traceback (most recent call last):",
                f'  File "{TORCH}/distributed/run.py", line 7, in main',
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 8099 got signal: 1",
            ],
            "the launcher itself ended: torch",
            0,
        ),
    ],
)  # fmt: skip
def test_failure_without_a_known_rank_is_reported_without_verdict(
    lines: list[str], said: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = log_of("\n".join(lines), tmp_path)
    assert main([str(path)]) == code
    shown = capfd.readouterr()
    assert not shown.out
    assert said in shown.err


# --- whose line it is, and what is shown of what is not understood ----------------------------------------------------


def positions(rank: int, queued: int, done: int) -> str:
    """Returns the lines of a rank that only reports another rank's timeout."""
    head = f"[rank{rank}]:[E1017 02:40:10.5 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    why = "due to a collective timeout from this local rank and we will try our best to dump the debug info."
    return (
        f"{head} Received a dump signal {why} Last enqueued NCCL work: {queued}, last completed NCCL work: {done}.This"
        " is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks."
    )


FINGER = (
    "Detected mismatch between collectives on ranks. Rank {} is running collective: CollectiveFingerPrint(Sequence"
    "Number=5, OpType=ALLGATHER, TensorShape=[8], TensorDtypes=Float), but Rank 3 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)."
)
STEP_LINES = [f"[rank{rank}] train: {step:>4}/900 loss=2.8" for step in (10, 20) for rank in range(4)]


@pytest.mark.parametrize(
    ("lines", "cause", "fault"),
    [
        ([positions(0, 131, 117), positions(1, 131, 117), positions(2, 117, 117)], "missing-from-collective", [2]),
        ([f"[RANK {r}] 2026-05-19 10:10:29,004 [ERROR] step failed - {FINGER.format(r)}" for r in (0, 2)],
         "collective-mismatch", [3]),
        (STEP_LINES[:-1], "missing-from-collective", [3]),
        ([*STEP_LINES, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-05-02T03:58:46 DUE TO TIME LIMIT ***"],
         "no-rank-stands-out", []),
        ([f"2026-01-01 10:00:0{at} | INFO | rank {rank} | batch {at}" for at in range(4) for rank in range(2)]
         + ["2026-01-01 10:00:09 | ERROR | rank 1 | stopped", *own()], "rank-exception", [1]),
        (['{"level": "error", "rank": 6, "msg": "uncaught", "exc": "Traceback (most recent call last):\\n'
          '  File \\"/app/a.py\\", line 41, in f\\nValueError: bad"}'], "rank-exception", [6]),
        (["[pod/w-1/t] rank 2/3: joined", *on("[pod/w-1/t] ", own())], "rank-exception", [2]),
        (["[pod/w-1/t] rank 2/4: joined", "[pod/w-1/t] rank 3/4: joined", *on("[pod/w-1/t] ", own())],
         "rank-exception", ["pod/w-1/t"]),
        (["n1: rank 25 died from signal 9 and dumped core"], "rank-killed", [25]),
        (["run.sh: line 7: 4711 Killed                  python train.py"], "rank-killed", ["process 4711"]),
        (["Memory on the node where the task (actor ID: f9, name=W.run, pid=4331, memory used=2G) was running was 99%"],
         "rank-killed", ["process 4331"]),
        ([*own("subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGSEGV: 11>.")],
         "rank-killed", ["a process of the launcher's"]),
        (["srun: error: Node failure on n2", "3: up on node n2"], "node-lost", []),
        (["Traceback (most recent call last):", '  File "/srv/a.py", line 41, in main'], "rank-exception", ["?"]),
        (["[E socket.cpp:1] [c10d] The server socket has failed to bind to [::]:29512 (errno: 98 - Address already in "
          "use).", "Traceback (most recent call last):", '  File "/srv/a.py", line 41, in main'],
         "rank-exception", ["?"]),
        (own("torch.distributed.DistNetworkError: The client socket has timed out after 9000ms while trying to connect "
             "to (node-a, 29400)."), "init-not-joined", []),
        (own("torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/4 clients joined."),
         "init-not-joined", []),
        (["[E ProcessGroupNCCL.cpp:7] [Rank 2] NCCL watchdog thread terminated with exception: CUDA error: ECC"],
         "rank-exception", [2]),
        (["[E ProcessGroupNCCL.cpp:7] [PG 4 Rank 1] Exception (either an error or timeout) detected by watchdog at "
          "work: 9, last enqueued NCCL work: 9, last completed NCCL work: 8."], "no-rank-stands-out", []),
        ([*chain(*zip(own(), own(), strict=True)), *summary({0: 1, 1: 1})], "rank-exception", [0, 1]),
        ([*own(), *own("KeyError: 7", 43), *summary({0: 1, 1: 1})], "rank-exception", ["?"]),
    ],
    ids=["positions", "fingerprints", "steps", "all level", "a logger's field", "records in JSON", "a pod and its rank",
         "a pod of two ranks", "PALS", "a shell", "Ray's memory", "the old launcher", "Slurm's node", "cut off",
         "a port", "a store", "clients", "an old watchdog", "a rank of a group", "all alike", "two of two"],
)  # fmt: skip
def test_failure_is_assigned_to_its_rank(lines: list[str], cause: str, fault: list[int | str], tmp_path: Path) -> None:
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert named(verdict) == (cause, fault), verdict.summary


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["[10:00:01] ERROR storage: the quota service said no"], "not understood; the first errors are"),
        (["ERROR a: first", "step 1", "ERROR b: second"], "job.log:1: ERROR a: first"),
        (["WARNING net: retrying after [Errno 104]", *STEPS], "no failure seen"),
        (["ERROR upload failed", *STEPS], "worked on after its errors"),
        (["val_error 0.2", "Test Error: 0.31", "epoch 3 error_rate=0.1"], "nothing wrong seen"),
        (["ERROR upload failed", "Training completed."], "worked on"),
    ],
)
def test_unrecognized_error_lines_are_shown(
    lines: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = log_of("\n".join(lines), tmp_path)
    assert main([str(path)]) == 1
    shown = capfd.readouterr()
    assert said in shown.err and not shown.out
    assert ("nothing wrong seen" in shown.err) == (said == "nothing wrong seen")


def test_consequences_are_shown_after_causes(tmp_path: Path) -> None:
    lines = ["ERROR launcher: a child was Terminated", *(f"ERROR {'abcdefg'[at] * 3}: no" for at in range(7))]
    summary_lines = read_logs([log_of("\n".join(lines), tmp_path)]).summary
    assert len(summary_lines) == 6 and "Terminated" not in " ".join(summary_lines)


def test_silent_ranks_are_reported_unseen_not_arrived(tmp_path: Path) -> None:
    closing = [f"W1 api.py:9] Sending process {pid} closing signal SIGTERM" for pid in (101, 102, 103)]
    verdict = verdict_of("\n".join([*watchdog(0, 31)[:1], *summary({0: -6}), *closing]), tmp_path)
    assert "ranks 1-3 were not seen" in verdict.summary and verdict.world_size in (0, 4)
    verdict = verdict_of(watchdog(0, 31)[0], tmp_path)
    assert not any("transport" in one for one in verdict.suggestions)


def test_terminal_wrapped_lines_are_rejoined(tmp_path: Path) -> None:
    wrapped = [
        part for r in (1, 2) for text in watchdog(r, 4) for part in text.replace(": WorkN", ": Work\nN").split("\n")
    ]
    verdict = verdict_of("\n".join(wrapped), tmp_path)
    assert named(verdict)[0] == "missing-from-collective" and "ranks 1-2 wait" in verdict.summary.lower()


@pytest.mark.parametrize("quote", ["    ", "> ", "\t", "> > "])
def test_quoted_log_is_read(quote: str, tmp_path: Path) -> None:
    lines = (LOGS / "raise.log").read_text().splitlines()
    assert named(verdict_of("\n".join(quote + line for line in lines), tmp_path)) == ("rank-exception", [1])


@pytest.mark.parametrize("loud", ["ERROR upload failed, try {}", "val_error {}"])
def test_frequent_error_lines_do_not_hide_the_failure(loud: str, tmp_path: Path) -> None:
    text = "".join(f"{loud.format(at)} of 9\nstep {at} loss 0.5\n" for at in range(80_000))
    assert len(text) > 2 * CHUNK_BYTES
    verdict = verdict_of(text + "\n".join(on("[rank3]: ", own())), tmp_path)
    assert named(verdict) == ("rank-exception", [3])


# --- what a process survived, and whose numbers are local -------------------------------------------------------------

CAUGHT = [*on("[rank1]: ", ["ERROR going on without it", *own()]), "[rank1]: step 1", "[rank1]: step 2"]
LOCAL_END = (
    "E1128 20:10:00.1 1234 torch/distributed/api.py:882] failed (exitcode: {}) local_rank: 1 (pid: 77) of binary: p"
)
IB = "NET/IB : Got completion from peer 10.4.0.23<41190> with status=12 opcode=0 len=0 vendor err 129 (Send)"


@pytest.mark.parametrize(
    ("lines", "cause", "fault"),
    [
        ([*CAUGHT[:-2], LOCAL_END.format(-9)], "rank-killed", [1]),  # no exception ends a process with SIGKILL
        ([*CAUGHT, LOCAL_END.format(1)], "rank-exited", [1]),
        ([*own(), "  min_nodes        : 2", LOCAL_END.format(1)], "rank-exception", ["?"]),
        (["Namespace(machine_rank=1, num_machines=2)", "-- Process 3 terminated with the following error:", *own()],
         "rank-exception", ["local rank 3"]),
        (["torchrun --nnodes 2 --node-rank 1 train.py", *on("[default1]:", own())], "rank-exception", ["local rank 1"]),
        ([*in_old_words(0, 100), *in_old_words(1, 100), *in_old_words(2, 99), "world_size=3"], "gpu-kernel", [2]),
        (["NCCL error in: x, invalid usage", "Last error:",
          "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4"],
         "rank-exception", ["?"]),
        ([f"n1:7:9 [4] net_ib.cc:2207 NCCL WARN {IB}", "[rank4]: Traceback (most recent call last):",
          f'[rank4]:   File "{TORCH}/distributed/distributed_c10d.py", line 9, in all_reduce', f"[rank4]: {NCCL}"],
         "node-unreachable", []),
        (["(VllmWorker rank=3 pid=1187) Traceback (most recent call last):",
          '(VllmWorker rank=3 pid=1187)   File "/w.py", line 41, in f', "(VllmWorker rank=3 pid=1187) ValueError: bad"],
         "rank-exception", [3]),
        ([LOCAL_END.format(1), *on("[rank0]: ", own()), LOCAL_END.format(1), *on("[rank1]: ", own(line=43)),
          LOCAL_END.format(1)], "rank-exception", [1]),
        ([*on("[rank1]: ", own()), "W1 api.py:9] Unable to shutdown process 77 via 15, forcefully exiting via 9",
          LOCAL_END.format(-9)], "rank-exception", [1]),
    ],
    ids=["a signal", "steps", "launch configurations", "spawned on two machines", "a node's launch line",
         "behind in one group", "NCCL's own", "InfiniBand", "a worker with its rank", "attempts", "put down"],
)  # fmt: skip
def test_log_gives_cause_and_rank_for_each_numbering(
    lines: list[str], cause: str, fault: list[int | str], tmp_path: Path
) -> None:
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert named(verdict) == (cause, fault), verdict.summary


def test_local_rank_alone_limits_the_confidence(tmp_path: Path) -> None:
    verdict = verdict_of("\n".join([*own(), LOCAL_END.format(1)]), tmp_path)
    assert (named(verdict), verdict.confidence) == (("rank-exception", [1]), "medium")


def test_first_end_seen_by_launcher_limits_the_confidence(tmp_path: Path) -> None:
    lines = [*on("[rank2]: ", own()), *on("[rank0]: ", own(line=43)), *summary({0: 1, 2: 1}, {2: 4})]
    verdict = verdict_of("\n".join(lines), tmp_path)
    assert (at_fault(verdict), verdict.confidence) == ([2], "medium")


def test_log_file_per_node_gives_the_global_rank(tmp_path: Path) -> None:
    """Each launcher counts its own processes from 0."""
    for node, raised in ((0, lost()), (1, own())):
        lines = [*on("[default1]:", raised), LOCAL_END.format(1), *summary({2 * node + 1: 1})]
        text = "\n".join(lines).replace(f"(local_rank: {2 * node + 1})", "(local_rank: 1)")
        (tmp_path / f"node-{'ab'[node]}.log").write_text(text)
    assert named(diagnose(locate.read(tmp_path).evidence)) == ("rank-exception", [3])


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.log", 3), ("attempt_0-rank1-stderr.log", 1), ("lora_rank8.log", None), ("rank16-lora.log", None)],
)
def test_rank_is_read_from_the_log_file_name(name: str, rank: int | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("\n".join(own()))
    culprits = [one.rank for one in diagnose(read_logs([path]).evidence).culprits]
    assert culprits == ([rank] if rank is not None else [])


def test_secrets_in_a_log_are_never_written(tmp_path: Path) -> None:
    """Also where the page holds them as JSON."""
    path = log_of(
        "\n".join(own("ValueError: {'api_key': 'sk-abcdefghijklmnop', 'password': 'hunter22hunter'}")), tmp_path
    )
    page = tmp_path / "out" / "report.html"
    main([str(path), "--html", str(page)])
    text = page.read_text()
    assert "sk-abcdefghijklmnop" not in text and "hunter22hunter" not in text and "ValueError" in text


@pytest.mark.parametrize("number", ["65535", "65536", "999999999", "1000000000000000000"])
def test_implausible_rank_numbers_are_ignored(number: str, tmp_path: Path) -> None:
    """Every kind of message that names a rank, with a corrupted number."""
    lines = [*on(f"[default{number}]:", own()), *on(f"[rank{number}]: ", own()), *summary({1: 1}), LOCAL_END.format(1)]
    lines += [f'{{"rank": {number}, "msg": "step"}}', f"n1: rank {number} died from signal 9", f"{number}: step 1"]
    lines += [f"(Worker pid=7, ip=10.0.0.1) - (ip=10.0.0.1, pid=7) world_rank={number}", f"world_size={number}"]
    text = "\n".join(lines).replace("rank      : 1 (local_rank: 1)", f"rank      : {number} (local_rank: 1)")
    text = text.replace("local_rank: 1 (pid: 77)", f"local_rank: {number} (pid: 77)")
    evidence = read_logs([log_of(text, tmp_path)]).evidence
    assert evidence.world_size <= 1 << 17 and all(one.rank < 1 << 17 for one in evidence.ranks)
    diagnose(evidence)
