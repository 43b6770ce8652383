from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """Collects, while its context is active, signals that stop colaunch. Ignored signals (nohup) stay ignored."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._wake, self._woken = os.pipe()
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        self._fd_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for signum in (*STOPPING, signal.SIGCHLD):
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._wake)
        os.close(self._woken)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            self._taken.append(signum)

    def taken(self) -> list[int]:
        taken, self._taken = self._taken, []
        return taken

    def wait(self, timeout_s: float) -> None:
        if self._taken:
            return
        if select.select([self._wake], [], [], timeout_s)[0]:
            try:
                os.read(self._wake, 4096)
            except BlockingIOError:
                return
