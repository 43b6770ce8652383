"""The store that a job's supervisors share, for all spellings of torchrun's options."""

from __future__ import annotations

import pytest

from safelaunch.job.argv import CommandLine
from safelaunch.supervise.cluster.rendezvous import MOST_HOSTS, NoRendezvous, SharedStore, hosts_of, meeting
from safelaunch.supervise.cluster.store import Address

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
C10D = ("--nnodes=2", "--rdzv-backend=c10d")
ETCD = ("--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=n1:2379")


def command_of(*words: str) -> CommandLine:
    return CommandLine((), words, ("train.py",))


def found(words: tuple[str, ...] | None, environ: dict[str, str], named: str | None = None) -> str:
    """Returns the store's address, with ``to start`` if needed, or the reason for no store.

    Args:
        words: torchrun's arguments, or None under exec.
    """
    where = meeting(None if words is None else command_of(*words), environ, named)
    if isinstance(where, SharedStore):
        return f"{where.address}{', to start' if where.to_start else ''}"
    return where.why or "one node"


def check(said: str, expected: str) -> None:
    """Compares with all of ``expected``, or, after ``...``, with a part."""
    if expected.startswith("..."):
        assert expected[3:] in said
    else:
        assert said == expected


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
        ((*C10D, "--rdzv-endpoint=n1"), {}, "n1:29400"),
        (("--nnodes=1:4", "--rdzv_backend", "c10d", "--rdzv_endpoint", "n1:7"), {}, "n1:7"),
        ((*C10D, "--rdzv-endpoint=[fd00::1]:7"), {}, "[fd00::1]:7"),
        ((*C10D, "--rdzv-endpoint=fd00::1"), {}, "[fd00::1]:29400"),
        ((), {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "n1:7"}, "n1:7"),
        (("--nnodes=3",), {"PET_NNODES": "1", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "5"}, "n1:5"),
        # A port from the scheduler is ignored if torchrun has a store.
        ((*C10D, "--rdzv-endpoint=n5:29400"), {**STEP, "SLURM_STEP_RESV_PORTS": "12000"}, "n5:29400"),
        (ETCD, {}, "...--rdzv-backend=etcd-v2"),
        ((*C10D, "--rdzv-conf=timeout=9,store_type=file", "--rdzv-endpoint=/tmp/x"), {}, "...store_type=file"),
        (C10D, {}, "...endpoint ''"),
        ((*C10D, "--rdzv-endpoint=n1:0"), {}, "...endpoint 'n1:0'"),
        ((*C10D, "--rdzv-endpoint=n1:http"), {}, "...endpoint 'n1:http'"),
    ],
)
def test_torchruns_store_is_found(words: tuple[str, ...], environ: dict[str, str], expected: str) -> None:
    check(found(words, environ), expected)


@pytest.mark.parametrize(
    ("words", "named", "environ", "expected"),
    [
        (None, None, {}, "...torchrun does not start this job"),
        (None, None, STEP, "...torchrun does not start this job"),
        (None, None, MASTER, "...torchrun does not start this job"),
        (None, "n1:29700", {}, "n1:29700, to start"),
        (None, "[fd00::1]:29700", STEP, "[fd00::1]:29700, to start"),
        (None, "29700", STEP, "n1:29700, to start"),
        (None, "29700", MASTER, "n1:29700, to start"),
        (None, "29700", {}, "...names no host"),
        (None, None, {**STEP, "SLURM_STEP_RESV_PORTS": "12000-12003"}, "n1:12003, to start"),
        (None, None, {**STEP, "SLURM_STEP_RESV_PORTS": "12000"}, "n1:12000, to start"),
        (None, None, {**STEP, "SLURM_STEP_RESV_PORTS": ""}, "...torchrun does not start this job"),
        # A named store takes precedence over torchrun's.
        (ETCD, "29700", STEP, "n1:29700, to start"),
        (ETCD, "n3:29700", {}, "n3:29700, to start"),
        (ETCD, None, {**STEP, "SLURM_STEP_RESV_PORTS": "12000"}, "n1:12000, to start"),
        ((*C10D, "--rdzv-endpoint=n5:29400"), "29700", {}, "n5:29700, to start"),
        ((), "29700", STEP, "one node"),
    ],
)
def test_store_to_start_is_chosen_from_the_environment(
    words: tuple[str, ...] | None, named: str | None, environ: dict[str, str], expected: str
) -> None:
    check(found(words, environ, named), expected)


def test_command_under_exec_has_no_torchrun_options() -> None:
    where = meeting(CommandLine((), (), ("bash", "run.sh"), program="bash"), {})
    assert isinstance(where, NoRendezvous)
    assert "torchrun does not start this job" in where.why


def test_nodes_of_a_step_take_precedence_over_the_jobs() -> None:
    assert hosts_of({"SLURM_JOB_NODELIST": "n[1-8]", "SLURM_STEP_NODELIST": "n[3-4]"}) == ("n3", "n4")


def test_slurm_steps_get_separate_rendezvous_keys() -> None:
    steps = [{**STEP, "SLURM_STEP_ID": number} for number in ("0", "1", "0")]
    one, other, again = (meeting(None, step, "n1:29700") for step in steps)
    assert isinstance(one, SharedStore)
    assert one == again != other


def test_jobs_with_different_rdzv_ids_stay_separate() -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:7")
    one, other, again = (meeting(command_of(*words, f"--rdzv-id={name}"), {}) for name in ("a", "b", "a"))
    assert isinstance(one, SharedStore)
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
def test_node_count_and_node_rank_are_read(words: tuple[str, ...], nodes: int, node_rank: int | None) -> None:
    where = meeting(command_of(*words), {})
    assert isinstance(where, SharedStore)
    assert (where.nodes, where.node_rank) == (nodes, node_rank)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("login", ("login",)),
        ("n1,n2", ("n1", "n2")),
        ("n[1-3,7],login", ("n1", "n2", "n3", "n7", "login")),
        ("n[008-010,20]", ("n008", "n009", "n010", "n20")),
        ("gpu[3]-ib.cluster,n1", ("gpu3-ib.cluster", "n1")),
        ("rack[1-2]n[09-10]-ib", ("rack1n09-ib", "rack1n10-ib", "rack2n09-ib", "rack2n10-ib")),
        ("n[a-b]", ("n",)),
    ],
)
def test_slurm_host_list_is_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert hosts_of({"SLURM_STEP_NODELIST": text}) == hosts


@pytest.mark.slow
def test_expanded_host_list_is_bounded() -> None:
    assert len(hosts_of({"SLURM_JOB_NODELIST": "n[1-999999999][1-999999999]"})) == MOST_HOSTS
