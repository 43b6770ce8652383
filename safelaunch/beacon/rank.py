"""Installs all hooks of a rank before the user's script runs, and removes them after a fork.

The beacon must not raise into the script, print, change an exit code, or prevent the rank from ending.
"""

from __future__ import annotations

import os
import sys

from . import caught_exceptions, descriptors, faults, imports, layout, lifeline, log, marks, output, page, timers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

C10D = "torch.distributed.distributed_c10d"
ELASTIC = "torch.distributed.elastic.multiprocessing.api"

_owner = 0  # pid that installed the beacon; a forked child's differs
_on_request: list[Any] = []  # modules that only some jobs load; each has ``detach``


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Starts the beacon in this process.

    ``role`` is ``rank``, ``spawned`` if the rank's number arrives later, or ``unknown_role`` if the environment doesn't
    show whether the process is a rank, a launcher or neither.
    """
    log.run_dir = run_dir
    imports.offer_safelaunch()
    if role == "spawned":
        imports.after_import(ELASTIC, _claim_when_spawned)
    elif role == "unknown_role":
        _wait_for_a_role()
    else:
        claim(run_dir, os.environ)


def is_claimed() -> bool:
    return _owner == os.getpid()


@log.guarded
def _claim_when_spawned(module: Any) -> None:
    # torch's ``_wrap`` gets the rank of a child of ``torchrun --run-path``.
    original = module._wrap

    def _wrap(local_rank: int, fn: Any, args: Any, envs: Any, *rest: Any, **kwargs: Any) -> Any:
        claim(log.run_dir, {**os.environ, **envs[local_rank]})
        return original(local_rank, fn, args, envs, *rest, **kwargs)

    module._wrap = _wrap


@log.guarded
def claim(run_dir: str, env: Mapping[str, str], kind: int = layout.EXPLICIT) -> None:
    """Makes this process the rank that ``env`` describes.

    The page is created first. Each later step is guarded separately, so that a failure affects only that step.
    """
    global _owner
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = int(env["RANK"])
    base = os.path.join(run_dir, "pages", layout.page_name(attempt, rank, os.getpid()))
    mapped, words = page.create(base)
    page.keep(mapped)
    words[layout.RANK] = rank
    words[layout.LOCAL_RANK] = int(env.get("LOCAL_RANK", rank))
    words[layout.WORLD_SIZE] = int(env.get("WORLD_SIZE", "1"))
    words[layout.ATTEMPT] = attempt
    words[layout.KIND] = kind
    _owner = os.getpid()
    marks.use(mapped, words)
    words[layout.READY] = layout.MAGIC
    supervisor = int(env.get("SAFELAUNCH_SUPERVISOR_PID", "0"))
    for step in (
        lambda: descriptors.hold(env.get("SAFELAUNCH_LEASES", "")),
        lambda: _end_with_job(run_dir, env),
        lambda: output.install(base + layout.RING_SUFFIX),
        lambda: faults.install(base, words, supervisor),
        lambda: caught_exceptions.install(base + layout.CAUGHT_SUFFIX),
        lambda: timers.install(words),
        lambda: _write_meta(base),
        lambda: os.register_at_fork(after_in_child=_after_fork),
        lambda: _keep_allocations(base, env.get(layout.MEMORY_HISTORY, "")),
        lambda: imports.after_import("torch.optim.optimizer", _torch_optimizer),
        lambda: _load_probes(base, env),
        lambda: _note_first_step(base),
        lambda: imports.after_import(C10D, lambda c10d: _torch_distributed(c10d, base, words, env)),
        lambda: _watch_under_exec(run_dir, env),
    ):
        log.guarded(step)()


def _end_with_job(run_dir: str, env: Mapping[str, str]) -> None:
    # The job waits for its first process and that process's children. A rank further down can outlive it as a daemon.
    if env.get("SAFELAUNCH_AGENT_PID") in (str(os.getpid()), str(os.getppid())):
        lifeline.end_with_keepers(run_dir)


def _watch_under_exec(run_dir: str, env: Mapping[str, str]) -> None:
    # Under ``safelaunch exec``, the parent might have no beacon. After importing torch, a process has threads anyway.
    if env.get("SAFELAUNCH_MODE") == "exec":
        imports.after_import("torch.distributed", lambda _: lifeline.watch(run_dir, "rank"))


@log.guarded
def _torch_optimizer(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(marks.optimizer_stepped)


def _load_probes(base: str, env: Mapping[str, str]) -> None:
    names = env.get(layout.PROBES, "")
    if names:
        from . import addon_probes

        def load(name: str) -> None:
            probe = addon_probes.load(name)
            _on_request.append(probe)
            probe.install(base, env.get(probe.VARIABLE, ""))

        for name in names.split(","):
            log.guarded(load)(name)


def _keep_allocations(base: str, asked: str) -> None:
    if asked:
        from . import device_memory

        _on_request.append(device_memory)
        device_memory.install(base)


def _note_first_step(base: str) -> None:
    from . import contract

    marks.at_first_step = lambda: contract.note(base)


@log.guarded
def _torch_distributed(c10d: Any, base: str, words: memoryview, env: Mapping[str, str]) -> None:
    marks.set_state(layout.TORCH)
    from . import group_timeout, server

    log.guarded(group_timeout.apply)(c10d, env.get("SAFELAUNCH_GROUP_TIMEOUT", ""))
    if server.start(base, words):
        marks.set_server_up()


def _write_meta(base: str) -> None:
    roots = [os.path.dirname(os.__file__)]
    roots += [entry for entry in sys.path if "site-packages" in entry or "dist-packages" in entry]
    facts = {"executable": sys.executable, "python": sys.version.split()[0], "cwd": os.getcwd(), "gpu": _gpu()}
    page.note(base + layout.META_SUFFIX, {**facts, "argv": sys.orig_argv, "code_roots": roots})


def _gpu() -> str:
    # The device that ``LOCAL_RANK`` selects from the visible ones, as scripts do; empty if it selects none.
    visible = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    number = os.environ.get("LOCAL_RANK", "")
    if len(visible) == 1:  # a launcher selected it
        return visible[0]
    return visible[int(number)] if number.isdigit() and int(number) < len(visible) else ""


def _after_fork() -> None:
    # A forked child (a DataLoader worker, for example) isn't the rank.
    if os.getpid() == _owner:
        return
    for module in (marks, output, faults, caught_exceptions, descriptors, *_on_request):
        log.guarded(module.detach)()


# --- a process of unknown role ----------------------------------------------------------------------------------------
# Under ``safelaunch exec``, a process without a rank's variables becomes a launcher when it starts torch's elastic
# workers. It becomes a rank when it imports torch's optimizers or marks a step. Its number is its task's if srun or
# mpirun started several, and at the first step torch.distributed's, if initialized. If several processes claim a rank,
# the supervisor prefers the one that steps.


def _wait_for_a_role() -> None:
    # These hooks reveal the role, and cost nothing until one fires.
    from . import agent

    marks.before_first_step = _before_first_step
    imports.after_import(ELASTIC, agent.start_with_first_workers)
    imports.after_import("torch.optim.optimizer", lambda _: _claim_as_task())


@log.guarded
def _claim_as_task() -> None:
    if not is_claimed():
        claim(log.run_dir, {**task(os.environ), **os.environ}, layout.IMPLICIT)


def task(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the rank variables of this process: of its task if srun or mpirun started it, else of rank 0 of 1.

    They don't apply if each task is a launcher (``srun --ntasks-per-node=1``), because its ranks have their own.
    """
    numbers = (layout.numbers_in(env, names) for names in layout.TASKS)
    number, size, local = next(filter(None, numbers), (0, 1, 0))
    return dict(zip(layout.OF_A_RANK, map(str, (number, size, max(local, 0))), strict=True))


@log.guarded
def _before_first_step() -> None:
    _claim_as_task()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        marks.renumber(distributed.get_rank(), distributed.get_world_size())
