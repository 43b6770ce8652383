"""Answers ``safelaunch_gil`` in a rank's Python, with facts that only this interpreter knows.

Any answer shows that no thread holds the GIL.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from .variables import MOST_FRAMES, OPTIMIZED, in_variables, upwards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_c_handlers: dict[int, bytes] = {}  # signals that Python and the beacon handle themselves
_ARGS: Any = vars(BaseException)["args"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
MOST_EXCEPTIONS = 16
MOST_MEMBERS = 200_000  # in all groups together
MOST_POSTED = 256
MOST_LOADERS = 8
MOST_CHARACTERS = 200  # in a description
MOST_PREFIXES = 8
_SIGINT, _SIGTERM = 2, 15
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def as_json() -> bytes:
    """Returns the answer as JSON.

    Never raises: an error must not reach C++, and any answer is better than none.
    """
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
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)


def _groups() -> tuple[dict[str, list[int]], int | None]:
    """Returns each process group's global ranks by name, in group order, and how many groups this rank created."""
    world = _world()
    if world is None:
        return {}, None
    names, groups, left = world.pg_names, {}, MOST_MEMBERS
    rank = os.environ.get("RANK", "")
    for group, members in list(world.pg_group_ranks.items()):
        left -= len(members)
        if group in names and left >= 0:
            # With processes of other jobs, a group can have its own numbers, which aren't ranks of this job.
            is_of_the_job = not rank.isdecimal() or members.get(int(rank)) == group.rank()
            groups[str(names[group])] = sorted(members, key=members.__getitem__) if is_of_the_job else []
    return groups, int(world.group_count)


def _descriptions() -> dict[str, str]:
    # For example, ``mesh_tp`` for dimension ``tp`` of a DeviceMesh.
    world = _world()
    names = dict(world.pg_names) if world is not None else {}
    descriptions = {str(name): getattr(group, "group_desc", "") for group, name in names.items()}
    return {name: text[:MOST_CHARACTERS] for name, text in descriptions.items() if type(text) is str and text}


def _stores() -> dict[str, str]:
    """Returns the address of each process group's rendezvous store.

    If their stores differ, two groups with the same name and ranks are different groups.
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
        else:  # of another kind, so it can't be compared with another rank's
            addresses[str(world.pg_names[group])] = f"{socket.gethostname()}:{os.getpid()}"
    return addresses


def _handlers() -> list[int]:
    """Returns the signals that the script handles, in Python or by a handler that it installed in C."""
    import signal

    present = {number: signal.getsignal(number) for number in signal.valid_signals()}
    of_python = {
        int(number)
        for number, handler in present.items()
        if callable(handler) and handler is not signal.default_int_handler
    }
    return sorted(of_python | {number for number, usual in _c_handlers.items() if _c_handler(number) != usual})


def remember_signal_handlers() -> None:
    """Remembers the handlers of SIGINT and SIGTERM before the script can replace them in C."""
    for number in (_SIGINT, _SIGTERM):
        _c_handlers[number] = _c_handler(number)


def _c_handler(number: int) -> bytes:
    # glibc's ``struct sigaction`` begins with the address that the kernel calls.
    import ctypes

    action = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action.raw[:8]


def _torch_directories() -> list[str]:
    # Frames and the kernel can name the directory differently.
    place = os.path.dirname(sys.modules["torch"].__file__ or "")
    return list(dict.fromkeys((place, os.path.realpath(place))))


def _foreign_backend() -> bool:
    """Returns whether a process group has a backend that isn't torch's.

    The ends of such a backend's calls are unknown.
    """
    world = _world()
    own = sys.modules.get("torch._C._distributed_c10d")
    for group in list(world.pg_names) if world is not None else ():
        parts = (group, *(group._get_backend(device) for device in group._device_types))
        if any(getattr(own, type(part).__name__, None) is not type(part) for part in parts):
            return True
    return False


def _handled_exceptions() -> list[dict[str, object]]:
    """Returns the exception that each thread is handling in an ``except`` or ``finally``.

    Doesn't run the exception's code. In ``sys.excepthook`` or an exit handler, the main thread is handling the
    exception that ended its script.
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
    # A running script's outermost frame is a module's or runpy's.
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
    """Returns each thread's current batch of sends and receives (``P2POp``), from its innermost function that has any.

    If a variable shows that the thread is waiting for a send, receives are left out, and vice versa. gloo doesn't
    record sends or receives, and a rank that waits for one has no c10d frame on its stack.
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
    """Returns the operations in a function's variables if its code refers to ``P2POp`` or ``batch_isend_irecv``."""
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
    """Returns the operations in the direction (send or receive) of the work that the loop waits for.

    Such a loop is ``for work in works: work.wait()``. Returns all operations if the direction is unknown.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Work", None)
    works = [value for value in list(variables.values()) if kind is not None and type(value) is kind]
    if len(works) != 1 or works[0].is_completed():
        return ops
    try:
        works[0]._source_rank()
        sends = False
    except RuntimeError:  # only a receive has a source rank
        sends = True
    return [op for op in ops if _sends(op) is sends] or ops


def _batches() -> dict[str, int]:
    """Returns each DataLoader's batch size by variable name, in the script and in functions that create DataLoaders."""
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
