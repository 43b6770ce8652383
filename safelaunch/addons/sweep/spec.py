"""Parses a sweep, from a file or a grid, and expands it into jobs. Errors name the file and line, or quote the word.

    defaults:                       # for every job below; a job's own keys win (env: variable by variable)
      command: --nproc-per-node=1 train.py --lr {lr} --seed {seed}
      gpus: 1
      preset: hang-debug
      env: {WANDB_NAME: "{name}"}
      timeout: 2h                   # also retries, ports, stall-timeout, startup-timeout, max-stall, on-stall
    matrix:                         # every combination is a job
      lr: [1e-3, 3e-4]
      seed: 0..4
    jobs:                           # optional: several kinds of jobs, each with the parameters that it uses
      prepare: {command: --no-python bash prepare.sh, gpus: 0}
      train: {needs: prepare, nodes: 2, slurm: {partition: gpu, time: 120}}   # with --engine slurm

Scalars are kept as written (``1e-3`` stays ``1e-3``), because they become words of a command line.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from safelaunch.addons.sweep import slurm
from safelaunch.addons.sweep.errors import SpecError
from safelaunch.addons.sweep.jobs import SweepJob, port_marks, port_names
from safelaunch.addons.sweep.metrics import check_pattern
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.settings.options import BY_NAME, WATCHDOG_KEYS, parse_count, parse_run_name, parse_seconds
from safelaunch.settings.yamlfile import (
    YamlNode,
    did_you_mean,
    known_entries,
    mapping_entries,
    not_boolean,
    scalar,
    text_of,
    texts_of,
    variables_of,
)
from safelaunch.system.errors import UsageError
from safelaunch.system.redaction.shapes import is_secret_name

T = TypeVar("T")
D = TypeVar("D")
TOP = ("defaults", "matrix", "jobs")
SHARED = (
    "command",
    "gpus",
    "nodes",
    "ports",
    "preset",
    "env",
    *WATCHDOG_KEYS,
    "timeout",
    "retries",
    "needs",
    "cwd",
    "metric",
    "slurm",
)
OF_A_JOB = (*SHARED, "name")
BUILTIN = ("name", "job_dir", "sweep_dir")
MAX_JOBS = 10_000
LONGEST_NAME = 64
_HASH = 6

Params = tuple[tuple[str, str], ...]

_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKEN = re.compile(rf"\{{\{{|\}}\}}|\{{({_PARAMETER.pattern})\}}|[{{}}]")
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """A text with placeholders in braces; a doubled brace stands for a single one."""

    text: str
    where: str  # place of its definition: ``sweep.yaml:7``

    def fields(self) -> frozenset[str]:
        names = set()
        for match in _TOKEN.finditer(self.text):
            if match.group() in "{}":
                raise SpecError(
                    f"{self.where}: a single {match.group()!r} in {self.text!r}",
                    "a placeholder is {name}; write {{ and }} for braces",
                )
            if match[1]:
                names.add(match[1])
        return frozenset(names)

    def check(self, allowed: Collection[str]) -> frozenset[str]:
        """Returns the placeholders in this text. Raises SpecError for one that isn't ``allowed``."""
        used = self.fields()
        for name in sorted(used - set(allowed)):
            raise SpecError(
                f"{self.where}: unknown placeholder {{{name}}} in {self.text!r}{did_you_mean(name, allowed)}",
                f"known here: {', '.join(sorted(allowed))}; write {{{{ and }}}} for braces",
            )
        return used

    def fill(self, values: Mapping[str, str]) -> str:
        """Replaces every placeholder by its value. Braces in a value stay as they are."""

        def replaced(match: re.Match[str]) -> str:
            return values[match[1]] if match[1] else match.group()[0]

        return _TOKEN.sub(replaced, self.text)


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    values: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Template:
    """An entry of ``jobs`` in a sweep's file, or the only job of a grid."""

    job: SweepJob  # common properties of its jobs
    command: tuple[TemplateText, ...]
    axes: tuple[Axis, ...] = ()  # sweep's parameters; each combination of the used ones is a job
    name: TemplateText | None = None
    options: tuple[TemplateText, ...] = ()  # safelaunch's options before ``command``
    env: tuple[tuple[str, TemplateText], ...] = ()
    cwd: TemplateText | None = None
    needs: tuple[TemplateText, ...] = ()  # names of groups or jobs

    def working_texts(self) -> tuple[TemplateText, ...]:
        cwd = () if self.cwd is None else (self.cwd,)
        return (*self.command, *self.options, *(text for _, text in self.env), *cwd)


