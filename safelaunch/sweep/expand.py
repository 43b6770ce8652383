"""Expands templates into jobs: combinations, names, placeholders, needs. Checks all before anything starts. Pure."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from safelaunch.settings.options import parse_run_name
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.sweep.grid import BUILTIN, MAX_JOBS, Matrix, Params, Text
from safelaunch.sweep.jobs import Job, port_marks, port_names
from safelaunch.sweep.spec import Template
from safelaunch.system.errors import SpecError
from safelaunch.system.redaction.shapes import is_secret_name

LONGEST_NAME = 64
_HASH = 6


@dataclass(frozen=True, slots=True)
class Places:
    """Absolute paths for ``{sweep_dir}`` and, below ``jobs_dir``, ``{job_dir}``; ``cwd`` is the working directory."""

    sweep_dir: str
    jobs_dir: str
    cwd: str


def expand(templates: Sequence[Template], places: Places) -> tuple[Job, ...]:
    """Every job of the sweep, in written order. Raises SpecError."""
    found: list[tuple[Job, tuple[Text, ...]]] = []
    for template in templates:
        found += _jobs(template, places)
        if len(found) > MAX_JOBS:
            raise SpecError(f"{template.where}: more than {MAX_JOBS} jobs", "split the sweep")
    if not found:
        raise SpecError("the sweep has no jobs")
    _check_used(templates, [job for job, _ in found])
    _check_names([job for job, _ in found])
    groups: dict[str, list[str]] = {}
    for job, _ in found:
        groups.setdefault(job.group, []).append(job.name)
    jobs = tuple(replace(job, needs=_needs(job, texts, groups)) for job, texts in found)
    _check_order(jobs)
    return jobs


def _jobs(template: Template, places: Places) -> list[tuple[Job, tuple[Text, ...]]]:
    """The jobs of one template, with unresolved needs: one for each combination of the parameters that it uses."""
    known = [*(axis.name for axis in template.matrix.axes), *BUILTIN]
    ports = _ports(template)
    used = {
        name
        for text in template.working_texts()
        for name in text.check(known if text is template.cwd else [*known, *ports])
    }
    matrix = Matrix(tuple(axis for axis in template.matrix.axes if axis.name in used))
    known = [*(axis.name for axis in matrix.axes), *BUILTIN]
    for text in template.other_texts():
        text.check([name for name in known if text is not template.name or name not in BUILTIN])
    for name in ports:
        if name not in used:
            raise SpecError(
                f"{template.where}: the port {{{name}}} is not used", "put it into the command or env, or request fewer"
            )
    combinations = matrix.combinations()
    names = _names(template, combinations)
    return [_job(template, params, name, places) for params, name in zip(combinations, names, strict=True)]


def _check_used(templates: Sequence[Template], jobs: Sequence[Job]) -> None:
    used = {name for job in jobs for name, _ in job.params}
    for axis in templates[0].matrix.axes:
        if axis.name not in used:
            raise SpecError(
                f"{axis.where}: the parameter {axis.name!r} is not used",
                f"put {{{axis.name}}} into the command, env or cwd",
            )


def _ports(template: Template) -> tuple[str, ...]:
    """The names of the template's ports. Raises SpecError if a parameter has one of them."""
    names = port_names(template.ports)
    for axis in template.matrix.axes:
        if axis.name in names:
            raise SpecError(
                f"{axis.where}: {{{axis.name}}} is the name of a leased port", "give the parameter another name"
            )
    return names


def _job(template: Template, params: Params, name: str, places: Places) -> tuple[Job, tuple[Text, ...]]:
    own = {"name": name, "sweep_dir": places.sweep_dir, "job_dir": posixpath.join(places.jobs_dir, name)}
    values = {**dict(params), **own}
    with_ports = {**values, **port_marks(template.ports)}
    cwd = posixpath.join(places.cwd, template.cwd.fill(values)) if template.cwd is not None else places.cwd
    job = Job(
        name=name,
        words=tuple(text.fill(with_ports) for text in _words(template)),
        where=template.where,
        group=template.group,
        params=params,
        gpus=template.gpus,
        ports=template.ports,
        env=tuple((variable, text.fill(with_ports)) for variable, text in template.env),
        cwd=cwd,
        timeout_s=template.timeout_s,
        retries=template.retries,
        metrics=template.metrics,
        nodes=template.nodes,
        batch=template.batch,
    )
    return job, tuple(Text(text.fill(values), text.where) for text in template.needs)


