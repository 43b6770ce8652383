"""The beacon of one rank: everything that is set up before the user's script runs, and undone after a fork.

Nothing here may raise into the script, print, change an exit code, or keep the rank from ending.
"""

from __future__ import annotations

import os
import sys

from . import caught, descriptors, exits, faults, imports, layout, leases, log, marks, page, ring, streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_owner = 0  # pid of the process that set the beacon up; a forked child's differs


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Wakes the beacon in this process. ``role`` is ``rank``, or ``spawned`` when the rank's number arrives later."""
    log.run_dir = run_dir
    if role == "spawned":
        imports.after_import("torch.distributed.elastic.multiprocessing.api", _claim_when_told)
        return
    claim(run_dir, os.environ)


def is_claimed() -> bool:
    return _owner == os.getpid()


@log.guarded
def _claim_when_told(module: Any) -> None:
    """``torchrun --run-path``: the spawned child learns its rank as it enters ``_wrap``, which we enter first."""
    original = module._wrap

    def _wrap(local_rank: int, fn: Any, args: Any, envs: Any, *rest: Any, **kwargs: Any) -> Any:
        claim(log.run_dir, {**os.environ, **envs[local_rank]})
        return original(local_rank, fn, args, envs, *rest, **kwargs)

    module._wrap = _wrap


@log.guarded
def claim(run_dir: str, env: Mapping[str, str], kind: int = layout.EXPLICIT) -> None:
    """Makes this process the rank that ``env`` describes: its page first, then everything else, each for itself."""
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
        lambda: _keep_output(base),
        lambda: faults.install(base, words, supervisor),
        lambda: exits.install(base + layout.EXIT_SUFFIX),
        lambda: caught.install(base + layout.CAUGHT_SUFFIX),
        lambda: _write_meta(base),
        lambda: os.register_at_fork(after_in_child=_after_fork),
        lambda: imports.after_import("torch.optim.optimizer", _torch_optimizer),
        lambda: imports.after_import("torch.distributed.distributed_c10d", lambda _: _torch_distributed(base)),
    ):
        log.guarded(step)()


def _keep_output(base: str) -> None:
    output = ring.Ring(base + layout.RING_SUFFIX)
    page.keep(output)
    streams.attach(output)


@log.guarded
def _torch_optimizer(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(marks.optimizer_stepped)


@log.guarded
def _torch_distributed(base: str) -> None:
    marks.set_state(layout.TORCH)
    from . import server

    if server.start(base + layout.SERVER_SUFFIX):
        marks.server_is_up()


def _write_meta(base: str) -> None:
    """What only this interpreter knows of itself: key TAB value lines (json is not imported yet)."""
    roots = [os.path.dirname(os.__file__)]
    roots += [entry for entry in sys.path if "site-packages" in entry or "dist-packages" in entry]
    lines = [f"executable\t{sys.executable}", f"python\t{sys.version.split()[0]}", f"cwd\t{os.getcwd()}"]
    lines += [f"argument\t{argument}" for argument in sys.orig_argv]
    lines += [f"code_root\t{root}" for root in roots]
    text = "\n".join(line.replace("\n", " ") for line in lines)
    with open(base + layout.META_SUFFIX, "wb", opener=log.private) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def _after_fork() -> None:
    """In a forked child (a DataLoader worker, say): let go of everything that is the rank's own."""
    if os.getpid() == _owner:
        return
    log.guarded(marks.detach)()
    log.guarded(streams.detach)()
    log.guarded(faults.detach)()
    log.guarded(exits.detach)()
    log.guarded(caught.detach)()
    log.guarded(descriptors.detach)()
