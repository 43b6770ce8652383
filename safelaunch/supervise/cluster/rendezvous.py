"""Finds the store that a job's supervisors share, from the command line and the environment. Has no side effects.

torchrun's agents share a store, unless their rendezvous is over etcd or in a file. Under other launchers, the
supervisor on the host that ``--cluster-store`` names starts one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from safelaunch.job.argv import CommandLine
from safelaunch.supervise.cluster.store import Address

C10D_PORT, STATIC_PORT = 29400, 29500
MOST_HOSTS = 4096
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True, slots=True)
class SharedStore:
    address: Address
    prefix: str
    nodes: int = 2  # with fewer, torchrun starts no rank
    node_rank: int | None = None  # of this node
    to_start: bool = False  # a supervisor on that host must start it
    most_nodes: int = 2


@dataclass(frozen=True, slots=True)
class NoRendezvous:
    why: str = ""  # clause; empty for a job on one node


@dataclass(frozen=True, slots=True)
class _Torchrun:
    """torchrun's options, or else the ``PET_*`` variables that set them."""

    command: CommandLine
    environ: Mapping[str, str]

    def option(self, name: str, shortest: str, default: str) -> str:
        value = self.command.value_of(f"--{name}", shortest=shortest)
        return value if value is not None else self.environ.get(f"PET_{name.replace('-', '_').upper()}", default)

    @property
    def has_one_node(self) -> bool:
        return self.most_nodes == 1 or self.command.has_flag("--standalone")

    @property
    def most_nodes(self) -> int:
        return _most_nodes(self.option("nnodes", "--nn", "1"))

    @property
    def least_nodes(self) -> int:
        least = self.option("nnodes", "--nn", "1").partition(":")[0]
        return int(least) if least.isdecimal() else 1

    @property
    def node_rank(self) -> int | None:
        """Returns the node's rank for a static rendezvous; None for c10d, which assigns ranks itself."""
        static = self.option("rdzv-backend", "--rdzv-b", "static").lower() == "static"
        number = self.option("node-rank", "--node-r", "") or "0"
        return int(number) if static and number.isdecimal() else None

    @property
    def run_id(self) -> str:
        return self.option("rdzv-id", "--rdzv-i", "none")

    def store(self) -> Address | NoRendezvous:
        backend = self.option("rdzv-backend", "--rdzv-b", "static").lower()
        if backend not in ("c10d", "static"):
            return NoRendezvous(f"with --rdzv-backend={backend} the nodes share no store; --cluster-store provides one")
        if re.search(r"(?:^|,)\s*store_type\s*=\s*file\b", self.option("rdzv-conf", "--rdzv-c", "")):
            return NoRendezvous("with store_type=file the nodes have no store that answers over the network")
        endpoint = self.option("rdzv-endpoint", "--rdzv-e", "")
        if backend == "static" and not endpoint:
            port = self.option("master-port", "--master-p", "")
            endpoint = f"{self.option('master-addr', '--master-a', '127.0.0.1')}:{port}"
        address = _address(endpoint, C10D_PORT if backend == "c10d" else STATIC_PORT)
        return address or NoRendezvous(
            f"the rendezvous endpoint {endpoint!r} is not an address that a node can connect to"
        )


def meeting(
    command: CommandLine | None, environ: Mapping[str, str], named: str | None = None
) -> SharedStore | NoRendezvous:
    """Returns the store named by ``--cluster-store`` (``named``), or torchrun's.

    Under ``exec``, ``command`` is None.
    """
    torchrun = _Torchrun(command, environ) if command is not None and command.program is None else None
    if torchrun is not None and torchrun.has_one_node:
        return NoRendezvous()
    agents = torchrun.store() if torchrun is not None else NoRendezvous(_NO_TORCHRUN)
    run_id = torchrun.run_id if torchrun is not None else _run_id(environ)
    if named is None and torchrun is not None and isinstance(agents, Address):
        least, most = torchrun.least_nodes, torchrun.most_nodes
        return SharedStore(agents, _prefix(run_id), least, torchrun.node_rank, most_nodes=most)
    named = named or _scheduled_port(environ)
    if named is None:
        assert isinstance(agents, NoRendezvous)
        return agents
    host, port = _host_and_port(named)
    if not host:
        first = next(iter(hosts_of(environ)), environ.get("MASTER_ADDR", ""))
        host = agents.host if isinstance(agents, Address) else first
    address = Address(host, int(port)) if host else None
    if address is None:
        return NoRendezvous(f"--cluster-store {named} names no host, and the job's first host is unknown")
    least, number = (torchrun.least_nodes, torchrun.node_rank) if torchrun is not None else (1, None)
    return SharedStore(address, _prefix(run_id), least, number, to_start=True)


def _prefix(run_id: str) -> str:
    import hashlib  # late: it loads OpenSSL, 4 MB

    return f"safelaunch/1/{hashlib.blake2b(run_id.encode(), digest_size=8).hexdigest()}"


def _run_id(environ: Mapping[str, str]) -> str:
    # Differs between jobs on the same hosts, but not between a job's supervisors.
    job = environ.get("SLURM_JOB_ID")
    if job:
        return f"slurm {job}.{environ.get('SLURM_STEP_ID', '')}"
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def _scheduled_port(environ: Mapping[str, str]) -> str | None:
    # The last port reserved for the Slurm step (``srun --resv-ports``): MPI uses the first ones.
    match = re.search(r"(\d+)$", environ.get("SLURM_STEP_RESV_PORTS", ""))
    return match[1] if match is not None and 0 < int(match[1]) < 65536 else None


def hosts_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns all nodes of the Slurm step (``rack[1-2]n[001-016,20],login``); empty if there is no valid list."""
    nodes = next((environ[name] for name in NODE_LISTS if environ.get(name)), "")
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes):
        names = [""]
        for plain, numbers in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", item):
            names = [f"{name}{plain}{number}" for name in names for number in (_numbers(numbers) or ("",))][:MOST_HOSTS]
        hosts += names
    return tuple(hosts[:MOST_HOSTS])


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return []
        most = min(int(last or first), int(first) + MOST_HOSTS)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), most + 1)]
    return numbers


def _most_nodes(value: str) -> int:
    last = value.rpartition(":")[2]
    return int(last) if last.isdecimal() else 1


def _host_and_port(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _address(endpoint: str, default_port: int) -> Address | None:
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d*))?", endpoint)
    host, port = bracketed.groups() if bracketed else (endpoint, "")
    if not bracketed and endpoint.count(":") == 1:
        host, _, port = endpoint.partition(":")
    if (port and not port.isdecimal()) or not host:
        return None
    number = int(port) if port else default_port
    return Address(host, number) if 0 < number < 65536 else None


_NO_TORCHRUN = "torchrun does not start this job, so its nodes share no store; --cluster-store provides one"
