"""The words for sbatch that a sweep's file may give: partition, account, time, and others. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.sweep.placeholders import Text
from safelaunch.system.errors import SpecError

# The keys of 'slurm', each a word of its own.
KEYS = ("partition", "account", "time", "qos", "sbatch")
# sbatch's other options that make sense for a job of a sweep.
KNOWN = """
acctg-freq begin cluster-constraint comment constraint container contiguous core-spec cores-per-socket cpu-freq
cpus-per-gpu cpus-per-task deadline delay-boot distribution exclude exclusive export export-file extra-node-info
get-user-env gpu-bind gpu-freq gres gres-flags hint licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nice no-kill no-requeue nodelist overcommit oversubscribe power prefer priority profile
propagate reboot requeue reservation signal sockets-per-node spread-job switches thread-spec threads-per-core time-min
tmp use-min-nodes wait-all-nodes wckey
"""
# What the engine sets, and what to use instead.
OURS = {
    "array": "colaunch makes arrays of jobs that are alike",
    "chdir": "use 'cwd'",
    "dependency": "use 'needs'",
    "error": "the output goes to the job's log in the sweep directory",
    "output": "the output goes to the job's log in the sweep directory",
    "open-mode": "the output is always appended",
    "gpus": "use 'gpus': GPUs on each node",
    "gpus-per-node": "use 'gpus': GPUs on each node",
    "job-name": "colaunch finds its jobs by their names",
    "kill-on-invalid-dep": "colaunch sets it for jobs that need others",
    "nodes": "use 'nodes'",
    "ntasks": "each node runs one safelaunch",
    "ntasks-per-node": "each node runs one safelaunch",
    "wait": "colaunch waits by itself",
    "parsable": "colaunch reads sbatch's answer",
    "wrap": "use 'command'",
    "test-only": "use colaunch --dry-run",
    "hold": "colaunch would wait for it for ever",
    **{key: f"use the key '{key}'" for key in ("partition", "account", "time", "qos")},
}
_TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"--([a-z][a-z-]*)(=.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.@:+,-]+")


def key_word(key: str, value: Text) -> str:
    """The word for one of ``KEYS`` but ``sbatch``. Raises SpecError."""
    text = value.text
    if key == "time" and not _TIME.fullmatch(text):
        raise SpecError(
            f"{value.where}: time: {text!r} is not a time of Slurm's",
            'minutes, "hours:minutes:seconds" or "days-hours", in quotes',
        )
    if not _NAME.fullmatch(text):
        raise SpecError(f"{value.where}: {key}: {text!r} is not a name that Slurm can have")
    return f"--{key}={text}"


def checked(words: Sequence[Text]) -> tuple[str, ...]:
    """Further words for sbatch. Raises SpecError for one that is unknown, or that colaunch sets itself."""
    return tuple(_checked(word) for word in words)


def _checked(word: Text) -> str:
    match = _WORD.fullmatch(word.text)
    if match is None:
        raise SpecError(
            f"{word.where}: sbatch: {word.text!r} is not an option in its long form", "write e.g. --cpus-per-task=8"
        )
    name, value = match[1], match[2]
    if name in OURS:
        raise SpecError(f"{word.where}: sbatch: --{name} cannot be given here", OURS[name])
    if name not in KNOWN.split():
        raise SpecError(
            f"{word.where}: sbatch: unknown option --{name}{did_you_mean(name, [*KNOWN.split(), *OURS])}",
            "see sbatch --help",
        )
    if value is not None and not value[1:].isprintable():
        raise SpecError(f"{word.where}: sbatch: --{name}: its value holds characters that cannot be printed")
    return word.text