def axis(name: str, words: Sequence[str], where: str) -> Axis:
    if not _PARAMETER.fullmatch(name):
        raise SpecError(f"{where}: {name!r} cannot be a parameter's name", "letters, digits, _ and -, a letter first")
    if name in BUILTIN:
        what = "the job's name, its directory or the sweep's"
        raise SpecError(f"{where}: {{{name}}} is a built-in placeholder: {what}", "give the parameter another name")
    values = [value for word in words for value in _range(word, where)]
    if not values:
        raise SpecError(f"{where}: {name!r} has no values", f"write e.g. {name}=1,2 or a list")
    twice = next((value for value in values if values.count(value) > 1), None) if len(values) <= MAX_JOBS else None
    if twice is not None:
        raise SpecError(f"{where}: {name!r} has the value {twice!r} twice")
    return Axis(name, tuple(values), where)


def parse_grid(word: str) -> Axis:
    """Parses a value of ``--grid``: ``lr=1e-3,3e-4`` or ``seed=0..4``. Raises SpecError."""
    name, equals, values = word.partition("=")
    where = f"--grid {word}"
    if not equals:
        raise SpecError(f"{where}: expected NAME=VALUE,VALUE,...", "e.g. --grid lr=1e-3,3e-4 --grid seed=0..4")
    return axis(name, [value for value in values.split(",") if value], where)


def _range(word: str, where: str) -> list[str]:
    match = _RANGE.fullmatch(word)
    if not match:
        return [word]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise SpecError(f"{where}: the range {word} is empty", f"write {last}..{first}, or list the values")
    if last - first >= MAX_JOBS:
        raise SpecError(f"{where}: the range {word} has more than {MAX_JOBS} values", "split the sweep")
    return [str(number) for number in range(first, last + 1)]


def combinations(axes: Sequence[Axis]) -> list[Params]:
    """Returns all combinations; the first axis changes slowest. Raises SpecError if there are too many."""
    size = math.prod(len(axis.values) for axis in axes)
    if size > MAX_JOBS:
        raise SpecError(f"{axes[0].where}: {size} combinations, more than {MAX_JOBS}", "split the sweep")
    return list(itertools.product(*([(axis.name, value) for value in axis.values] for axis in axes)))


def templates_of(root: YamlNode, metrics: tuple[str, ...] = ()) -> tuple[Template, ...]:
    """Returns the templates in a file, to which ``metrics`` are added. Raises SpecError or PresetError."""
    if root.kind == "nothing":
        raise SpecError(f"{root.where}: the file is empty", "it needs 'jobs', or 'defaults' with a command")
    top = _entries(root, TOP, "a sweep")
    defaults = _entries(top["defaults"], SHARED, "defaults") if "defaults" in top else {}
    axes = _matrix(top["matrix"]) if "matrix" in top else ()
    if "jobs" not in top:
        if "command" not in defaults:
            raise SpecError(f"{root.where}: both 'jobs' and a 'command' in 'defaults' are missing")
        return (_template("", root.where, defaults, axes, metrics),)
    if top["jobs"].kind == "list":
        raise SpecError(
            f"{top['jobs'].where}: jobs must be a mapping from each job's name to its keys, not a list",
            "write e.g.  jobs: {train: {command: train.py --lr {lr}}}",
        )
    templates = []
    for key, node in mapping_entries(top["jobs"], "jobs"):
        _check_name(key.text, key.where)
        own = {} if node.kind == "nothing" else _entries(node, OF_A_JOB, f"the job {key.text!r}")
        templates.append(_template(key.text, key.where, _merged(defaults, own), axes, metrics))
    if not templates:
        raise SpecError(f"{top['jobs'].where}: 'jobs' is empty")
    return tuple(templates)


