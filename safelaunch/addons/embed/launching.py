"""``safelaunch.launch``: torch's ``elastic_launch`` with the watchdog beside it.

The caller stays what it is under ``elastic_launch``: torch's agent, the parent of the ranks. The supervisor is another
process beside it (``addons.embed.supervisor``). During the call, variables in ``os.environ`` start the beacon in
the ranks, which inherit them; in a rank that is no new interpreter, ``beacon.entrypoint`` does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from safelaunch.addons.embed.wire import (
    Connection,
    Done,
    FromSupervisor,
    LaunchRequest,
    RanksEnded,
    Ready,
    Refused,
    Stop,
    Stopping,
)
from safelaunch.beacon import entrypoint as ranks
from safelaunch.beacon.durations import seconds_of
from safelaunch.cli.api import interpreter
from safelaunch.model import Verdict
from safelaunch.settings.options import BY_FLAG, LaunchOptions, Option
from safelaunch.system import errors, procstat
from safelaunch.system.console import say
from safelaunch.system.errors import DurationError, SafelaunchError, UsageError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig
    from typing_extensions import Unpack

# --- safelaunch's options as keywords of ``safelaunch.launch`` --------------------------------------------------------


def words_of(options: Mapping[str, object]) -> tuple[tuple[str, str | None], ...]:
    """The options as the command line's flags and values. What is unknown or wrong is found where those are.

    Raises DurationError for what should be a duration and is none.
    """
    found: list[tuple[str, str | None]] = []
    for name, value in options.items():
        flag = "--config" if name == "config_file" else f"--{name.replace('_', '-')}"
        option = BY_FLAG.get(flag)
        if option is not None and option.is_duration and value is not None and not _is_switch(option, value):
            found.append((flag, _duration(name, option, value)))
        elif name == "watch":
            found += [] if value else [("--no-watch", None)]
        elif isinstance(value, bool):
            found += [(flag, None)] if value else []
        elif isinstance(value, (list, tuple)):
            found += [(flag, os.fspath(one)) for one in value]
        elif value is not None:
            found.append((flag, str(value)))
    return tuple(found)


def _is_switch(option: Option, value: object) -> bool:
    return option.value_is_optional and isinstance(value, bool)


def _duration(name: str, option: Option, value: object) -> str:
    """The value as the command line has it."""
    try:
        text = value if isinstance(value, str) else f"{seconds_of(value):.15g}"
        option.parse(text)
    except ValueError:
        raise DurationError(f"{name}: {value!r} is not {option.expects}, or a timedelta") from None
    return text


T = TypeVar("T")


class HangError(SafelaunchError):
    """The watchdog ended a hung job. ``verdict`` says who hung it and why; ``bundle`` is the evidence.

    ``verdict`` is None only if it could not be had, ``bundle`` also where it could not be written.
    """

    exit_code = 124

    def __init__(self, verdict: Verdict | None = None, bundle: Path | None = None) -> None:
        super().__init__(
            verdict.summary if verdict is not None else "The job hung, and was ended.",
            f"The evidence is in {bundle}; open report.html there." if bundle is not None else "",
        )
        self.args = (verdict, bundle)
        self.verdict = verdict
        self.bundle = bundle


class Launch(Generic[T]):
    """A job that is started by calling it, like torch's ``elastic_launch``. ``launch`` makes one.

    After a call, ``verdict`` and ``bundle`` are those of the newest incident of the run, whether it hung, crashed, or
    went on; None if there was none.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., T] | str | None,
        own: Sequence[tuple[str, str | None]] = (),
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._own = tuple(own)
        self.verdict: Verdict | None = None
        self.bundle: Path | None = None

    def __call__(self, *args: Any) -> dict[int, T]:
        """Runs the entrypoint on every rank of this node; returns what it returned, by global rank.

        Raises ChildFailedError if a rank fails, as ``elastic_launch`` does; HangError if the watchdog ended the job;
        UsageError, before anything starts, for an option that is wrong.
        """
        from torch.distributed.elastic.multiprocessing import api as workers

        self.verdict = self.bundle = None
        if _is_inside_a_run():
            return self._run(self._entrypoint, args)
        beside = _SupervisorProcess.start(_request(self._config, self._entrypoint, args, self._own))
        if beside is None:
            return self._run(self._entrypoint, args)
        try:
            with _environment(beside.env), beside.reported_to(workers):
                results = self._run(beside.watched(self._entrypoint), args)
        except BaseException as error:
            if self._finish(beside, failed=True).hung:
                raise HangError(self.verdict, self.bundle) from _cause(error)
            raise
        self._finish(beside, failed=False)
        return results

    def _run(self, entrypoint: Callable[..., T] | str | None, args: tuple[Any, ...]) -> dict[int, T]:
        from torch.distributed.launcher.api import elastic_launch

        results: dict[int, T] = elastic_launch(self._config, entrypoint)(*args)
        return results

    def _finish(self, beside: _SupervisorProcess, *, failed: bool) -> Done:
        told = beside.finish(failed=failed)
        self.verdict = told.verdict
        self.bundle = Path(told.bundle) if told.bundle else None
        return told


