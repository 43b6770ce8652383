"""Reports a rank's stacks from inside the process, for nodes that don't permit py-spy.

Nothing here runs until the supervisor asks. The answer goes to a Unix socket next to the rank's page: JSON in the form
of ``py-spy dump --json``, facts about each thread that the kernel shows only to the process itself, and a descriptor of
the process's memory.
"""

from __future__ import annotations

import _socket
import _thread
import os
import sys
import threading

from . import layout, log, page, signals
from .variables import OPTIMIZED, in_variables, upwards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

HANDLER = "safelaunch_stacks"
SEND_S = 1.0
MOST_THREADS = 4096
MOST_FRAMES = 1024  # innermost frames of a thread
MOST_CHARACTERS = 4096  # in a local variable
MOST_BITS = 64  # in a number
MOST_CHILDREN = 256
_C10D = "torch/distributed/distributed_c10d.py"
_EXTENSIONS = "torch/utils/cpp_extension.py"
_DATALOADER = "torch/utils/data/dataloader.py"
_READS_LOCALS = {"locals", "vars", "dir", "eval", "exec"}


def handler(base: str) -> Callable[[Any, Any], None]:
    """Returns a handler for c10d's worker server. ``base`` is the path of the rank's page."""

    def answer(request: Any, response: Any) -> None:
        _answer(base + layout.ASK_SUFFIX)
        response.set_content(b"{}", "application/json")
        response.set_status(200)

    return answer


@log.guarded
def _answer(path: str) -> None:
    with _Closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)) as connection:
        connection.settimeout(SEND_S)
        try:
            connection.connect(path)
        except OSError:
            return  # the supervisor waits no longer
        send(connection)


@log.guarded
def listen(base: str, words: memoryview) -> None:
    """Starts a thread that answers on a separate socket, because torch's worker server accepts no handlers."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(base + layout.STACKS_SUFFIX)
    os.chmod(base + layout.STACKS_SUFFIX, 0o600)
    listener.listen(4)
    fd = page.out_of_the_way(listener.detach())
    signals.without(lambda: _thread.start_new_thread(_serve, (fd, words, os.getpid())))
    os.register_at_fork(after_in_child=lambda: _close(fd))


@log.guarded
def _serve(fd: int, words: memoryview, owner: int) -> None:
    listener: Any = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
    while os.getpid() == owner:
        number, _ = listener._accept()
        try:
            with _Closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, number)) as connection:
                connection.settimeout(SEND_S)
                log.guarded(send)(connection)
        finally:
            words[layout.ANSWERED] += 1


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


class _Closing:
    # ``_socket``'s own type is no context manager

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> Any:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def send(connection: Any) -> None:
    """Sends a descriptor of this process's memory with the first byte, then the answer up to the end of the stream."""
    data = b"\n" + page.as_json(snapshot()).encode("utf-8", "replace")
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        memory = -1
    try:
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, memory.to_bytes(4, sys.byteorder))] if memory >= 0 else []
        sent = connection.sendmsg([data[:1]], rights, _socket.MSG_NOSIGNAL)
        while sent < len(data):  # SIGPIPE would end the script
            sent += connection.send(data[sent : sent + (1 << 16)], _socket.MSG_NOSIGNAL)
    except OSError:
        pass  # the supervisor waits no longer
    finally:
        if memory >= 0:
            os.close(memory)


def snapshot() -> dict[str, object]:
    """Returns the answer.

    Reads the stacks first, because they all show the same moment only while this thread keeps the GIL.
    """
    threads = _stacks()
    roles = log.guarded(_roles)() or {}
    return {"threads": threads, "calls": _task_files("syscall"), "waits": _task_files("wchan"), "roles": roles}


def _stacks() -> list[dict[str, object]]:
    # The answering thread is included: without frames, it would look like a library's.
    return [_stack(ident, frame) for ident, frame in list(sys._current_frames().items())[:MOST_THREADS]]


def _stack(ident: int, innermost: FrameType) -> dict[str, object]:
    registered: Any = getattr(threading, "_active", {}).get(ident)
    frames: list[dict[str, object]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        entry: dict[str, object] = {
            "name": getattr(code, "co_qualname", code.co_name),
            "filename": code.co_filename,
            "line": frame.f_lineno or 0,
        }
        if _tells(code, innermost=not frames) and (variables := _variables(frame)):
            entry["locals"] = variables
        frames.append(entry)
        frame = frame.f_back
    thread: dict[str, object] = {"thread_id": ident, "frames": frames}
    name, tid = getattr(registered, "_name", None), getattr(registered, "_native_id", None)
    tid = _thread.get_native_id() if ident == _thread.get_ident() else tid
    if type(name) is str:
        thread["thread_name"] = name
    if type(tid) is int and os.path.exists(f"/proc/self/task/{tid}"):
        thread["os_thread_id"] = tid
    return thread


def _tells(code: CodeType, *, innermost: bool) -> bool:
    # The verdict reads variables of c10d's functions, and of functions that wait for a key or a lock.
    file = code.co_filename
    if file.endswith((_C10D, _EXTENSIONS)) or "/filelock/" in file:
        return True
    return innermost and not {"get", "wait"}.isdisjoint(code.co_names)


def _variables(frame: FrameType) -> list[dict[str, object]]:
    """Returns the function's variables that are numbers or strings.

    Before Python 3.13, reading variables creates a copy of all of them, which is cleared afterwards. Functions that
    might use this copy, through ``locals()`` or a debugger, are skipped.
    """
    code = frame.f_code
    if not code.co_flags & OPTIMIZED or frame.f_trace is not None:
        return []
    if sys.version_info < (3, 13) and not _READS_LOCALS.isdisjoint(code.co_names):
        return []
    return in_variables(frame, _shown) or []


def _shown(variables: Any) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = []
    for name, value in list(variables.items()):
        is_small = type(value) is int and value.bit_length() <= MOST_BITS
        if is_small or (type(value) is str and len(value) <= MOST_CHARACTERS):
            shown.append({"name": name, "repr": repr(value)})
    return shown


def _task_files(name: str) -> dict[str, str]:
    contents: dict[str, str] = {}
    for tid in os.listdir("/proc/self/task")[:MOST_THREADS]:
        try:
            fd = os.open(f"/proc/self/task/{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            contents[tid] = os.read(fd, 512).decode("ascii", "replace").strip()
        except OSError:
            pass  # the thread has ended
        finally:
            os.close(fd)
    return contents


def _roles() -> dict[str, str]:
    """Returns pid → role for the workers of each DataLoader in which a thread of this process is waiting."""
    roles: dict[str, str] = {}
    for innermost in list(sys._current_frames().values()):
        for frame in upwards(innermost):
            if frame.f_code.co_filename.endswith(_DATALOADER) and frame.f_code.co_varnames[:1] == ("self",):
                waiting: Any = in_variables(frame, lambda variables: variables.get("self"))
                pids = [
                    getattr(worker, "pid", None) for worker in list(getattr(waiting, "_workers", ()))[:MOST_CHILDREN]
                ]
                roles.update({str(pid): "dataloader worker" for pid in pids if type(pid) is int})
                break
    return roles
