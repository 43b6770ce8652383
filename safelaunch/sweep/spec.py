"""Reads the file of a sweep into templates. Errors name file and line.

    defaults:                       # for every job below; a job's own keys win (env: variable by variable)
      command: --nproc-per-node=1 train.py --lr {lr} --seed {seed}
      gpus: 1
      preset: hang-debug
      env: {WANDB_NAME: "{name}"}
      timeout: 2h                   # also retries, ports, stall-timeout, startup-timeout, max-stall, on-stall
    matrix:                         # every combination is a job
      lr: [1e-3, 3e-4]
      seed: 0..4
    jobs:                           # optional: several kinds of jobs, each for the parameters that it uses
      prepare: {command: --no-python bash prepare.sh, gpus: 0}
      train: {needs: prepare, nodes: 2, slurm: {partition: gpu, time: 120}}   # with --engine slurm

Scalars keep their text as written (``1e-3`` stays ``1e-3``), because they become words of a command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.settings.options import BY_NAME, WATCHDOG_KEYS, parse_count, parse_run_name, parse_seconds
from safelaunch.settings.yamlfile import Node, known_entries, mapping_entries, text_of, texts_of
from safelaunch.sweep import slurm
from safelaunch.sweep.grid import Axis, Matrix, Text, axis, scalar
from safelaunch.sweep.metrics import check_pattern
from safelaunch.system.errors import SpecError, UsageError

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

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def templates_of(root: Node, metrics: tuple[str, ...] = ()) -> tuple[Template, ...]:
    """The templates in a parsed file. Raises SpecError or PresetError, naming file and line.

    ``metrics``: more of them, for every job.
    """
    if root.kind == "nothing":
        raise SpecError(f"{root.where}: the file is empty", "it needs 'jobs', or 'defaults' with a command")
    top = {key: node for key, _, node in known_entries(root, TOP, "a sweep")}
    defaults = _entries(top["defaults"], SHARED, "defaults") if "defaults" in top else {}
    shared = _matrix(top["matrix"]) if "matrix" in top else Matrix()
    if "jobs" not in top:
        if "command" not in defaults:
            raise SpecError(f"{root.where}: both 'jobs' and a 'command' in 'defaults' are missing")
        return (_template("", root.where, defaults, shared, metrics),)
    if top["jobs"].kind == "list":
        raise SpecError(
            f"{top['jobs'].where}: jobs must be a mapping from each job's name to its keys, not a list",
            "write e.g.  jobs: {train: {command: train.py --lr {lr}}}",
        )
    found = []
    for key, node in mapping_entries(top["jobs"], "jobs"):
        _check_group(key)
        own = {} if node.kind == "nothing" else _entries(node, OF_A_JOB, f"the job {key.text!r}")
        found.append(_template(key.text, key.where, _merged(defaults, own), shared, metrics))
    if not found:
        raise SpecError(f"{top['jobs'].where}: 'jobs' is empty")
    return tuple(found)


def _entries(node: Node, known: tuple[str, ...], what: str) -> dict[str, Node]:
    return {key: value for key, _, value in known_entries(node, known, what)}


def _check_group(key: Node) -> None:
    try:
        parse_run_name(key.text)
    except ValueError:
        raise SpecError(
            f"{key.where}: {key.text!r} cannot be a job's name", "use 1 to 64 letters, digits, '.', '_' and '-'"
        ) from None


def _merged(defaults: Mapping[str, Node], own: Mapping[str, Node]) -> dict[str, Node]:
    """The job's keys merged over the defaults; ``env`` and ``slurm`` are merged key by key."""
    merged = {**defaults, **own}
    for name in ("env", "slurm"):
        if name in defaults and name in own:
            mapping_entries(own[name], name)
            words = {key.text: (key, value) for each in (defaults, own) for key, value in each[name].entries}
            merged[name] = Node(own[name].where, "mapping", entries=tuple(words.values()))
    return merged


def _template(group: str, where: str, keys: Mapping[str, Node], matrix: Matrix, more: tuple[str, ...]) -> Template:
    if "command" not in keys:
        raise SpecError(f"{where}: the job {group!r} has no 'command'", "write what you would pass to safelaunch")
    metrics = _metrics(keys["metric"]) if "metric" in keys else ()
    return Template(
        group=group,
        where=where,
        command=command_of(keys["command"]),
        matrix=matrix,
        name=_text(keys, "name"),
        options=_options(keys),
        env=_env(keys["env"]) if "env" in keys else (),
        cwd=_text(keys, "cwd"),
        needs=_needs(keys),
        gpus=_count(keys, "gpus", 1),
        ports=_count(keys, "ports", 0),
        timeout_s=_seconds(keys, "timeout"),
        retries=_count(keys, "retries", 0),
        metrics=(*metrics, *more),
        nodes=_nodes(keys),
        batch=slurm.words_of(keys["slurm"]) if "slurm" in keys else (),
    )


# --- one key each -----------------------------------------------------------------------------------------------------


