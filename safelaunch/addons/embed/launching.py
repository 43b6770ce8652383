"""Implements ``safelaunch.launch``: torch's ``elastic_launch``, with the watchdog.

As with ``elastic_launch``, the caller acts as torch's agent and is the parent of the ranks. The supervisor is a
separate process (``addons.embed.supervisor``). During the call, variables in ``os.environ`` start the beacon in each
rank; in ranks that are forks of the caller, ``beacon.entrypoint`` starts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from safelaunch.addons.embed.keywords import flags_of
from safelaunch.addons.embed.request import launch_request
from safelaunch.addons.embed.supervisor_process import SupervisorProcess
from safelaunch.addons.embed.wire import (
    Done,
)
from safelaunch.beacon import entrypoint as ranks
from safelaunch.model import Verdict
from safelaunch.settings.options import LaunchOptions
from safelaunch.system.errors import SafelaunchError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig
    from typing_extensions import Unpack


T = TypeVar("T")


class HangError(SafelaunchError):
    """The watchdog ended a hung job.

    ``verdict`` says which rank caused the hang, and why; None if there is no verdict. ``bundle`` is the path of the
    evidence; None if it couldn't be written.
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
    """A job that starts when this object is called, like torch's ``elastic_launch``; see ``launch``.

    After a call, ``verdict`` and ``bundle`` describe the latest incident of the run, whether the job hung, crashed or
    continued. They are None if there was no incident.
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
        """Runs the entrypoint on every rank of this node; returns the results by global rank.

        Raises ChildFailedError if a rank fails, as ``elastic_launch`` does; HangError if the watchdog ended the job;
        and, before starting anything, UsageError for an invalid option.
        """
        from torch.distributed.elastic.multiprocessing import api as workers

        self.verdict = self.bundle = None
        if _is_inside_a_run():
            return self._run(self._entrypoint, args)
        beside = SupervisorProcess.start(launch_request(self._config, self._entrypoint, args, self._own))
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

    def _finish(self, beside: SupervisorProcess, *, failed: bool) -> Done:
        result = beside.finish(failed=failed)
        self.verdict = result.verdict
        self.bundle = Path(result.bundle) if result.bundle else None
        return result


def _cause(error: BaseException) -> BaseException | None:
    return None if isinstance(error, ranks.module("agent").Stopped) else error


@overload
def launch(config: LaunchConfig, entrypoint: Callable[..., T], **options: Unpack[LaunchOptions]) -> Launch[T]: ...
@overload
def launch(config: LaunchConfig, entrypoint: str | None, **options: Unpack[LaunchOptions]) -> Launch[None]: ...
def launch(
    config: LaunchConfig, entrypoint: Callable[..., T] | str | None, **options: Unpack[LaunchOptions]
) -> Launch[Any]:
    """Launches ``entrypoint`` on every rank and watches the job. Replaces torch's ``elastic_launch``.

    ``results = safelaunch.launch(config, train)(arguments)`` takes torch's own ``LaunchConfig``, returns the same
    ``{rank: result}``, and raises the same ``ChildFailedError``. If the job hangs, the watchdog ends it, and
    ``HangError`` explains why. The environment, the configuration file and presets apply as on the command line.

    Args:
        config: torch's launch configuration.
        entrypoint: A function or program, which gets the arguments of the call.
        **options: See ``LaunchOptions``.

    Raises ValueError for an invalid duration.
    """
    return Launch(config, entrypoint, flags_of(options))


def _is_inside_a_run() -> bool:
    return "SAFELAUNCH_RUN_DIR" in os.environ and Path(os.environ["SAFELAUNCH_RUN_DIR"]).is_dir()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
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
