"""Command lines that ``safelaunch`` rejects before anything starts, and options that it leaves to torchrun."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from safelaunch.cli import main
from safelaunch.job import torchrun


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SAFELAUNCH_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", os.fspath(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


def said(words: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(words.split())
    return code, capfd.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("statsu", "statsu is neither a script nor a subcommand; did you mean 'safelaunch status'?"),
        ("doctr --json", "doctr is neither a script nor a subcommand; did you mean 'safelaunch doctor'?"),
        ("--stall-timout 60 train.py", "there is no option --stall-timout; did you mean safelaunch's --stall-timeout?"),
        (
            "--stall_timeout=5 train.py",
            "there is no option --stall_timeout; did you mean safelaunch's --stall-timeout?",
        ),
        ("--run_name x train.py", "there is no option --run_name; did you mean safelaunch's --run-name?"),
        (
            "--nproc-per-nodes 2 train.py",
            "there is no option --nproc-per-nodes; did you mean torchrun's --nproc-per-node?",
        ),
        (
            "--nproc_per_nods=2 train.py",
            "there is no option --nproc_per_nods; did you mean torchrun's --nproc_per_node?",
        ),
        ("--nnodes 1 --rdvz-id 3 train.py", "there is no option --rdvz-id; did you mean torchrun's --rdzv-id?"),
        ("--wait", "the script is missing (usage: safelaunch [options] script.py [script args...])"),
        ("--nproc-per-node train.py", "the script is missing (usage: safelaunch [options] script.py [script args...])"),
        (
            "python train.py",
            "python is a program, not a Python script; to watch what it starts: safelaunch exec --",
        ),
        ("--nproc-per-node=2 torchrun train.py", "torchrun is a program, not"),
        ("--standalone --nnodes=2 train.py", "--standalone is for one node, so with --nnodes=2 each node would wait"),
    ],
)
def test_run_rejects_invalid_command_line_on_one_line(
    words: str, expected: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = said(words, capfd)
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith(f"safelaunch: {expected}")
    assert sorted(path.name for path in here.iterdir()) == ["train.py"], "no bundle"


def test_run_of_missing_script_names_nearest_file(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = said("--nproc-per-nod=2 trian.py --lr 1", capfd)
    assert (code, lines) == (2, [f"safelaunch: trian.py does not exist in {here}; did you mean 'train.py'?"])


@pytest.mark.parametrize(
    "words",
    ["train.py", "statsu", "--nproc-per-nod=2 train.py", "--nproc_per_nod 2 train.py", "train.py --stall-timout 3"],
)
def test_run_accepts_what_torchrun_accepts(words: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "statsu").write_text("")
    assert said(f"--dry-run --no-lease {words}", capfd) == (0, [])


@pytest.mark.parametrize("option", ["--xyzzy", "--nope", "-x"])
def test_run_leaves_unknown_option_to_torchrun(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(f"--dry-run {option} 60 train.py", capfd) == (0, [])


def test_dry_run_of_missing_script_only_warns(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = said("--dry-run elsewhere.sh", capfd)
    assert (code, lines) == (0, [f"safelaunch: elsewhere.sh does not exist in {here}"])


def test_run_warns_of_taken_master_port(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, (line,) = said(f"--dry-run --master-port {port} train.py", capfd)
    assert code == 0
    assert line.startswith(f"safelaunch: port {port} is taken on this node, by pid {os.getpid()} (")
    assert said(f"--dry-run --master-port {port} train.py", capfd) == (0, [])


def test_run_warns_of_nccl_that_torch_lacks(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    for has_nccl in (False, True):
        monkeypatch.setattr(torchrun, "has_nccl", lambda package, has_nccl=has_nccl: has_nccl)
        code, lines = said("--dry-run train.py", capfd)
        assert code == 0 and ["initializes NCCL" in line for line in lines] == [True] * (not has_nccl)


@pytest.mark.parametrize(("rank", "lines"), [("", 1), ("0", 0)])
def test_exec_of_distributed_script_without_rank_warns(
    rank: str, lines: int, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    code, warnings = said("exec --dry-run -- python train.py", capfd)
    assert code == 0 and len(warnings) == lines
    assert all("safelaunch --nproc-per-node=N train.py" in line for line in warnings)


@pytest.mark.parametrize(
    ("words", "variable", "possible"),
    [
        ("", "", False),
        ("--max-restarts 0", "", False),
        ("--max-restarts=3", "", True),
        ("--max_restarts 3", "", True),
        ("--max-r 1", "", True),
        ("", "2", True),
        ("--max-restarts 0", "2", False),
    ],
)
def test_on_stall_restart_needs_max_restarts(
    words: str,
    variable: str,
    possible: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if variable:
        monkeypatch.setenv("PET_MAX_RESTARTS", variable)
    assert main(["--dry-run", "--on-stall", "restart", *words.split(), "train.py"]) == 0
    shown = capfd.readouterr()
    assert ("--max-restarts is 0" in shown.err) is not possible
    assert f"on stall         {'restart' if possible else 'kill'} " in shown.out
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in shown.out) is possible


@pytest.mark.parametrize(("words", "own"), [("", True), ("--nnodes=1:1", True), ("--nnodes=2", False)])
def test_restarts_on_one_node_use_separate_store_per_attempt(
    words: str, own: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a shared store, gloo finds the ports of the previous attempt. Other nodes might run plain torchrun."""
    assert main(["--dry-run", "--max-restarts=1", *words.split(), "train.py"]) == 0
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capfd.readouterr().out) is own
