"""Resources of a job before it starts: number of ranks, leased port, and cases without a lease."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.job.argv import CommandLine
from safelaunch.job.torchrun import KNOWN, TorchInstallation, binds_any_port
from safelaunch.leases import resources
from safelaunch.leases.choose import Inventory, LeasableGpu, pool_of, wish_of
from safelaunch.settings.options import Settings
from safelaunch.system.errors import UsageError


def command(words: str, script: str = "train.py") -> CommandLine:
    return CommandLine((), tuple(words.split()), tuple(script.split()))


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("", {}, 1),
        ("--nproc-per-node=4", {}, 4),
        ("--nproc_per_node 4", {}, 4),
        ("--nproc 4 --nnodes 2", {}, 4),
        ("--np=2 --nproc-per-node=3", {}, 3),
        ("--nproc-per-node gpu", {}, "all"),
        ("--nproc-per-node auto", {}, "all"),
        ("--nproc-per-node cpu", {}, 0),
        ("--nproc-per-node x", {}, 0),
        ("--nproc-per-node", {}, 0),
        ("", {"PET_NPROC_PER_NODE": "6"}, 6),
        ("--nproc-per-node=2", {"PET_NPROC_PER_NODE": "6"}, 2),
        ("--help", {}, 0),
    ],
)
def test_number_of_ranks_follows_options_and_environment(words: str, environ: dict[str, str], expected: object) -> None:
    assert resources.ranks_of(command(words), environ) == expected


def test_number_of_ranks_of_other_program_is_unknown() -> None:
    assert resources.ranks_of(CommandLine((), (), ("bash", "run.sh"), program="/bin/bash"), {}) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--master-port auto --nnodes 1", "--master-port 20001 --nnodes 1"),
        ("--master_port=auto", "--master_port=20001"),
        ("--role auto --master-port=auto", "--role auto --master-port=20001"),
        ("--master-port 29500", "--master-port 29500"),
        ("--master-p auto", "--master-p 20001"),
    ],
)
def test_command_line_option_value_is_replaced(words: str, expected: str) -> None:
    assert command(words).with_value("--master-port", "auto", "20001", shortest="--master-p").torchrun == tuple(
        expected.split()
    )


def test_option_abbreviations_are_unambiguous() -> None:
    """Abbreviations that ``value_of`` accepts for --nproc-per-node and --nnodes match no other option in argparse."""
    for shortest, name in (("--np", "--nproc"), ("--nn", "--nnodes"), ("--master-p", "--master")):
        assert {option[: len(name)].replace("_", "-") for option in KNOWN if option.startswith(shortest)} == {name}


def old_torch(tmp_path: Path) -> TorchInstallation:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_text("default=29500,\n")
    return TorchInstallation("python", tmp_path, "2.9.1")


@pytest.mark.parametrize(
    ("words", "environ", "leased"),
    [
        ("", {}, True),
        ("--nnodes=1:1", {}, True),
        ("--standalone", {}, False),
        ("--nnodes=2", {}, False),
        ("--rdzv-endpoint=localhost:0", {}, False),
        ("--rdzv_backend c10d", {}, False),
        ("--master-port=1234", {}, False),
        ("--master_addr=x", {}, False),
        ("", {"PET_MASTER_PORT": "1234"}, False),
        ("", {"PET_NNODES": "2"}, False),
        ("", {"PET_RDZV_ENDPOINT": "localhost:0"}, False),
    ],
)
def test_older_torchrun_gets_leased_port(tmp_path: Path, words: str, environ: dict[str, str], leased: bool) -> None:
    environ = {**environ, "SAFELAUNCH_LEASE_DIR": os.fspath(tmp_path / "leases")}
    torch = old_torch(tmp_path)
    allocation = resources.gather(command(words), Settings(gpus="none"), environ, torch)
    assert (allocation.ports is not None) == leased
    if allocation.ports is not None:
        assert allocation.command.torchrun[0] == f"--master-port={allocation.ports.ports[0]}"
        assert len(allocation.descriptors) == 1
    else:
        assert allocation.command.torchrun == tuple(words.split())
    allocation.release()


def test_installed_torchrun_port_behaviour_is_recognized() -> None:
    from torch.distributed import run

    default = run.get_args_parser().get_default("master_port")
    assert binds_any_port(Path(run.__file__).parents[1]) == (default is None)


def test_master_port_auto_is_leased(tmp_path: Path) -> None:
    environ = {"SAFELAUNCH_LEASE_DIR": os.fspath(tmp_path / "leases")}
    allocation = resources.gather(command("--master-port auto"), Settings(gpus="none"), environ, old_torch(tmp_path))
    other = resources.gather(
        command("--master-port=auto"), Settings(gpus="none"), environ, TorchInstallation("python", tmp_path, "")
    )
    assert allocation.ports is not None and other.ports is not None
    assert allocation.command.torchrun == ("--master-port", str(allocation.ports.ports[0]))
    assert allocation.ports.ports != other.ports.ports
    allocation.release(), other.release()


def test_master_port_auto_without_lease_directory_is_free_port(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job starts anyway, with a free port that stays bound, and one line says so."""
    (tmp_path / "leases").write_text("no directory")
    environ = {"SAFELAUNCH_LEASE_DIR": os.fspath(tmp_path / "leases")}
    torch = TorchInstallation("python", tmp_path, "")
    first, other = (
        resources.gather(command("--master-port=auto"), Settings(gpus="none"), environ, torch) for _ in range(2)
    )
    assert first.port is not None and first.command.torchrun == (f"--master-port={first.port}",)
    assert first.port != other.port and first.descriptors == ()
    line = capfd.readouterr().err.splitlines()[0]
    assert line.startswith(f"safelaunch: master port {first.port} is free but not leased")
    assert "no leases can be taken" in line
    again = resources.with_another_port(first, Settings(gpus="none"), environ)
    assert again.port is not None and again.port != other.port
    for allocation in (other, again):
        allocation.release()


