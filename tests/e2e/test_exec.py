"""safelaunch exec: launchers and scripts other than torchrun, watched the same way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job, Result

pytestmark = pytest.mark.torch

ASLEEP = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 21):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 5 and dist.get_rank() == 1 and sys.argv[1:] == ["hang"]:
        time.sleep(3600)
dist.destroy_process_group()
"""
ALONE = """
import sys, time, torch
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for step in range(1, 21):
    optimizer.step()
    if step == 5 and sys.argv[1:] == ["hang"]:
        time.sleep(3600)
    if step == 5 and sys.argv[1:] == ["raise"]:
        raise ValueError("a bad batch")
"""


def run(scratch: Path, *command: str | Path) -> Result:
    with Job(["exec", "--stall-timeout=2", "--", *command], scratch) as job:
        return job.wait()


def script(scratch: Path, text: str) -> Path:
    path = scratch / "train.py"
    path.write_text(text)
    return path


def shell_launcher(scratch: Path) -> Path:
    """What people write by hand: variables exported, ranks in the background."""
    path = scratch / "run.sh"
    path.write_text(
        "set -e\n"
        "export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2\n"
        f"export MASTER_PORT=$({sys.executable} -c \"import socket; s = socket.socket(); s.bind(('127.0.0.1', 0));"
        ' print(s.getsockname()[1])")\n'
        f'for RANK in 0 1; do RANK=$RANK LOCAL_RANK=$RANK {sys.executable} train.py "$@" & done\n'
        "wait -n; wait -n\n"
    )
    return path


def test_a_shell_script_that_starts_ranks(tmp_path: Path) -> None:
    script(tmp_path, ASLEEP)
    result = run(tmp_path, "bash", shell_launcher(tmp_path), "hang")
    assert result.code == 124, result.stderr
    assert result.verdict["cause"] == "stuck-in-user-code"
    assert [(c["rank"], c["step"]) for c in result.verdict["culprits"]] == [(1, 5)]
    assert not result.bundle.problems()
    assert not result.leftovers


@pytest.mark.nightly
def test_a_shell_script_whose_ranks_finish(tmp_path: Path) -> None:
    script(tmp_path, ASLEEP)
    result = run(tmp_path, "bash", shell_launcher(tmp_path))
    assert (result.code, result.bundles, result.leftovers) == (0, (), ()), result.stderr


@pytest.mark.nightly
def test_a_plain_script_is_rank_0_of_1(tmp_path: Path) -> None:
    result = run(tmp_path, sys.executable, script(tmp_path, ALONE), "hang")
    assert result.code == 124, result.stderr
    culprit = result.verdict["culprits"][0]
    assert (culprit["rank"], culprit["step"], Path(culprit["frame"]["file"]).name) == (0, 5, "train.py")
    assert not result.leftovers


@pytest.mark.nightly
def test_a_plain_script_that_raises(tmp_path: Path) -> None:
    result = run(tmp_path, sys.executable, script(tmp_path, ALONE), "raise")
    assert result.code == 1, result.stderr
    assert (result.verdict["outcome"], result.verdict["cause"]) == ("crash", "rank-exception")
    assert (
        result.verdict["culprits"][0]["frame"]["line"]
        == ALONE.splitlines().index('        raise ValueError("a bad batch")') + 1
    )


def test_a_command_without_ranks_keeps_its_exit_code(tmp_path: Path) -> None:
    result = run(tmp_path, "sh", "-c", "exit 7")
    assert (result.code, result.bundles) == (7, ())


@pytest.mark.parametrize(
    "words", [["exec"], ["exec", "--"], ["exec", "--", "no-such-command-at-all"], ["exec", "--nope", "ls"]]
)
def test_what_cannot_be_run_is_said(tmp_path: Path, words: list[str]) -> None:
    with Job(words, tmp_path) as job:
        result = job.wait()
    assert result.code == 2
    assert "exec: " in result.said


@pytest.mark.nightly
def test_a_program_that_replaces_a_helper_by_exec_is_the_rank(tmp_path: Path) -> None:
    training = script(tmp_path, ALONE)
    helper = tmp_path / "helper.py"
    helper.write_text(
        f"import os, sys, torch.optim\nos.execv(sys.executable, [sys.executable, {str(training)!r}, 'hang'])\n"
    )
    result = run(tmp_path, sys.executable, helper)
    assert result.code == 124, result.said
    assert result.verdict["cause"] == "stuck-in-user-code"
    assert result.bundles[0].json("ranks/0/progress.json")["step"] == 5
