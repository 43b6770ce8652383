"""Early looks at real jobs: a word within seconds, where the threshold is still minutes away."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import asked, status
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

BLOCKED, RHYTHMS = PROGRAMS / "blocked.py", PROGRAMS / "rhythms.py"
WORD = re.compile(r"^safelaunch: quiet for (\d+) s \((.*?)\)(.*?): (.*)\.\.\. watching$", re.MULTILINE)


def words(job: Job) -> list[str]:
    return [found[3] for found in WORD.findall(job.stderr)]


def test_a_frozen_rank_is_told_of_long_before_the_threshold(tmp_path: Path) -> None:
    """On the screen, in the status, to the command, and in a bundle as a witness; nothing is ended for it."""
    told = tmp_path / "told"
    own = [f"--on-suspect=env | grep ^SAFELAUNCH_ > {told}.new; mv {told}.new {told}", "--nproc-per-node=2"]
    with Job([*own, BLOCKED, "--how=asleep", "--culprit=1", f"--scratch={tmp_path}"], tmp_path) as job:
        job.until(lambda: words(job), "a word")
        assert re.match(
            r"rank 1 is asleep in blocked\.py:\d+ \(wait_for_licence\), while rank 0 waits in", words(job)[0]
        )
        run = status(job)
        assert run is not None and run["threshold_s"] == 600 and run["watch"] == "watching"
        (look,) = run["early"]
        assert (look["cause"], [place["rank"] for place in look["places"]]) == ("stuck-in-user-code", [1])
        assert f": {words(job)[0]}" in asked(job, "status").stdout
        job.until(told.exists, "the command")
        env = dict(line.split("=", 1) for line in told.read_text().splitlines())
        assert (env["SAFELAUNCH_RANKS"], env["SAFELAUNCH_SUMMARY"]) == ("1", words(job)[0])
        dump = asked(job, "dump")
        assert dump.returncode == 0, dump.stderr
        bundle = job.bundles()[0]
        assert bundle.json("early.json")[0]["words"] == words(job)[0]
        assert "Early looks" in bundle.text("report.md") and bundle.problems() == []
        job.process.send_signal(signal.SIGINT)
        result = job.wait()
    assert [one.verdict["outcome"] for one in result.bundles] == ["dump", "hang"]  # Ctrl-C takes the evidence as well
    assert not result.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "steps"), [("evaluating", 90), ("child-evaluates", 130)])
def test_an_evaluation_of_each_epoch_is_told_of_once(how: str, steps: int, tmp_path: Path) -> None:
    mine = [f"--how={how}", f"--steps={steps}", "--length=0.02", "--quiet=12", f"--scratch={tmp_path}"]
    with Job(["--nproc-per-node=2", RHYTHMS, *mine], tmp_path) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    said = words(job)
    assert len(said) == 1 and " active at rhythms.py:" in said[0], result.stderr


@pytest.mark.nightly
def test_no_early_look(tmp_path: Path) -> None:
    own = ["--no-early-look", "--stall-timeout=14", "--nproc-per-node=2"]
    with Job([*own, BLOCKED, "--how=asleep", "--culprit=1", f"--scratch={tmp_path}"], tmp_path) as job:
        result = job.wait()
    assert result.code == 124 and words(job) == []
    assert not (result.bundle.path / "early.json").exists()


@pytest.mark.nightly
def test_a_hang_of_which_a_word_was_said_has_it_in_its_report(tmp_path: Path) -> None:
    own = ["--stall-timeout=30", "--nproc-per-node=2"]
    with Job([*own, BLOCKED, "--how=fifo", "--culprit=0", f"--scratch={tmp_path}"], tmp_path) as job:
        result = job.wait()
    assert result.code == 124 and result.bundle.problems() == []
    said: Any = json.loads(result.bundle.text("early.json"))
    assert [[place["rank"] for place in look["places"]] for look in said] == [[0]] * len(said)
    assert said[-1]["words"] in result.bundle.text("report.md").replace("`", "")
