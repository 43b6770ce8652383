"""``scripts/qa/gpu_check.py`` without a GPU, with the stand-in for NVML, and what it undoes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from safelaunch.leases.choose import Inventory, LeasableGpu
from tests.qa import gpu_check
from tests.qa.gpu_check import Machine, NotPossible, limited_clock
from tests.qa.gpu_readings import CLOCK, MEMORY, POWER, UTILISATION
from tests.support.nvml import stub
from tests.support.paths import ROOT
from tests.support.waiting import until

NVIDIA_SMI = '#!/bin/sh\necho "$@" >>{log}\n[ "$3" != "{refused}" ]\n'


def run(environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.qa.gpu_check", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=240)


def test_machine_without_gpu_is_reported_with_exit_code_2(tmp_path: Path) -> None:
    done = run({}, f"--out={tmp_path / 'out'}")
    if done.returncode != 2:
        pytest.skip("this machine has a GPU")
    assert done.stdout.startswith("no NVIDIA GPU here: looked for the driver's files, libnvidia-ml.so.1 in")
    assert "NVML: no NVIDIA driver on this node; torch " in done.stdout
    assert not (tmp_path / "out").exists()


def test_rows_that_need_only_the_driver_are_measured(node: stub.Node, tmp_path: Path) -> None:
    node.write(gpus=2)
    done = run(node.environ, f"--out={tmp_path}", "--sample=1")
    assert done.returncode == 1, done.stderr  # the stand-in reports neither clocks nor Xid events
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    rows = {row["name"]: (row["verdict"], row["measured"]) for row in document["rows"]}
    assert rows["1 inventory"] == ("ok", "2 by NVML, 2 by the leases, 0 by torch")
    assert rows["1 leases"] == ("ok", "exit codes [0, 2, 0], afterwards free")
    assert rows["2 idle"] == (
        "differs",
        "utilisation % 0 [0..0], memory utilisation % 0 [0..0], power W 70 [70..70]; SM clock MHz isn't reported; "
        "Xid isn't reported",
    )
    assert document["states"]["no process"][0]["power W"] == 70.5
    assert document["versions"]["driver"] == "999.99"
    assert {name for name, (verdict, _) in rows.items() if verdict == "not possible here"} == rows.keys() - {
        "1 inventory",
        "1 leases",
        "2 idle",
        "7 versions",
    }
    assert (tmp_path / "table.txt").read_text() == done.stdout
    with tarfile.open(tmp_path / "bundles.tar.gz") as archive:
        assert "bundles/release" in archive.getnames()


def test_gpu_that_is_lost_makes_rows_differ_and_stops_none(node: stub.Node, tmp_path: Path) -> None:
    node.write("fail nvmlDeviceGetHandleByIndex_v2 15 0", gpus=1)
    done = run(node.environ, f"--out={tmp_path}", "--sample=1")
    assert done.returncode == 1 and "GPU is lost" in done.stdout
    assert len(json.loads((tmp_path / "gpu_check.json").read_text())["rows"]) == 10


def test_check_that_is_terminated_prints_the_rows_so_far(node: stub.Node, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.qa.gpu_check", f"--out={tmp_path}", "--sample=600", "--limit=10000"]
    environ = {**os.environ, **node.environ}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        table = tmp_path / "table.txt"
        until(lambda: table.exists() and "1 leases" in table.read_text(), "three rows")
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and printed == table.read_text()
    assert (tmp_path / "bundles.tar.gz").exists()


# --- rows that need CUDA, with stand-ins for safelaunch, torchrun and the program -------------------------------------

LAUNCHER = """
import os, sys
script = next(at for at, word in enumerate(sys.argv[1:], 1) if word.endswith(".py"))
os.execv(sys.executable, [sys.executable, *sys.argv[script:]])
"""
PROGRAM = """
import json, pathlib, sys, time
how, file = sys.argv[1], pathlib.Path(sys.argv[2])
file.touch()
if how == "train":
    time.sleep(0.5)
    now = time.time()
    file.write_text(json.dumps([(now + (number - 50) / 10, 0.004 if number < 50 else 0.008) for number in range(100)]))
elif how == "blocked":
    bundle = file.parent / "bundles" / "job"
    bundle.mkdir(parents=True)
    verdict = {"outcome": "hang", "cause": "gpu-kernel", "confidence": "high", "culprits": [{"frame": {"line": 15}}]}
    (bundle / "verdict.json").write_text(json.dumps(verdict))
    print("safelaunch: quiet for 8 s", file=sys.stderr)
    sys.exit(124)  # BLOCKED
