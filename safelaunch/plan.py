"""What will be started: the argument vector and the environment, each variable with its origin. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .argv import CommandLine
from .config import Settings
from .presetfile import EnvSetting
from .torchrun import Torch, launcher


@dataclass(frozen=True, slots=True)
class Applied:
    """A variable that safelaunch would set. ``kept``: the user had exported it, and that value stays."""

    name: str
    value: str
    origin: str
    why: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One job, ready to start. ``watched`` False: torchrun alone, without beacon and watch."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    applied: tuple[Applied, ...]
    run_name: str
    run_dir: Path
    torch: Torch
    settings: Settings
    watched: bool
    script: tuple[str, ...]


def build(
    command: CommandLine,
    settings: Settings,
    torch: Torch,
    *,
    environ: Mapping[str, str],
    run_dir: Path,
    supervisor_pid: int,
    visible_gpus: str | None,
) -> Plan:
    """The plan for one torchrun job. ``visible_gpus``: CUDA_VISIBLE_DEVICES to set, None to leave it."""
    applied = _apply(settings.env, environ, run_dir)
    if visible_gpus is not None:
        applied += (Applied("CUDA_VISIBLE_DEVICES", visible_gpus, _origin(settings, "gpus"), "the job's own GPUs"),)
    env = dict(environ)
    env.update({setting.name: setting.value for setting in applied if not setting.kept})
    if settings.watch:
        env.update(injection(environ, run_dir, supervisor_pid))
    return Plan(
        argv=(torch.python, os.fspath(launcher(torch.python)), *command.arguments),
        env=env,
        applied=applied,
        run_name=settings.run_name or default_name(command),
        run_dir=run_dir,
        torch=torch,
        settings=settings,
        watched=settings.watch,
        script=command.script,
    )


def _origin(settings: Settings, option: str) -> str:
    return f"--{option} ({settings.origins.get(option, 'default')})"


def _apply(settings: tuple[EnvSetting, ...], environ: Mapping[str, str], run_dir: Path) -> tuple[Applied, ...]:
    """What presets and configuration set, with ``{run_dir}`` filled in; an exported variable keeps its value."""
    applied = []
    for setting in settings:
        kept = setting.name in environ or any(name in environ for name in setting.yields_to)
        applied.append(Applied(setting.name, setting.expand(os.fspath(run_dir)), setting.origin, setting.why, kept))
    return tuple(applied)


def injection(environ: Mapping[str, str], run_dir: Path, supervisor_pid: int) -> dict[str, str]:
    """The variables that wake the beacon. ``SAFELAUNCH_PYTHONPATH`` says that PYTHONPATH was set, even if empty."""
    inject = os.fspath(Path(__file__).parent / "beacon" / "inject")
    own = environ.get("PYTHONPATH")
    variables = {
        "SAFELAUNCH_RUN_DIR": os.fspath(run_dir),
        "SAFELAUNCH_SUPERVISOR_PID": str(supervisor_pid),
        "PYTHONPATH": f"{inject}{os.pathsep}{own}" if own else inject,
    }
    if own is not None:
        variables["SAFELAUNCH_PYTHONPATH"] = own
    return variables


def default_name(command: CommandLine) -> str:
    """A run's name when none was given: the script's, or the module's, without directory and suffix."""
    script = command.script[0] if command.script else "run"
    stem = script.rpartition(".")[2] if command.has_flag("-m", "--module") else Path(script).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "run"
