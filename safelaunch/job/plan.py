"""Plans a job: its arguments and its environment, with the origin of each variable. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safelaunch import addons
from safelaunch.beacon import layout
from safelaunch.job.argv import CommandLine, is_one_node, restarts
from safelaunch.job.torchrun import TorchInstallation, launcher
from safelaunch.settings.options import EnvSetting, Settings

LEASES = "SAFELAUNCH_LEASES"  # paths of files that the beacons lock
HELD_LEASES = "SAFELAUNCH_HELD"  # descriptors of leases that a sweep hands to a run
GROUP_TIMEOUT = "SAFELAUNCH_GROUP_TIMEOUT"  # seconds; a ! after them means all groups


@dataclass(frozen=True, slots=True)
class PlanVariable:
    name: str
    value: str
    origin: str
    why: str
    kept: bool = False  # the user's exported value wins


@dataclass(frozen=True, slots=True)
class Plan:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    applied: tuple[PlanVariable, ...]
    run_name: str
    run_dir: Path
    torch: TorchInstallation | None  # None: unknown (exec)
    settings: Settings
    watched: bool
    script: tuple[str, ...]  # as the user wrote it
    by_torchrun: bool = True  # False: only the kernel reports ranks' exits
    gpus: str = ""
    command: CommandLine | None = None  # None under exec
    typed: tuple[str, ...] = ()  # all words after ``safelaunch``


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Inputs of a plan other than its command line."""

    environ: Mapping[str, str]
    run_dir: Path
    supervisor_pid: int
    visible_gpus: str | None = None  # None leaves CUDA_VISIBLE_DEVICES unchanged
    rank_locks: tuple[str, ...] = ()  # files for the beacons to lock
    gpus: str = ""
    typed: tuple[str, ...] = ()


def build(command: CommandLine, settings: Settings, torch: TorchInstallation, around: Surroundings) -> Plan:
    argv = (torch.python, os.fspath(launcher(torch.python)), *command.arguments)
    restarts_here = restarts(command, around.environ) and is_one_node(command, around.environ)
    plan = _plan(argv, default_name(command), settings, torch, around, restarts_here=restarts_here)
    return replace(plan, script=command.script, command=command)


def build_exec(
    words: tuple[str, ...], program: str, settings: Settings, torch: TorchInstallation | None, around: Surroundings
) -> Plan:
    """Plans a job of ``safelaunch exec``, which can be any command. ``program`` is the path of ``words[0]``."""
    name, own = name_of_command(words), {"SAFELAUNCH_MODE": "exec"}
    return replace(_plan((program, *words[1:]), name, settings, torch, around, own), script=words, by_torchrun=False)


def build_beside(
    command: CommandLine,
    argv: tuple[str, ...],
    settings: Settings,
    torch: TorchInstallation,
    around: Surroundings,
    caller: int,
) -> Plan:
    """Plans ranks that process ``caller`` (whose command line is ``argv``) starts itself, as torchrun would.

    In the plan's ``env``, the caller needs to set those variables that differ from its own.
    """
    own = {"SAFELAUNCH_AGENT_PID": str(caller)}
    plan = _plan(argv, default_name(command), settings, torch, around, own)
    return replace(plan, script=command.script, command=command, typed=())


def _plan(
    argv: tuple[str, ...],
    name: str,
    settings: Settings,
    torch: TorchInstallation | None,
    around: Surroundings,
    own: Mapping[str, str] | None = None,
    *,
    restarts_here: bool = False,
) -> Plan:
    """Builds the parts common to all plans.

    Args:
        name: Name of the run if the settings give none.
        own: Additional variables.
        restarts_here: True if torchrun restarts ranks, and all of them run on this node.
    """
    applied, env = _environment(settings, around, own or {}, restarts_here)
    return Plan(
        argv=argv,
        env=env,
        applied=applied,
        run_name=settings.run_name or name,
        run_dir=around.run_dir,
        torch=torch,
        settings=settings,
        watched=settings.watch,
        script=(),
        gpus=around.gpus,
        typed=around.typed,
    )


