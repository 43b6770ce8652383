"""Table of torchrun's options, read from its source without importing torch, and compared with the parser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from safelaunch.job import torchrun
from safelaunch.system.errors import UsageError


def real() -> dict[str, bool]:
    from torch.distributed.run import get_args_parser

    return {name: action.nargs != 0 for action in get_args_parser()._actions for name in action.option_strings}


def test_torchrun_options_match_installed_parser() -> None:
    import torch

    assert torchrun.options(Path(torch.__file__).parent) == real()


def test_torchrun_known_options_match_installed_parser() -> None:
    """KNOWN is torch 2.13's. Older versions have fewer options, newer ones more, but none changes its arity."""
    options = real()
    assert {name: valued for name, valued in torchrun.KNOWN.items() if name in options}.items() <= options.items()
    import torch

    if torch.__version__.startswith("2.13."):
        assert options == torchrun.KNOWN


SOURCE = '''
def other(parser):
    parser.add_argument("--not-mine")

def get_args_parser() -> ArgumentParser:
    """Help."""
    parser = ArgumentParser(description="x")

    def comma(value):
        return value.split(",")

    parser.add_argument("--apart", "--a_part", action=env, type=str, help="--fake")
    parser.add_argument("-s", "--switch", action=check_env)
    parser.add_argument("--plain")
    parser.add_argument("--true", action="store_true")
    parser.add_argument("--qualified", action=module.check_env)
    parser.add_argument("--optional", nargs=0)
    parser.add_argument("training_script", type=str)
    return parser

def later():
    parser.add_argument("--nor-mine")
'''
FOUND = {
    **dict.fromkeys(["--apart", "--a_part", "--plain"], True),
    **dict.fromkeys(["-h", "--help", "-s", "--switch", "--true", "--qualified", "--optional"], False),
}


def test_torchrun_options_are_parsed_from_source() -> None:
    assert torchrun.parse_options(SOURCE) == FOUND


def test_torchrun_parser_signature_over_several_lines_is_read() -> None:
    source = SOURCE.replace("def get_args_parser()", "def get_args_parser(\n    prog=None,\n)")
    assert torchrun.parse_options(source) == FOUND


def test_torchrun_parser_as_last_function_is_read() -> None:
    source = SOURCE[: SOURCE.index("def later")]
    assert torchrun.parse_options(source) == FOUND


@pytest.mark.parametrize(
    "source",
    ["", "def get_args_parser(:\n    x\n\ny = 1\n", "def get_args_parser():\n    return build()\n\nx = 1\n", "\x00"],
    ids=["empty", "a syntax error", "no options", "null byte"],
)
def test_torchrun_unrecognized_source_uses_known_options(tmp_path: Path, source: str) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_text(source)
    assert torchrun.options(tmp_path) == torchrun.KNOWN


def test_torchrun_missing_source_uses_known_options(tmp_path: Path) -> None:
    assert torchrun.options(tmp_path) == torchrun.KNOWN
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_bytes(b"\xff\xfe" * 10)
    assert torchrun.options(tmp_path) == torchrun.KNOWN


# --- choice of torch --------------------------------------------------------------------------------------------------


