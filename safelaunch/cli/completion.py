"""``safelaunch completion SHELL``: prints a shell's completion script, which was generated with the package."""

from __future__ import annotations

from importlib import resources

from safelaunch.cli.parsing import Parser
from safelaunch.system.console import put, show
from safelaunch.system.errors import SafelaunchError

SHELLS = {"bash": "safelaunch.bash", "zsh": "_safelaunch", "fish": "safelaunch.fish"}
_EPILOG = """\
For every new shell, add one line to its start-up file:
  bash  ~/.bashrc                    eval "$(safelaunch completion bash)"
  zsh   ~/.zshrc, after compinit     eval "$(safelaunch completion zsh)"
  fish  ~/.config/fish/config.fish   safelaunch completion fish | source"""


def main(argv: list[str]) -> int:
    """Prints the script, or the completions that it requests with ``--values``; returns 0."""
    words = parser().parse_args(argv)
    if words.values is not None:
        show("\n".join(_runs() if words.values == "runs" else _presets()))
    elif words.shell is None:
        parser().error(f"name a shell: {', '.join(SHELLS)}")
    else:
        put(script(words.shell).rstrip("\n"))
    return 0


def parser() -> Parser:
    from argparse import SUPPRESS, RawDescriptionHelpFormatter

    command_line = Parser(
        "completion",
        description="Prints a script that completes subcommands, options, presets, runs and files.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    command_line.add_argument("shell", nargs="?", choices=tuple(SHELLS), metavar="SHELL", help=", ".join(SHELLS))
    command_line.add_argument("--values", choices=("runs", "presets"), help=SUPPRESS)
    return command_line


def script(shell: str) -> str:
    """Returns a shell's completion script. Raises SafelaunchError in a source tree, which has none."""
    try:
        return resources.files("safelaunch.cli").joinpath(f"completions/{SHELLS[shell]}").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SafelaunchError(
            "completion: the scripts are made as safelaunch is installed.", "pip install -e ."
        ) from None


def _runs() -> list[str]:
    from safelaunch.supervise.control.discover import look, our_roots

    runs = [run for run in look(our_roots()) if run.alive]
    return list(dict.fromkeys([*(run.name for run in runs if run.name), *(run.id for run in runs)]))


def _presets() -> list[str]:
    from safelaunch.settings.presets import builtin_names, find_builtin_dir

    return list(builtin_names(find_builtin_dir()))
