"""Other GPUs for ranks that are started anew, in place of those that verdicts make suspect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safelaunch.errors import ResourceError
from safelaunch.launch.paths import RunPaths
from safelaunch.model import Suspect
from safelaunch.system.console import say

# GPU → the one that is leased in its place, and the path of its ranks' lock; None if the job has no lease of it. Raises
# ResourceError, with the reason, if there is none to be had.
Exchange = Callable[[str], tuple[str, str] | None]


class GpuExchange:
    """What ``--exclude-blamed`` does while a job runs. Nothing here raises.

    ``expect`` it before torchrun may start ranks anew, which then wait for the decision; then either ``decide`` or
    ``drop`` it.
    """

    def __init__(self, run: RunPaths, exchange: Exchange, *, wanted: bool) -> None:
        self._path, self._pending = run.gpus, run.gpus_pending
        self._exchange = exchange
        self._wanted = wanted

    def expect(self) -> None:
        """A verdict is on its way that may make a GPU suspect."""
        if self._wanted:
            try:
                self._pending.touch(mode=0o600)
            except OSError:
                pass  # the ranks then keep their GPUs this time

    def decide(self, suspects: Sequence[Suspect]) -> None:
        """Exchanges suspected GPUs of this job, and writes that down for the beacons. May take seconds."""
        if self._wanted:
            give_others(suspects, self._exchange, self._path)
            self.drop()

    def drop(self) -> None:
        """There is no such verdict."""
        try:
            self._pending.unlink(missing_ok=True)
        except OSError:
            pass


def give_others(suspects: Sequence[Suspect], exchange: Exchange, path: Path) -> None:
    """Exchanges suspected GPUs, each line of ``path`` being one exchange. Never raises."""
    for gpu in [one.name for one in suspects if one.unit == "gpu"]:
        try:
            other = _give_another(gpu, exchange, path)
        except ResourceError as error:
            say(f"the ranks keep GPU {gpu}: {error.message}")
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the ranks are to be started anew all the same
            say(f"the ranks keep GPU {gpu} ({type(error).__name__}: {error})")
            continue
        if other:
            say(f"ranks that are started from now on have GPU {other} in place of {gpu} (--exclude-blamed)")


def _give_another(gpu: str, exchange: Exchange, path: Path) -> str:
    found = exchange(gpu)
    if found is None:
        return ""
    other, lock = found
    before = path.read_text("ascii") if path.exists() else ""
    written = path.with_suffix(".new")
    written.write_text(f"{before}{gpu}\t{other}\t{lock}\n", "ascii")
    written.replace(path)
    return other
