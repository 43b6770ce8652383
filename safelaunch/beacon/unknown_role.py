"""The beacon of a process under ``safelaunch exec`` whose role is not known yet: a rank, a launcher, or neither.

The environment of such a process does not name its role. The process becomes a launcher when it starts torch's elastic
workers, and a rank when it imports torch's optimizers or marks a step. Its number is that of its task, where srun or
mpirun started several; at the first step it asks torch.distributed, if that has one. If several processes claim the
same rank, the supervisor prefers the one that steps.
"""

from __future__ import annotations

import os
import sys

from . import agent, imports, layout, log, marks, rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Rank, world size and local rank of a task. Slurm's are those of a step (srun): the batch script is no task of one.
TASKS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Installs the hooks that reveal the role of this process. They cost nothing until one of them fires."""
    log.run_dir = run_dir
    imports.offer_safelaunch()
    marks.before_first_step = _before_first_step
    imports.after_import("torch.distributed.elastic.multiprocessing.api", agent.start_with_first_workers)
    imports.after_import("torch.optim.optimizer", lambda _: _claim())


@log.guarded
def _claim() -> None:
    if rank.is_claimed():
        return
    rank.claim(log.run_dir, {**task(os.environ), **os.environ}, layout.IMPLICIT)


def task(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the rank's variables for the task that srun or mpirun started here; without one, rank 0 of 1.

    Under ``srun --ntasks-per-node=1`` with a launcher in each task, the ranks have variables of their own.
    """
    for names in TASKS:
        number, size, local = (env.get(name, "") for name in names)
        if number.isdigit() and size.isdigit() and int(number) < int(size):
            return {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": local if local.isdigit() else "0"}
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@log.guarded
def _before_first_step() -> None:
    _claim()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        marks.renumber(distributed.get_rank(), distributed.get_world_size())
