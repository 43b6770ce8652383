"""Facts about a job for its bundles, without secrets."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from safelaunch import __version__
from safelaunch.bundle.publication import BundleOwner, Retention
from safelaunch.capture.memory_kills import KillCounts, kill_counts
from safelaunch.capture.redaction import without_secrets
from safelaunch.job.argv import most_restarts
from safelaunch.job.job import Job
from safelaunch.job.paths import Unfinished, local_bundles, working_directory
from safelaunch.job.plan import Plan
from safelaunch.settings.options import addon_options
from safelaunch.supervise.hooks import Notifier
from safelaunch.system.console import say
from safelaunch.system.redaction.job_secrets import left_out, secret_values
from safelaunch.system.redaction.redact import shown_env
from safelaunch.system.redaction.redactor import Redactor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobContext:
    run_name: str
    run_dir: Path
    bundle_dir: Path
    fallback_dir: Path
    launch: Mapping[str, object]
    host: str = field(default_factory=socket.gethostname)
    redactor: Redactor = field(default_factory=Redactor)
    kills_at_start: KillCounts = field(default_factory=kill_counts)
    keeping: Retention = field(default_factory=Retention)
    notifier: Notifier = field(default_factory=Notifier)
    suspects: Notifier = field(default_factory=Notifier)
    unfinished: Unfinished = field(default_factory=Unfinished)
    attempts: int = 1
    """number of times that torchrun starts the ranks, at most"""
    owner: BundleOwner | None = None
    """future owner of the bundle"""
    script: tuple[str, ...] = ()

    def cleaned(self, value: T) -> T:
        return without_secrets(value, self.redactor)


def job_context(job: Job) -> JobContext:
    assert job.run is not None
    plan, settings = job.plan, job.plan.settings
    redactor = Redactor(secret_values(plan.env, plan.argv, _ordinary(plan)))
    return JobContext(
        run_name=plan.run_name,
        run_dir=job.run.root,
        bundle_dir=settings.bundle_dir,
        fallback_dir=local_bundles(),
        launch=_launch(job, redactor),
        redactor=redactor,
        keeping=Retention(settings.keep_bundles),
        notifier=Notifier(settings.on_bundle, report=lambda text: say(redactor.job_text(text))),
        suspects=Notifier(settings.on_suspect, option="--on-suspect", report=lambda text: say(redactor.job_text(text))),
        script=tuple(plan.script),
        attempts=1 + (most_restarts(plan.command, plan.env) if plan.command is not None else 0),
    )


def _ordinary(plan: Plan) -> list[str]:
    # These words occur all over a bundle: a variable with one as its value is no secret.
    places = [os.fspath(working_directory()), os.fspath(plan.settings.bundle_dir), os.fspath(plan.run_dir)]
    return [*places, *plan.script[:1], plan.run_name, socket.gethostname(), user_name()]


def _launch(job: Job, redactor: Redactor) -> dict[str, object]:
    plan, settings = job.plan, job.plan.settings
    values = shown_env({setting.name: setting.value for setting in plan.applied})
    return {
        "schema": 1,
        "run_name": plan.run_name,
        "host": socket.gethostname(),
        "user": user_name(),
        "cwd": os.fspath(working_directory()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(job.started_unix_s)),
        "not_redacted": list(left_out(plan.env, plan.argv, _ordinary(plan))),
        "command": redactor.argv(plan.argv),
        "typed": redactor.argv(("safelaunch", *_typed_by_user(plan)))[1:],
        "safelaunch": __version__,
        "torch": plan.torch.version if plan.torch is not None else "",
        "distributed_debug": plan.env.get("TORCH_DISTRIBUTED_DEBUG", ""),
        "agent_pid": job.agent.pid,
        "presets": list(settings.presets),
        "environment": [
            {"name": s.name, "value": values[s.name], "origin": s.origin, "why": s.why, "kept_yours": s.kept}
            for s in plan.applied
        ],
        "watchdog": {
            "stall_timeout_s": settings.effective_stall_timeout_s,
            "startup_timeout_s": settings.startup_timeout_s,
            "max_stall_s": settings.effective_max_stall_s,
            "on_stall": settings.on_stall,
            "pg_timeout": str(settings.pg_timeout or ""),
            "early_look": settings.early_look,
            **{option.attribute: getattr(settings, option.attribute) for option in addon_options()},
            "on_suspect": redactor.job_text(settings.on_suspect or ""),
            "origins": dict(settings.origins),
        },
        "bundles": {
            "directory": os.fspath(settings.bundle_dir),
            "keep": settings.keep_bundles,
            "on_bundle": redactor.job_text(settings.on_bundle or ""),
        },
    }


def _typed_by_user(plan: Plan) -> tuple[str, ...]:
    # The user can't rerun a demo's command.
    from safelaunch.stacks.frames import is_demo

    return () if any(map(is_demo, plan.script[:1])) else plan.typed


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
