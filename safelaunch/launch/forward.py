"""Passing signals on to the job."""

from __future__ import annotations

import os
import signal

from safelaunch.launch.process import FORWARDED, SI_KERNEL

# These ask the job to end; USR1 and USR2 do not.
STOPPING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


class Forwarder:
    """Waits for a signal or a child's end, whichever comes first, and passes signals on to the job, once each."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.stop_requested = False

    def wait(self, timeout_s: float) -> None:
        """Returns after ``timeout_s`` seconds, a child's end, or a signal that was passed on."""
        # Not sigtimedwait: when its time is up and it is interrupted as well (Ctrl-Z, then fg), CPython 3.11 returns a
        # siginfo that was never filled in, and a signal that nobody sent would go to the job.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        info = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD, signal.SIGALRM})
        if info.si_signo not in FORWARDED:
            return
        if info.si_signo in STOPPING:
            self.stop_requested = True
        try:
            # From the terminal it would have reached the whole foreground group: torchrun and what shares its group.
            send = os.killpg if info.si_code == SI_KERNEL else os.kill
            send(self._pid, info.si_signo)
        except ProcessLookupError:
            return
