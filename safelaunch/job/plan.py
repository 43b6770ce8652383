"""The plan of a job: its argument vector and environment, each variable with its origin. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safelaunch import addons
from safelaunch.beacon import layout
from safelaunch.job.argv import CommandLine, is_one_node, restarts
from safelaunch.job.torchrun import TorchInstallation, launcher
from safelaunch.settings.config import INTERNAL_ENV
from safelaunch.settings.options import (
    STALL_CEILING_S,
    STARTUP_MAX_STALL_S,
    EnvSetting,
    Option,
    Settings,
    addon_options,
)
from safelaunch.system.console import command_lines

LEASES = "SAFELAUNCH_LEASES"  # the beacons' locks, by path
GROUP_TIMEOUT = "SAFELAUNCH_GROUP_TIMEOUT"  # seconds, and a ! for all groups


@dataclass(frozen=True, slots=True)
class Applied:
    """A variable that safelaunch would set. ``kept``: the user exported it, and that value wins."""

    name: str
    value: str
    origin: str
    why: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One job, ready to start.

    ``watched`` False: no beacon, no watch. ``torch`` None: unknown (exec). ``by_torchrun`` False: ``argv`` is any
    command, and only the kernel reports how ranks end. ``script``: what to run, as the user wrote it. ``gpus``: the
    job's GPUs, in words. ``command``: what torchrun gets; None under ``exec``. ``typed``: all words behind
    ``safelaunch``, as the user typed them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    applied: tuple[Applied, ...]
    run_name: str
    run_dir: Path
    torch: TorchInstallation | None
    settings: Settings
    watched: bool
    script: tuple[str, ...]
    by_torchrun: bool = True
    gpus: str = ""
    command: CommandLine | None = None
    typed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A plan's inputs besides the command line. ``visible_gpus``: CUDA_VISIBLE_DEVICES; None leaves it as it is.

    ``rank_locks``: the files that the beacons lock for the job's leases. ``gpus``: the job's GPUs, in words.
    """

    environ: Mapping[str, str]
    run_dir: Path
    supervisor_pid: int
    visible_gpus: str | None = None
    rank_locks: tuple[str, ...] = ()
    gpus: str = ""
    typed: tuple[str, ...] = ()


def build(command: CommandLine, settings: Settings, torch: TorchInstallation, around: Surroundings) -> Plan:
    """The plan for one torchrun job."""
    argv = (torch.python, os.fspath(launcher(torch.python)), *command.arguments)
    begins_anew = restarts(command, around.environ) and is_one_node(command, around.environ)
    plan = _plan(argv, default_name(command), settings, torch, around, begins_anew=begins_anew)
    return replace(plan, script=command.script, command=command)


