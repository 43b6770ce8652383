"""Completion scripts and man page, as the build writes them, and what shells do with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.cli import COMMANDS, completion, main
from scripts.build.generate import MAN_PAGE, write
from tests.support.paths import ROOT

PRESETS = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
CASES = [
    ("safelaunch st", {"status"}),
    ("safelaunch --stall-t", {"--stall-timeout"}),
    ("safelaunch --nproc", {"--nproc-per-node"}),
    ("safelaunch --preset ", PRESETS),
    ("safelaunch --on-stall ", {"kill", "restart", "dump"}),
    ("safelaunch help dem", {"demo"}),
    ("safelaunch diagnose --ht", {"--html"}),
    ("safelaunch diagnose tr", {"train.py"}),
    ("safelaunch completion ", {"bash", "zsh", "fish"}),
    ("safelaunch explain coll", {"collective-mismatch"}),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Writes them as the build does, because an installation might be older."""
    write()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, and a ``safelaunch`` on the PATH."""
    binary = tmp_path / "bin" / "safelaunch"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m safelaunch "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def output_of(words: list[str], cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_bash_completion_offers_expected_words(shell: Path) -> None:
    lines = "\n".join(f'try "{line}"' for line, _ in CASES)
    code = f"""eval "$(safelaunch completion bash)"
        try() {{
            COMP_WORDS=($1); [[ $1 == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
            _shtab_safelaunch 2>/dev/null  # compopt wants to be called by readline
            echo "${{COMPREPLY[*]}}"
        }}
        {lines}"""
    offers = output_of(["bash", "--norc", "-c", code], shell).splitlines()
    assert {line: set(words.split()) for (line, _), words in zip(CASES, offers, strict=True)} == dict(CASES)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completion_offers_expected_words(shell: Path) -> None:
    lines = "\n".join(f"echo (complete -C '{line}' | string split -f1 \\t)" for line, _ in CASES)
    code = f"safelaunch completion fish | source\n{lines}"
    offers = output_of(["fish", "--no-config", "-c", code], shell).splitlines()
    offered = {line: set(words.split()) for (line, _), words in zip(CASES, offers, strict=True)}
    assert offered == {**dict(CASES), "safelaunch --preset ": PRESETS | {"train.py", "bin/"}}, "a preset may be a file"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completion_offers_presets_and_files(shell: Path) -> None:
    code = """eval "$(safelaunch completion zsh 2>/dev/null | sed '/^compdef/d')" 2>/dev/null
        _alternative() { print -l -- "$@" }
        _safelaunch_presets"""
    asked = output_of(["zsh", "-f", "-c", code], shell).splitlines()
    assert asked == ["presets:preset:compadd -a names", "files:file:_files"]
    assert completion.script("zsh").count(":NAME|FILE:_safelaunch_presets") == 3


@pytest.mark.parametrize("name", completion.SHELLS)
def test_completion_script_parses_in_its_shell(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    (tmp_path / "script").write_text(completion.script(name))
    assert output_of([name, "-n", "script"], tmp_path) == ""


def test_completion_values_list_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(completion, "_runs", lambda: ["train", "r4711"])
    assert main(["completion", "--values", "runs"]) == 0
    assert capsys.readouterr().out == "train\nr4711\n"
    for name in completion.SHELLS:
        assert "safelaunch completion --values runs" in completion.script(name), name


def test_man_page_renders_without_warnings(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    shown = re.sub(".\x08", "", output_of(["groff", "-man", "-Tascii", "-P-c", "-ww", str(ROOT / MAN_PAGE)], tmp_path))
    assert "--stall-timeout SECONDS|auto" in shown
    for command in COMMANDS:
        assert f"   safelaunch {command}" in shown
