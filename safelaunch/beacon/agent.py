"""The beacon in the torchrun agent, which is the only process that knows its workers' pids and exit codes.

The beacon appends one JSON object per line to ``agent.events``. Each has a ``time_unix_s``:

- ``{"event": "started", "attempt", "master_port", "world_size", "workers": {rank: [local_rank, pid, start_ticks]}}``
- ``{"event": "failing", "attempt", "exits": {rank: returncode}, "error"}``, before the agent ends the peers of a failed
  rank, or all ranks because it failed itself with ``error``
- ``{"event": "closed", "attempt", "exits"}``, after all workers have ended
- ``{"event": "raised", "error", "message"}``: an exception ended the agent itself
"""

from __future__ import annotations

import os
import sys
from time import time

from . import imports, layout, lifeline, log, marks, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

MOST_OF_ERROR = 500  # characters

_words = memoryview(bytes(layout.SIZE)).cast("Q")
_supervisor = 0


class Stopped(Exception):
    """Raised to end a launch because the supervisor is ending its hung job. See ``attach``."""


@log.guarded
def start(run_dir: str, role: str) -> None:
    log.run_dir = run_dir
    lifeline.watch(run_dir, layout.AGENT_ROLE)
    _create_page()
    _report_own_end()
    imports.after_import("torch.distributed.elastic.multiprocessing.api", _wrap_context)


@log.guarded
def start_with_first_workers(module: Any) -> None:
    """Starts the beacon in a launcher under ``safelaunch exec``, when the process first starts torch workers."""
    context = module.PContext
    original = context.start

    def start(self: Any) -> None:
        context.start = original
        _become_launcher(module)
        context.start(self)

    context.start = start


@log.guarded
def _become_launcher(module: Any) -> None:
    marks.set_launcher()
    lifeline.watch(log.run_dir, "launcher")
    _create_page()
    _wrap_context(module)


def _create_page(supervisor: int = 0) -> None:
    global _words, _supervisor
    _supervisor = supervisor or int(os.environ.get("SAFELAUNCH_SUPERVISOR_PID", "0"))
    _, _words = page.create(os.path.join(log.run_dir, layout.AGENT_PAGE))
    _words[layout.READY] = layout.MAGIC


def attach(
    module: Any, run_dir: str, supervisor: int, asks_to_stop: Callable[[], bool], stopping: Callable[[], object]
) -> Callable[[], None]:
    """Reports the workers that this process itself starts under ``safelaunch.launch``.

    Args:
        module: torch's module with ``PContext``.
        supervisor: Pid of the supervisor.
        asks_to_stop: If it returns true, the next check of the workers raises ``Stopped``.
        stopping: Called if a signal or an interrupt ends the launch, before the workers are ended.

    Returns:
        A function that ends the reporting.
    """
    log.run_dir = run_dir
    _create_page(supervisor)
    context = module.PContext
    before = context.start, context.wait, context.close
    _wrap_context(module)
    reporting_close = context.close

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = before[1](self, *args, **kwargs)
        # Called after the check, because the supervisor requests a stop before it ends ranks.
        if asks_to_stop():
            raise Stopped("the watchdog ends this job")
        return result

    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(sys.exc_info()[1]).__name__ in ("SignalException", "KeyboardInterrupt"):
            stopping()
        return reporting_close(self, *args, **kwargs)

    context.wait, context.close = wait, close

    def detach() -> None:
        context.start, context.wait, context.close = before

    return detach


def _report_own_end() -> None:
    """Makes the agent report the exception that ends it.

    If the supervisor ends a hung job with SIGTERM, no traceback is printed, because it would explain nothing and push
    the verdict off the screen.
    """
    original = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        _raised(kind, value)
        if not (_words[layout.ENDING] and kind.__name__ == "SignalException"):
            log.guarded(log.without_our_frames)(value)
            original(kind, value, value.__traceback__)

    sys.excepthook = excepthook


@log.guarded
def _raised(kind: type[BaseException], value: BaseException) -> None:
    _append_event("raised", error=kind.__name__, message=str(value)[:1000])


@log.guarded
def _append_event(event: str, **values: object) -> None:
    import json

    line = json.dumps({"event": event, "time_unix_s": time(), **values}) + "\n"
    page.append(os.path.join(log.run_dir, layout.EVENTS), line.encode())


@log.guarded
def _wrap_context(module: Any) -> None:
    context = module.PContext
    original_start, original_close = context.start, context.close

    def start(self: Any) -> None:
        original_start(self)
        _started(self)

    def close(self: Any, death_sig: Any = None, *args: Any, **kwargs: Any) -> Any:
        # With a signal, the agent ends ranks that haven't failed: at a normal end, because it must stop, or because it
        # failed.
        error = _own_error() if death_sig is not None else ""
        if death_sig is None or error:
            _failing(self, error)
        try:
            return original_close(self, death_sig, *args, **kwargs)
        finally:
            _closed(self)
            _goodbye(self)

    context.start, context.close = start, close


def _rank(context: Any, local_rank: int) -> str:
    return str(context.envs[local_rank].get("RANK", local_rank))


def _env(context: Any) -> Mapping[str, str]:
    # From one rank, for variables that all share. The kernel can have chosen MASTER_PORT.
    return next(iter(context.envs.values()), {})


def _attempt(context: Any) -> int:
    return int(_env(context).get("TORCHELASTIC_RESTART_COUNT", "0"))


@log.guarded
def _started(context: Any) -> None:
    workers = {_rank(context, local): [local, pid, page.start_ticks(pid)] for local, pid in context.pids().items()}
    _words[layout.ACK] = 0
    env = _env(context)
    where = {"master_port": str(env.get("MASTER_PORT", "")), "world_size": int(env.get("WORLD_SIZE", "0"))}
    _append_event("started", attempt=_attempt(context), **where, workers=workers)


def _exits(context: Any) -> dict[str, int]:
    codes = {}
    for local, handler in getattr(context, "subprocess_handlers", {}).items():
        codes[_rank(context, local)] = handler.proc.poll()
    spawned = getattr(getattr(context, "_pc", None), "processes", ())
    for local, process in enumerate(spawned):
        codes[_rank(context, local)] = process.exitcode
    return {rank: code for rank, code in codes.items() if code is not None}


def _own_error() -> str:
    # Empty if a signal or the supervisor caused the exception.
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or isinstance(error, Stopped) or type(error).__name__ == "SignalException":
        return ""
    return f"{type(error).__name__}: {error}"[:MOST_OF_ERROR]


@log.guarded
def _failing(context: Any, error: str) -> None:
    exits = _exits(context)
    if error or any(exits.values()):
        _append_event("failing", attempt=_attempt(context), exits=exits, error=error)
        page.wait_for_ack(_words, _supervisor, layout.AGENT_HOLD_S)


@log.guarded
def _closed(context: Any) -> None:
    _append_event("closed", attempt=_attempt(context), exits=_exits(context))


@log.guarded
def _goodbye(context: Any) -> None:
    # The supervisor must notify other nodes that the job stops here: the store that they read might be in this process.
    # torchrun always sends its workers SIGTERM; only a SignalException in flight shows a request to stop.
    stopped = type(sys.exc_info()[1]).__name__ == "SignalException"
    env = _env(context)
    if stopped and env.get("WORLD_SIZE", "") != env.get("LOCAL_WORLD_SIZE", ""):  # other nodes have ranks
        page.wait_for_ack(_words, _supervisor, layout.GOODBYE_S)