def build_exec(
    words: tuple[str, ...], program: str, settings: Settings, torch: TorchInstallation | None, around: Surroundings
) -> Plan:
    """The plan for any command that starts ranks or is one; ``program`` is the path of ``words[0]``."""
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
    """The plan for ranks that another process, of pid ``caller``, starts itself, as torchrun would for ``command``.

    ``argv``: that process's command line. Of ``env``, it needs what differs from its own.
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
    begins_anew: bool = False,
) -> Plan:
    """``name``: of the run, where the user gives none. ``own``: variables besides those of every watched job.

    ``begins_anew``: torchrun restarts ranks, all of them on this node.
    """
    applied, env = _environment(settings, around, own or {}, begins_anew)
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
    settings: Settings, around: Surroundings, own: Mapping[str, str], begins_anew: bool
) -> tuple[tuple[Applied, ...], dict[str, str]]:
    """The variables to set, with their origins, and the complete environment."""
    applied = _apply(settings.env, around.environ, around.run_dir)
    if around.visible_gpus is not None:
        gpus = Applied("CUDA_VISIBLE_DEVICES", around.visible_gpus, _origin(settings, "gpus"), "the job's own GPUs")
        applied += (gpus,)
    if settings.on_stall == "restart" or begins_anew:
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        origin = _origin(settings, "on-stall") if settings.on_stall == "restart" else "--max-restarts"
        why = "each attempt gets its own store: in a shared one, gloo finds the ports of the last attempt"
        applied += (Applied(name, "1", origin, why, name in around.environ),)
    of_another_run = ("SAFELAUNCH_HELD", LEASES, GROUP_TIMEOUT, layout.PROBES)
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
    """The variables by which ranks load the probes of add-ons and by which the probes are configured."""
    found = addons.probe_values(settings)
    if not found:
        return {}
    return {layout.PROBES: ",".join(found), **{name: value for one in found.values() for name, value in one.items()}}


def _origin(settings: Settings, option: str) -> str:
    return f"--{option} ({settings.origins.get(option, 'default')})"


def _apply(settings: tuple[EnvSetting, ...], environ: Mapping[str, str], run_dir: Path) -> tuple[Applied, ...]:
    """The variables of presets and configuration, with ``{run_dir}`` filled in; exported values win."""
    applied = []
    for setting in settings:
        kept = setting.name in environ or any(name in environ for name in setting.yields_to)
        applied.append(Applied(setting.name, setting.expand(os.fspath(run_dir)), setting.origin, setting.why, kept))
    return tuple(applied)


def injection(environ: Mapping[str, str], run_dir: Path, supervisor_pid: int) -> dict[str, str]:
    """The variables that start the beacon. ``SAFELAUNCH_PYTHONPATH`` exists if PYTHONPATH was set, even to nothing."""
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
    """The plan with another run directory: a run of another pid namespace may already have the planned name."""
    if run_dir == plan.run_dir:
        return plan
    old, new = os.fspath(plan.run_dir), os.fspath(run_dir)
    applied = tuple(replace(one, value=one.value if one.kept else one.value.replace(old, new)) for one in plan.applied)
    env = {**plan.env, **{one.name: one.value for one in applied if not one.kept}}
    if "SAFELAUNCH_RUN_DIR" in env:
        env["SAFELAUNCH_RUN_DIR"] = new
    return replace(plan, applied=applied, env=env, run_dir=run_dir)


def default_name(command: CommandLine) -> str:
    """A run's default name: that of the script or module, without directory and suffix."""
    script = command.script[0] if command.script else "run"
    stem = script.rpartition(".")[2] if command.has_flag("-m", "--module") else Path(script).stem
    return _file_name(stem)


def name_of_command(words: tuple[str, ...]) -> str:
    """A run's default name, where the command is not torchrun's.

    ``train`` of ``python train.py``, ``run`` of ``bash run.sh``: of the first argument that looks like a file.
    """
    script = next((word for word in words[1:] if Path(word).suffix in (".py", ".sh")), words[0])
    return _file_name(Path(script).stem)


def _file_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "run"


# --- ``--dry-run``: the plan as text, with the command, each variable and its origin, GPUs and timeouts ---------------


def describe(plan: Plan, width: int) -> str:
    """The whole plan of a run as text; the command in lines of at most ``width``."""
    from safelaunch.system.redaction.job_secrets import secret_values  # nothing that is started waits for these
    from safelaunch.system.redaction.redactor import Redactor

    settings = plan.settings
    redactor = Redactor(secret_values(plan.env, plan.argv, [plan.run_name, os.fspath(plan.run_dir)]))
    lines = [
        f"run name      {plan.run_name}",
        "torch         " + (f"{plan.torch.version or 'unknown'} ({plan.torch.python})" if plan.torch else "not found"),
        *command_lines([shlex.quote(word) for word in redactor.argv(plan.argv)], "command       ", width),
        f"run directory {plan.run_dir}",
        f"bundles       {settings.bundle_dir}   ({settings.origin('bundle-dir')})",
        *_bundles(settings),
        f"GPUs          {_gpus(plan)}",
        "",
        "watchdog      " + ("on" if settings.watch else f"off   ({settings.origin('no-watch')})"),
    ]
    if settings.watch:
        stall = f"{settings.effective_stall_timeout_s:g} s"
        if settings.stall_timeout_s is None:
            stall = f"auto: learned, {settings.stall_floor_s:g} to {STALL_CEILING_S:g} s; until then {stall}"
        lines += [
            f"  stall timeout    {stall}   ({settings.origin('stall-timeout')})",
            f"  startup timeout  {settings.startup_timeout_s:g} s   ({settings.origin('startup-timeout')})",
            f"  max stall        {_max_stall(settings)}   ({settings.max_stall_origin})",
            f"  on stall         {settings.on_stall}   ({settings.origin('on-stall')})",
            *(_addon_line(settings, option) for option in addon_options() if option.unset),
            f"  early look       {'yes' if settings.early_look else 'no'}   ({settings.origin('no-early-look')})",
        ]
        if settings.on_suspect:
            lines.append(f"  on suspect       {settings.on_suspect}   ({settings.origin('on-suspect')})")
    if settings.pg_timeout is not None:
        lines += ["", f"group timeout {_group_timeout(settings)}   ({settings.origin('pg-timeout')})"]
    lines += ["", "environment"]
    lines += _variables(plan) or ["  nothing except safelaunch's own variables"]
    return redactor.text("\n".join(lines))