def _cause(error: BaseException) -> BaseException | None:
    """What is shown as the cause of a HangError: that ranks which were ended failed, but not our own stop."""
    return None if isinstance(error, ranks.module("agent").Stopped) else error


@overload
def launch(config: LaunchConfig, entrypoint: Callable[..., T], **options: Unpack[LaunchOptions]) -> Launch[T]: ...
@overload
def launch(config: LaunchConfig, entrypoint: str | None, **options: Unpack[LaunchOptions]) -> Launch[None]: ...
def launch(
    config: LaunchConfig, entrypoint: Callable[..., T] | str | None, **options: Unpack[LaunchOptions]
) -> Launch[Any]:
    """Launches ``entrypoint`` on every rank, watched: use it in place of torch's ``elastic_launch``.

    ``results = safelaunch.launch(config, train)(arguments)`` takes torch's own ``LaunchConfig``, returns the same
    ``{rank: result}``, and raises the same ``ChildFailedError``. If the job hangs, the watchdog ends it, and
    ``HangError`` says why.

    ``entrypoint``: a function, or a program whose arguments are given to the call. ``options``: see ``Options``. The
    environment, the configuration file and presets count as they do on the command line. Raises ValueError for a
    keyword that should be a duration and is none.
    """
    return Launch(config, entrypoint, words_of(options))


# --- the request ------------------------------------------------------------------------------------------------------


def _request(
    config: LaunchConfig, entrypoint: object, args: tuple[Any, ...], own: tuple[tuple[str, str | None], ...]
) -> LaunchRequest:
    import torch

    itself = procstat.read(os.getpid())
    return LaunchRequest(
        own=own,
        torchrun=(
            f"--nnodes={config.min_nodes}:{config.max_nodes}",
            f"--nproc-per-node={config.nproc_per_node}",
            f"--max-restarts={config.max_restarts}",
            f"--rdzv-backend={config.rdzv_backend}",
            f"--rdzv-endpoint={config.rdzv_endpoint}",
            f"--rdzv-id={config.run_id}",
        ),
        script=_script(entrypoint, args),
        argv=(sys.executable, *sys.orig_argv[1:]),
        python=sys.executable,
        torch_package=os.fspath(Path(torch.__file__).parent),
        torch_version=str(torch.__version__),
        pid=os.getpid(),
        start_ticks=itself.start_ticks if itself is not None else 0,
    )


def _script(entrypoint: object, args: tuple[Any, ...]) -> tuple[str, ...]:
    """What runs, as words: the function's name, or the script and its arguments."""
    if not isinstance(entrypoint, str):
        return (str(getattr(entrypoint, "__name__", type(entrypoint).__name__)),)
    words = [entrypoint, *(str(arg) for arg in args)]
    if entrypoint == sys.executable or Path(entrypoint).name.startswith("python"):
        scripts = [place for place, word in enumerate(words[1:], 1) if not word.startswith("-")]
        return tuple(words[scripts[0] :]) if scripts else tuple(words)
    return tuple(words)


