"""Warns about ranks that compute on a device other than their own."""

from __future__ import annotations

import time
from collections.abc import Mapping

from safelaunch.capture.pages import RankContract, read_contract
from safelaunch.job.paths import RunPaths
from safelaunch.model import rank_words
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.console import say

DEVICE_PATIENCE_S = 10.0  # between the first steps of the first and the last rank


def wrong_devices(noted: Mapping[int, RankContract], local_ranks: Mapping[int, int]) -> str:
    wrong = {
        rank: contract.device
        for rank, contract in noted.items()
        if contract.device not in (None, local_ranks.get(rank))
    }
    if not wrong:
        return ""
    devices = sorted({f"cuda:{device}" for device in wrong.values()})
    text = f"{rank_words(wrong)} {'computes' if len(wrong) == 1 else 'compute'} on "
    text += f"{', '.join(devices)}, which is not the device of the rank's LOCAL_RANK"
    return f"{text}: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"


class DeviceNotice:
    """Warns once in each attempt, at the first step."""

    def __init__(self, run: RunPaths, watch: Watch) -> None:
        self._run, self._watch = run, watch
        self._attempt = -1
        self._due_s: float | None = None

    def tick(self, now: float) -> None:
        try:
            self._tick(now)
        except Exception:  # noqa: BLE001 - costs only this warning
            self._attempt = self._watch.attempt[0]

    def _tick(self, now: float) -> None:
        attempt = self._watch.attempt[0]
        if attempt == self._attempt:
            return
        pages = self._watch.roster.pages()
        noted = {rank: read_contract(self._run.pages / page.name) for rank, page in pages.items()}
        read = {rank: contract for rank, contract in noted.items() if contract is not None}
        if not read:
            return
        self._due_s = self._due_s or now + DEVICE_PATIENCE_S
        if len(read) < len(pages) and now < self._due_s:
            return
        self._attempt, self._due_s = attempt, None
        wrong = wrong_devices(read, {rank: page.read().local_rank for rank, page in pages.items()})
        if wrong:
            say(wrong)

    def finish(self) -> None:
        """Checks once more, because a short job might end before each rank has completed a step."""
        self.tick(time.monotonic() + 2 * DEVICE_PATIENCE_S)
