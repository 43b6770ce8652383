"""Where the supervisors of a job meet, from torchrun's options in all their spellings."""

from __future__ import annotations

import pytest

from safelaunch.cluster.store import Address
from safelaunch.cluster.where import Alone, Meeting, meeting
from safelaunch.launch.argv import CommandLine


def found(*words: str, **environ: str) -> str:
    where = meeting(CommandLine((), words, ("train.py",)), environ)
    return str(where.address) if isinstance(where, Meeting) else where.why or "one node"


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ((), {}, "one node"),
        (("--nnodes=1",), {}, "one node"),
        (("--nnodes=1:1", "--rdzv-backend=c10d"), {}, "one node"),
        (("--nnodes=2", "--standalone"), {}, "one node"),
        (("--nnodes=2",), {}, "127.0.0.1:29500"),
        (("--nnodes", "2", "--master-addr", "n1", "--master-port", "1234"), {}, "n1:1234"),
        (("--nnodes", "2", "--master_addr", "n1", "--master_port", "1234"), {}, "n1:1234"),
        (("--nnodes=2", "--rdzv-endpoint=n1:77", "--master-addr=n2"), {}, "n1:77"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1"), {}, "n1:29400"),
        (("--nnodes=1:4", "--rdzv_backend", "c10d", "--rdzv_endpoint", "n1:7"), {}, "n1:7"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]:7"), {}, "[fd00::1]:7"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=fd00::1"), {}, "[fd00::1]:29400"),
        ((), {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "n1:7"}, "n1:7"),
        (("--nnodes=3",), {"PET_NNODES": "1", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "5"}, "n1:5"),
    ],
)
def test_the_address(words: tuple[str, ...], environ: dict[str, str], expected: str) -> None:
    assert found(*words, **environ) == expected


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--rdzv-backend=etcd-v2", "--rdzv-endpoint=n1:2379"), "--rdzv-backend=etcd-v2"),
        (("--rdzv-backend=c10d", "--rdzv-conf=timeout=9,store_type=file", "--rdzv-endpoint=/tmp/x"), "store_type=file"),
        (("--rdzv-backend=c10d",), "endpoint ''"),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=n1:0"), "endpoint 'n1:0'"),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=n1:http"), "endpoint 'n1:http'"),
    ],
)
def test_why_there_is_none(words: tuple[str, ...], why: str) -> None:
    assert why in found("--nnodes=2", *words)


def test_under_exec_nobody_knows_of_a_store() -> None:
    where = meeting(CommandLine((), (), ("bash", "run.sh"), program="bash"), {})
    assert isinstance(where, Alone)
    assert "not torchrun" in where.why


def test_jobs_that_share_a_store_do_not_meet() -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:7")
    one, other, again = (meeting(CommandLine((), (*words, f"--rdzv-id={name}"), ()), {}) for name in ("a", "b", "a"))
    assert isinstance(one, Meeting)
    assert one == again != other
    assert one.address == Address("n1", 7)


@pytest.mark.parametrize(
    ("words", "nodes", "node_rank"),
    [
        (("--nnodes=3",), 3, 0),
        (("--nnodes=3", "--node-rank=2"), 3, 2),
        (("--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:7", "--node-rank=1"), 2, None),
    ],
)
def test_how_many_nodes_are_awaited_and_which_one_this_is(
    words: tuple[str, ...], nodes: int, node_rank: int | None
) -> None:
    where = meeting(CommandLine((), words, ("train.py",)), {})
    assert isinstance(where, Meeting)
    assert (where.nodes, where.node_rank) == (nodes, node_rank)
