"""Launches that fail, or do not do what was meant, told by the command line and the environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safelaunch.job.argv import CommandLine
from safelaunch.settings.yamlfile import nearest


def nodes_never_meet(command: CommandLine, options: Collection[str], environ: Mapping[str, str]) -> str:
    """Why the nodes of a job can't find each other; empty if they can.

    Source: ``run`` of ``torch/distributed/run.py``: with ``--standalone``, each node makes a rendezvous of its own.
    """
    nodes = _value(command, environ, "--nnodes", "--nn", "1")
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
    endpoint = _value(command, environ, "--rdzv-endpoint", "--rdzv-e", "")
    is_static = _value(command, environ, "--rdzv-backend", "--rdzv-b", "static") == "static"
    is_one_node = _value(command, environ, "--nnodes", "--nn", "1") in ("1", "1:1")
    serves = _value(command, environ, "--node-rank", "--node-r", "0") == "0" if is_static else is_one_node
    host, _, port = endpoint.rpartition(":")
    if is_static and not endpoint:
        port = _value(command, environ, "--master-port", "--master-p", "")
    elif not is_static and host not in ("localhost", "127.0.0.1", "::1", "[::1]"):
        return None
    if not serves or is_given(options, environ, "standalone") or not (port.isascii() and port.isdigit()):
        return None
    return int(port) or None


def has_no_number_of_processes(command: CommandLine, environ: Mapping[str, str]) -> bool:
    """Whether torchrun starts one process only because nobody has said how many."""
    return command.program is None and not _value(command, environ, "--nproc-per-node", "--np", "")


def _value(command: CommandLine, environ: Mapping[str, str], name: str, shortest: str, default: str) -> str:
    given = command.value_of(name, shortest=shortest)
    return (given if given is not None else environ.get(f"PET_{name[2:].upper().replace('-', '_')}", default)).strip()


# --- what torchrun shall start exists ---------------------------------------------------------------------------------
# What Python or the system may accept passes: a directory or an archive with ``__main__.py``, a pipe, standard input,
# a path within an archive.

_MOST_NAMES = 2000


def why_missing(script: Sequence[str], options: Collection[str], environ: Mapping[str, str]) -> str:
    """Why the script, the first word of ``script``, can't be started, in one line; empty if it can.

    ``options``: those given to torchrun, in full.
    """
    word = script[0] if script else ""
    if not word or word.startswith("-"):
        return ""  # standard input, or an option of Python's own
    others = is_given(options, environ, "no-python") or is_given(options, environ, "module", "-m")
    return "" if others or "PYTHON_EXEC" in environ else _file(word)  # of these, torchrun or Python says it


def is_given(options: Collection[str], environ: Mapping[str, str], name: str, short: str = "") -> bool:
    """Whether torchrun's switch ``name`` is on, by its option or its PET variable."""
    variable = "PET_" + name.upper().replace("-", "_")
    given = {f"--{name}", f"--{name.replace('-', '_')}", short} & set(options)
    return bool(given) or environ.get(variable, "0").strip() not in ("", "0")


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
