"""Checks for mistakes that would make the run fail later."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path

from safelaunch.job import mistakes, torchrun
from safelaunch.job.argv import CommandLine, is_given
from safelaunch.settings.options import BY_FLAG, OPTION_GROUPS, Settings
from safelaunch.supervise.cluster.key import BadKeyFile, read_key
from safelaunch.system.errors import UsageError

LARGEST_SCRIPT = 1 << 20
MOST_IMPORTED = 64


def check(settings: Settings) -> None:
    """Raises UsageError if the key file or the bundle directory is unusable."""
    _check_key(settings)
    if settings.is_explicit("bundle-dir"):
        from safelaunch.bundle.publication import check_directory

        problem = check_directory(settings.bundle_dir)
        if problem:
            raise UsageError(
                f"--bundle-dir {settings.bundle_dir} cannot hold bundles: {problem}.",
                "Name a directory that you can write to and other users cannot; safelaunch creates it if necessary.",
            )


def without_effect(settings: Settings) -> list[str]:
    """Returns lines about presets that have no effect here, and about options that --no-watch disables."""
    idle = [option.flag for option in OPTION_GROUPS["Watching"] if _is_idle(settings, option.name)]
    unwatched = f"--no-watch: {', '.join(idle)}: no effect, because nothing of safelaunch runs in the ranks"
    preset = "preset {0} sets nothing with the installed torch: safelaunch presets show {0}"
    return [*([unwatched] if idle else []), *(preset.format(name) for name in settings.idle_presets)]


def mistakes_of_torchrun(
    command: CommandLine, options: Collection[str], environ: Mapping[str, str], torch: torchrun.TorchInstallation
) -> list[str]:
    """Returns lines about a taken port, and about a script that needs NCCL although this torch lacks it."""
    port = mistakes.port_to_serve(command, options, environ)
    holder = _holder_of(port) if port is not None else ""
    taken = (
        f"port {port} is taken on this node, by {holder}: choose a different one; on a single node, "
        "--master-port=auto does"
    )
    is_file = not any(is_given(options, environ, name) for name in ("module", "no-python"))
    source = _source_of(command.script[0]) if is_file and not torchrun.has_nccl(torch.package) else None
    lacking = mistakes.lacks_nccl(command.script[0], source, torch.version) if source is not None else ""
    return [*([taken] if holder else []), *([lacking] if lacking else [])]


def mistakes_of_exec(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns a line about a script that needs rank variables and won't get them; empty if there is no problem."""
    script = mistakes.python_script(words)
    source = _source_of(script) if script and "RANK" not in environ else None
    lacking = mistakes.lacks_rank_variables(script, source) if source is not None else ""
    return [lacking] if lacking else []


def misplaced(script: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Returns a line about each safelaunch option that comes after the script.

    Leaves out options that the script seems to define, itself or in a module that it imports from its folder.
    """
    words = mistakes.misplaced(script, BY_FLAG, lambda: _text_with_imports(_file_of(script[0], is_module=is_module)))
    return [f"{word} comes after {script[0]}, so the script gets it; put safelaunch's options first" for word in words]


def _file_of(word: str, *, is_module: bool) -> Path:
    if not is_module:
        return Path(word)
    place = Path(*word.split("."))
    roots = [Path(root or ".") for root in ("", *sys.path)]
    names = (place.with_suffix(".py"), place / "__main__.py")
    return next((root / name for root in roots for name in names if (root / name).is_file()), place)


def _text_with_imports(script: Path) -> str:
    text = _text_of(script)
    folder, modules = script.parent, [Path(*name.split(".")) for name in sorted(mistakes.imported_names(text))]
    files = [folder / name for module in modules for name in (module.with_suffix(".py"), module / "__init__.py")]
    return "\n".join([text, *map(_text_of, islice(filter(Path.is_file, files), MOST_IMPORTED))])


def _text_of(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(LARGEST_SCRIPT).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _source_of(script: str) -> ast.Module | None:
    """Parses the script; None if it can't be a rank or isn't a regular file."""
    try:
        if not (script.endswith(".py") and Path(script).is_file()):
            return None
        with open(script, "rb") as file:
            text = file.read(LARGEST_SCRIPT)
        return ast.parse(text) if mistakes.may_be_a_rank(text) else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _holder_of(port: int) -> str:
    from safelaunch.capture import sockets
    from safelaunch.system import procstat

    inodes = sockets.listeners(os.getpid(), port)
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if inodes and entry.name.isdigit()):
        if not inodes.keys().isdisjoint(sockets.inodes(pid)):
            holder = procstat.read(pid)
            return f"pid {pid} ({holder.name if holder is not None else 'gone'})"
    return "a process of another user or container" if inodes else ""


def _is_idle(settings: Settings, name: str) -> bool:
    return not settings.watch and settings.origin(name) == "command line" and name not in ("no-watch", "preset")


def _check_key(settings: Settings) -> None:
    if settings.cluster_key_file is None:
        return
    try:
        read_key(settings.cluster_key_file)
    except BadKeyFile as error:
        raise UsageError(
            f"--cluster-key-file {settings.cluster_key_file}: {error}.",
            "Put the same random text there on every node, readable only by you: openssl rand -hex 32 > FILE",
        ) from error
