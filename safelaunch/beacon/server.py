"""Starts c10d's worker server: an HTTP server on a unix socket whose C++ threads answer while Python hangs.

The server starts before any process group exists, and its object is never destroyed: destroying it in a forked child
would shut down the parent's listener and abort the parent.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading

from . import descriptors, inside, layout, log, page, signals
from .variables import MOST_FRAMES, OPTIMIZED, in_variables, upwards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_server: Any = None
_c_handlers: dict[int, bytes] = {}  # for the signals that Python and the beacon handle themselves
_backends: list[str] = []  # backends whose calls torch 2.15 and later records under the backend's own name
_ARGS: Any = vars(BaseException)["args"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
MOST_EXCEPTIONS = 16
MOST_MEMBERS = 200_000  # in all groups together
MOST_POSTED = 256
MOST_LOADERS = 8
MOST_CHARACTERS = 200  # in a description
GIL_HANDLER = "safelaunch_gil"
FLIGHT_RECORD_HANDLER = "safelaunch_flight_record"
MOST_BACKENDS = 16
MOST_PREFIXES = 8
_SIGINT, _SIGTERM = 2, 15
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GLOO = "gloo"  # records by itself, and is the recorder that torch reads if no backend is named


def start(base: str, words: memoryview) -> bool:
    """Starts the server. Returns False if this torch has none. ``base`` is the path of the page ``words``."""
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
            # C++ drops its reference after the interpreter is gone; if that were the last one, the process would abort.
            _never_destroy(handler)
            register(name, handler)

        add(GIL_HANDLER, _answer_gil)
        add(FLIGHT_RECORD_HANDLER, _answer_flight_record)
        add(inside.HANDLER, inside.handler(base))
        _follow_recorders(add)
    for number in (_SIGINT, _SIGTERM):
        _c_handlers[number] = _c_handler(number)
    global _server
    _server = _without_server_log(
        lambda: descriptors.protect_new_sockets(lambda: signals.without(lambda: server_class(path)))
    )
    _never_destroy(_server)
    return True


def _counted(answer: Callable[[Any, Any], None], words: memoryview) -> Callable[[Any, Any], None]:
    """Returns a handler that counts its calls as its last act: after that it doesn't need the GIL."""

    def handle(request: Any, response: Any) -> None:
        try:
            answer(request, response)
        finally:
            words[layout.ANSWERED] += 1

    return handle


def _answer_gil(request: Any, response: Any) -> None:
    response.set_content(_told(), "application/json")
    response.set_status(200)


def _told() -> bytes:
    """Returns the answer. An error here must not reach C++: only the fact that it answers matters."""
    try:
        import contextlib
        import json

        groups, made = _groups()
        facts: dict[str, object] = {"handling": _handled_exceptions(), "groups": groups, "groups_made": made}
        more = {
            "posted": _posted,
            "called": _descriptions,
            "foreign_backend": _foreign_backend,
            "batches": _batches,
            "stores": _stores,
            "handlers": _handlers,
            "torch": _torch_directories,
        }
        for name, find in more.items():
            with contextlib.suppress(Exception):  # objects that only look like c10d's
                facts[name] = find()
        return json.dumps(facts).encode()
    except Exception:  # another torch, or a class with tricks
        return b"{}"


def _world() -> Any:
    # c10d's process groups; None before they exist.
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)


def _groups() -> tuple[dict[str, list[int]], int | None]:
    """Returns each process group's global ranks by its name, in group order; and how many groups this rank created."""
    world = _world()
    if world is None:
        return {}, None
    names, groups, left = world.pg_names, {}, MOST_MEMBERS
    rank = os.environ.get("RANK", "")
    for group, members in list(world.pg_group_ranks.items()):
        left -= len(members)
        if group in names and left >= 0:
            # A group with processes of other jobs can have its own numbers: they aren't ranks of this job.
            is_of_the_job = not rank.isdecimal() or members.get(int(rank)) == group.rank()
            groups[str(names[group])] = sorted(members, key=members.__getitem__) if is_of_the_job else []
    return groups, int(world.group_count)


def _descriptions() -> dict[str, str]:
    # For example, ``mesh_tp`` for the dimension ``tp`` of a DeviceMesh.
    world = _world()
    names = dict(world.pg_names) if world is not None else {}
    descriptions = {str(name): getattr(group, "group_desc", "") for group, name in names.items()}
    return {name: text[:MOST_CHARACTERS] for name, text in descriptions.items() if type(text) is str and text}


