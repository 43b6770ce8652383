"""Bundles of real jobs as a user keeps them: no secret in them, nobody else may read them, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.support.jobs import SECRET_VALUES, Bundle, Job
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

LEAKY, BLOCKED = PROGRAMS / "leaky.py", PROGRAMS / "blocked.py"

# Built from pieces, so that no scanner takes this file for a leak.
PLANTED = {
    "by its name": "violet-rhino-4471-lamp",
    "another": "Tr0ub4dor&3 <it's>",
    "a token": "hf_" + "QwErTyUiOpAsDfGhJkLzXcVb",
    "a key": "AKIA" + "QWERTYUIOP123456",
    "a web token": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiJsZWFreSJ9" + ".bGVha3lzaWduYXR1cmU",
    "a URL": "postgres://trainer:umbrella-parade-9@db.example:5432/runs",
    "a bearer": "b3arer0fGoodNews0123456789",
    "an argument": "gh-like-argument-77-of-mine",
}
HOOK = "https://hooks.slack.com/services/" + "T0000/B0000/leakyhookleakyhook"
LEAKS = (
    *(value for name, value in PLANTED.items() if name != "a URL"),
    "umbrella-parade-9",
    "leakyhookleakyhook",
    "hard-coded-in-the-source",
    "Tr0ub4dor",
    *SECRET_VALUES,
)
ENVIRONMENT: dict[str, str | None] = {
    "PLANTED": json.dumps(PLANTED),
    "SERVICE_PASSWORD": PLANTED["by its name"],
    "OTHER_SECRET": PLANTED["another"],
    "ENDPOINT": PLANTED["a URL"],
    "SOMETHING": PLANTED["a token"],
    "BEARER": PLANTED["a bearer"],
    "SAFELAUNCH_ON_BUNDLE": f"true {HOOK}",
}
ARGUMENTS = [
    "--api-key", PLANTED["an argument"], f"--auth-token={PLANTED['a web token']}", "--store", PLANTED["a URL"],
]  # fmt: skip


def leaks(bundle: Bundle) -> list[str]:
    """Each file of the bundle that holds a planted secret, by content or by name."""
    found = []
    for path in sorted(bundle.path.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        for secret in LEAKS:
            if secret.encode() in data or secret in path.name:
                found.append(f"{path.relative_to(bundle.path)}: {secret}")
    return found


@pytest.mark.parametrize("how", ["crashes", pytest.param("hangs", marks=pytest.mark.nightly)])
def test_no_secret_is_in_a_bundle(how: str, tmp_path: Path) -> None:
    words = ["--preset=hang-debug", "--stall-timeout=4", "--nproc-per-node=2", LEAKY, "--how", how, *ARGUMENTS]
    # PLANTED itself is no name of a secret: env.json would show what it holds, were it not for their values.
    with Job([*words, f"--scratch={tmp_path}/fifos"], tmp_path, env=ENVIRONMENT) as job:
        result = job.wait(grace_s=0)
        for pid in job.pids():  # the children that the ranks left on purpose
            os.kill(pid, signal.SIGKILL)
    bundle = result.bundle
    assert result.code == (124 if how == "hangs" else 1), result.stderr
    assert [culprit["rank"] for culprit in bundle.verdict["culprits"]] == [0]
    # The secrets did pass: what stood around them is there.
    assert "by its name is [redacted]" in bundle.text("ranks/0/log_tail.txt")
    assert "to [redacted]" in bundle.text("ranks/0/stack.txt")
    assert "--password [redacted]" in bundle.text("ranks/0/stack.txt")
    assert any("NCCL INFO a key: [redacted]" in path.read_text() for path in bundle.path.glob("node/*/nccl.node.*.log"))
    assert "--api-key" in bundle.json("launch.json")["command"]
    assert bundle.json("launch.json")["bundles"]["on_bundle"] == "true [redacted]"
    if how == "crashes":
        assert "[redacted]" in bundle.json("ranks/0/exception.json")["message"]
        assert "raise ValueError" in bundle.json("ranks/0/exception.json")["text"]
    else:
        environments = [path.read_text() for path in bundle.path.glob("node/*/env.json")]
        assert any('"SERVICE_PASSWORD": "[redacted]"' in text for text in environments)
        assert "phase [redacted]" in bundle.text("ranks/0/progress.json")
        assert "fifos/rank0-[redacted]" in bundle.text("ranks/0/stack.txt")
        assert b"group [redacted]" in (bundle.path / "flight_recorder/nccl_trace_rank_0").read_bytes()
    assert leaks(bundle) == []
    assert bundle.problems() == []


FAILS = """
import os, time
for number in range(1500):
    print(f"line {number} of the output of this rank")
