"""Finds the command that started a job in the job's output, and translates it to safelaunch.

Shells (``set -x``, prompts), launchers (DeepSpeed's ``cmd = ...``), ``subprocess`` errors and manifests print such
commands. A torchrun command keeps its options, because safelaunch accepts them. Other launchers, and scripts that start
their own ranks, run unchanged under ``safelaunch exec``. If srun starts the ranks, it starts one safelaunch for each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, takewhile

from safelaunch.job.argv import split
from safelaunch.job.torchrun import KNOWN

_MOST = 1 << 14  # characters
_LAUNCHER = r"accelerate|deepspeed|colossalai|horovodrun|mpirun|mpiexec"
_PROGRAM = re.compile(rf"torchrun|safelaunch|{_LAUNCHER}|python[\d.]*")
_AROUND = re.compile(
    r"srun|cd|source|export|env|exec|nohup|time|sudo|numactl|stdbuf|taskset|uv|poetry|conda|nsys"
    r"|docker|podman|apptainer|singularity|kubectl"
)
# Text before a command: nothing, the mark of ``set -x``, a prompt, or an announcement.
_LEAD = re.compile(
    r"(?!\s*File \")\s*(?:\++ +|(?:\([\w.-]+\) ?)?(?:\[[^]]{1,80}\]|[^\s\[\]]{0,80})[$#%>] +"
    r"|.{0,200}?\b(?:cmd|command|args|argv|entrypoint|exec\w*|run|running|launch\w*|invok\w*)\b[\"'`:=\s]*?)??"
    r"(?P<quote>[`\"']?)(?P<command>\[(?=[\"'])"
    rf"|(?:\w+=\S* +)*(?:\S*/)?(?:{_PROGRAM.pattern}|{_AROUND.pattern})\s)",
    re.IGNORECASE,
)
_HINT = re.compile(r"\.py(?![\w:])|[\s'\"]-m[\s'\"]")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_LOCAL_RANK_OPTION = re.compile(r"--local[-_]rank\b")
_USE_ENV = ("--use_env", "--use-env")
_HOSTS = re.compile(r"--?(?:H|host|hosts|hostfile|machinefile|f)\b")
_TOOLS = re.compile(r"(?:pip|venv|ensurepip|json|http|site|pytest|build|compileall|py_compile|zipfile)(?:\.|$)")
_OPERATORS = ";<>|&"
_STORE, _STORE_ON_HOST = "--cluster-store=29700", "--cluster-store=HOST:29700"  # srun and MASTER_ADDR give the host


def launch_of(text: str) -> tuple[str, ...]:
    """Returns the command that runs the job of this line under safelaunch; empty if the line shows no launch.

    Args:
        text: One line without prefixes, or a command of several lines that end in backslashes.
    """
    if (".py" not in text and "-m" not in text) or len(text) > _MOST or not _HINT.search(text):
        return ()
    if (lead := _LEAD.match(text)) is None:
        return ()
    command = text[lead.start("command") :].replace("\\\n", " ").rstrip().removesuffix(lead["quote"])
    return next(filter(None, map(_under_safelaunch, _commands(command))), ())


def best_launch(current: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Returns the better of two launches: the first that uses a launcher, else the last script.

    Earlier scripts might only prepare data.
    """
    return (launch_of(text) if not current or _is_script(current) else ()) or current


def _is_script(launch: Sequence[str]) -> bool:
    return re.search(r" -- (?:\S*/)?python[\d.]* (?!.*-m \S*(?:launch|run)\b)", " ".join(launch)) is not None


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the complete commands in a shell line or in the printed form of a Python list."""
    is_list = text.startswith("[")
    if not is_list and ("$(" in text or "`" in text or text.endswith("\\")):
        return
    text = text[1 : text.rfind("]")] if is_list else re.sub(r"(?<=\s)\d(?=>)", "", text)  # removes file descriptors
    tokens = shlex.shlex(text, posix=True, punctuation_chars="" if is_list else _OPERATORS)
    tokens.whitespace_split, tokens.commenters, tokens.whitespace = True, "", ", \t" if is_list else " \t"
    with suppress(ValueError):  # unclosed quote
        for is_operator, words in groupby(tokens, lambda word: bool(word) and not word.strip(_OPERATORS)):
            if not is_operator:
                yield list(takewhile("#".__ne__, words))


def _under_safelaunch(words: Sequence[str]) -> tuple[str, ...]:
    """Converts a command to run under safelaunch, keeping variables and wrappers (srun); empty if it starts no job."""
    names = [word.rpartition("/")[2] if not word.startswith("-") else "" for word in words]
    assigned = next((n for n, word in enumerate(words) if not _ASSIGNED.match(word)), 0)
    at = next((n for n, name in enumerate(names) if n >= assigned and _PROGRAM.fullmatch(name)), -1)
    around = names[assigned] if at > assigned else ""
    if at < 0 or any(_LOCAL_RANK_OPTION.match(word) or word in ("-h", "--help") for word in words):
        return ()
    if around and not _AROUND.fullmatch(around):
        return ()
    command = _translated(words[at:], names[at], "srun" in names[assigned:at])
    return (*words[:at], *command) if command else ()


def _translated(words: Sequence[str], name: str, in_srun: bool) -> tuple[str, ...]:
    """Converts a command to run under safelaunch; empty if it starts no job.

    Args:
        words: The command, starting with its program.
        in_srun: True if srun starts the command once per task.
    """
    options = next((n for n, word in enumerate(words[1:], 1) if not word.startswith("-") or word == "-m"), len(words))
    of_python, arguments = name.startswith("python"), words[options:]
    module = arguments[1] if of_python and arguments[:1] == ["-m"] and len(arguments) > 1 else ""
    script = arguments[0].rpartition("/")[2] if of_python and arguments else ""
    if name == "safelaunch":
        return tuple(words) if _names_a_script(words[1:]) and re.match(r"-|exec$|.*\.py$", words[1]) else ()
    if name == "torchrun" or script == "torchrun":
        return _torchrun_command(words[1:] if name == "torchrun" else arguments[1:])
    if module == "torch.distributed.run" or (module == "torch.distributed.launch" and {*arguments} & {*_USE_ENV}):
        return _torchrun_command([word for word in arguments[2:] if word not in _USE_ENV])
    starts = _is_job(module, script) if of_python else _names_a_script(words[1:])
    if not starts:
        return ()
    if name in ("mpirun", "mpiexec") and any(map(_HOSTS.match, words)):
        at = next((n for n, word in enumerate(words) if re.fullmatch(r"(?:\S*/)?python[\d.]*", word)), 0)
        store = _STORE if any("MASTER_ADDR" in word for word in words) else _STORE_ON_HOST
        return (*words[:at], "safelaunch", "exec", store, "--", *words[at:]) if at else ()
    return ("safelaunch", "exec", *([_STORE] if in_srun else []), "--", *words)


def _is_job(module: str, script: str) -> bool:
    return script.endswith(".py") or (bool(module) and not _TOOLS.match(module))


def _names_a_script(words: Sequence[str]) -> bool:
    return any(word.endswith(".py") for word in words) or "-m" in words or "--module" in words


def _torchrun_command(words: Sequence[str]) -> tuple[str, ...]:
    command = split(words, {}, KNOWN)
    is_program = command.has_flag("-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path")
    return ("safelaunch", *words) if command.script and (is_program or command.script[0].endswith(".py")) else ()
