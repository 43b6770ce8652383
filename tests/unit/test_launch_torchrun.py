"""The table of torchrun's options, read from its source without importing torch, against the real parser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.errors import UsageError
from safelaunch.launch import torchrun


def real() -> dict[str, bool]:
    from torch.distributed.run import get_args_parser

    return {name: action.nargs != 0 for action in get_args_parser()._actions for name in action.option_strings}


def test_the_table_is_the_installed_parsers() -> None:
    import torch

    assert torchrun.options(Path(torch.__file__).parent) == real()


def test_the_fallback_knows_them_all() -> None:
    """KNOWN is torch 2.13's; an older torch has fewer, a newer one more, but none changes its arity."""
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


def test_reading_a_source() -> None:
    assert torchrun.parse_options(SOURCE) == FOUND


def test_a_signature_over_several_lines() -> None:
    source = SOURCE.replace("def get_args_parser()", "def get_args_parser(\n    prog=None,\n)")
    assert torchrun.parse_options(source) == FOUND


def test_the_last_function_of_a_file() -> None:
    source = SOURCE[: SOURCE.index("def later")]
    assert torchrun.parse_options(source) == FOUND


@pytest.mark.parametrize(
    "source",
    ["", "def get_args_parser(:\n    x\n\ny = 1\n", "def get_args_parser():\n    return build()\n\nx = 1\n", "\x00"],
    ids=["empty", "a syntax error", "no options", "null byte"],
)
def test_a_source_beyond_recognition_falls_back(tmp_path: Path, source: str) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_text(source)
    assert torchrun.options(tmp_path) == torchrun.KNOWN


def test_no_source_falls_back(tmp_path: Path) -> None:
    assert torchrun.options(tmp_path) == torchrun.KNOWN
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "run.py").write_bytes(b"\xff\xfe" * 10)
    assert torchrun.options(tmp_path) == torchrun.KNOWN


# --- which torch ------------------------------------------------------------------------------------------------------


def test_this_interpreters_torch() -> None:
    import torch

    found = torchrun.find({})
    assert found == torchrun.Torch(sys.executable, Path(torch.__file__).parent, torch.__version__)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter of its own without torch, as under pipx."""
    monkeypatch.setattr(torchrun, "_torch_on", lambda path: None)


@pytest.mark.parametrize(
    "head",
    [
        "#!{python}\n",
        "#! {python}\n",
        "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
        "#!/usr/bin/env {name}\n",
    ],
    ids=["plain", "a space", "long path", "env"],
)
@pytest.mark.usefixtures("without_torch")
def test_the_torch_of_the_torchrun_on_path(tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    python = tmp_path / "python-of-that-environment"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    package = Path(torch.__file__).parent
    monkeypatch.setattr(torchrun, "_ask_for_torch", lambda found: package if found == os.fspath(python) else None)
    script = tmp_path / "torchrun"
    script.write_text(head.format(python=python, name=python.name) + "from torch.distributed.run import main\n")
    script.chmod(0o755)
    assert torchrun.find({"PATH": os.fspath(tmp_path)}).python == os.fspath(python)


def test_another_interpreter_is_asked() -> None:
    import torch

    assert torchrun._ask_for_torch(sys.executable) == Path(torch.__file__).parent
    assert torchrun._ask_for_torch("/bin/false") is None
    assert torchrun._ask_for_torch("/no/such/python") is None


@pytest.mark.usefixtures("without_torch")
def test_no_torch_anywhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("pip install 'torch>=2.6'")):
        torchrun.find({"PATH": os.fspath(tmp_path)})
    (tmp_path / "torchrun").write_bytes(b"\x7fELF no script at all")
    (tmp_path / "torchrun").chmod(0o755)
    with pytest.raises(UsageError, match="torch is not installed"):
        torchrun.find({"PATH": os.fspath(tmp_path)})


def test_the_launcher_is_the_console_script_beside_the_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    ours = Path(torchrun.__file__).parent / "launcher" / "torchrun"
    assert torchrun.launcher(os.fspath(python)) == ours
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexec something-else\n")
    assert torchrun.launcher(os.fspath(python)) == ours
    (tmp_path / "torchrun").write_text("#!/x/python\nimport sys\nfrom torch.distributed.run import main\n")
    assert torchrun.launcher(os.fspath(python)) == tmp_path / "torchrun"


@pytest.mark.slow
def test_our_own_launcher_is_torchrun() -> None:
    ours = Path(torchrun.__file__).parent / "launcher" / "torchrun"
    done = subprocess.run([sys.executable, ours, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: torchrun ")