def _entries(node: YamlNode, keys: tuple[str, ...], what: str) -> dict[str, YamlNode]:
    return {key: value for key, _, value in known_entries(node, keys, what)}


def _check_name(name: str, where: str) -> None:
    try:
        parse_run_name(name)
    except ValueError:
        raise SpecError(
            f"{where}: {name!r} cannot be a job's name",
            "use 1 to 64 letters, digits, '.', '_' and '-', beginning with neither '.' nor '-'",
        ) from None


def _merged(defaults: Mapping[str, YamlNode], own: Mapping[str, YamlNode]) -> dict[str, YamlNode]:
    merged = {**defaults, **own}
    for name in ("env", "slurm"):
        if name in defaults and name in own:
            mapping_entries(own[name], name)
            words = {key.text: (key, value) for each in (defaults, own) for key, value in each[name].entries}
            merged[name] = YamlNode(own[name].where, "mapping", entries=tuple(words.values()))
    return merged


def _template(
    group: str, where: str, keys: Mapping[str, YamlNode], axes: tuple[Axis, ...], more: tuple[str, ...]
) -> Template:
    if "command" not in keys:
        raise SpecError(f"{where}: the job {group!r} has no 'command'", "write what you would pass to safelaunch")
    nodes = _number(keys, "nodes", parse_count, 1)
    if nodes < 1:
        raise SpecError(f"{keys['nodes'].where}: nodes: a job needs at least 1 node")
    job = SweepJob(
        name="",
        words=(),
        where=where,
        group=group,
        gpus=_number(keys, "gpus", parse_count, 1),
        ports=_number(keys, "ports", parse_count, 0),
        timeout_s=_number(keys, "timeout", parse_seconds, None),
        retries=_number(keys, "retries", parse_count, 0),
        metrics=(*(_metrics(keys["metric"]) if "metric" in keys else ()), *more),
        nodes=nodes,
        batch=slurm.words_of(keys["slurm"]) if "slurm" in keys else (),
    )
    return Template(
        job=job,
        command=command_of(keys["command"]),
        axes=axes,
        name=_text(keys, "name"),
        options=_options(keys),
        env=_env(keys["env"]) if "env" in keys else (),
        cwd=_text(keys, "cwd"),
        needs=_needs(keys),
    )


def command_of(node: YamlNode) -> tuple[TemplateText, ...]:
    """Returns the words of a command, given as a list or as a text that is split as a shell does."""
    if node.kind == "list":
        words = tuple(TemplateText(scalar(item, "command"), item.where) for item in node.items)
    else:
        words = tuple(TemplateText(word, node.where) for word in _split(text_of(node, "command"), node.where))
    if not words:
        raise SpecError(f"{node.where}: command is empty", "write what you would pass to safelaunch")
    return words


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{where}: command: {error}", "check the quotes, or write a list of words") from error


def _text(keys: Mapping[str, YamlNode], name: str) -> TemplateText | None:
    return TemplateText(scalar(keys[name], name), keys[name].where) if name in keys else None


def _number(keys: Mapping[str, YamlNode], name: str, parse: Callable[[str], T], default: D) -> T | D:
    if name not in keys:
        return default
    try:
        return parse(scalar(keys[name], name))
    except ValueError:
        kind = "a whole number" if parse is parse_count else "a positive number of seconds (also 90s, 10m, 2h)"
        raise SpecError(f"{keys[name].where}: {name}: {keys[name].text!r} is not {kind}") from None