def _environment(
    settings: Settings, around: Surroundings, own: Mapping[str, str], restarts_here: bool
) -> tuple[tuple[PlanVariable, ...], dict[str, str]]:
    applied = _apply(settings.env, around.environ, around.run_dir)
    if around.visible_gpus is not None:
        gpus = PlanVariable(
            "CUDA_VISIBLE_DEVICES", around.visible_gpus, _origin(settings, "gpus"), "the job's own GPUs"
        )
        applied += (gpus,)
    if settings.on_stall == "restart" or restarts_here:
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        origin = _origin(settings, "on-stall") if settings.on_stall == "restart" else "--max-restarts"
        why = "each attempt gets its own store: in a shared one, gloo finds the last attempt's ports"
        applied += (PlanVariable(name, "1", origin, why, name in around.environ),)
    of_another_run = (HELD_LEASES, LEASES, GROUP_TIMEOUT, layout.PROBES)
    env = {name: value for name, value in around.environ.items() if name not in of_another_run}
    env.update({setting.name: setting.value for setting in applied if not setting.kept})
    if settings.watch:
        env.update(injection(around.environ, around.run_dir, around.supervisor_pid))
        env.update(own)
        env.update(_probe_variables(settings))
        if settings.pg_timeout is not None:
            env[GROUP_TIMEOUT] = f"{settings.pg_timeout.seconds:g}{'!' if settings.pg_timeout.everywhere else ''}"
        if around.rank_locks:
            env[LEASES] = os.pathsep.join(around.rank_locks)
    return applied, env


def _probe_variables(settings: Settings) -> dict[str, str]:
    by_probe = addons.probe_values(settings)
    if not by_probe:
        return {}
    values = {name: value for variables in by_probe.values() for name, value in variables.items()}
    return {layout.PROBES: ",".join(by_probe), **values}


def _origin(settings: Settings, option: str) -> str:
    return f"--{option} ({settings.origins.get(option, 'default')})"


def _apply(settings: tuple[EnvSetting, ...], environ: Mapping[str, str], run_dir: Path) -> tuple[PlanVariable, ...]:
    """Returns the variables set by presets and configuration, with ``{run_dir}`` filled in. Exported ones win."""
    applied = []
    for setting in settings:
        kept = setting.name in environ or any(name in environ for name in setting.yields_to)
        applied.append(
            PlanVariable(setting.name, setting.expand(os.fspath(run_dir)), setting.origin, setting.why, kept)
        )
    return tuple(applied)


def injection(environ: Mapping[str, str], run_dir: Path, supervisor_pid: int) -> dict[str, str]:
    """Returns the variables that start the beacon in each Python process of the job.

    SAFELAUNCH_PYTHONPATH preserves the user's PYTHONPATH, even an empty one.
    """
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


def in_directory(plan: Plan, run_dir: Path) -> Plan:
    """Replaces the plan's run directory, because a run in another pid namespace might already use the planned one."""
    if run_dir == plan.run_dir:
        return plan
    old, new = os.fspath(plan.run_dir), os.fspath(run_dir)
    applied = tuple(
        variable if variable.kept else replace(variable, value=variable.value.replace(old, new))
        for variable in plan.applied
    )
    env = {**plan.env, **{variable.name: variable.value for variable in applied if not variable.kept}}
    if "SAFELAUNCH_RUN_DIR" in env:
        env["SAFELAUNCH_RUN_DIR"] = new
    return replace(plan, applied=applied, env=env, run_dir=run_dir)


def default_name(command: CommandLine) -> str:
    """Returns the name of the script or module, without directory and suffix."""
    script = command.script[0] if command.script else "run"
    stem = script.rpartition(".")[2] if command.has_flag("-m", "--module") else Path(script).stem
    return _file_name(stem)


def name_of_command(words: tuple[str, ...]) -> str:
    """Returns the first word that looks like a file: ``train`` for ``python train.py``, ``run`` for ``bash run.sh``."""
    script = next((word for word in words[1:] if Path(word).suffix in (".py", ".sh")), words[0])
    return _file_name(Path(script).stem)


def _file_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "run"
