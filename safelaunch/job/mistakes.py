"""Launches that fail, or do not do what was meant, told by the command line, the environment and the script. Pure."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from safelaunch.job.argv import CommandLine, is_one_node, of_torchrun
from safelaunch.settings.yamlfile import nearest

RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
_STARTERS = {"Process", "spawn", "start_processes", "Popen", "fork", "mp", "multiprocessing", "subprocess"}
_FROM_ELSEWHERE = {"rank", "world_size", "store", "init_method"}  # what init_process_group else takes from variables


def nodes_never_meet(command: CommandLine, options: Collection[str], environ: Mapping[str, str]) -> str:
    """Why the nodes of a job can't find each other; empty if they can.

    Source: ``run`` of ``torch/distributed/run.py``: with ``--standalone``, each node makes a rendezvous of its own.
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
    """The port that torchrun shall serve on this node, where the user has chosen it.

    Source: ``get_rdzv_endpoint`` of ``torch/distributed/run.py``, and torch's static and c10d rendezvous.
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
    """Whether torchrun starts one process only because nobody has said how many."""
    return command.program is None and not of_torchrun(command, environ, "--nproc-per-node", "--np", "")


def python_script(words: Sequence[str]) -> str:
    """``train.py`` of ``python -u train.py``; empty if Python is told something else, or it is no Python."""
    program, *rest = words
    if not re.fullmatch(r"python[\d.]*", program.rpartition("/")[2]):
        return ""
    script = next((word for word in rest if not word.startswith("-")), "")
    return script if script.endswith(".py") and not {"-m", "-c"} & set(rest[: rest.index(script)]) else ""


def misplaced(script: Sequence[str], flags: Collection[str], read: Callable[[], str]) -> list[str]:
    """Returns those of safelaunch's ``flags`` that come after the script and that the script doesn't plainly read.

    ``read`` returns the script's source, and is called only if there are such flags.
    """
    words = script[1 : script.index("--")] if "--" in script else script[1:]
    found = sorted({word.partition("=")[0] for word in words} & set(flags))
    source = read() if found else ""
    return [flag for flag in found if not reads_option(source, flag)]


def reads_option(source: str, flag: str) -> bool:
    """Returns whether a script may read an option of this name: through argparse, click or absl, or from a dataclass or
    a function whose fields become options.
    """
    name = re.escape(flag[2:]).replace(r"\-", "[-_]")
    if re.search(rf"(?<![\w-])(?:--{name}(?![\w-])|{name} *[:=](?!=)|(?P<quote>[\"']){name}(?P=quote))", source):
        return True
    return flag == "--config" and "LightningCLI" in source


def imported_names(source: str) -> set[str]:
    """Returns the modules that a source may import, relative ones without their dots; none if it isn't Python."""
    found: set[str] = set()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return found
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            found |= {package, *(f"{package}.{name.name}".strip(".") for name in node.names)} - {""}
    return found


def may_be_a_rank(text: bytes) -> bool:
    """Whether a source is worth parsing."""
    return b"init_process_group" in text or b"environ" in text


def lacks_rank_variables(script: str, source: ast.AST) -> str:
    """A line about a script, started without the variables of a rank, that asks for them and makes none itself."""
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
    """Whether it is ``os.environ["RANK"]``, which fails without the variable."""
    of_environ = isinstance(node.ctx, ast.Load) and _name_of(node.value) == "environ"
    return of_environ and isinstance(node.slice, ast.Constant) and node.slice.value in RANK_VARIABLES


def _takes_variables(node: ast.AST) -> bool:
    """Whether it initialises the process group by nothing but the variables."""
    if not _is_initialisation(node):
        return False
    return not node.args[1:] and not {keyword.arg for keyword in node.keywords} & {None, *_FROM_ELSEWHERE}