else:
    time.sleep(600)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    launcher, program = tmp_path / "launcher.py", tmp_path / "program.py"
    launcher.write_text(LAUNCHER)
    program.write_text(PROGRAM)
    words = (sys.executable, os.fspath(launcher))
    values = {"SAFELAUNCH": words, "TORCHRUN": words, "PROGRAM": program, "ONE_RANK": ("--standalone", program)}
    for name, value in values.items():
        monkeypatch.setattr(gpu_check, name, value)
    gpus = Inventory((LeasableGpu("0", "GPU-1"),))
    return Machine({**os.environ}, tmp_path, 0, 1.0, True, time.monotonic() + 600, gpus, {"gpus": ["1"]})


def sampled(*values: float) -> list[dict[str, object]]:
    now = time.time()
    names = (UTILISATION, MEMORY, POWER, CLOCK)
    return [{"time": now + number, "Xid": [], **dict(zip(names, values, strict=True))} for number in range(3)]


def test_readings_are_taken_in_each_state(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([(0, 0, 120, 1980), (100, 30, 690, 1500), (100, 0, 150, 1980), (100, 0, 160, 1980)])
    monkeypatch.setattr(Machine, "sample", lambda machine: sampled(*next(taken)))
    text, problems = gpu_check.states(machine)
    assert not problems and "spin-wide: utilisation % 100" in text
    assert list(machine.values["states"]) == ["hold", "compute", "spin", "spin-wide"]


def test_messages_and_bundle_of_blocked_job_are_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_last_call", lambda bundle: "all_reduce #1 scheduled, started: False")
    text, problems = gpu_check.blocked(gpu_check.EXPLICIT, machine)
    assert not problems and "hang, gpu-kernel (high) at lines [15]; all_reduce #1 scheduled" in text
    assert machine.values["blocked, explicit"]["messages"][0][1] == "safelaunch: quiet for 8 s"


def test_overhead_is_measured_in_four_runs(machine: Machine) -> None:
    text, problems = gpu_check.overhead(machine)
    assert not problems and text.startswith("ratio 1.0000; torchrun against itself 0.00%")
    assert [len(run) for run in machine.values["step times"]] == [100] * 4


def test_slower_steps_under_clock_limit_are_measured(
    machine: Machine, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "sample", lambda machine, times=1: sampled(100, 30, 690, 1980))
    text, problems = gpu_check.clocks(machine)
    assert not problems and text.startswith("4.000 ms a step, limited 8.000; exit code 0")
    assert log.read_text() == "-i GPU-1 -lgc 990,990\n-i GPU-1 -rgc\n"


# --- the limit of the clock -------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return write_nvidia_smi(tmp_path)


def write_nvidia_smi(place: Path, refused: str = "") -> Path:
    """Writes a stand-in for nvidia-smi that logs its words, and fails if the third is ``refused``."""
    program, log = place / "nvidia-smi", place / "log"
    program.write_text(NVIDIA_SMI.format(log=log, refused=refused))
    program.chmod(0o755)
    return log


def test_clock_limit_is_removed_after_the_block(log: Path) -> None:
    with limited_clock("GPU-1", 900):
        assert log.read_text() == "-i GPU-1 -lgc 900,900\n"
    assert log.read_text() == "-i GPU-1 -lgc 900,900\n-i GPU-1 -rgc\n"


def test_clock_limit_is_removed_after_an_error(log: Path) -> None:
    with pytest.raises(ValueError, match="the job failed"), limited_clock("GPU-1", 900):
        raise ValueError("the job failed")
    assert log.read_text().endswith("-rgc\n")


def test_refused_clock_limit_changes_nothing(log: Path) -> None:
    write_nvidia_smi(log.parent, refused="-lgc")
    with pytest.raises(NotPossible, match="can't be limited"), limited_clock("GPU-1", 900):
        pass
    assert log.read_text() == "-i GPU-1 -lgc 900,900\n"


def test_clock_limit_that_stays_is_reported(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nvidia_smi(log.parent, refused="-rgc")
    with limited_clock("GPU-1", 900):
        pass
    assert "THE CLOCK MIGHT STILL BE LIMITED: run nvidia-smi -i GPU-1 -rgc" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_clock_limit_is_removed_if_the_check_is_ended_by_a_signal(number: signal.Signals, log: Path) -> None:
    program = (
        "import signal, sys, time\nfrom tests.qa.gpu_check import limited_clock\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "with limited_clock('GPU-1', 900): time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until(lambda: log.exists() and "-lgc" in log.read_text(), "the limit")
        process.send_signal(number)
    until(lambda: log.read_text().endswith("-i GPU-1 -rgc\n"), "the end of the limit")