def test_master_port_auto_on_several_nodes_is_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every node"):
        resources.gather(
            command("--master-port auto --nnodes 2"),
            Settings(gpus="none"),
            {},
            TorchInstallation("python", tmp_path, ""),
        )


@pytest.mark.parametrize("gpus", [None, "all"])
def test_gpus_are_not_leased_without_driver(monkeypatch: pytest.MonkeyPatch, gpus: str | None) -> None:
    monkeypatch.setattr(resources, "has_driver", lambda environ: False)
    allocation = resources.gather(command("--nproc-per-node=2"), Settings(gpus=gpus, wait=True), {}, None)
    assert allocation == resources.JobResources(command("--nproc-per-node=2"))


@pytest.mark.parametrize(
    ("words", "program", "environ", "asked"),
    [
        ("", None, {}, True),
        ("--nproc-per-node=cpu", None, {}, False),
        ("", None, {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("", None, {"CUDA_VISIBLE_DEVICES": "1"}, True),
        ("", "/bin/bash", {}, False),
        ("", "/bin/bash", {"CUDA_VISIBLE_DEVICES": "1"}, True),
        ("--nproc-per-node=cpu", None, {"CUDA_VISIBLE_DEVICES": "1"}, False),
    ],
)
def test_driver_is_queried_only_if_gpus_matter(
    monkeypatch: pytest.MonkeyPatch, words: str, program: str | None, environ: dict[str, str], asked: bool
) -> None:
    questions: list[object] = []

    def inventory(environ: object) -> Inventory:
        questions.append(environ)
        return Inventory(missing="no NVIDIA GPU found")

    monkeypatch.setattr(resources, "has_driver", lambda environ: True)
    monkeypatch.setattr("safelaunch.leases.inventory.inventory", inventory)
    allocation = resources.gather(replace(command(words), program=program), Settings(), environ, None)
    assert bool(questions) == asked and allocation.lease is None


def test_gpus_none_hides_gpus_and_leases_nothing() -> None:
    assert resources.gather(command(""), Settings(gpus="none"), {}, None).visible_gpus == ""


def test_run_inside_run_leases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "has_driver", lambda environ: True)
    environ = {
        "SAFELAUNCH_SUPERVISOR_PID": str(os.getppid()),
        "SAFELAUNCH_LEASES": "/a:/b",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    allocation = resources.gather(command("--nproc-per-node=2"), Settings(), environ, None)
    assert (allocation.lease, allocation.visible_gpus, allocation.rank_locks) == (None, None, ("/a", "/b"))


EIGHT = tuple(LeasableGpu(str(number), f"GPU-{number}") for number in range(8))


@pytest.mark.parametrize(
    ("words", "environ", "gpus", "count"),
    [
        ("", {}, None, 8),
        ("", {}, "4", 4),
        ("", {}, "1", 0),
        ("", {"CUDA_VISIBLE_DEVICES": "0,1"}, None, 2),
        ("", {"CUDA_VISIBLE_DEVICES": "3"}, None, 0),
        ("--nproc-per-node=1", {}, None, 0),
        ("", {"PET_NPROC_PER_NODE": "1"}, None, 0),
    ],
)
def test_single_process_for_several_gpus_is_noted(
    words: str, environ: dict[str, str], gpus: str | None, count: int
) -> None:
    wish = wish_of(gpus, 1, pool_of(environ, EIGHT), Inventory(EIGHT))
    assert wish is not None
    notes = resources._about_one_process(command(words), Settings(gpus=gpus), wish, environ)
    assert notes == [f"1 process for {count} GPUs: --nproc-per-node={count} starts one for each"] * bool(count)