def _words(template: Template) -> tuple[Text, ...]:
    """The options before the command, but after a leading ``exec``."""
    first = 1 if template.command and template.command[0].text == "exec" else 0
    return (*template.command[:first], *template.options, *template.command[first:])


# --- names ------------------------------------------------------------------------------------------------------------


def _names(template: Template, combinations: Sequence[Params]) -> list[str]:
    """One name for each combination: the template's, or one made from the group and the parameters."""
    if template.name is not None:
        names = [template.name.fill(dict(params)) for params in combinations]
        for name in names:
            try:
                parse_run_name(name)
            except ValueError:
                raise SpecError(
                    f"{template.name.where}: {name!r} cannot be a job's name",
                    "use 1 to 64 letters, digits, '.', '_' and '-', beginning with neither '.' nor '-'",
                ) from None
        return names
    plain = [derive(template.group, params) for params in combinations]
    # A hash distinguishes values that are too long, or that differ only in characters that file names can't contain.
    return [
        name if len(name) <= LONGEST_NAME and plain.count(name) == 1 else _with_hash(name, params)
        for name, params in zip(plain, combinations, strict=True)
    ]


def derive(group: str, params: Params) -> str:
    """``train_lr-1e-3_seed-0``; ``job`` without a group and parameters. A secret's value is left out."""
    values = (name if is_secret_name(name) else f"{name}-{value}" for name, value in params)
    parts = [*([group] if group else []), *values]
    return _file_name("_".join(parts)) or "job"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip(".-")


def _with_hash(name: str, params: Params) -> str:
    digest = hashlib.sha256(repr(params).encode()).hexdigest()[:_HASH]
    return f"{name[: LONGEST_NAME - _HASH - 1]}-{digest}"


def _check_names(jobs: Sequence[Job]) -> None:
    first: dict[str, Job] = {}
    for job in jobs:
        other = first.setdefault(job.name.lower(), job)  # one directory each, also on a disk that ignores case
        if other is not job:
            raise SpecError(
                f"{job.where}: two jobs are called {job.name!r} (the other at {other.where})",
                "put a placeholder that differs into 'name', or rename one of them",
            )


# --- needs ------------------------------------------------------------------------------------------------------------


def _needs(job: Job, texts: Sequence[Text], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of the jobs that ``job`` waits for; a group means all of its jobs."""
    names = {name for group in groups.values() for name in group}
    found: dict[str, None] = {}
    for text in texts:
        if text.text in groups and text.text:
            found.update(dict.fromkeys(groups[text.text]))
        elif text.text in names:
            found[text.text] = None
        else:
            known = list(dict.fromkeys([*(group for group in groups if group), *sorted(names)]))
            raise SpecError(
                f"{text.where}: needs: unknown job {text.text!r}{did_you_mean(text.text, known)}",
                f"jobs: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}",
            )
    return tuple(found)


def _check_order(jobs: Sequence[Job]) -> None:
    """Raises SpecError if jobs need each other in a circle: it removes jobs without needs until none is left."""
    left = {job.name: job for job in jobs}
    while left:
        free = [name for name, job in left.items() if not any(need in left for need in job.needs)]
        if not free:
            raise SpecError(f"{next(iter(left.values())).where}: needs form a cycle: {_circle(left)}")
        for name in free:
            del left[name]


def _circle(left: Mapping[str, Job]) -> str:
    path = [next(iter(left))]
    while True:
        path.append(next(need for need in left[path[-1]].needs if need in left))
        if path[-1] in path[:-1]:
            return " -> ".join(path[path.index(path[-1]) :])