def _may_make_ranks(node: ast.AST) -> bool:
    """Whether it may set the variables, do without them, or start other processes that have them."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
        return _name_of(node) in _STARTERS
    if isinstance(node, ast.keyword):
        return node.arg == "RANK"
    return isinstance(node, ast.Constant) and node.value in ("RANK", "WORLD_SIZE")


def lacks_nccl(script: str, source: ast.AST, version: str) -> str:
    """A line about a script that initialises NCCL alone, for a torch without it."""
    calls = [node for node in ast.walk(source) if _is_initialisation(node)]
    if not calls or not all(_backend_of(call) == "nccl" for call in calls):
        return ""
    return (
        f"{script} initializes NCCL, which torch {version} doesn't have, as it is built without CUDA: install the "
        'build for your GPUs, or use the backend "gloo"'
    )


def _is_initialisation(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _name_of(node.func) == "init_process_group"


def _backend_of(call: ast.Call) -> object:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "backend"] or call.args[:1]
    return given[0].value if given and isinstance(given[0], ast.Constant) else None


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# --- what torchrun shall start exists ---------------------------------------------------------------------------------
# What Python or the system may accept passes: a directory or an archive with ``__main__.py``, a pipe, standard input,
# a path within an archive. A module or program in a place that only the ranks know passes as well.

_MOST_NAMES = 2000


def why_missing(script: Sequence[str], options: Collection[str], environ: Mapping[str, str], python: str) -> str:
    """Why the first word of ``script`` can't be started, in one line; empty if it can, or if that is not known.

    ``options``: those given to torchrun, in full. ``python``: the interpreter that torchrun starts.
    """
    word = script[0] if script else ""
    if not word or word.startswith("-"):
        return ""  # standard input, or an option of Python's own
    if is_given(options, environ, "no-python"):
        return _program(word, environ)
    if "PYTHON_EXEC" in environ:
        return ""  # torchrun starts any program as Python
    if is_given(options, environ, "module", "-m"):
        return _module(word) if python == sys.executable else ""
    return _file(word)


def is_given(options: Collection[str], environ: Mapping[str, str], name: str, short: str = "") -> bool:
    """Whether torchrun's switch ``name`` is on, by its option or its PET variable."""
    variable = "PET_" + name.upper().replace("-", "_")
    given = {f"--{name}", f"--{name.replace('-', '_')}", short} & set(options)
    return bool(given) or environ.get(variable, "0").strip() not in ("", "0")


def _program(word: str, environ: Mapping[str, str]) -> str:
    from shutil import which

    if which(word, path=environ.get("PATH")) is not None or os.path.exists(word):  # noqa: PTH110 - never raises
        return ""
    return f"{word}: command not found" if "/" not in word else f"{word} does not exist"


def _module(word: str) -> str:
    """A package may extend its own path, so only the first part of a name is looked for."""
    import importlib.util

    name = word.partition(".")[0]
    path, here = list(sys.path), os.getcwd()  # noqa: PTH109 - a string for sys.path
    sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - a finder of the user's; Python will say what is wrong with it
        return ""
    finally:
        sys.path[:] = path
    return "" if found else f"there is no module {name} (in {here}, or installed for {sys.executable})"


def _file(word: str) -> str:
    try:
        os.stat(word)  # noqa: PTH116 - pathlib changes the word
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return ""  # within an archive, or not readable: Python says which
    else:
        return ""
    if _is_known_to_import_system(word):
        return ""
    folder, name = os.path.split(word)
    match = _neighbour(Path(folder or "."), name)
    hint = f"; did you mean {os.path.join(folder, match)!r}?" if match else ""  # noqa: PTH118 - as the user wrote it
    where = "" if folder.startswith("/") else f" in {os.getcwd()}"  # noqa: PTH109
    return f"{word} does not exist{where}{hint}"


def _is_known_to_import_system(word: str) -> bool:
    import pkgutil

    try:
        return pkgutil.get_importer(word) is not None
    except Exception:  # noqa: BLE001 - a path hook of the user's
        return True


def _neighbour(folder: Path, name: str) -> str:
    from itertools import islice

    try:
        with os.scandir(folder) as found:
            return nearest(name, [one.name for one in islice(found, _MOST_NAMES) if one.name.isprintable()])
    except OSError:
        return ""