def _addon_line(settings: Settings, option: Option) -> str:
    value = getattr(settings, option.attribute) or option.unset
    return f"  {option.name.replace('-', ' '):<17}{value}   ({settings.origin(option.name)})"


def _max_stall(settings: Settings) -> str:
    """Returns after how long without a step the job is ended, even if it is working."""
    if settings.effective_max_stall_s is not None:
        return f"{settings.effective_max_stall_s:g} s"
    never = "never: only a job that is proved dead, or that torch is about to end, is ended"
    if settings.is_explicit("startup-timeout"):
        return f"{max(STARTUP_MAX_STALL_S, settings.startup_timeout_s):g} s before the first step, then {never}"
    return never


def _group_timeout(settings: Settings) -> str:
    """For which process groups it is."""
    assert settings.pg_timeout is not None
    if not settings.watch:
        return "not applied: without the watchdog, nothing of safelaunch's runs in the ranks"
    which = "of all process groups" if settings.pg_timeout.everywhere else "where the script sets none"
    return f"{settings.pg_timeout.seconds:g} s, {which}"


def _bundles(settings: Settings) -> list[str]:
    """Which bundles are kept, and the command that runs for each."""
    kept = f"the {settings.keep_bundles} newest" if settings.keep_bundles else "all"
    lines = [
        f"  keep           {kept}   ({settings.origin('keep-bundles')})",
    ]
    if settings.on_bundle:
        lines.append(f"  on bundle      {settings.on_bundle}   ({settings.origin('on-bundle')})")
    return lines


def _gpus(plan: Plan) -> str:
    value = plan.env.get("CUDA_VISIBLE_DEVICES")
    if plan.gpus:
        origin = f"   ({plan.settings.origin('gpus')})" if plan.settings.gpus is not None else ""
        return f"{plan.gpus}{origin}"
    if value is None:
        return "all that torch sees"
    origin = next((s.origin for s in plan.applied if s.name == "CUDA_VISIBLE_DEVICES"), "your environment")
    return f"{value or 'none'}   ({origin})"


def _variables(plan: Plan) -> list[str]:
    from safelaunch.system.redaction.redact import redact_env

    values = redact_env({setting.name: setting.value for setting in plan.applied})
    lines = []
    for setting in plan.applied:
        lines.append(f"  {setting.name}={values[setting.name]}   ({_origin_of(setting)})")
        if setting.why:
            lines.append(f"      {setting.why}")
    for name in sorted(INTERNAL_ENV | {"PYTHONPATH"}):
        if plan.watched and name in plan.env and name not in values:
            lines.append(
                f"  {name}={plan.env[name]}   (safelaunch: for the beacon; your script sees PYTHONPATH as you set it)"
            )
    return lines


def _origin_of(setting: Applied) -> str:
    return f"{setting.origin}; not applied: your exported value wins" if setting.kept else setting.origin
