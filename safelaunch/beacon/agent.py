"""The beacon of the torchrun agent, which knows what nobody else does: its workers' pids and how they ended.

It appends one JSON object a line to ``agent.events``:
``{"event": "agent", "pid"}``, ``{"event": "started", "attempt", "workers": {rank: [local_rank, pid]}}``,
``{"event": "failing", "attempt", "exits": {rank: returncode}}`` before the peers of a failed rank are ended, and
``{"event": "closed", "attempt", "exits"}`` after. Each carries ``time_unix_s``.
"""

import os
import sys
from time import time

from . import imports, layout, log, page

_words = None
_supervisor = 0


@log.guarded
def start(run_dir, role):
    """Wakes the beacon in the torchrun agent; from here on its children know whose they are."""
    global _words, _supervisor
    log.run_dir = run_dir
    _supervisor = int(os.environ.get("SAFELAUNCH_SUPERVISOR_PID", "0"))
    os.environ["SAFELAUNCH_AGENT_PID"] = str(os.getpid())
    _, _words = page.create(os.path.join(run_dir, layout.AGENT_PAGE))
    _words[layout.READY] = layout.MAGIC
    _hush_our_own_stop()
    imports.after_import("torch.distributed.elastic.multiprocessing.api", _wrap_context)


def _hush_our_own_stop():
    """When the supervisor ends a hung job, torchrun's traceback of our SIGTERM says nothing and hides the verdict."""
    original = sys.excepthook

    def excepthook(kind, value, traceback):
        if not (_words[layout.ENDING] and kind.__name__ == "SignalException"):
            original(kind, value, traceback)

    sys.excepthook = excepthook


@log.guarded
def _tell(event, **values):
    import json

    line = json.dumps({"event": event, "time_unix_s": time(), **values}) + "\n"
    path = os.path.join(log.run_dir, layout.EVENTS)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


@log.guarded
def _wrap_context(module):
    context = module.PContext
    original_start, original_close = context.start, context.close

    def start(self):
        original_start(self)
        _started(self)

    def close(self, death_sig=None, *args, **kwargs):
        if death_sig is None:  # not because somebody stops the job
            _failing(self)
        try:
            return original_close(self, death_sig, *args, **kwargs)
        finally:
            _closed(self)

    context.start, context.close = start, close


def _rank(context, local_rank):
    return context.envs[local_rank].get("RANK", str(local_rank))


def _attempt(context):
    return int(next(iter(context.envs.values()), {}).get("TORCHELASTIC_RESTART_COUNT", "0"))


@log.guarded
def _started(context):
    workers = {_rank(context, local): [local, pid] for local, pid in context.pids().items()}
    _words[layout.ACK] = 0
    _tell("started", attempt=_attempt(context), workers=workers)


def _exits(context):
    """Return codes known so far by rank; ``poll`` of a subprocess that the agent owns is what the agent does itself."""
    codes = {}
    for local, handler in getattr(context, "subprocess_handlers", {}).items():
        codes[_rank(context, local)] = handler.proc.poll()
    spawned = getattr(getattr(context, "_pc", None), "processes", ())
    for local, process in enumerate(spawned):
        codes[_rank(context, local)] = process.exitcode
    return {rank: code for rank, code in codes.items() if code is not None}


@log.guarded
def _failing(context):
    exits = _exits(context)
    if any(exits.values()):
        _tell("failing", attempt=_attempt(context), exits=exits)
        page.wait_for_ack(_words, _supervisor)


@log.guarded
def _closed(context):
    _tell("closed", attempt=_attempt(context), exits=_exits(context))
