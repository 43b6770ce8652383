"""Jobs that fail: the verdict names the rank that failed first, and tells its victims from it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from safelaunch.system.decoding import load_pickle
from tests.support.jobs import Job, Result, line_of
from tests.support.nvml import stub
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

CRASHING = PROGRAMS / "crashing.py"


def run(tmp_path: Path, *words: str | Path, env: Mapping[str, str] | None = None) -> Result:
    with Job(words, tmp_path, env=env) as job:
        return job.wait()


def crash(
    tmp_path: Path, ranks: int, how: str, culprit: int, script: Path = CRASHING, env: Mapping[str, str] | None = None
) -> Result:
    """Runs a crash to its end; its bundle is sound and nothing is left."""
    words = (f"--nproc-per-node={ranks}", script, "--how", how, "--culprit", str(culprit))
    result = run(tmp_path, *words, env=env)
    assert result.code == 1, result.stderr  # torchrun's own
    assert result.leftovers == ()
    assert result.bundle.path.name.endswith("-crash")
    assert result.bundle.problems() == []
    assert result.verdict["outcome"] == "crash"
    assert str(result.bundle.path) in result.said
    return result


def culprits(result: Result) -> list[int]:
    return [culprit["rank"] for culprit in result.verdict["culprits"]]


def test_an_exception_on_one_rank(tmp_path: Path) -> None:
    own = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{tmp_path}/my_nccl.%h.%p", "SAFELAUNCH_PRESET": "hang-debug"}
    result = crash(tmp_path, 3, "exception", 0, env=own)
    verdict = result.verdict
    assert (verdict["cause"], verdict["confidence"], culprits(result)) == ("rank-exception", "high", [0])
    frame = verdict["culprits"][0]["frame"]
    assert (frame["file"], frame["line"]) == (str(CRASHING), line_of(CRASHING, "FAILS: exception"))
    became = f"which became TrainingError: step failed at crashing.py:{line_of(CRASHING, 'BECOMES')} (train)"
    assert "ValueError: loss 3.2 is above the limit" in verdict["summary"] and became in verdict["summary"]
    assert verdict["victims"] == "1-2"
    assert any("consequence" in text for text in verdict["ruled_out"])
    for peer in (1, 2):  # where they stood while the failing rank still held its connections
        assert "training.py" in result.bundle.text(f"ranks/{peer}/stack.txt")
        assert "Thread" in result.bundle.text(f"ranks/{peer}/stack.txt")
    told = result.bundle.json("ranks/0/exception.json")
    assert (told["type"], told["earlier"][0]["type"]) == ("__main__.TrainingError", "ValueError")
    assert "rank      : 0 (local_rank: 0)" in result.stderr  # torchrun's own account is there
    (log,) = result.bundle.path.glob("node/*/my_nccl.*")  # the user's variables hold, and their file is collected
    assert log.name == f"my_nccl.{socket.gethostname().partition('.')[0]}.{verdict['culprits'][0]['pid']}"
    environment = result.bundle.json(f"node/{verdict['culprits'][0]['host']}/env.json")
    assert {name: environment[name] for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")}.items() <= own.items()
    assert "Connection closed by b" in result.bundle.json("ranks/0/rank.json")["nccl_log"]["warnings"][0]


@pytest.mark.nightly
def test_a_script_that_python_cannot_read_leaves_no_bundle(tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    script.write_text("import sys\n\ndef train(:\n    pass\n")
    result = run(tmp_path, "--nproc-per-node=2", script)
    assert (result.code, result.bundles, result.leftovers) == (1, (), ())
    assert "Python can't read the code: SyntaxError: invalid syntax (typo.py, line 3)" in " ".join(result.said.split())


@pytest.mark.nightly
@pytest.mark.quick
def test_a_rank_that_exits_with_a_code(tmp_path: Path) -> None:
    result = crash(tmp_path, 2, "exit", 1)
    assert (result.verdict["cause"], culprits(result)) == ("rank-exited", [1])
    assert "code 4" in result.verdict["summary"]
    frame = result.verdict["culprits"][0]["frame"]
    assert (frame["line"], frame["function"]) == (line_of(CRASHING, "FAILS: exit"), "leave")
    assert result.verdict["victims"] == "0"


def test_a_rank_that_a_signal_kills(tmp_path: Path) -> None:
    """By its own fault: faulthandler can still speak. SIGKILL is a row of the fault matrix."""
    result = crash(tmp_path, 2, "SIGSEGV", 1)
    assert (result.verdict["cause"], culprits(result), result.verdict["victims"]) == ("rank-killed", [1], "0")
    assert "SIGSEGV" in result.verdict["summary"]
    frame, line = result.verdict["culprits"][0]["frame"], line_of(CRASHING, "FAILS: signal")
    assert (frame["line"], frame["function"]) == (line, "kill_myself")
    assert f'crashing.py", line {line} in kill_myself' in result.bundle.text("ranks/1/fault.txt")


def test_a_clean_early_exit_names_who_left_early(tmp_path: Path) -> None:
    result = crash(tmp_path, 3, "exit", 2, PROGRAMS / "uneven.py")
    assert (result.verdict["cause"], culprits(result)) == ("uneven-batches", [2])
    assert result.verdict["culprits"][0]["frame"]["line"] == line_of(PROGRAMS / "uneven.py", "EXITS")
    assert result.verdict["victims"] == "0-1"


@pytest.mark.nightly
def test_peers_that_have_ended_do_not_take_the_blame(tmp_path: Path) -> None:
    script = PROGRAMS / "forgotten.py"
    result = crash(tmp_path, 3, "forgotten", 0, script)
    assert (result.verdict["cause"], culprits(result)) == ("collective-mismatch", [0])
    assert result.verdict["culprits"][0]["frame"]["line"] == line_of(script, "FAILS: forgotten")
    assert result.verdict["confidence"] == "high"
    records = result.bundle.path / "flight_recorder"
    dumps = [load_pickle((records / f"nccl_trace_rank_{rank}").read_bytes()) for rank in range(3)]
    assert [len(dump["entries"]) for dump in dumps] == [5, 4, 4]


@pytest.mark.nightly
def test_who_sent_another_size_is_named_and_not_the_rank_that_gloo_aborts(tmp_path: Path) -> None:
    """On a mesh of two dimensions, which manifest and reports show with its groups."""
    result = crash(tmp_path, 4, "size", 2)
    told = result.bundle.json("manifest.json")["job"]
    assert (told["world_size"], told["mesh"]) == (4, {"dp": 2, "tp": 2})
    groups = sorted(
        (one["called"], one["ranks"]) for one in told["groups"].values() if one["called"].startswith("mesh_")
    )
    assert groups == [("mesh_dp", "0,2"), ("mesh_dp", "1,3"), ("mesh_tp", "0-1"), ("mesh_tp", "2-3")]
    assert "The job: 4 ranks = dp 2 x tp 2" in result.bundle.text("report.md")
    assert "4 ranks = dp 2 x tp 2" in result.bundle.text("report.html")
    aborted = [n for n in (0, 1, 3) if "Aborted" in (result.bundle.path / f"ranks/{n}/fault.txt").read_text()]
    assert (result.verdict["cause"], result.verdict["confidence"]) == ("collective-mismatch", "medium")
    assert culprits(result) == [2] and aborted
    assert result.verdict["culprits"][0]["frame"]["line"] == line_of(CRASHING, "FAILS: size")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), pytest.param(("--caught",), marks=pytest.mark.nightly)])
def test_a_gpu_that_is_out_of_memory(more: tuple[str, ...], node: stub.Node, tmp_path: Path) -> None:
    """With stand-ins for CUDA's allocator and NVML. The snapshot is of the failed allocation, before any is freed."""
    script = (PROGRAMS / "shortage.py", *more)
    program = shutil.copy("/bin/sleep", tmp_path / "notebook")
    with subprocess.Popen([program, "600"]) as other:
        own = ("--preset=oom-debug", "--gpus=2", "--nproc-per-node=2")
        result = run(tmp_path, *own, *script, f"--beside={other.pid}", env=node.environ)
        other.kill()
    said = f"Process {other.pid}, which does not belong to this job, uses 9.0 GiB of the same GPU."
    assert said in result.verdict["summary"]
    assert said in " ".join(result.stderr.replace("safelaunch: ", " ").split())
    assert any("`safelaunch gpus`" in one for one in result.verdict["suggestions"])
    assert (result.code, result.verdict["cause"], culprits(result)) == (1, "rank-exception", [1])
    assert "77.0 GiB in tensors and 1.0 GiB reserved and unused" in result.verdict["summary"]
    assert "60.0 GiB in 60 blocks, allocated at shortage.py:1 (fill)" in result.verdict["summary"]
    memory = result.bundle.json("ranks/1/device_memory.json")
    assert (memory["asked"], memory["largest"], memory["largest_free"]) == (4 << 30, 17 << 30, 1 << 29)
    assert (memory["at_allocation"], memory["retries"], memory["whole_names"]) == (True, 2, ["0.weight"])
    assert memory["whole"] == 40_000 * 64 * 4 and 0 < memory["sharded"] <= (64 * 64 + 64) * 4 // 2
    snapshot = load_pickle((result.bundle.path / "ranks/1/memory_snapshot.pickle").read_bytes())
    assert len(snapshot["segments"][0]["blocks"]) == 62 and snapshot["device_traces"] == [
        [{"action": "alloc", "size": 1 << 30}]
    ]
    assert (result.bundle.path / "ranks/0/device_memory.json").exists() == bool(more)
    report = result.bundle.text("report.md")
    assert "## GPU memory of rank 1" in report and "## GPU memory of rank 0" not in report
    assert result.bundle.problems() == []


