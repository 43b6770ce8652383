"""A private Slurm for tests: one controller and several nodes on this machine, in a directory, on free ports.

``with Cluster(root) as cluster: cluster.run(["srun", ...])``. It needs root and the packages slurm-wlm and munge, and
touches nothing of an installed Slurm: every path and port is its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.nodes import free_port, free_range

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "scontrol")
READY_S = 60.0


def why_not() -> str:
    """Returns why Slurm can't run here; empty if it can."""
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    if os.getuid():
        return "slurmctld and slurmd are started as root"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return "this machine's own name does not resolve"
    return ""


def can_name() -> bool:
    """Returns whether a process can have its own host name and mounts, like the nodes of a ``named`` cluster."""
    return subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode == 0


class Cluster:
    """A Slurm in a directory with a short path. As Slurm sorts the nodes, the first has this machine's name.

    Args:
        gpus: Number of GPUs on each node, as Slurm sees them: files.
        more: Lines of slurm.conf, which win.
        named: Processes on a node see the node's name as its host's.
    """

    def __init__(
        self, root: Path, nodes: int = 2, *, gpus: int = 0, more: Sequence[str] = (), named: bool = False
    ) -> None:
        self.root = root
        self.gpus = gpus
        self.more = tuple(more)
        self.nodes = [socket.gethostname(), *(f"zz{number}" for number in range(2, nodes + 1))]
        self.named = named
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.conf = root / "slurm.conf"
        self.env = {"SLURM_CONF": os.fspath(self.conf)}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        root = self.root
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (root / name).mkdir()
        key, munge = root / "munge.key", root / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = [f"--{name}-file={root / name}" for name in ("pid", "log", "seed")]
        self._begin(["munged", "-F", "-f", f"--key-file={key}", f"--socket={munge}", *places])
        self._until(munge.exists, "munged")
        self.conf.write_text(self._configuration(munge))
        self._begin_controller()
        for node in self.nodes:
            self.start_node(node)
        self._until(self._is_idle, "every node to be idle")

    def _configuration(self, munge: Path) -> str:
        root, host = self.root, socket.gethostname()
        lines = [
            "ClusterName=test",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge}",
            "CredType=cred/munge",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool.%n",
            f"SlurmctldPidFile={root}/slurmctld.pid",
            f"SlurmdPidFile={root}/slurmd.%n.pid",
            f"SlurmctldLogFile={root}/slurmctld.log",
            f"SlurmdLogFile={root}/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            f"MpiParams=ports={free_range(8, 2_000, 9_900)}",
            f"FirstJobId={_first_job()}",
            "ReturnToService=2",
            "KillWait=10",
            "SchedulerParameters=sched_interval=2,batch_sched_delay=0",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
        ]
        if self.gpus:
            lines.append("GresTypes=gpu")
            (root / "dev").mkdir()
            for number in range(self.gpus):
                os.mknod(root / "dev" / f"nvidia{number}", 0o20600, os.makedev(1, 3))
            files = f"{root}/dev/nvidia[0-{self.gpus - 1}]"
            (root / "gres.conf").write_text(f"NodeName={','.join(self.nodes)} Name=gpu File={files}\n")
        given = {line.partition("=")[0] for line in self.more}
        lines = [line for line in lines if line.partition("=")[0] not in given] + list(self.more)
        for node in self.nodes:
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
            lines.append(f"NodeName={node} {place} CPUs=4 RealMemory=500{gres}")
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES State=UP")
        return "\n".join(lines) + "\n"

    def _begin_controller(self) -> None:
        self._begin(["slurmctld", "-D", "-f", self.conf])
        self._controller = self._daemons[-1]

    def stop_controller(self) -> None:
        """Stops the controller, as for an update: jobs continue, and requests get no answer."""
        self._controller.terminate()
        self._controller.wait(30)
        self._daemons.remove(self._controller)

    def start_controller(self) -> None:
        self._begin_controller()

    def start_node(self, node: str) -> None:
        """Starts a node's slurmd."""
        words: list[str | Path] = ["slurmd", "-D", "-f", self.conf, "-N", node]
        if self.named:
            hosts = self.root / "hosts"
            hosts.write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(self.nodes)}\n")
            inside = f'mount --bind {hosts} /etc/hosts && hostname {node} && exec "$@"'
            words = ["unshare", "--uts", "--mount", "sh", "-c", inside, "-", *words]
        self._begin(words)
        self._slurmds[node] = self._daemons[-1]

    def kill_node(self, node: str) -> None:
        """Kills slurmd and all that it has started, as in a power failure, before any of them can report."""
        slurmd = self._slurmds.pop(node)
        self._daemons.remove(slurmd)
        slurmd.kill()
        slurmd.wait()
        log, job = f"{self.root}/slurmd.{node}.log", (f"SLURMD_NODENAME={node}", f"SLURM_CONF={self.conf}")
        while found := [each for each in _processes() if _is_step(each, log)] or [
            each for each in _processes() if _has(each, job)
        ]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _begin(self, words: Sequence[str | Path]) -> None:
        name = os.fspath(words[0])
        with (self.root / f"{name}.out").open("ab") as out:
            self._daemons.append(subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL))

    def _is_idle(self) -> bool:
        done = self.run(["sinfo", "--noheader", "--Node", "-o", "%T"], patience_s=10.0)
        states = done.stdout.split()  # a line for each node and partition
        return len(states) >= len(self.nodes) and set(states) == {"idle"}

    def _until(self, reached: object, what: str) -> None:
        assert callable(reached)
        deadline = time.monotonic() + READY_S
        while not reached():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.root.glob("*.out"))

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SAFELAUNCH_", "PYTEST_", "PET_", "SLURM_"))}
        return {**ours, "OMP_NUM_THREADS": "1", **self.env, **(env or {})}

    def begin(self, words: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a client, such as ``sbatch --wait``."""
        null = subprocess.DEVNULL
        return subprocess.Popen(words, env=self.environ(env), stdin=null, stdout=null, stderr=null)

    def run(
        self, words: Sequence[str | Path], *, env: Mapping[str, str] | None = None, patience_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [os.fspath(word) for word in words],
            env=self.environ(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            stdin=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """Ends the jobs, then the daemons that were started here."""
        if len(self._daemons) > 1:
            subprocess.run(["scancel", "--state=RUNNING"], env=self.environ(), capture_output=True, timeout=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _processes() -> list[int]:
    return [
        int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal() and int(entry.name) != os.getpid()
    ]


def _is_step(pid: int, log: str) -> bool:
    """Returns whether a process is a slurmstepd of the slurmd with this log."""
    place = Path(f"/proc/{pid}")
    try:
        if not place.joinpath("comm").read_text().startswith("slurmstepd"):
            return False
        return any(os.readlink(link) == log for link in place.joinpath("fd").iterdir())  # noqa: PTH115
    except OSError:
        return False


def _has(pid: int, variables: Sequence[str]) -> bool:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(each.encode() in found for each in variables)


def _first_job() -> int:
    # The pages' scripts count their ports from 10000 by the job's number, and another cluster might run here. These
    # ports stay reserved, as do the next jobs'.
    return int(free_range(16, 10_001, 19_900).split("-")[0]) - 10_000
