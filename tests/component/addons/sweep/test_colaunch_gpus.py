"""Sweeps on a node with eight GPUs (the NVML stub) that other users share, with leases and without."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safelaunch.leases.holder import ourselves
from safelaunch.leases.store import LeaseStore
from tests.support.leasing import AS_A_RANK, log_of, safelaunch
from tests.support.nvml import stub
from tests.support.paths import PROGRAMS
from tests.support.sweeps import SWEPT, Sweep, several
from tests.support.waiting import until

USER = PROGRAMS / "gpu_user.py"
EVERYTHING = [stub.uuid(number) for number in range(8)]


def using(place: Path, limit: float | str, *sizes: int) -> str:
    """Jobs j0, j1, ... of these sizes, each of which finds out whether it has its GPUs alone."""
    (place / "witnesses").mkdir()
    command = f"exec -- {sys.executable} {USER} {place / 'witnesses'} {limit}"
    return "\n".join(["jobs:", *(f"  j{n}: {{gpus: {size}, command: '{command}'}}" for n, size in enumerate(sizes))])


def leases(node: stub.Node) -> LeaseStore:
    return LeaseStore(os.fspath(node.lease_dir))


def test_gpus_shared_with_other_users_are_never_shared_and_all_get_a_turn(node: stub.Node, tmp_path: Path) -> None:
    """Two sweeps and two single runs that wait, for eight GPUs of which one is used without a lease."""
    node.write(used=[7])
    spec = using(tmp_path, 0.4, 1, 4, 1, 2, 6, 1)
    witnesses = tmp_path / "witnesses"
    (tmp_path / "other").mkdir()
    alone = ["exec", f"--bundle-dir={tmp_path}", "--gpus=3", "--wait", "--", sys.executable, USER, witnesses, "0.4"]
    env = {**node.environ, **AS_A_RANK}
    with Sweep(tmp_path, spec, env=env) as one, Sweep(tmp_path / "other", spec, env=env) as other:
        until(lambda: log_of(witnesses) or one.process.poll() is not None, "a job that runs")
        with safelaunch(*alone, env=env) as first, safelaunch(*alone, env=env) as second:
            results = [one.wait(), other.wait()]
            assert [first.wait(120), second.wait(120)] == [0, 0]
    assert [result.code for result in results] == [0, 0], results
    words = [line.split()[1] for line in log_of(witnesses)]
    assert words.count("done") == 14 and set(words) == {"got", "done"}
    assert stub.uuid(7) not in "\n".join(log_of(witnesses)), "used without a lease"
    store = leases(node)
    assert store.look(EVERYTHING) == {} and store.waiting() == []
    assert [result.leftovers for result in results] == [(), ()]


def test_killed_job_keeps_gpus_until_its_rank_ends(node: stub.Node, tmp_path: Path) -> None:
    """``kill -9`` of a job's safelaunch: the next job has the GPUs when nothing uses them any more, not before."""
    spec = using(tmp_path, "go", 8, 8)
    with Sweep(tmp_path, spec, env={**node.environ, **AS_A_RANK}) as sweep:
        until(lambda: len(log_of(tmp_path / "witnesses")) == 8 or sweep.process.poll() is not None, "the first job")
        held = leases(node).look(EVERYTHING)
        assert {(holder.name, holder.by) for holder in held.values()} == {("j0", "supervisor")}
        (started,) = [record for record in sweep.records() if record["event"] == "started"]
        assert {holder.pid for holder in held.values()} == {started["pid"]}, "the job's own safelaunch holds them"
        rank = int(log_of(tmp_path / "witnesses")[0].split()[2])
        os.kill(started["pid"], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{rank}").exists(), "the end of its rank")
        (tmp_path / "go").touch()
        result = sweep.wait()
    assert sweep.states() == {"j0": "failed", "j1": "succeeded"}
    words = [line.split()[1] for line in log_of(tmp_path / "witnesses")]
    assert words.count("got") == 16 and "CONFLICT" not in words
    assert (result.code, result.leftovers, leases(node).look(EVERYTHING)) == (1, (), {})


def test_holders_of_awaited_gpus_are_named(node: stub.Node, tmp_path: Path) -> None:
    """All GPUs are leased to another user for a while; then the job succeeds."""
    theirs = leases(node).attempt(EVERYTHING, lambda held: EVERYTHING, ourselves("", "their.py")).lease
    assert theirs is not None
    spec = f"jobs: {{a: {{gpus: 2, command: '{SWEPT} a ok 0.2'}}}}"
    with Sweep(tmp_path, spec, env=node.environ) as sweep:
        until(lambda: leases(node).waiting() or sweep.process.poll() is not None, "a place in the queue")
        time.sleep(0.5)
        assert leases(node).waiting() and sweep.marks("begun") == {}
        theirs.release()
        result = sweep.wait()
    assert sweep.states() == {"a": "succeeded"}, result.stderr
    assert "a waits for GPUs in use by others:" in result.said
    assert f"GPU 0    leased by pid {os.getpid()}" in result.stderr and "their.py" in result.stderr


def test_hung_job_frees_its_gpus(node: stub.Node, tmp_path: Path) -> None:
    spec = f"""
defaults: {{gpus: 8, stall-timeout: 2}}
jobs:
  stuck: {{command: "{SWEPT} stuck hang 1"}}
  next: {{command: "{SWEPT} next ok 0.2"}}
"""
    with Sweep(tmp_path, spec, env=node.environ) as sweep:
        result = sweep.wait()
    assert sweep.states() == {"stuck": "hung", "next": "succeeded"}
    assert (result.code, result.leftovers, leases(node).look(EVERYTHING)) == (1, (), {})


def test_unusable_lease_directory_starts_nothing(node: stub.Node, tmp_path: Path) -> None:
    node.lease_dir.write_text("in the way")
    with Sweep(tmp_path, several("ok", 0, 1), env=node.environ) as sweep:
        result = sweep.wait()
    assert result.code == 2 and "no leases can be taken in" in result.said
    assert not (tmp_path / "s").exists()


def test_jobs_have_separate_ports(node: stub.Node, tmp_path: Path) -> None:
    """Two services with fixed ports in each of three jobs at once."""
    serve = (
        "import http.server, sys, threading, time, os\n"
        "for port in sys.argv[1:]:\n"
        "    server = http.server.HTTPServer(('127.0.0.1', int(port)), http.server.SimpleHTTPRequestHandler)\n"
        "    threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "open(os.environ['UP'], 'w').write(' '.join(sys.argv[1:]))\n"
        "while len([name for name in os.listdir('up')]) < 3: time.sleep(0.02)\n"
        "time.sleep(0.5)\n"
    )
    (tmp_path / "serve.py").write_text(serve)
    (tmp_path / "up").mkdir()
    spec = f"""
matrix: {{n: 0..2}}
jobs:
  s:
    ports: 2
    command: exec -- {sys.executable} serve.py {{port}} {{port2}}
    env: {{UP: "up/{{name}}", N: "{{n}}", TB: "{{port2}}"}}
"""
    with Sweep(tmp_path, spec, "--slots", "3", env={"SAFELAUNCH_LEASE_DIR": os.fspath(node.lease_dir)}) as sweep:
        result = sweep.wait()
    assert set(sweep.states().values()) == {"succeeded"}, [sweep.log(name) for name in sweep.jobs]
    ports = " ".join(path.read_text() for path in (tmp_path / "up").iterdir()).split()
    assert len(set(ports)) == 6 and result.code == 0
    assert leases(node).look([f"port-{port}" for port in ports]) == {}


@pytest.mark.torch
def test_table_shows_port_chosen_by_torchrun(node: stub.Node, tmp_path: Path) -> None:
    """In a terminal of 160 columns, with a GPU, and one more port that was leased for the job."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "open(f'port{os.environ[\"RANK\"]}', 'w').write(os.environ['MASTER_PORT'] + ' ' + sys.argv[1])\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
    )
    words = ["--sweep-dir", "s", "--grid", "lr=1e-3", "--ports-per-job", "1", "--", os.fspath(script), "{port}", "{lr}"]
    env = {**os.environ, **node.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "30"}
    master, slave = os.openpty()
    command = [sys.executable, "-m", "safelaunch", "colaunch", *words]
    shown = b""
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        while (written := tmp_path / "port0") and not (written.exists() and len(written.read_text().split()) == 2):
            shown += os.read(master, 65536)
        port, leased = written.read_text().split()
        while f"{port},{leased}".encode() not in shown:
            shown += os.read(master, 65536)
        (tmp_path / "go").touch()
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:
            pass
        assert process.wait(60) == 0
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(rf"lr-1e-3 +lr=1e-3 +running +0 +{port},{leased} ", text)
    (entry,) = json.loads((tmp_path / "s" / "summary.json").read_text())["jobs"]
    assert entry["gpus"] == [stub.uuid(0)]
