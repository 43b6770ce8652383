"""Master ports of real runs: two at once under a torchrun that always takes 29500, and ports lost to strangers.

The torchrun here is a stand-in of a few lines, which has its port as torch 2.6 and 2.9 have it, and starts its rank as
torch's elastic agent does; so no torch is needed, and a test can hold it where it is about to listen.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from safelaunch.leases.store import LeaseStore
from tests.support.leasing import safelaunch
from tests.support.waiting import until

RUN = """
import argparse, os, socket, sys, time
from torch.distributed.elastic.multiprocessing.api import PContext


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=str, default="1")
    parser.add_argument("--master-port", "--master_port", type=int, default=29500)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main(args=None):
    args = get_args_parser().parse_args(args)
    gate = os.environ["GATE"]
    while not (os.path.exists(gate) or os.path.exists(f"{gate}{args.master_port}")):
        time.sleep(0.01)
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", args.master_port))
    server.listen()
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(args.master_port)}
    context = PContext([sys.executable, args.script, *args.arguments], {0: {**os.environ, **env}})
    context.start()
    code = context.process.wait()
    context.close()
    sys.exit(code)
"""
API = """
import subprocess


class PContext:
    def __init__(self, argv, envs):
        self.argv, self.envs = argv, envs
        self.subprocess_handlers = {}

    def start(self):
        self.process = subprocess.Popen(self.argv, env=self.envs[0], start_new_session=True)

    def pids(self):
        return {0: self.process.pid}

    def close(self, death_sig=None):
        pass
"""
SCRIPT = """
import os, sys, time
with open(os.environ["RAN"], "a") as file:
    file.write(os.environ["MASTER_PORT"] + "\\n")
while not os.path.exists(os.environ["END"]):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


class Scene:
    """``bind``: let torchrun listen (``let``: on that port); ``end``: let ranks end; ``ran``: what ports they saw."""

    def __init__(self, place: Path) -> None:
        package = place / "old" / "torch"
        for folder in ("", "distributed", "distributed/elastic", "distributed/elastic/multiprocessing"):
            (package / folder).mkdir(parents=True)
            (package / folder / "__init__.py").touch()
        (package / "version.py").write_text("__version__ = '2.9.1'\n")
        (package / "distributed" / "run.py").write_text(RUN)
        (package / "distributed" / "elastic" / "multiprocessing" / "api.py").write_text(API)
        self.script = place / "script.py"
        self.script.write_text(SCRIPT)
        self.bind, self.end, self._ran = place / "bind", place / "end", place / "ran"
        self.store = LeaseStore(os.fspath(place / "leases"))
        path = [os.fspath(place / "old"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {
            "PYTHONPATH": os.pathsep.join(path),
            "SAFELAUNCH_LEASE_DIR": self.store.directory,
            "SAFELAUNCH_BUNDLE_DIR": os.fspath(place / "bundles"),
            "GATE": os.fspath(self.bind),
            "END": os.fspath(self.end),
            "RAN": os.fspath(self._ran),
        }

    def let(self, port: int) -> None:
        self.bind.with_name(f"{self.bind.name}{port}").touch()

    @property
    def ran(self) -> list[int]:
        return [int(line) for line in self._ran.read_text().split()] if self._ran.exists() else []

    def leased(self) -> list[int]:
        """The ports that are held now."""
        names = [path.name for path in Path(self.store.directory).glob("port-*")]
        keys = sorted({name.partition(".")[0] for name in names})
        return [int(key.removeprefix("port-")) for key in self.store.look(keys)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def stranger(port: int) -> socket.socket:
    """A server of somebody who takes no leases; as most, it sets SO_REUSEADDR."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("", port))
    one.listen()
    return one


@pytest.mark.parametrize("words", [[], ["--master-port=auto"]], ids=["plain", "auto"])
def test_two_runs_at_once_never_meet_on_a_port(scene: Scene, words: list[str]) -> None:
    scene.bind.touch()
    with (
        safelaunch(*words, scene.script, "0", env=scene.env) as one,
        safelaunch(*words, scene.script, "0", env=scene.env) as other,
    ):
        until(lambda: len(scene.ran) == 2 or one.poll() is not None or other.poll() is not None, "two ranks")
        taken = scene.ran
        scene.end.touch()
        assert [one.communicate(timeout=60)[1], other.communicate(timeout=60)[1]] == ["", ""]
    assert (one.returncode, other.returncode) == (0, 0)
    assert len(set(taken)) == 2 and 29500 not in taken
    assert scene.leased() == []


@pytest.mark.parametrize("words", [[], ["--master-port", "auto"]], ids=["plain", "auto"])
def test_a_port_that_a_stranger_took_is_replaced_by_another(scene: Scene, words: list[str]) -> None:
    scene.end.touch()
    with safelaunch(*words, scene.script, "0", env=scene.env) as process:
        until(lambda: scene.leased() or process.poll() is not None, "a port")
        (lost,) = scene.leased()
        with stranger(lost):
            scene.bind.touch()
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    (port,) = scene.ran
    assert port != lost
    said = [line for line in stderr.splitlines() if line.startswith("safelaunch: ")]
    assert said == [
        f"safelaunch: another program, without a lease, took port {lost} before torchrun could listen on it; "
        f"restarting the job with port {port}"
    ]
    assert scene.leased() == []


def test_it_is_not_tried_for_ever(scene: Scene) -> None:
    """Every port that it leases is lost: three more are tried, and torchrun's own error is the end of it."""
    seen: dict[int, socket.socket] = {}
    with safelaunch(scene.script, "0", env=scene.env) as process:
        while process.poll() is None:
            for port in scene.leased():
                if port not in seen:
                    seen[port] = stranger(port)
                    scene.let(port)
        _, stderr = process.communicate(timeout=60)
    for server in seen.values():
        server.close()
    assert process.returncode == 1
    assert stderr.count("restarting the job with port") == 3 and "Address already in use" in stderr
    assert scene.ran == []


def test_a_failure_of_the_script_is_its_own(scene: Scene) -> None:
    scene.bind.touch()
    with safelaunch("--master-port=auto", scene.script, "7", env=scene.env) as process:
        until(lambda: scene.ran or process.poll() is not None, "the rank")
        scene.end.touch()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7, stderr
    assert len(scene.ran) == 1 and "restarting the job with port" not in stderr


def test_a_launcher_that_fails_by_itself_is_not_started_again(scene: Scene) -> None:
    scene.bind.touch()
    with safelaunch("--master-port=auto", "--nproc-per-node", env=scene.env) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and "restarting the job with port" not in stderr
    assert scene.ran == []


WAITS = """
import os, sys, time
while any(word.endswith("/torchrun") for word in sys.orig_argv) and not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
"""


@pytest.mark.torch
def test_the_installed_torchrun_gets_another_port_as_well(scene: Scene, tmp_path: Path) -> None:
    """It takes a second to import torch (here: until the gate), in which a stranger takes the port leased for it."""
    scene.end.touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WAITS)
    env = {**scene.env, "PYTHONPATH": os.fspath(tmp_path / "site")}
    with safelaunch("--master-port=auto", "--nproc-per-node=2", scene.script, "0", env=env) as process:
        until(lambda: scene.leased() or process.poll() is not None, "a port")
        (lost,) = scene.leased()
        with stranger(lost):
            scene.bind.touch()
            _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert len(scene.ran) == 2 and scene.ran[0] == scene.ran[1] != lost
    assert f"took port {lost} before" in stderr
    assert not list(tmp_path.glob("bundles/*")), "nothing has crashed"