def _is_inside_a_run() -> bool:
    """Whether a supervisor watches this process already, under ``safelaunch exec``: it sees these ranks as well."""
    return "SAFELAUNCH_RUN_DIR" in os.environ and Path(os.environ["SAFELAUNCH_RUN_DIR"]).is_dir()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for what this process starts meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            elif os.environ.get(name) == changes[name]:
                del os.environ[name]


# --- the supervisor ---------------------------------------------------------------------------------------------------


class _SupervisorProcess:
    """The supervisor's process, as the caller sees it."""

    def __init__(self, process: subprocess.Popen[bytes], line: Connection, ready: Ready) -> None:
        self._process = process
        self._line = line
        self._stop = False
        self._done: Done | None = None
        self.env = ready.env
        self._run_dir = ready.run_dir

    @classmethod
    def start(cls, request: LaunchRequest) -> _SupervisorProcess | None:
        """Starts it, and waits until the job may start; None if that is impossible, and the job goes unwatched.

        Raises what the supervisor raises: a UsageError.
        """
        ours, theirs = socket.socketpair()
        try:
            # In a session of its own: Ctrl-C is for the caller.
            process = subprocess.Popen(
                [*interpreter("safelaunch.addons.embed.supervisor"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            say(f"cannot watch this job: no supervisor could be started ({error.strerror or error})")
            return None
        finally:
            theirs.close()
        line = Connection(ours, FromSupervisor)
        line.say(request)
        answer = line.wait()
        if isinstance(answer, Ready):
            return cls(process, line, answer)
        line.close()
        process.wait()
        if isinstance(answer, Refused):
            kind = getattr(errors, answer.kind, UsageError)
            raise kind(answer.message, answer.fix)
        say(f"cannot watch this job: its supervisor ended with {process.returncode}")
        return None

    def watched(self, entrypoint: Callable[..., T] | str | None) -> Callable[..., T] | str | None:
        """What the ranks are to run: a program has the beacon by its environment."""
        return ranks.WatchedFunction(entrypoint, self.env) if self._run_dir and callable(entrypoint) else entrypoint

    @contextmanager
    def reported_to(self, workers: Any) -> Iterator[None]:
        """Reports to it what torch's launcher does meanwhile; ``workers``: torch's module of worker processes."""
        if not self._run_dir:
            yield
            return
        agent = ranks.module("agent")
        detach = agent.attach(workers, self._run_dir, self._process.pid, self._asks_to_stop, self._stopping)
        try:
            yield
        finally:
            detach()

    def _asks_to_stop(self) -> bool:
        for message in self._line.heard():
            if isinstance(message, Stop):
                self._stop = True
            elif isinstance(message, Done):
                self._done = message
        return self._stop

    def _stopping(self) -> None:
        self._say(Stopping())

    def _say(self, message: Stopping | RanksEnded) -> None:
        self._line.say(message)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCHLD)  # wakes it

    def finish(self, *, failed: bool) -> Done:
        """Tells it that no rank is left, and waits until everything is written."""
        self._say(RanksEnded(failed))
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # if somebody has stopped it, we would wait for ever
        while self._done is None and (message := self._line.wait()) is not None:
            if isinstance(message, Done):
                self._done = message
        self._line.close()
        self._process.wait()
        if self._done is None:
            self._clean_up()
        return self._done or Done()

    def _clean_up(self) -> None:
        """After a supervisor that was killed, which is its own way to say nothing and to remove nothing."""
        say(f"the supervisor of this job ended with {self._process.returncode} before it: the rest went unwatched")
        if self._run_dir:
            rmtree(self._run_dir, ignore_errors=True)
