"""Other GPUs for ranks that are started anew, in place of those that verdicts make suspect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safelaunch.model import Suspect
from safelaunch.system.console import say

# GPU → the one that is leased in its place, and the path of its ranks' lock; None where there is none.
Exchange = Callable[[str], tuple[str, str] | None]


def give_others(suspects: Sequence[Suspect], exchange: Exchange, path: Path) -> None:
    """Exchanges suspected GPUs of this job, and writes that down for the beacons. Never raises; may take seconds."""
    for gpu in [one.name for one in suspects if one.unit == "gpu"]:
        try:
            other = _give_another(gpu, exchange, path)
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