if os.environ["RANK"] == "1":
    time.sleep(3)  # it is known by then
    raise [ValueError, KeyError][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]("always")
time.sleep(60)
"""


@pytest.mark.nightly
def test_everything_that_is_kept_of_two_crashes(tmp_path: Path) -> None:
    """Two attempts, two bundles, one kept; the command that is told of both."""
    own = ["--keep-bundles=1", "--run-name=kept"]
    told = tmp_path / "told"
    command = f'echo "$SAFELAUNCH_OUTCOME $SAFELAUNCH_CULPRITS $(dirname "$SAFELAUNCH_VERDICT")" >> {told}; exit 7'
    own += ["--on-bundle", command]
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    before = os.umask(0)
    try:
        job = Job([*own, "--max-restarts=1", "--nproc-per-node=2", script], tmp_path)
    finally:
        os.umask(before)
    with job:
        result = job.wait()
    bundle = result.bundle  # the only one
    lines = told.read_text().splitlines()
    assert len(set(lines)) == 2
    assert f"crash 1 {bundle.path}" in lines
    assert result.said.count("--on-bundle failed with exit code 7") == 2
    kept = {path.name for path in bundle.path.parent.iterdir()}
    assert kept == {bundle.path.name, "latest"}
    assert "line 1499 of the output" in bundle.text("ranks/1/log_tail.txt")
    assert bundle.problems() == []


@pytest.mark.nightly
def test_the_command_outlives_the_job_that_is_ended(tmp_path: Path) -> None:
    """It runs while the hung job is ended, and the end of safelaunch waits for it."""
    done = tmp_path / "done"
    words = ["--stall-timeout=2", "--nproc-per-node=2", f"--on-bundle=sleep 8; touch {done}"]
    with Job([*words, BLOCKED, "--how=asleep", "--culprit=1", f"--scratch={tmp_path}"], tmp_path) as job:
        result = job.wait()
    assert result.code == 124
    assert done.exists()
    about_it = [line for line in result.said.splitlines() if "--on-bundle" in line]
    assert all("--on-bundle=sleep" in line for line in about_it), "only in the command to run it again"
    assert result.leftovers == ()


@pytest.mark.nightly
def test_who_stops_safelaunch_does_not_wait_for_the_command(tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    with Job([f"--on-bundle=touch {begun}; sleep 25; touch {done}", "--nproc-per-node=2", script], tmp_path) as job:
        job.until(begun.exists, "the command")
        job.until(lambda: "bundle: " in job.stderr, "the verdict")
        job.until(lambda: not [pid for pid in job.pids() if is_launcher(pid)], "the end of the job")
        time.sleep(0.5)  # for safelaunch to have seen it
        job.process.send_signal(signal.SIGTERM)
        result = job.wait()
    assert not done.exists()
    assert result.code == 1
    assert result.leftovers == ()


def is_launcher(pid: int) -> bool:
    try:
        return b"torchrun\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def listening(pid: int) -> list[str]:
    """What a process listens on, over all families: ``tcp ADDRESS`` or the path of a unix socket."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                found.append(f"{protocol} {fields[1]}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[6] in inodes and int(fields[3], 16) & 0x10000:
            found.append(fields[7] if len(fields) > 7 else "unnamed")
    return found


def test_nothing_listens_outside_the_run_directory(tmp_path: Path) -> None:
    words = ["--nproc-per-node=2", PROGRAMS / "healthy.py", f"--scratch={tmp_path}"]
    with Job(words, tmp_path) as job:
        job.until(lambda: (tmp_path / "training-0").exists(), "the training")
        run = next((job.runtime / "safelaunch").glob("r*"))
        own = listening(job.process.pid)
        ranks = {rank: [at for at in listening(pid) if at.startswith("/")] for rank, pid in job.ranks().items()}
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (run.parent, run, run / "pages")}
    assert own == [f"{run}/.control"]  # as it was called before it listened
    assert set(ranks) == {0, 1}
    assert all(len(paths) == 1 and paths[0].startswith(f"{run}/pages/") for paths in ranks.values()), ranks
    assert modes == {0o700}
