"""Where the store of torchrun's agents is, from the command line alone; or why there is none to meet in. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from safelaunch.cluster.store import Address
from safelaunch.launch.argv import CommandLine

C10D_PORT, STATIC_PORT = 29400, 29500  # torchrun's own, where none is given


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store in which the supervisors of one job meet, and what all their keys begin with.

    ``nodes``: with fewer of them, torchrun starts no rank. ``node_rank``: this one's, where the command line gives it.
    """

    address: Address
    prefix: str
    nodes: int = 2
    node_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Alone:
    """There is nobody to meet, or nowhere. ``why``: a clause for a person; empty for a job of one node."""

    why: str = ""


def meeting(command: CommandLine, environ: Mapping[str, str]) -> Meeting | Alone:
    """``environ``: torchrun's ``PET_*`` variables stand for the options that are not given."""

    def option(name: str, shortest: str, default: str) -> str:
        found = command.value_of(f"--{name}", shortest=shortest)
        return found if found is not None else environ.get(f"PET_{name.replace('-', '_').upper()}", default)

    if command.program is not None:
        return Alone("it is not torchrun that starts the job, so its nodes have no store in common")
    if _most_nodes(option("nnodes", "--nn", "1")) == 1 or command.has_flag("--standalone"):
        return Alone()
    backend = option("rdzv-backend", "--rdzv-b", "static").lower()
    conf = option("rdzv-conf", "--rdzv-c", "")
    if backend not in ("c10d", "static"):
        return Alone(f"with --rdzv-backend={backend} the nodes have no store in common")
    if re.search(r"(?:^|,)\s*store_type\s*=\s*file\b", conf):
        return Alone("with store_type=file the nodes have no store that answers over the network")
    endpoint = option("rdzv-endpoint", "--rdzv-e", "")
    if backend == "static" and not endpoint:
        endpoint = f"{option('master-addr', '--master-a', '127.0.0.1')}:{option('master-port', '--master-p', '')}"
    address = _address(endpoint, C10D_PORT if backend == "c10d" else STATIC_PORT)
    if address is None:
        return Alone(f"the rendezvous endpoint {endpoint!r} is not one that a node could connect to")
    run_id = option("rdzv-id", "--rdzv-i", "none")
    import hashlib  # late: it loads OpenSSL, 4 MB that a job of one node does without

    prefix = f"safelaunch/1/{hashlib.blake2b(run_id.encode(), digest_size=8).hexdigest()}"
    number = option("node-rank", "--node-r", "") if backend == "static" else ""
    least = option("nnodes", "--nn", "1").partition(":")[0]
    node_rank = int(number or 0) if backend == "static" and (number or "0").isdecimal() else None
    return Meeting(address, prefix, int(least) if least.isdecimal() else 1, node_rank)


def _most_nodes(value: str) -> int:
    """Of ``2`` or ``1:4``; what is no number torchrun will reject."""
    last = value.rpartition(":")[2]
    return int(last) if last.isdecimal() else 1


def _address(endpoint: str, default_port: int) -> Address | None:
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d*))?", endpoint)
    host, port = bracketed.groups() if bracketed else (endpoint, "")
    if not bracketed and endpoint.count(":") == 1:
        host, _, port = endpoint.partition(":")
    if (port and not port.isdecimal()) or not host:
        return None
    number = int(port) if port else default_port
    return Address(host, number) if 0 < number < 65536 else None
