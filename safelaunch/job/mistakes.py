"""Finds launches that would fail or wouldn't do what the user intended. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard

from safelaunch.job.argv import CommandLine, is_given, is_one_node, of_torchrun

RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
_STARTERS = {"Process", "spawn", "start_processes", "Popen", "fork", "mp", "multiprocessing", "subprocess"}
_FROM_ELSEWHERE = {
    "rank",
    "world_size",
    "store",
    "init_method",
}  # arguments of ``init_process_group`` that replace these variables


def nodes_never_meet(command: CommandLine, options: Collection[str], environ: Mapping[str, str]) -> str:
    """Returns why the nodes of a job can't find each other; "" if they can.

    Source: ``run`` in ``torch/distributed/run.py``: with ``--standalone``, each node has its own rendezvous.
    """
    nodes = of_torchrun(command, environ, "--nnodes", "--nn", "1")
    least = nodes.partition(":")[0]
    if not (is_given(options, environ, "standalone") and least.isascii() and least.isdigit() and int(least) > 1):
        return ""
    return (
        f"--standalone is for one node, so with --nnodes={nodes} each node would wait for the others forever; on "
        "every node, name a rendezvous instead: --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=JOB"
    )


def port_to_serve(command: CommandLine, options: Collection[str], environ: Mapping[str, str]) -> int | None:
    """Returns the port on which torchrun will listen on this node; None if it listens on none that the user chose.

    Source: ``get_rdzv_endpoint`` in ``torch/distributed/run.py``, and torch's static and c10d rendezvous.
    """
    endpoint = of_torchrun(command, environ, "--rdzv-endpoint", "--rdzv-e", "")
    is_static = of_torchrun(command, environ, "--rdzv-backend", "--rdzv-b", "static") == "static"
    is_first = of_torchrun(command, environ, "--node-rank", "--node-r", "0") == "0"
    serves = is_first if is_static else is_one_node(command, environ)
    host, _, port = endpoint.rpartition(":")
    if is_static and not endpoint:
        port = of_torchrun(command, environ, "--master-port", "--master-p", "")
    elif not is_static and host not in ("localhost", "127.0.0.1", "::1", "[::1]"):
        return None
    if not serves or is_given(options, environ, "standalone") or not (port.isascii() and port.isdigit()):
        return None
    return int(port) or None


def has_no_number_of_processes(command: CommandLine, environ: Mapping[str, str]) -> bool:
    """Returns whether torchrun will start only one process because no number of processes was given."""
    return command.program is None and not of_torchrun(command, environ, "--nproc-per-node", "--np", "")


def python_script(words: Sequence[str]) -> str:
    """Returns the script in a command that runs one with Python: ``train.py`` for ``python -u train.py``, else ""."""
    program, *rest = words
    if not re.fullmatch(r"python[\d.]*", program.rpartition("/")[2]):
        return ""
    script = next((word for word in rest if not word.startswith("-")), "")
    return script if script.endswith(".py") and not {"-m", "-c"} & set(rest[: rest.index(script)]) else ""


def misplaced(script: Sequence[str], flags: Collection[str], read: Callable[[], str]) -> list[str]:
    """Returns the ``flags`` of safelaunch that come after the script, unless the script seems to read them itself.

    Args:
        read: Returns the script's source; called only if needed.
    """
    words = script[1 : script.index("--")] if "--" in script else script[1:]
    misplaced_flags = sorted({word.partition("=")[0] for word in words} & set(flags))
    source = read() if misplaced_flags else ""
    return [flag for flag in misplaced_flags if not reads_option(source, flag)]


def reads_option(source: str, flag: str) -> bool:
    """Returns whether a script might read this option: by argparse, click, absl, a dataclass or parameters."""
    name = re.escape(flag[2:]).replace(r"\-", "[-_]")
    if re.search(rf"(?<![\w-])(?:--{name}(?![\w-])|{name} *[:=](?!=)|(?P<quote>[\"']){name}(?P=quote))", source):
        return True
    return flag == "--config" and "LightningCLI" in source


def imported_names(source: str) -> set[str]:
    """Returns the modules that Python source might import; relative imports lose their leading dots."""
    names: set[str] = set()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return names
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            names |= {package, *(f"{package}.{name.name}".strip(".") for name in node.names)} - {""}
    return names


def may_be_a_rank(text: bytes) -> bool:
    return b"init_process_group" in text or b"environ" in text


def lacks_rank_variables(script: str, source: ast.AST) -> str:
    """Returns a message if a script needs the variables of a rank but doesn't set them, else ""."""
    nodes = list(ast.walk(source))
    read = [node.slice for node in nodes if isinstance(node, ast.Subscript) and _is_read(node)]
    if not (read or any(_takes_variables(node) for node in nodes)):
        return ""
    if any(_may_make_ranks(node) and node not in read for node in nodes):
        return ""
    return (
        f"{script} needs a rank's variables (RANK, WORLD_SIZE, ...), which exec doesn't set: safelaunch "
        f"--nproc-per-node=N {script} starts N ranks with them"
    )


def _is_read(node: ast.Subscript) -> bool:
    of_environ = isinstance(node.ctx, ast.Load) and _name_of(node.value) == "environ"
    return of_environ and isinstance(node.slice, ast.Constant) and node.slice.value in RANK_VARIABLES


def _takes_variables(node: ast.AST) -> bool:
    if not _is_initialisation(node):
        return False
    return not node.args[1:] and not {keyword.arg for keyword in node.keywords} & {None, *_FROM_ELSEWHERE}


def _may_make_ranks(node: ast.AST) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
        return _name_of(node) in _STARTERS
    if isinstance(node, ast.keyword):
        return node.arg == "RANK"
    return isinstance(node, ast.Constant) and node.value in ("RANK", "WORLD_SIZE")


def lacks_nccl(script: str, source: ast.AST, version: str) -> str:
    """Returns a message if a script initializes only NCCL and this torch was built without it, else ""."""
    calls = [node for node in ast.walk(source) if _is_initialisation(node)]
    if not calls or not all(_backend_of(call) == "nccl" for call in calls):
        return ""
    return (
        f"{script} initializes NCCL, which torch {version} doesn't have because it is built without CUDA: install the "
        'build for your GPUs, or use the backend "gloo"'
    )


def _is_initialisation(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _name_of(node.func) == "init_process_group"


def _backend_of(call: ast.Call) -> object:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "backend"] or call.args[:1]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
