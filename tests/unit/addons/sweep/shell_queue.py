"""An engine for sweeps that is as small as can be: each job is a shell in the background, as after ``at now``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from safelaunch.addons.sweep.scheduler import ListedJob, Meaning, SubmittedWork


class Shell:
    """The jobs that this process has submitted."""

    name = "shell"
    keeps_order = False
    meanings: Mapping[str, Meaning] = {}

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}

    def across(self, nodes: int) -> None:
        return None

    def submit_command(self, work: SubmittedWork) -> list[str]:
        return ["/bin/bash", os.fspath(work.script)]

    def submit(self, work: SubmittedWork) -> str:
        self.jobs[work.name] = subprocess.Popen(self.submit_command(work), env=self._environ, start_new_session=True)
        return str(self.jobs[work.name].pid)

    def list(self) -> list[ListedJob]:
        states = {name: "running" if job.poll() is None else "ended" for name, job in self.jobs.items()}
        return [ListedJob(name, str(self.jobs[name].pid), state) for name, state in states.items()]  # type: ignore[arg-type]

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        for number in numbers:
            os.killpg(int(number), signal.SIGKILL if kill else signal.SIGTERM)


class ShellJob:
    """A job in a shell has no scheduler to ask."""

    restart, node, gpus, cores = 0, "", (), None

    def __init__(self, environ: Mapping[str, str]) -> None:
        pass

    def environment(self) -> dict[str, str]:
        return {}

    def first_host(self) -> str:
        return ""

    def why_ended(self) -> str:
        return "CANCELLED"


SCHEDULER, SCHEDULER_JOB = Shell, ShellJob