def _options(keys: Mapping[str, YamlNode]) -> tuple[TemplateText, ...]:
    words: list[TemplateText] = []
    if "preset" in keys:
        for node in texts_of(keys["preset"], "preset"):
            words += [TemplateText("--preset", node.where), TemplateText(node.text, node.where)]
    for name in WATCHDOG_KEYS:
        if name in keys:
            node = keys[name]
            BY_NAME[name].parse_node(node)
            words += [TemplateText(f"--{name}", node.where), TemplateText(node.text, node.where)]
    return tuple(words)


def _env(node: YamlNode) -> tuple[tuple[str, TemplateText], ...]:
    return tuple(
        (key.text, TemplateText(scalar(not_boolean(value, key.text), key.text), value.where))
        for key, value in variables_of(node, "give the option in 'command'")
    )


def _needs(keys: Mapping[str, YamlNode]) -> tuple[TemplateText, ...]:
    if "needs" not in keys or (keys["needs"].kind == "list" and not keys["needs"].items):
        return ()
    return tuple(TemplateText(node.text, node.where) for node in texts_of(keys["needs"], "needs"))


def _metrics(node: YamlNode) -> tuple[str, ...]:
    names = []
    for item in texts_of(node, "metric"):
        try:
            check_pattern(item.text)
        except UsageError as error:
            raise SpecError(f"{item.where}: {error.message}", error.fix) from error
        names.append(item.text)
    return tuple(names)


def _matrix(node: YamlNode) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    for key, value in mapping_entries(node, "matrix"):
        nodes = value.items if value.kind == "list" else (value,)
        axes.append(axis(key.text, [scalar(item, key.text) for item in nodes], key.where))
    return tuple(axes)


def expand(templates: Sequence[Template], paths: SweepPaths, cwd: str) -> tuple[SweepJob, ...]:
    """Returns all jobs of the sweep, in the order of the file; ``cwd`` is absolute. Raises SpecError."""
    pairs: list[tuple[SweepJob, tuple[TemplateText, ...]]] = []
    for template in templates:
        pairs += _jobs(template, paths, cwd)
        if len(pairs) > MAX_JOBS:
            raise SpecError(f"{template.job.where}: more than {MAX_JOBS} jobs", "split the sweep")
    if not pairs:
        raise SpecError("the sweep has no jobs")
    _check_used(templates, [job for job, _ in pairs])
    _check_names([job for job, _ in pairs])
    groups: dict[str, list[str]] = {}
    for job, _ in pairs:
        groups.setdefault(job.group, []).append(job.name)
    jobs = tuple(replace(job, needs=_names_needed(texts, groups)) for job, texts in pairs)
    _check_order(jobs)
    return jobs


def _jobs(template: Template, paths: SweepPaths, cwd: str) -> list[tuple[SweepJob, tuple[TemplateText, ...]]]:
    """Returns a template's jobs, one per combination of the parameters that it uses; their needs aren't resolved."""
    fields = [*(axis.name for axis in template.axes), *BUILTIN]
    ports = _ports(template)
    used = {
        name
        for text in template.working_texts()
        for name in text.check(fields if text is template.cwd else [*fields, *ports])
    }
    axes = [axis for axis in template.axes if axis.name in used]
    fields = [*(axis.name for axis in axes), *BUILTIN]
    for text in template.needs:
        text.check(fields)
    if template.name is not None:
        template.name.check([axis.name for axis in axes])
    for name in ports:
        if name not in used:
            raise SpecError(
                f"{template.job.where}: the port {{{name}}} is not used",
                "put it into the command or env, or request fewer",
            )
    rows = combinations(axes)
    return [_job(template, *row, paths, cwd) for row in zip(rows, _names(template, rows), strict=True)]


def _check_used(templates: Sequence[Template], jobs: Sequence[SweepJob]) -> None:
    used = {name for job in jobs for name, _ in job.params}
    for axis in templates[0].axes:
        if axis.name not in used:
            raise SpecError(
                f"{axis.where}: the parameter {axis.name!r} is not used",
                f"put {{{axis.name}}} into the command, env or cwd",
            )


