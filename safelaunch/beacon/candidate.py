"""Under ``safelaunch exec``: a process that may turn out to be a rank, a launcher of ranks, or nothing of the kind.

Nobody has told it. It becomes a launcher when it starts torch's elastic workers, and a rank when it imports torch's
optimizers or marks a step; its number, if it has one, is asked of torch.distributed at the first step. Of several such
processes the supervisor takes the one that steps.
"""

from __future__ import annotations

import os
import sys

from . import agent, imports, layout, log, marks, rank


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Waits, without costing anything, for a sign of what this process is."""
    log.run_dir = run_dir
    marks.before_first_step = _before_first_step
    imports.after_import("torch.distributed.elastic.multiprocessing.api", agent.may_become_one)
    imports.after_import("torch.optim.optimizer", lambda _: _claim())


@log.guarded
def _claim() -> None:
    if rank.is_claimed():
        return
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **os.environ}
    rank.claim(log.run_dir, env, layout.IMPLICIT)


@log.guarded
def _before_first_step() -> None:
    _claim()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        marks.renumber(distributed.get_rank(), distributed.get_world_size())
