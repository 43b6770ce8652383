"""The beacon of the torchrun agent, which knows what nobody else does: its workers' pids and how they ended.

It appends one JSON object a line to ``agent.events``:
``{"event": "agent", "pid"}``, ``{"event": "started", "attempt", "master_port", "workers": {rank: [local_rank, pid,
start_ticks]}}``,
``{"event": "failing", "attempt", "exits": {rank: returncode}}`` before the peers of a failed rank are ended, and
``{"event": "closed", "attempt", "exits"}`` after. Each carries ``time_unix_s``.
"""

from __future__ import annotations

import os
import signal
import sys
from time import time

from . import imports, layout, log, marks, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_words = memoryview(bytes(layout.SIZE)).cast("Q")
_supervisor = 0


@log.guarded
def start(run_dir: str, role: str) -> None:
    """Wakes the beacon in the torchrun agent; from here on its children know whose they are."""
    global _words, _supervisor
    log.run_dir = run_dir
    _supervisor = int(os.environ.get("SAFELAUNCH_SUPERVISOR_PID", "0"))
    os.environ["SAFELAUNCH_AGENT_PID"] = str(os.getpid())
    _, _words = page.create(os.path.join(run_dir, layout.AGENT_PAGE))
    _words[layout.READY] = layout.MAGIC
    _hush_our_own_stop()
    imports.after_import("torch.distributed.elastic.multiprocessing.api", _wrap_context)


@log.guarded
def may_become_one(module: Any) -> None:
    """Under ``safelaunch exec`` a launcher is known by what it does: it starts torch's elastic workers."""
    global _supervisor
    _supervisor = int(os.environ.get("SAFELAUNCH_SUPERVISOR_PID", "0"))
    context = module.PContext
    original = context.start

    def start(self: Any) -> None:
        context.start = original
        _become(module)
        context.start(self)

    context.start = start


@log.guarded
def _become(module: Any) -> None:
    global _words
    marks.is_launcher()
    _, _words = page.create(os.path.join(log.run_dir, layout.AGENT_PAGE))
    _words[layout.READY] = layout.MAGIC
    _wrap_context(module)


def _hush_our_own_stop() -> None:
    """When the supervisor ends a hung job, torchrun's traceback of our SIGTERM says nothing and hides the verdict."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        if not (_words[layout.ENDING] and kind.__name__ == "SignalException"):
            original(kind, value, traceback)

    sys.excepthook = excepthook


@log.guarded
def _tell(event: str, **values: object) -> None:
    import json

    line = json.dumps({"event": event, "time_unix_s": time(), **values}) + "\n"
    path = os.path.join(log.run_dir, layout.EVENTS)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


@log.guarded
def _wrap_context(module: Any) -> None:
    log.guarded(page.die_with_parent)(_supervisor, signal.SIGTERM)
    context = module.PContext
    original_start, original_close = context.start, context.close

    def start(self: Any) -> None:
        original_start(self)
        _started(self)

    def close(self: Any, death_sig: Any = None, *args: Any, **kwargs: Any) -> Any:
        if death_sig is None:  # not because somebody stops the job
            _failing(self)
        try:
            return original_close(self, death_sig, *args, **kwargs)
        finally:
            _closed(self)

    context.start, context.close = start, close


def _rank(context: Any, local_rank: int) -> str:
    return str(context.envs[local_rank].get("RANK", local_rank))


def _attempt(context: Any) -> int:
    for env in context.envs.values():
        return int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return 0


def _master_port(context: Any) -> str:
    """MASTER_PORT as the ranks have it: torchrun may have let the kernel choose it."""
    for env in context.envs.values():
        return str(env.get("MASTER_PORT", ""))
    return ""


@log.guarded
def _started(context: Any) -> None:
    workers = {_rank(context, local): [local, pid, page.start_ticks(pid)] for local, pid in context.pids().items()}
    _words[layout.ACK] = 0
    _tell("started", attempt=_attempt(context), master_port=_master_port(context), workers=workers)


def _exits(context: Any) -> dict[str, int]:
    """Return codes known so far by rank; ``poll`` of a subprocess that the agent owns is what the agent does itself."""
    codes = {}
    for local, handler in getattr(context, "subprocess_handlers", {}).items():
        codes[_rank(context, local)] = handler.proc.poll()
    spawned = getattr(getattr(context, "_pc", None), "processes", ())
    for local, process in enumerate(spawned):
        codes[_rank(context, local)] = process.exitcode
    return {rank: code for rank, code in codes.items() if code is not None}


@log.guarded
def _failing(context: Any) -> None:
    exits = _exits(context)
    if any(exits.values()):
        _tell("failing", attempt=_attempt(context), exits=exits)
        page.wait_for_ack(_words, _supervisor)


@log.guarded
def _closed(context: Any) -> None:
    _tell("closed", attempt=_attempt(context), exits=_exits(context))
