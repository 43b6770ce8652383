"""Finds the installed torchrun: its interpreter, version and options.

Doesn't import torch, which would take over a second and hundreds of megabytes. The options come from the installed
``torch/distributed/run.py``, which will parse the same command line.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from safelaunch.system.errors import UsageError
from safelaunch.system.files import text_of

FLAG_ACTIONS = {"check_env", "store_true", "store_false", "store_const", "help", "version", "count", "append_const"}


@dataclass(frozen=True, slots=True)
class TorchInstallation:
    python: str
    package: Path
    version: str  # 2.13.0+cpu
    note: str = ""  # why this interpreter is used, if another one was expected


def find(environ: Mapping[str, str]) -> TorchInstallation:
    """Returns the torch for the user's script: the active environment's, else this interpreter's, else PATH's.

    PATH precedes this interpreter if pipx or ``uv tool`` made its environment for safelaunch. Raises UsageError if
    there is no torch.
    """
    own, is_tool = _torch_on(sys.path), _is_tool()
    at_home = TorchInstallation(sys.executable, own, _version(own)) if own is not None else None
    active = list(_active(environ, is_tool or own is None))
    if at_home is not None and active and _is_ours(active[0][0]):
        return at_home
    on_path = _on_path(environ) if is_tool or own is None else ()
    for python, origin in (*active, *on_path):
        package = None if _is_ours(python) else _ask_for_torch(python)
        if package is not None:
            note = f"the job runs with {python} ({origin}); safelaunch itself is installed in {sys.prefix}"
            return TorchInstallation(python, package, _version(package), note)
    if at_home is not None and (active or is_tool):
        lacking = f"{active[0][1] if active else 'PATH'} has no torch"
        return replace(at_home, note=f"the job runs with safelaunch's own {sys.executable}: {lacking}")
    if at_home is not None:
        return at_home
    from safelaunch.system import commands

    raise UsageError(
        "torch is missing: neither safelaunch's own environment, nor an active one, nor PATH has it.",
        f"Activate the environment that has it, or install it:\n{commands.line(commands.pip_install('torch'))}",
    )


def _is_tool() -> bool:
    return any((Path(sys.prefix) / record).is_file() for record in ("pipx_metadata.json", "uv-receipt.toml"))


def _is_ours(python: str) -> bool:
    return os.path.realpath(os.path.dirname(python)) == os.path.realpath(os.path.dirname(sys.executable))  # noqa: PTH120


def _active(environ: Mapping[str, str], even_base: bool) -> Iterator[tuple[str, str]]:
    # Conda's ``base`` might be active in every shell, without the user's intent.
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        is_chosen = name == "VIRTUAL_ENV" or even_base or environ.get("CONDA_DEFAULT_ENV") != "base"
        if environ.get(name) and is_chosen:
            yield os.path.join(environ[name], "bin", "python"), name  # noqa: PTH118


def _on_path(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the interpreters that the first ``torchrun`` and the first ``python3`` on PATH use."""
    from shutil import which

    script, python = (which(name, path=environ.get("PATH")) for name in ("torchrun", "python3"))
    of_script = _interpreter_of(Path(script)) if script is not None else None
    if of_script:
        yield of_script, "of the torchrun on PATH"
    if python is not None:
        yield python, "on PATH"


def _torch_on(path: list[str]) -> Path | None:
    """Returns torch's directory on ``path`` or, for an editable installation, from the import system."""
    for entry in path:
        package = Path(entry or ".") / "torch"
        if (package / "distributed" / "run.py").is_file() and (package / "version.py").is_file():
            return package
    import importlib.util

    spec = importlib.util.find_spec("torch")  # without importing it
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return package if (package / "distributed" / "run.py").is_file() else None


def _interpreter_of(script: Path) -> str | None:
    """Returns the interpreter of a console script, even if the path is long and pip wrote the ``#!/bin/sh`` form."""
    match = re.match(r"#!\s*(?:/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \"\$0\"|([^\n]+))", text_of(script)[:4096])
    if match is None:
        return None
    from shutil import which

    program, *rest = (match.group(2) or "").split() or [match.group(1)]
    python = which(rest[-1]) if program == "/usr/bin/env" and rest else program
    return python if python and Path(python).is_file() else None