def test_torch_of_running_interpreter_is_found() -> None:
    import torch

    installation = torchrun.find({})
    assert installation == torchrun.TorchInstallation(sys.executable, Path(torch.__file__).parent, torch.__version__)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreter without torch in its own environment, as under pipx."""
    monkeypatch.setattr(torchrun, "_torch_on", lambda path: None)


@pytest.mark.parametrize(
    "head",
    [
        "#!{python}\n",
        "#! {python}\n",
        "#!{python} -E\n",
        "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
        "#!/usr/bin/env {name}\n",
    ],
    ids=["plain", "a space", "an option, by pipx", "long path", "env"],
)
@pytest.mark.usefixtures("without_torch")
def test_torch_of_torchrun_on_path_is_found(tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    python = tmp_path / "python-of-that-environment"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    package = Path(torch.__file__).parent
    monkeypatch.setattr(
        torchrun, "_ask_for_torch", lambda interpreter: package if interpreter == os.fspath(python) else None
    )
    script = tmp_path / "torchrun"
    script.write_text(head.format(python=python, name=python.name) + "from torch.distributed.run import main\n")
    script.chmod(0o755)
    assert torchrun.find({"PATH": os.fspath(tmp_path)}).python == os.fspath(python)


@dataclass(frozen=True)
class Elsewhere:
    """Environments next to safelaunch's: two with torch, one without."""

    root: Path

    def named(self, name: str) -> str:
        return os.fspath(self.root / name)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    import torch

    for name in ("user", "conda", "bare"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
        (tmp_path / name / "bin" / "python3").symlink_to(sys.executable)
    package = Path(torch.__file__).parent
    monkeypatch.setattr(torchrun, "_ask_for_torch", lambda python: None if "/bare/" in python else package)
    return Elsewhere(tmp_path)


OWN = os.fspath(Path(sys.executable).parents[1])
BASE = {"CONDA_DEFAULT_ENV": "base"}


@pytest.mark.parametrize("record", ["pipx_metadata.json", "uv-receipt.toml", ""], ids=["pipx", "uv tool", "plain"])
@pytest.mark.parametrize(
    ("active", "of_tool", "of_plain"),
    [
        ({"VIRTUAL_ENV": "user"}, "user", "user"),
        ({"VIRTUAL_ENV": "user", "CONDA_PREFIX": "conda"}, "user", "user"),
        ({"VIRTUAL_ENV": "bare", "CONDA_PREFIX": "conda"}, "conda", "conda"),
        ({"CONDA_PREFIX": "conda"}, "conda", "conda"),
        ({"CONDA_PREFIX": "conda", **BASE}, "conda", OWN),
        ({"PATH": "user/bin"}, "user", OWN),
        ({"PATH": "bare/bin"}, OWN, OWN),
        ({"VIRTUAL_ENV": "bare"}, OWN, OWN),
        ({"VIRTUAL_ENV": OWN, "CONDA_PREFIX": "conda"}, OWN, OWN),
        ({}, OWN, OWN),
    ],
)
def test_torch_of_active_environment_precedes_own(
    active: dict[str, str],
    of_tool: str,
    of_plain: str,
    record: str,
    elsewhere: Elsewhere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchrun, "_is_tool", lambda: bool(record))
    places = {name: word if name in BASE else elsewhere.named(word) for name, word in active.items()}
    installation = torchrun.find({"PATH": "/nowhere", **places})
    wanted = of_tool if record else of_plain
    assert Path(installation.python).parents[1] == Path(elsewhere.named(wanted))
    is_plainly_ours = wanted == OWN and (active.get("VIRTUAL_ENV") == OWN or not (record or "bare" in active.values()))
    assert bool(installation.note) != is_plainly_ours, "an unexpected interpreter is noted"
    assert "\n" not in installation.note


@pytest.mark.parametrize("record", ["pipx_metadata.json", "uv-receipt.toml"])
def test_tool_environment_is_recognized_by_installer_record(
    record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", os.fspath(tmp_path))
    assert not torchrun._is_tool()
    (tmp_path / record).write_text("")
    assert torchrun._is_tool()


def test_torch_of_other_interpreter_is_queried() -> None:
    import torch

    assert torchrun._ask_for_torch(sys.executable) == Path(torch.__file__).parent
    assert torchrun._ask_for_torch("/bin/false") is None
    assert torchrun._ask_for_torch("/no/such/python") is None


@pytest.mark.usefixtures("without_torch")
def test_missing_torch_is_usage_error_with_install_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"\n    {sys.executable} -m pip install torch")):
        torchrun.find({"PATH": os.fspath(tmp_path)})
    (tmp_path / "torchrun").write_bytes(b"\x7fELF no script at all")
    (tmp_path / "torchrun").chmod(0o755)
    with pytest.raises(UsageError, match="torch is missing"):
        torchrun.find({"PATH": os.fspath(tmp_path)})


def test_launcher_is_console_script_next_to_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    ours = Path(torchrun.__file__).parent / "launcher" / "torchrun"
    assert torchrun.launcher(os.fspath(python)) == ours
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexec something-else\n")
    assert torchrun.launcher(os.fspath(python)) == ours
    (tmp_path / "torchrun").write_text("#!/x/python\nimport sys\nfrom torch.distributed.run import main\n")
    assert torchrun.launcher(os.fspath(python)) == tmp_path / "torchrun"


@pytest.mark.slow
def test_own_launcher_is_torchrun() -> None:
    ours = Path(torchrun.__file__).parent / "launcher" / "torchrun"
    done = subprocess.run([sys.executable, ours, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: torchrun ")
