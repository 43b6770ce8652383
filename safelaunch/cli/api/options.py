"""safelaunch's options as keywords of ``safelaunch.launch``. Their meaning is that of the command line's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

Text = str | os.PathLike[str]
Seconds = float | str  # 90, "90s", "10m"


class Options(TypedDict, total=False):
    """Every keyword is the option of that name: ``stall_timeout=90`` is ``--stall-timeout 90``.

    Two have other names here: ``config_file`` is ``--config``, and ``watch=False`` is ``--no-watch``.
    """

    preset: Text | Sequence[Text]
    stall_timeout: Seconds
    stall_floor: Seconds
    max_stall: Seconds
    startup_timeout: Seconds
    on_stall: Literal["kill", "restart", "dump"]
    no_early_look: bool
    on_suspect: str
    check_every: int
    on_inconsistent: Literal["report", "dump", "stop"]
    pg_timeout: Seconds  # "10m!": of all groups
    watch: bool
    bundle_dir: Text
    keep_bundles: int
    on_bundle: str
    gpus: int | str
    wait: bool | Seconds
    no_lease: bool
    run_name: str
    cluster_key_file: Text
    cluster_store: str
    config_file: Text


def words_of(options: Mapping[str, object]) -> tuple[tuple[str, str | None], ...]:
    """The options as the command line's flags and values. What is unknown or wrong is found where those are."""
    found: list[tuple[str, str | None]] = []
    for name, value in options.items():
        flag = "--config" if name == "config_file" else f"--{name.replace('_', '-')}"
        if name == "watch":
            found += [] if value else [("--no-watch", None)]
        elif isinstance(value, bool):
            found += [(flag, None)] if value else []
        elif isinstance(value, (list, tuple)):
            found += [(flag, os.fspath(one)) for one in value]
        elif value is not None:
            found.append((flag, str(value)))
    return tuple(found)