def _ask_for_torch(python: str) -> Path | None:
    import subprocess

    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    try:
        # With -c, modules come first from the working directory, so it must not be writable by others.
        done = subprocess.run(
            [str(Path(python).absolute()), "-c", code], capture_output=True, text=True, timeout=20, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    origin = done.stdout.strip()
    return Path(origin).parent if done.returncode == 0 and origin else None


def _version(package: Path) -> str:
    return _in_version(package, "__version__") or ""


def has_nccl(package: Path) -> bool:
    """Returns whether torch was built for NVIDIA or AMD GPUs; True if unknown."""
    return _in_version(package, "cuda") != "" or bool(_in_version(package, "hip"))


def _in_version(package: Path, name: str) -> str | None:
    text = text_of(package / "version.py")
    match = re.search(rf"""^{name}\s*(?::[^=]*)?=\s*(?:None|['"]([^'"]+))""", text, re.M)
    return (match.group(1) or "") if match else None


def options(package: Path) -> dict[str, bool]:
    """Returns the options of the installed torchrun, each True if it takes a value.

    Source: ``get_args_parser`` in ``torch/distributed/run.py``; if that can't be read, the table of torch 2.13 below.
    """
    return _installed_options(package) or dict(KNOWN)


def _installed_options(package: Path) -> dict[str, bool]:
    try:
        return parse_options((package / "distributed" / "run.py").read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}


def binds_any_port(package: Path) -> bool:
    """Returns whether torchrun picks a free port for a single-node job without a given one, as torch 2.13 does.

    Older versions use 29500. Source: ``run`` in ``torch/distributed/run.py``, which tells a missing port from a given
    one.
    """
    text = text_of(package / "distributed" / "run.py")
    return not text or "args.master_port is None" in text  # True if unreadable


class LazyOptions(Mapping[str, bool]):
    """The result of ``options``, read at the first lookup."""

    def __init__(self, package: Path) -> None:
        self._package = package

    @cached_property
    def _installed(self) -> dict[str, bool]:
        return _installed_options(self._package)

    @property
    def _table(self) -> Mapping[str, bool]:
        return self._installed or KNOWN

    @property
    def is_certain(self) -> bool:
        """True if torchrun rejects all other options: the table was read from its own source."""
        return bool(self._installed)

    def __getitem__(self, option: str) -> bool:
        return self._table[option]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def parse_options(source: str) -> dict[str, bool]:
    """Returns the options that ``get_args_parser`` in ``source`` adds, each True if it takes a value."""
    # The function ends at the next statement without indentation.
    function = re.search(r"^def get_args_parser\b.*?(?=^[^\s)#]|\Z)", source, re.S | re.M)
    if function is None:
        return {}
    table = {"-h": False, "--help": False}
    for node in ast.walk(ast.parse(function.group(0))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            for name in names:
                if name.startswith("-"):
                    table[name] = _takes_value(node)
    return table if len(table) > 2 else {}


def _takes_value(call: ast.Call) -> bool:
    for keyword in call.keywords:
        if keyword.arg == "action":
            value = keyword.value
            action = (
                value.value if isinstance(value, ast.Constant) else getattr(value, "id", getattr(value, "attr", ""))
            )
            if action in FLAG_ACTIONS:
                return False
        if keyword.arg == "nargs" and isinstance(keyword.value, ast.Constant) and keyword.value.value == 0:
            return False
    return True


def launcher(python: str) -> Path:
    """Returns the torchrun script next to ``python``, else an equivalent script of safelaunch's.

    ``python -m torch.distributed.run`` isn't used: it would import modules such as ``queue`` from the working
    directory, and call itself ``run.py``.
    """
    installed = Path(python).parent / "torchrun"
    head = text_of(installed)[:4096]
    plain = head.startswith("#!") and "from torch.distributed.run import main" in head
    return installed if plain else Path(__file__).parent / "launcher" / "torchrun"


_VALUED = [
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
]
_FLAGS = ["help", "standalone", "module", "no-python", "run-path", "virtual-local-rank"]
KNOWN: dict[str, bool] = {
    **{spelling: True for name in _VALUED for spelling in (f"--{name}", f"--{name.replace('-', '_')}")},
    **{spelling: False for name in _FLAGS for spelling in (f"--{name}", f"--{name.replace('-', '_')}")},
    "-h": False,
    "-m": False,
    "-r": True,
    "-t": True,
}