def _stores() -> dict[str, str]:
    """Returns the address of each process group's store, by which its ranks found each other.

    Groups with the same name and ranks are different groups if their stores differ.
    """
    world = _world()
    addresses = {}
    for group, (_, store) in list(world.pg_map.items()) if world is not None else ():
        for _ in range(MOST_PREFIXES):
            store = getattr(store, "underlying_store", None) or store
        host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
        if type(host) is str and type(port) is int:
            host = socket.gethostname() if host in _LOOPBACK else host
            addresses[str(world.pg_names[group])] = f"{host}:{port}"
        elif type(path) is str:
            addresses[str(world.pg_names[group])] = f"{socket.gethostname()}:{os.path.abspath(path)}"
        else:  # of another kind: it can't be compared with another rank's
            addresses[str(world.pg_names[group])] = f"{socket.gethostname()}:{os.getpid()}"
    return addresses


def _handlers() -> list[int]:
    """Returns the signals that the script itself handles: in Python, or in C instead of Python's or the beacon's."""
    import signal

    present = {number: signal.getsignal(number) for number in signal.valid_signals()}
    of_python = {
        int(number)
        for number, handler in present.items()
        if callable(handler) and handler is not signal.default_int_handler
    }
    return sorted(of_python | {number for number, usual in _c_handlers.items() if _c_handler(number) != usual})


def _c_handler(number: int) -> bytes:
    # The kernel calls the address in the first field of glibc's ``struct sigaction``.
    import ctypes

    action = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action.raw[:8]


def _torch_directories() -> list[str]:
    # Frames and the kernel can name the directory differently.
    place = os.path.dirname(sys.modules["torch"].__file__ or "")
    return list(dict.fromkeys((place, os.path.realpath(place))))


def _foreign_backend() -> bool:
    """Returns whether a process group has a backend that isn't torch's: nothing is known about the end of its calls."""
    world = _world()
    own = sys.modules.get("torch._C._distributed_c10d")
    for group in list(world.pg_names) if world is not None else ():
        parts = (group, *(group._get_backend(device) for device in group._device_types))
        if any(getattr(own, type(part).__name__, None) is not type(part) for part in parts):
            return True
    return False


def _handled_exceptions() -> list[dict[str, object]]:
    """Returns the exception that each thread is handling, in an ``except`` or a ``finally``, without running its code.

    A main thread in ``sys.excepthook`` or an exit handler is handling the exception that ended its script.
    """
    current: Any = getattr(sys, "_current_exceptions", dict)()
    main = threading.main_thread().ident
    last = getattr(sys, "last_value", None)
    if last is not None and not _runs_script(sys._current_frames().get(main or 0)):
        current = {**current, main: last}
    handled = []
    for thread, value in list(current.items())[:MOST_EXCEPTIONS]:
        error = value[1] if isinstance(value, tuple) else value  # a triple up to Python 3.11
        if isinstance(error, BaseException):
            args = _ARGS.__get__(error)  # a class can have its own ``args``
            text = args[0] if args and type(args[0]) is str else ""
            frames = _frames(_TRACEBACK.__get__(error))
            handled.append({"thread": thread, "type": type(error).__name__, "message": text[:300], "frames": frames})
    return handled


def _runs_script(frame: Any) -> bool:
    # Only a running script has a frame of a module or of runpy as its outermost one.
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _frames(traceback: Any) -> list[dict[str, object]]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append({"file": code.co_filename, "line": traceback.tb_lineno, "function": code.co_name})
        traceback = traceback.tb_next
    return frames[::-1][:MOST_FRAMES]


