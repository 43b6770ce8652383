"""``--dry-run``: shows the plan of a job as text."""

from __future__ import annotations

import os
import shlex

from safelaunch.job.plan import Plan, PlanVariable
from safelaunch.settings.config import INTERNAL_ENV
from safelaunch.settings.options import STALL_CEILING_S, STARTUP_MAX_STALL_S, Option, Settings, addon_options
from safelaunch.system.console import command_lines


def describe(plan: Plan, width: int) -> str:
    from safelaunch.system.redaction.job_secrets import secret_values
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
    """Describes ``--max-stall``: the longest time without a step after which a job is ended, even if it still works."""
    if settings.effective_max_stall_s is not None:
        return f"{settings.effective_max_stall_s:g} s"
    never = "never: a job is ended only if it is proved dead, or if torch is about to end it"
    if settings.is_explicit("startup-timeout"):
        return f"{max(STARTUP_MAX_STALL_S, settings.startup_timeout_s):g} s before the first step, then {never}"
    return never


def _group_timeout(settings: Settings) -> str:
    assert settings.pg_timeout is not None
    if not settings.watch:
        return "not applied: without the watchdog, nothing of safelaunch's runs in the ranks"
    which = "of all process groups" if settings.pg_timeout.everywhere else "if the script sets none"
    return f"{settings.pg_timeout.seconds:g} s, {which}"


def _bundles(settings: Settings) -> list[str]:
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


def _origin_of(setting: PlanVariable) -> str:
    return f"{setting.origin}; not applied: your exported value wins" if setting.kept else setting.origin
