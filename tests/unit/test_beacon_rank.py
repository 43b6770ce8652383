"""Numbers of a rank, and ``--pg-timeout`` on a stand-in for c10d."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from safelaunch.beacon import group_timeout, rank

TORCHS, SCRIPTS, OURS = timedelta(minutes=30), timedelta(minutes=7), timedelta(seconds=5)


def c10d() -> Any:
    """Returns a module with two functions that return the timeout of the group they would create."""
    module: Any = ModuleType("distributed_c10d")

    def init_process_group(backend: str = "", init_method: str = "", timeout: Any = None) -> Any:
        return timeout or module.default_pg_timeout

    def new_group(ranks: Any = None, timeout: Any = None, **more: Any) -> Any:
        return timeout or module.default_pg_timeout

    module.init_process_group, module.new_group = init_process_group, new_group
    module.default_pg_timeout, module.default_pg_nccl_timeout = TORCHS, None
    return module


@pytest.mark.parametrize(
    ("option", "without", "explicit"), [("", TORCHS, SCRIPTS), ("5", OURS, SCRIPTS), ("5!", OURS, OURS)]
)
def test_group_timeout_replaces_default_or_explicit_timeout(
    option: str, without: timedelta, explicit: timedelta
) -> None:
    module = c10d()
    group_timeout.apply(module, option)
    assert [module.init_process_group(), module.new_group([0, 1])] == [without] * 2
    assert module.init_process_group("gloo", "env://", SCRIPTS) == explicit
    assert module.init_process_group("gloo", timeout=SCRIPTS) == explicit
    assert module.new_group(timeout=SCRIPTS, group_desc="dp") == explicit
    assert module.default_pg_nccl_timeout is None, "no NCCL timeout without NCCL"


def test_wrapped_call_with_wrong_argument_raises_type_error() -> None:
    module = c10d()
    group_timeout.apply(module, "5!")
    with pytest.raises(TypeError, match="backened"):
        module.init_process_group(backened="gloo")


def test_group_timeout_applies_to_functions_already_imported_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, package = c10d(), ModuleType("torch.distributed")
    vars(package)["new_group"] = module.new_group
    monkeypatch.setitem(sys.modules, "torch.distributed", package)
    group_timeout.apply(module, "5!")
    assert vars(package)["new_group"](timeout=SCRIPTS) == OURS


STEP = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("0", "1", "0")),
        (STEP, ("3", "4", "1")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, ("0", "1", "0")),  # the batch script
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            ("1", "2", "1"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("1", "2", "0")),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, ("0", "1", "0")),
        ({**STEP, "SLURM_PROCID": "x"}, ("0", "1", "0")),
    ],
)
def test_task_reads_rank_from_scheduler_variables(env: dict[str, str], expected: tuple[str, str, str]) -> None:
    task = rank.task(env)
    assert (task["RANK"], task["WORLD_SIZE"], task["LOCAL_RANK"]) == expected
