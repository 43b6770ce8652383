"""The rank variables of a process that has none: those of its task."""

from __future__ import annotations

import pytest

from safelaunch.beacon.unknown_role import task

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
def test_the_number_of_a_task(env: dict[str, str], expected: tuple[str, str, str]) -> None:
    found = task(env)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == expected