def _ports(template: Template) -> tuple[str, ...]:
    """Returns the names of the template's ports. Raises SpecError if a parameter has one of these names."""
    names = port_names(template.job.ports)
    for axis in template.axes:
        if axis.name in names:
            raise SpecError(
                f"{axis.where}: {{{axis.name}}} is the name of a leased port", "give the parameter another name"
            )
    return names


def _job(
    template: Template, params: Params, name: str, paths: SweepPaths, cwd: str
) -> tuple[SweepJob, tuple[TemplateText, ...]]:
    own = {"name": name, "sweep_dir": str(paths.root), "job_dir": str(paths.job(name))}
    values = {**dict(params), **own}
    with_ports = {**values, **port_marks(template.job.ports)}
    job = replace(
        template.job,
        name=name,
        words=tuple(text.fill(with_ports) for text in _words(template)),
        params=params,
        env=tuple((variable, text.fill(with_ports)) for variable, text in template.env),
        cwd=posixpath.join(cwd, template.cwd.fill(values)) if template.cwd is not None else cwd,
    )
    return job, tuple(TemplateText(text.fill(values), text.where) for text in template.needs)


def _words(template: Template) -> tuple[TemplateText, ...]:
    first = 1 if template.command and template.command[0].text == "exec" else 0
    return (*template.command[:first], *template.options, *template.command[first:])


def _names(template: Template, combinations: Sequence[Params]) -> list[str]:
    """Returns one name per combination: the template's, or one built from the group's name and the parameters."""
    if template.name is not None:
        names = [template.name.fill(dict(params)) for params in combinations]
        for name in names:
            _check_name(name, template.name.where)
        return names
    plain = [derive(template.job.group, params) for params in combinations]
    # A hash distinguishes values that are too long, or that differ only in characters that file names can't contain.
    return [
        name if len(name) <= LONGEST_NAME and plain.count(name) == 1 else _with_hash(name, params)
        for name, params in zip(plain, combinations, strict=True)
    ]


def derive(group: str, params: Params) -> str:
    """Builds a name such as ``train_lr-1e-3_seed-0``; ``job`` if nothing is left of it. Omits values of secrets."""
    values = (name if is_secret_name(name) else f"{name}-{value}" for name, value in params)
    parts = [*([group] if group else []), *values]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).lstrip(".-") or "job"


def _with_hash(name: str, params: Params) -> str:
    digest = hashlib.sha256(repr(params).encode()).hexdigest()[:_HASH]
    return f"{name[: LONGEST_NAME - _HASH - 1]}-{digest}"


def _check_names(jobs: Sequence[SweepJob]) -> None:
    first: dict[str, SweepJob] = {}
    for job in jobs:
        other = first.setdefault(job.name.lower(), job)  # one directory each, also on a disk that ignores case
        if other is not job:
            raise SpecError(
                f"{job.where}: two jobs are called {job.name!r} (the other at {other.where})",
                "put a placeholder that differs into 'name', or rename one of them",
            )


def _names_needed(texts: Sequence[TemplateText], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns the names of the jobs that a job waits for. The name of a group stands for all of its jobs."""
    names = {name for group in groups.values() for name in group}
    job_names: dict[str, None] = {}
    for text in texts:
        if text.text in groups and text.text:
            job_names.update(dict.fromkeys(groups[text.text]))
        elif text.text in names:
            job_names[text.text] = None
        else:
            choices = list(dict.fromkeys([*(group for group in groups if group), *sorted(names)]))
            raise SpecError(
                f"{text.where}: needs: unknown job {text.text!r}{did_you_mean(text.text, choices)}",
                f"jobs: {', '.join(choices[:12])}{', ...' if len(choices) > 12 else ''}",
            )
    return tuple(job_names)


def _check_order(jobs: Sequence[SweepJob]) -> None:
    try:
        TopologicalSorter({job.name: job.needs for job in jobs}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # each after the one that needs it
        where = next(job.where for job in jobs if job.name == circle[0])
        raise SpecError(f"{where}: needs form a cycle: {' -> '.join(circle)}") from None
