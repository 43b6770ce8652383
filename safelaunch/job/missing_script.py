"""Checks that the script, module or program given to torchrun exists.

Accepts anything that might start: a directory or archive with ``__main__.py``, a pipe, standard input, a path within an
archive, and modules or programs that only the ranks can find.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safelaunch.job.argv import is_given
from safelaunch.settings.yamlfile import nearest

_MOST_NAMES = 2000


def why_missing(script: Sequence[str], options: Collection[str], environ: Mapping[str, str], python: str) -> str:
    """Returns the reason why the script, module or program ``script[0]`` can't be started; "" if it can.

    Args:
        options: torchrun's options, unabbreviated.
        python: Interpreter that torchrun uses for the ranks.
    """
    word = script[0] if script else ""
    if not word or word.startswith("-"):
        return ""  # standard input, or an option for Python
    if is_given(options, environ, "no-python"):
        return _program(word, environ)
    if "PYTHON_EXEC" in environ:
        return ""  # torchrun starts any program as Python
    if is_given(options, environ, "module", "-m"):
        return _module(word) if python == sys.executable else ""
    return _file(word)


def _program(word: str, environ: Mapping[str, str]) -> str:
    from shutil import which

    if which(word, path=environ.get("PATH")) is not None or os.path.exists(word):  # noqa: PTH110 - never raises
        return ""
    return f"{word}: command not found" if "/" not in word else f"{word} does not exist"


def _module(word: str) -> str:
    """Looks only for the first part of a module's name, because a package can extend its own path."""
    import importlib.util

    name = word.partition(".")[0]
    path, here = list(sys.path), os.getcwd()  # noqa: PTH109 - a string for sys.path
    sys.path.insert(0, here)
    try:
        exists = importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - the user's finder failed; Python will report why
        return ""
    finally:
        sys.path[:] = path
    return "" if exists else f"there is no module {name} (in {here}, or installed for {sys.executable})"


def _file(word: str) -> str:
    try:
        os.stat(word)  # noqa: PTH116 - pathlib changes the word
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return ""  # in an archive, or unreadable
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
    except Exception:  # noqa: BLE001 - the user's path hook failed
        return True


def _neighbour(folder: Path, name: str) -> str:
    from itertools import islice

    try:
        with os.scandir(folder) as entries:
            return nearest(name, [entry.name for entry in islice(entries, _MOST_NAMES) if entry.name.isprintable()])
    except OSError:
        return ""
