"""What would fail later in a run, found before anything starts."""

from __future__ import annotations

from safelaunch.errors import UsageError
from safelaunch.settings.config import Settings
from safelaunch.settings.options import OPTION_GROUPS


def check(settings: Settings) -> None:
    """Raises UsageError, before anything starts, for what would fail later."""
    _check_key(settings)
    if settings.is_explicit("bundle-dir"):
        from safelaunch.bundle.publishing import check_directory

        problem = check_directory(settings.bundle_dir)
        if problem:
            raise UsageError(
                f"--bundle-dir {settings.bundle_dir} cannot hold bundles: {problem}.",
                "Name a directory that you can write to and other users cannot; safelaunch creates it if necessary.",
            )


def without_effect(settings: Settings) -> list[str]:
    """A line about each preset that does nothing here, and about options that need the watch where there is none."""
    idle = [option.flag for option in OPTION_GROUPS["Watching"] if _is_idle(settings, option.name)]
    return [
        *([f"--no-watch: {', '.join(idle)}: no effect, as nothing of safelaunch's runs in the ranks"] if idle else []),
        *_idle_presets(settings),
    ]


def _is_idle(settings: Settings, name: str) -> bool:
    return not settings.watch and settings.origin(name) == "command line" and name not in ("no-watch", "preset")


def _idle_presets(settings: Settings) -> list[str]:
    text = "preset {0} sets nothing of its own with the installed torch: safelaunch presets show {0}"
    return [text.format(name) for name in settings.idle_presets]


def _check_key(settings: Settings) -> None:
    if settings.cluster_key_file is None:
        return
    from safelaunch.cluster.keyfile import BadKeyFile, read_key

    try:
        read_key(settings.cluster_key_file)
    except BadKeyFile as error:
        raise UsageError(
            f"--cluster-key-file {settings.cluster_key_file}: {error}.",
            "Put the same random text there on every node, readable by you alone: openssl rand -hex 32 > FILE",
        ) from error
