"""``safelaunch diagnose`` of logs: what it prints at the end, and which files it rejects."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.cli import main

Capture = pytest.CaptureFixture[str]
GIVE = (
    "safelaunch:   Name a job's output, its stacks, its Flight Recorder dumps or a bundle. While the job hangs,"
    " `safelaunch dump --all` on its node needs no file.\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the next step ----------------------------------------------------------------------------------------------------

HEALTHY = "step 1 loss 2.5\nstep 2 loss 2.25\n"
RAISED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 7, in load
[rank1]: ValueError: no sample
"""
LAUNCH = (
    "A=b c",
    "safelaunch",
    "--rdzv-endpoint=$HEAD:29500",
    "train.py",
    "--name",
    "a b",
    "--token",
    "hf_" + "Xy9" * 12,
)
TYPED = "A='b c' safelaunch --rdzv-endpoint=$HEAD:29500 train.py --name 'a b' --token [redacted]"
ANY = "safelaunch --nproc-per-node=N train.py"


def with_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = locate.read_folder
    monkeypatch.setattr(
        locate, "read_folder", lambda folder, scratch: dataclasses.replace(read(folder, scratch), launch=LAUNCH)
    )


@pytest.mark.parametrize("is_shown", [False, True], ids=["no launch line", "launch line"])
def test_diagnose_of_a_possibly_hanging_log_suggests_next_steps(
    is_shown: bool, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.log").write_text(HEALTHY)
    if is_shown:
        with_launch(monkeypatch)
    assert main(["diagnose", "job.log"]) == 1
    assert capfd.readouterr() == (
        "",
        "safelaunch: a log of 2 lines: nothing wrong seen\n"
        "safelaunch: A log cannot show where ranks wait. If the job still runs, `safelaunch dump --all` on its node "
        "can.\n"
        f"safelaunch: To run the job under safelaunch: {TYPED if is_shown else ANY}\n",
    )


@pytest.mark.parametrize("is_shown", [False, True], ids=["no launch line", "launch line"])
def test_diagnose_of_a_failed_log_ends_with_safelaunch_command(
    is_shown: bool, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.log").write_text(RAISED)
    if is_shown:
        with_launch(monkeypatch)
    assert main(["diagnose", "job.log"]) == 0
    assert capfd.readouterr().out.splitlines()[-4:-1] == [
        "  To run the job under safelaunch:",
        f"    {TYPED if is_shown else ANY}",
        "  more: safelaunch explain rank-exception",
    ]
    assert main(["diagnose", "job.log", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["next"]["command"] == (TYPED if is_shown else ANY)


def test_diagnose_without_a_rank_ends_with_safelaunch_command(here: Path, capfd: Capture) -> None:
    (here / "job.log").write_text("NCCL error: unhandled system error\nncclSystemError: System call failed.\n")
    assert main(["diagnose", "job.log"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert "NCCL failed" in lines[0] and lines[-1] == f"safelaunch: To run the job under safelaunch: {ANY}"


# --- texts that no job has printed ------------------------------------------------------------------------------------

NOTES = """\
I looked at the job again on Friday with Sam.
It seems that the second node hangs whenever we save.
We should ask the people who run the cluster.
rank 3 was fine
"""
HOW_TO = "# Train\n\nRun `torchrun train.py`; it prints `epoch 1 loss 0.3`. If it fails with `RuntimeError: x`, stop.\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("README.md", HOW_TO, "It is Markdown, not the output of a job."),
        ("train.py", "lr = 0.1\nraise ValueError('x')\n", "It is Python source, not the output of a job."),
        ("run.sh", "export LR=0.1\ntorchrun train.py\n", "It is a shell script, not the output of a job."),
        ("run", "#!/bin/bash\nlr=0.1\n", "It is a script, not the output of a job."),
        ("config.yaml", "lr: 0.001\nepochs: 3\n", "It is YAML, not the output of a job."),
        ("ds.json", '{"train_batch_size": 8, "lr": 0.1}', "It is JSON, not the output of a job."),
        ("notes.txt", NOTES, "It is prose, not the output of a job."),
        ("job.log", "", "It is empty."),
        ("job.log", "\n\n \n", "It is empty."),
    ],
)  # fmt: skip
def test_diagnose_of_another_file_names_its_type(
    name: str, content: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert main(["diagnose", str(path)]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"safelaunch: cannot diagnose {path}. {said}\n{GIVE}")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"notes.txt": NOTES, "README.md": HOW_TO}, ", only README.md, notes.txt."),
        ({"a.md": HOW_TO, "b.md": "", "c.md": "", "d.md": ""}, ", only a.md, b.md, c.md and 1 more."),
        ({"train.log": "", "more.log": "\n"}, " Its logs are empty."),
        ({}, " It is an empty folder."),
    ],
)
def test_diagnose_of_folder_without_evidence_lists_its_contents(
    files: dict[str, str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["diagnose", str(tmp_path)]) == 2
    first, rest = capfd.readouterr().err.split("\n", 1)
    assert first.endswith(said) and rest == GIVE


def test_markdown_file_with_a_traceback_is_read(tmp_path: Path) -> None:
    """Reports are pasted into Markdown: what can be judged is judged, whatever the file is called."""
    text = f'{HOW_TO}\n[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 7, in main\n'
    (tmp_path / "report.md").write_text(f"{text}[rank1]:     raise ValueError()\n[rank1]: ValueError: no sample\n")
    assert [one.rank for one in locate.read(tmp_path / "report.md").evidence.ranks] == [1]
