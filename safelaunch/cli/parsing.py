"""Parses the options of subcommands: argparse with safelaunch's messages."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.console import WIDTH, display, folded
from safelaunch.system.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Parser of a subcommand. Options can't be abbreviated.

    Args:
        name: Name of the subcommand.
        after_dashes: Options that belong after ``--``, to the command line of a job.
    """

    def __init__(self, name: str, *, after_dashes: Collection[str] = (), **settings: Any) -> None:
        super().__init__(prog=f"safelaunch {name}", allow_abbrev=False, **settings)
        self.name = name
        self._after_dashes = after_dashes

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses as argparse does. For an unknown option, the error names the most similar one."""
        parsed, unknown = super().parse_known_args(args, namespace)
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        if option in self._after_dashes:
            self.error(f"{option} is an option of the jobs: give it after `--`, before their script")
        if option:
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            self.error(f"there is no option {option}{did_you_mean(option, names)}")
        return parsed, unknown

    def format_help(self) -> str:
        return folded(super().format_help(), min(WIDTH, display(1, os.environ).width))

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^unrecognized arguments: (.+)", r"unexpected: \1", message)
        raise UsageError(f"{self.name}: {message}", f"See safelaunch {self.name} --help.")
