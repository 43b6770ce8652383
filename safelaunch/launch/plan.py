"""What will be started: the argument vector and the environment, each variable with its origin. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safelaunch.launch.argv import CommandLine
from safelaunch.launch.torchrun import Torch, launcher
from safelaunch.settings.config import Settings
from safelaunch.settings.presetfile import EnvSetting

LEASES = "SAFELAUNCH_LEASES"  # the beacons' locks, by path


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
    """One job, ready to start.

    ``watched`` False: without beacon and watch. ``torch`` None: not known (exec). ``by_torchrun`` False: ``argv`` is
    any command, and nobody but the kernel will tell how ranks end. ``script``: what to run, as the user wrote it.
    ``gpus``: those that it got, in words.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    applied: tuple[Applied, ...]
    run_name: str
    run_dir: Path
    torch: Torch | None
    settings: Settings
    watched: bool
    script: tuple[str, ...]
    by_torchrun: bool = True
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan depends on besides the command line. ``visible_gpus``: CUDA_VISIBLE_DEVICES; None leaves it.

    ``rank_locks``: the files that the beacons lock for the leases of the job. ``gpus``: those that it got, in words.
    """

    environ: Mapping[str, str]
    run_dir: Path
    supervisor_pid: int
    visible_gpus: str | None = None
    rank_locks: tuple[str, ...] = ()
    gpus: str = ""


def build(command: CommandLine, settings: Settings, torch: Torch, around: Surroundings) -> Plan:
    """The plan for one torchrun job."""
    applied, env = _environment(settings, around, {})
    return Plan(
        argv=(torch.python, os.fspath(launcher(torch.python)), *command.arguments),
        env=env,
        applied=applied,
        run_name=settings.run_name or default_name(command),
        run_dir=around.run_dir,
        torch=torch,
        settings=settings,
        watched=settings.watch,
        script=command.script,
        gpus=around.gpus,
    )


def build_exec(
    words: tuple[str, ...], program: str, settings: Settings, torch: Torch | None, around: Surroundings
) -> Plan:
    """The plan for any command that starts ranks, or is one; ``program`` is the path of ``words[0]``."""
    applied, env = _environment(settings, around, {"SAFELAUNCH_MODE": "exec"})
    return Plan(
        argv=(program, *words[1:]),
        env=env,
        applied=applied,
        run_name=settings.run_name or _file_name(Path(_script_of(words)).stem),
        run_dir=around.run_dir,
        torch=torch,
        settings=settings,
        watched=settings.watch,
        script=words,
        by_torchrun=False,
        gpus=around.gpus,
    )


def _environment(
    settings: Settings, around: Surroundings, own: Mapping[str, str]
) -> tuple[tuple[Applied, ...], dict[str, str]]:
    """The variables that are set, with their origins, and the whole environment that results."""
    applied = _apply(settings.env, around.environ, around.run_dir)
    if around.visible_gpus is not None:
        gpus = Applied("CUDA_VISIBLE_DEVICES", around.visible_gpus, _origin(settings, "gpus"), "the job's own GPUs")
        applied += (gpus,)
    if settings.on_stall == "restart":
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        why = "each attempt gets a store of its own: in a shared one gloo finds the ports of the last attempt"
        applied += (Applied(name, "1", _origin(settings, "on-stall"), why, name in around.environ),)
    env = {name: value for name, value in around.environ.items() if name not in ("SAFELAUNCH_HELD", LEASES)}
    env.update({setting.name: setting.value for setting in applied if not setting.kept})
    if settings.watch:
        env.update(injection(around.environ, around.run_dir, around.supervisor_pid))
        env.update(own)
        if around.rank_locks:
            env[LEASES] = os.pathsep.join(around.rank_locks)
    return applied, env


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
    inject = os.fspath(Path(__file__).parents[1] / "beacon" / "inject")
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
    return _file_name(stem)


def _script_of(words: tuple[str, ...]) -> str:
    """``train.py`` of ``python train.py``, ``run.sh`` of ``bash run.sh``: the first argument that looks like a file."""
    return next((word for word in words[1:] if Path(word).suffix in (".py", ".sh")), words[0])


def _file_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "run"