def test_an_exception_in_a_loader_worker(tmp_path: Path) -> None:
    result = crash(tmp_path, 2, "loader", 1)
    assert (result.verdict["cause"], culprits(result)) == ("rank-exception", [1])
    assert "OSError" in result.verdict["summary"]
    (named,) = result.verdict["culprits"]
    assert (named["process"], named["frame"]["line"]) == ("dataloader worker 0", line_of(CRASHING, "FAILS: loader"))
    assert result.bundle.json(f"node/{named['host']}/env.json")["WORLD_SIZE"] == "2"
    assert "sample 40 is truncated" in result.bundle.json("ranks/1/exception.json")["text"]
    assert result.verdict["victims"] == "0"


def test_a_process_groups_own_timeout_is_the_hang_it_was(tmp_path: Path) -> None:
    """Its time is over before the watchdog's: the ranks that waited fail, the one they waited for is named."""
    script = PROGRAMS / "blocked.py"
    mine = ("--how", "asleep", "--culprit", "1", "--timeout", "8")
    result = run(tmp_path, "--stall-timeout=120", "--nproc-per-node=3", script, *mine)
    assert result.code == 1, result.stderr  # torchrun's own
    assert result.bundle.path.name.endswith("-hang")
    assert (result.verdict["outcome"], result.verdict["cause"]) == ("hang", "stuck-in-user-code")
    assert (culprits(result), result.verdict["victims"]) == ([1], "0,2")
    assert result.bundle.problems() == []
    assert result.leftovers == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "patient"),
    [("5s", True), pytest.param("5s!", False, marks=pytest.mark.nightly)],
)
def test_groups_without_a_timeout_get_that_of_the_command_line(given: str, patient: bool, tmp_path: Path) -> None:
    """With a ``!`` the others as well: then the slow round is what ends the job."""
    script = PROGRAMS / "impatient.py"
    result = run(tmp_path, f"--pg-timeout={given}", "--stall-timeout=200", "--nproc-per-node=2", script)
    assert result.code == 1, result.stderr
    assert (result.verdict["outcome"], result.verdict["cause"]) == ("hang", "stuck-in-user-code")
    assert culprits(result) == [1]
    assert ("the slow round is over" in result.stdout) is patient
    assert "5000ms" in result.bundle.json("ranks/0/exception.json")["message"]


def test_a_stop_by_the_user_leaves_no_bundle(tmp_path: Path) -> None:
    with Job(["--nproc-per-node=2", PROGRAMS / "live.py", f"--until={tmp_path}/stop"], tmp_path) as job:
        job.until(lambda: len(job.ranks()) == 2, "two ranks")
        job.until(lambda: all(_computes(pid) for pid in job.ranks().values()), "ranks that train")
        os.kill(job.process.pid, signal.SIGINT)
        result = job.wait()
    assert result.bundles == ()
    assert result.leftovers == ()
    assert result.code != 0
    assert all("waiting for the ranks to end" in line for line in result.said.splitlines())  # on a busy machine


def _computes(pid: int) -> bool:
    """Whether a rank has connected to its peers: torch is loaded, and it has listened for them."""
    try:
        return "libgloo" in (maps := Path(f"/proc/{pid}/maps").read_text()) or "libtorch_cpu" in maps
    except OSError:
        return False