def _posted() -> list[dict[str, object]]:
    """Returns the sends and receives (``P2POp``) of each thread's current batch, from its innermost function with some.

    If a variable of that function shows that the thread waits for a send, receives are left out, and vice versa. gloo
    records neither, and a rank that waits for one has no c10d frame on its stack.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "P2POp", None)
    posted: list[dict[str, object]] = []
    for thread, innermost in list(sys._current_frames().items()) if kind is not None else ():
        if len(posted) <= MOST_POSTED:
            ops = next(filter(None, (_ops_of(frame, kind) for frame in upwards(innermost))), [])
            posted += [{"thread": thread, "sends": _sends(op), "peer": int(op.peer), "tag": int(op.tag)} for op in ops]
    return posted[:MOST_POSTED]


def _sends(op: Any) -> bool:
    return "send" in getattr(op.op, "__name__", "")


def _ops_of(frame: Any, kind: type) -> list[Any]:
    """Returns the operations in the variables of a function that names the makers of batches; of no other function."""
    if not {"P2POp", "batch_isend_irecv"}.intersection(frame.f_code.co_names):
        return []

    def read(variables: Any) -> list[Any]:
        ops = []
        for value in list(variables.values()):
            each = value[:MOST_POSTED] if type(value) in (list, tuple) else (value,)
            ops += [op for op in each if type(op) is kind]
        return list({id(op): op for op in _waited_for(variables, ops)}.values())

    return in_variables(frame, read) or []


def _waited_for(variables: Any, ops: list[Any]) -> list[Any]:
    """Returns the operations with the direction of the one being waited for: ``for work in works: work.wait()``."""
    kind: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Work", None)
    works = [value for value in list(variables.values()) if kind is not None and type(value) is kind]
    if len(works) != 1 or works[0].is_completed():
        return ops
    try:
        works[0]._source_rank()
        sends = False
    except RuntimeError:  # only a receive has one
        sends = True
    return [op for op in ops if _sends(op) is sends] or ops


def _batches() -> dict[str, int]:
    """Returns the batch size of each DataLoader by its variable, in the script and in functions that create one."""
    kind: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "DataLoader", None)
    script = sys.modules.get("__main__")
    if kind is None or script is None:
        return {}
    sizes = _batches_in(vars(script), kind)
    for innermost in list(sys._current_frames().values()):
        for frame in upwards(innermost):
            if frame.f_code.co_flags & OPTIMIZED and "DataLoader" in frame.f_code.co_names:
                sizes.update(in_variables(frame, lambda variables: _batches_in(variables, kind)) or {})
    return dict(list(sizes.items())[:MOST_LOADERS])


def _batches_in(variables: Any, kind: type) -> dict[str, int]:
    sizes = {}
    for name, value in list(variables.items()):
        if kind in type(value).__mro__:
            own = vars(value)
            size = own.get("batch_size") or vars(own.get("batch_sampler")).get("batch_size")
            if type(size) is int and not name.startswith("_"):
                sizes[name] = size
    return sizes


def _answer_flight_record(request: Any, response: Any, **of_backend: str) -> None:
    from torch._C import _distributed_c10d as c10d

    dump: Any = c10d._dump_fr_trace  # type: ignore[attr-defined]
    response.set_content(_without_inductor(lambda: dump(**of_backend)), "application/octet-stream")
    response.set_status(200)


def keep_flight_record(path: str) -> None:
    """Writes the Flight Recorders of a rank that ends by itself: peers might wait for a call that it never makes."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dumps = {recorder: getattr(c10d, f"_dump_{recorder}_trace", None) for recorder in layout.RECORDERS}
    dumps |= {
        f"{layout.RECORDERS[0]}-{name}": functools.partial(c10d._dump_fr_trace, backend=name) for name in _backends
    }
    for recorder, dump in dumps.items():
        if dump is not None:
            page.note(f"{path}-{recorder}", _without_inductor(dump))


def _follow_recorders(add: Callable[[str, Callable[[Any, Any], None]], None]) -> None:
    """Adds a handler for each backend with its own recorder, from torch 2.15 on.

    The recorder has the name that the backend's object gives, which can differ from its registered name (``nccl`` makes
    an ``nccl2``). torch has no list of them; the server lists its handlers even while Python hangs.
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
    """Calls ``dump`` while ``torch._inductor`` looks absent to this thread, unless it is imported already.

    To name the frames of compiled code, torch checks for ``torch._inductor``, which imports it. That loads 800 modules,
    costs a second of CPU in every rank at once, and waits forever if the rank hangs in an import.
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
    """Stands in for ``torch._inductor``: without attributes for thread ``owner``, the real module for others."""

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
    """Stops the server at the exit of the process that started it. Left running, it sometimes aborts the rank.

    There must be no running handler that needs the GIL: ``shutdown`` waits for it while holding the GIL.
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
