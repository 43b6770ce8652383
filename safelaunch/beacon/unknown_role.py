"""The beacon of a process under ``safelaunch exec`` whose role is not known yet: a rank, a launcher, or neither.

The environment of such a process does not name its role. The process becomes a launcher when it starts torch's elastic
workers, and a rank when it imports torch's optimizers or marks a step. At the first step it asks torch.distributed for
its rank number, if it has one. If several processes claim the same rank, the supervisor prefers the one that steps.
"""

from __future__ import annotations

import os
import sys

from . import agent, imports, layout, log, marks, rank


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Installs the hooks that reveal the role of this process. They cost nothing until one of them fires."""
    log.run_dir = run_dir
    marks.before_first_step = _before_first_step
    imports.after_import("torch.distributed.elastic.multiprocessing.api", agent.start_with_first_workers)
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