def command_of(node: Node) -> tuple[Text, ...]:
    """The command as words, from a list or from one text that is split as in a shell."""
    if node.kind == "list":
        words = tuple(Text(scalar(item, "command"), item.where) for item in node.items)
    else:
        words = tuple(Text(word, node.where) for word in _split(text_of(node, "command"), node.where))
    if not words:
        raise SpecError(f"{node.where}: command is empty", "write what you would pass to safelaunch")
    return words


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{where}: command: {error}", "check the quotes, or write a list of words") from error


def _text(keys: Mapping[str, Node], name: str) -> Text | None:
    return Text(scalar(keys[name], name), keys[name].where) if name in keys else None


def _count(keys: Mapping[str, Node], name: str, default: int) -> int:
    if name not in keys:
        return default
    try:
        return parse_count(scalar(keys[name], name))
    except ValueError:
        raise SpecError(f"{keys[name].where}: {name}: {keys[name].text!r} is not a whole number") from None


def _nodes(keys: Mapping[str, Node]) -> int:
    nodes = _count(keys, "nodes", 1)
    if nodes < 1:
        raise SpecError(f"{keys['nodes'].where}: nodes: a job needs at least 1 node")
    return nodes


def _seconds(keys: Mapping[str, Node], name: str) -> float | None:
    if name not in keys:
        return None
    try:
        return parse_seconds(scalar(keys[name], name))
    except ValueError:
        text = keys[name].text
        raise SpecError(
            f"{keys[name].where}: {name}: {text!r} is not a positive number of seconds (also 90s, 10m, 2h)"
        ) from None


def _options(keys: Mapping[str, Node]) -> tuple[Text, ...]:
    """safelaunch's options of the job, as words."""
    words: list[Text] = []
    if "preset" in keys:
        for node in texts_of(keys["preset"], "preset"):
            words += [Text("--preset", node.where), Text(node.text, node.where)]
    for name in WATCHDOG_KEYS:
        if name in keys:
            node = keys[name]
            BY_NAME[name].parse_node(node)
            words += [Text(f"--{name}", node.where), Text(node.text, node.where)]
    return tuple(words)


def _env(node: Node) -> tuple[tuple[str, Text], ...]:
    found = []
    for key, value in mapping_entries(node, "env"):
        if not _VARIABLE.fullmatch(key.text):
            raise SpecError(f"{key.where}: {key.text!r} is not the name of an environment variable")
        if key.text.startswith("SAFELAUNCH_"):
            raise SpecError(f"{key.where}: {key.text} cannot be set here", "give the option in 'command'")
        if value.kind == "boolean":
            raise SpecError(
                f"{value.where}: {key.text}: {value.text} is a boolean, but a variable's value must be text",
                f'write "{value.text}" in quotes, or 1 or 0',
            )
        found.append((key.text, Text(scalar(value, key.text), value.where)))
    return tuple(found)


def _needs(keys: Mapping[str, Node]) -> tuple[Text, ...]:
    if "needs" not in keys or (keys["needs"].kind == "list" and not keys["needs"].items):
        return ()
    return tuple(Text(node.text, node.where) for node in texts_of(keys["needs"], "needs"))


def _metrics(node: Node) -> tuple[str, ...]:
    found = []
    for item in texts_of(node, "metric"):
        try:
            check_pattern(item.text)
        except UsageError as error:
            raise SpecError(f"{item.where}: {error.message}", error.fix) from error
        found.append(item.text)
    return tuple(found)


# --- the matrix -------------------------------------------------------------------------------------------------------


def _matrix(node: Node) -> Matrix:
    axes: list[Axis] = []
    for key, value in mapping_entries(node, "matrix"):
        nodes = value.items if value.kind == "list" else (value,)
        axes.append(axis(key.text, [scalar(item, key.text) for item in nodes], key.where))
    return Matrix(tuple(axes))


@dataclass(frozen=True, slots=True)
class Template:
    """One entry of ``jobs``, or the one job of a grid. ``group`` is its key, or empty.

    ``matrix``: the sweep's; the job runs for each combination of the parameters that it uses. ``options``: safelaunch's
    options before ``command``. ``needs``: names of groups or jobs. ``batch``: words for
    sbatch.
    """

    group: str
    where: str
    command: tuple[Text, ...]
    matrix: Matrix = field(default_factory=Matrix)
    name: Text | None = None
    options: tuple[Text, ...] = ()
    env: tuple[tuple[str, Text], ...] = ()
    cwd: Text | None = None
    needs: tuple[Text, ...] = ()
    gpus: int = 1
    ports: int = 0
    timeout_s: float | None = None
    retries: int = 0
    metrics: tuple[str, ...] = ()
    nodes: int = 1
    batch: tuple[str, ...] = ()

    def working_texts(self) -> tuple[Text, ...]:
        """The texts in which a parameter makes a difference."""
        cwd = () if self.cwd is None else (self.cwd,)
        return (*self.command, *self.options, *(text for _, text in self.env), *cwd)

    def other_texts(self) -> tuple[Text, ...]:
        return (*self.needs, *(() if self.name is None else (self.name,)))
