"""Starts c10d's worker server, an HTTP server on a Unix socket. Its C++ threads respond even while Python hangs.

The server starts before any process group exists. The server object is never destroyed, because destroying it in a
forked child would shut down the parent's listener and abort the parent.
"""

from __future__ import annotations

import functools
import os
import sys
import threading

from . import descriptors, garbage, gil_answer, inside, layout, log, page, signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_server: Any = None
_backends: list[str] = []  # backends with their own recorders, from torch 2.15 on
GIL_HANDLER = "safelaunch_gil"
FLIGHT_RECORD_HANDLER = "safelaunch_flight_record"
MOST_BACKENDS = 16
_GLOO = "gloo"  # has its own recorder, which torch also reads if no backend is named


def start(base: str, words: memoryview) -> bool:
    """Starts torch's worker server at a socket next to ``base``, the path of the page that is mapped as ``words``.

    Returns False if this version of torch has none.
    """
    path = base + layout.SERVER_SUFFIX
    try:
        from torch._C import _distributed_c10d as c10d

        server_class = c10d._WorkerServer
    except (ImportError, AttributeError):
        return False
    register = getattr(c10d, "_register_handler", None)
    if register is None:
        inside.listen(base, words)
    else:

        def add(name: str, answer: Callable[[Any, Any], None]) -> None:
            handler = _counted(answer, words)
            # C++ drops its reference after the interpreter is gone. If it were the last one, the process would abort.
            _never_destroy(handler)
            register(name, handler)

        add(GIL_HANDLER, _answer_gil)
        add(FLIGHT_RECORD_HANDLER, _answer_flight_record)
        add(inside.HANDLER, inside.handler(base))
        add(garbage.HANDLER, garbage.answer)
        _follow_recorders(add)
    gil_answer.remember_signal_handlers()
    global _server
    _server = _without_server_log(
        lambda: descriptors.protect_new_sockets(lambda: signals.without(lambda: server_class(path)))
    )
    _never_destroy(_server)
    return True


def _counted(answer: Callable[[Any, Any], None], words: memoryview) -> Callable[[Any, Any], None]:
    """Returns a handler that counts its calls. Counting is its last action; after that, it no longer needs the GIL."""

    def handle(request: Any, response: Any) -> None:
        try:
            answer(request, response)
        finally:
            words[layout.ANSWERED] += 1

    return handle


def _answer_gil(request: Any, response: Any) -> None:
    response.set_content(gil_answer.as_json(), "application/json")
    response.set_status(200)


def _answer_flight_record(request: Any, response: Any, **of_backend: str) -> None:
    from torch._C import _distributed_c10d as c10d

    dump: Any = c10d._dump_fr_trace  # type: ignore[attr-defined]
    response.set_content(_without_inductor(lambda: dump(**of_backend)), "application/octet-stream")
    response.set_status(200)


def keep_flight_record(path: str) -> None:
    """Writes the Flight Recorders of a rank that exits, because peers might wait for a call that it never makes."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dumps = {recorder: getattr(c10d, f"_dump_{recorder}_trace", None) for recorder in layout.RECORDERS}
    dumps |= {
        f"{layout.RECORDERS[0]}-{name}": functools.partial(c10d._dump_fr_trace, backend=name) for name in _backends
    }
    for recorder, dump in dumps.items():
        if dump is not None:
            page.note(f"{path}-{recorder}", _without_inductor(dump))


def _follow_recorders(add: Callable[[str, Callable[[Any, Any], None]], None]) -> None:
    """Adds a handler for each backend that has its own recorder, as backends do from torch 2.15 on.

    The recorder has the name that the backend's object reports, which can differ from its registered name (``nccl``
    makes an ``nccl2``). torch has no list of recorders, but the server lists its handlers even while Python hangs.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @log.guarded
    def note(group: Any) -> None:
        for device in group._device_types:
            name = group._get_backend(device).name()
            fit = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
            if fit and name not in (_GLOO, *_backends) and len(_backends) < MOST_BACKENDS:
                _backends.append(name)
                add(f"{FLIGHT_RECORD_HANDLER}_{name}", functools.partial(_answer_flight_record, backend=name))

    @functools.wraps(attach)
    def attaching(group: Any, *args: Any, **kwargs: Any) -> None:
        attach(group, *args, **kwargs)
        if group in c10d._world.pg_flight_recorder_hooks:
            note(group)

    c10d._maybe_attach_flight_recorder = attaching


def _without_inductor(dump: Callable[[], bytes]) -> bytes:
    """Calls ``dump`` while ``torch._inductor`` looks absent to this thread, unless it has already been imported.

    To name the frames of compiled code, torch checks whether ``torch._inductor`` exists, and this check imports it.
    That loads 800 modules, costs a second of CPU time in every rank at once, and waits forever if the rank hangs in an
    import.
    """
    torch = sys.modules["torch"]
    if "_inductor" in vars(torch):
        return dump()
    stand_in = _NotImported(threading.get_ident())
    vars(torch)["_inductor"] = stand_in
    try:
        return dump()
    finally:
        if vars(torch).get("_inductor") is stand_in:
            del vars(torch)["_inductor"]


class _NotImported:
    """Replaces ``torch._inductor``.

    It has no attributes for thread ``owner``, and acts as the real module for others.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._owner:
            raise AttributeError(name)
        import importlib

        return getattr(importlib.import_module("torch._inductor"), name)


def _never_destroy(thing: object) -> None:
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def stop() -> None:
    """Stops the server when the process that started it exits, because a running server sometimes aborts the rank.

    The caller ensures that no handler needs the GIL, because ``shutdown`` holds the GIL while it waits for handlers.
    """
    if _server is not None:
        _without_server_log(_server.shutdown)


def _without_server_log(make: Callable[[], object]) -> object:
    """Calls ``make`` with descriptor 2 redirected to memory, then writes all lines except the server's to stderr."""
    try:
        sys.stderr.flush()
        kept = os.memfd_create("safelaunch-stderr", os.MFD_CLOEXEC)
        real = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr, or no free descriptor: the server's lines do no harm
        return make()
    try:
        os.dup2(kept, 2, inheritable=True)
        try:
            return make()
        finally:
            os.dup2(real, 2, inheritable=True)
            written = os.pread(kept, 1 << 20, 0)
            for line in written.splitlines(keepends=True):
                if b"WorkerServer.cpp" not in line:
                    os.write(2, line)
    finally:
        os.close(real)
        os.close(kept)
