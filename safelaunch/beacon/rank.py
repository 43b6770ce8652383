"""The beacon of one rank. It installs every hook before the user's script runs, and removes them after a fork.

Nothing here may raise into the script, print, change an exit code, or keep the rank from ending.
"""

from __future__ import annotations

import os
import sys

from . import (
    caught_exceptions,
    descriptors,
    exits,
    faults,
    imports,
    layout,
    leases,
    lifeline,
    log,
    marks,
    page,
    ring,
    streams,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_CHECKS = f"{__package__}.checks"  # not imported unless asked for, nor is the next
_DEVICE_MEMORY = f"{__package__}.device_memory"
C10D = "torch.distributed.distributed_c10d"

_owner = 0  # pid of the process that installed the beacon; a forked child's differs


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Starts the beacon in this process. ``role``: ``rank``, or ``spawned`` if the rank's number arrives later."""
    log.run_dir = run_dir
    imports.offer_safelaunch()
    if role == "spawned":
        imports.after_import("torch.distributed.elastic.multiprocessing.api", _claim_when_spawned)
        return
    claim(run_dir, os.environ)


def is_claimed() -> bool:
    return _owner == os.getpid()


@log.guarded
def _claim_when_spawned(module: Any) -> None:
    """Wraps torch's ``_wrap``, whose arguments give a child of ``torchrun --run-path`` its rank."""
    original = module._wrap

    def _wrap(local_rank: int, fn: Any, args: Any, envs: Any, *rest: Any, **kwargs: Any) -> Any:
        claim(log.run_dir, {**os.environ, **envs[local_rank]})
        return original(local_rank, fn, args, envs, *rest, **kwargs)

    module._wrap = _wrap


@log.guarded
def claim(run_dir: str, env: Mapping[str, str], kind: int = layout.EXPLICIT) -> None:
    """Makes this process the rank that ``env`` describes.

    The page comes first. Each later step is guarded separately, so one that fails costs no other.
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
        lambda: leases.hold(env.get("SAFELAUNCH_LEASES", "")),
        lambda: _end_with_job(run_dir, env),
        lambda: _keep_output(base),
        lambda: faults.install(base, words, supervisor),
        lambda: exits.install(base + layout.EXIT_SUFFIX),
        lambda: caught_exceptions.install(base + layout.CAUGHT_SUFFIX),
        lambda: _write_meta(base),
        lambda: os.register_at_fork(after_in_child=_after_fork),
        lambda: _check_values(base, env.get(layout.CHECKS, "")),
        lambda: _keep_allocations(base, env.get(layout.MEMORY_HISTORY, "")),
        lambda: imports.after_import("torch.optim.optimizer", _torch_optimizer),
        lambda: _note_first_step(base),
        lambda: imports.after_import(C10D, lambda c10d: _torch_distributed(c10d, base, words, env)),
        lambda: _watch_under_exec(run_dir, env),
    ):
        log.guarded(step)()


def _end_with_job(run_dir: str, env: Mapping[str, str]) -> None:
    """Ties this process to the keepers if the job waits for it: the job's first process and that one's children.

    A rank further down may outlive the job as a daemon.
    """
    if env.get("SAFELAUNCH_AGENT_PID") in (str(os.getpid()), str(os.getppid())):
        lifeline.end_with_keepers(run_dir)


def _watch_under_exec(run_dir: str, env: Mapping[str, str]) -> None:
    """Starts ``lifeline.watch`` under ``safelaunch exec``, where the parent may have no beacon to do it.

    It waits for the import of torch, after which a process has threads anyway.
    """
    if env.get("SAFELAUNCH_MODE") == "exec":
        imports.after_import("torch.distributed", lambda _: lifeline.watch(run_dir, "rank"))


def _keep_output(base: str) -> None:
    output = ring.Ring(base + layout.RING_SUFFIX)
    page.keep(output)
    streams.attach(output)


@log.guarded
def _torch_optimizer(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(marks.optimizer_stepped)
        checks = sys.modules.get(_CHECKS)
        if checks is not None:
            module.register_optimizer_step_pre_hook(checks.optimizer_steps)
            register(checks.optimizer_stepped)


def _check_values(base: str, every: str) -> None:
    """Loads the consistency checks if somebody asked for them."""
    if every.isdigit() and int(every):
        from . import checks

        checks.install(base, int(every))


def _keep_allocations(base: str, asked: str) -> None:
    """Lets torch keep where GPU memory is allocated if somebody asked for it."""
    if asked:
        from . import device_memory

        device_memory.install(base)


def _note_first_step(base: str) -> None:
    def note() -> None:
        from . import contract

        contract.write(base)

    marks.at_first_step = log.guarded(note)


@log.guarded
def _torch_distributed(c10d: Any, base: str, words: memoryview, env: Mapping[str, str]) -> None:
    marks.set_state(layout.TORCH)
    from . import group_timeout, server

    log.guarded(group_timeout.apply)(c10d, env.get("SAFELAUNCH_GROUP_TIMEOUT", ""))

    if server.start(base + layout.SERVER_SUFFIX, words):
        marks.set_server_up()


def _write_meta(base: str) -> None:
    """Writes facts that only this interpreter knows, as key TAB value lines (json is not imported yet)."""
    roots = [os.path.dirname(os.__file__)]
    roots += [entry for entry in sys.path if "site-packages" in entry or "dist-packages" in entry]
    lines = [f"executable\t{sys.executable}", f"python\t{sys.version.split()[0]}", f"cwd\t{os.getcwd()}"]
    lines += [f"argument\t{argument}" for argument in sys.orig_argv]
    lines += [f"code_root\t{root}" for root in roots]
    lines += [f"gpu\t{_gpu()}"]
    text = "\n".join(line.replace("\n", " ") for line in lines)
    with open(base + layout.META_SUFFIX, "wb", opener=log.private) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def _gpu() -> str:
    """The device that ``LOCAL_RANK`` chooses among the visible ones, as scripts do; empty where it chooses none."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    number = os.environ.get("LOCAL_RANK", "")
    if len(visible) == 1:  # a launcher has chosen for the rank
        return visible[0]
    return visible[int(number)] if number.isdigit() and int(number) < len(visible) else ""


def _after_fork() -> None:
    """Removes the hooks in a forked child (a DataLoader worker, for example), which is not the rank."""
    if os.getpid() == _owner:
        return
    log.guarded(marks.detach)()
    log.guarded(streams.detach)()
    log.guarded(faults.detach)()
    log.guarded(exits.detach)()
    log.guarded(caught_exceptions.detach)()
    log.guarded(descriptors.detach)()
    for name in (_CHECKS, _DEVICE_MEMORY):
        module = sys.modules.get(name)
        if module is not None:
            log.guarded(module.detach)()
