"""Subcommands print what they can, without a traceback, for any encoding and any streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch import addons
from safelaunch.cli import COMMANDS
from tests.support.bundles import dumps, mismatching

# Hundreds of processes would take a minute, so a process that has imported everything forks for each command line.
FORKS = """
import json, os, sys
from safelaunch.cli import COMMANDS, entry, module_of
from safelaunch.cli import run
for name in COMMANDS:
    module_of(name)
codes = {}
for words in json.loads(os.environ["LINES"]):
    pid = os.fork()
    if not pid:
        sys.argv = ["safelaunch", *(os.fsdecode(word.encode()) for word in words)]  # as Python reads them
        entry()
    codes[" ".join(words)] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
with open(os.environ["CODES"], "w") as file:
    json.dump(codes, file)
os._exit(0)
"""
MISSING = addons.COMMANDS.keys() - COMMANDS.keys()
EXPECTED = [
    ([], 2),
    (["--help"], 0),
    (["--version"], 0),
    (["nosuchü→"], 2),
    (["--preset", "ü→", "train.py"], 2),
    (["--dry-run", "ü→.py"], 0),
    (["demo", "ü→"], 2),
    (["exec", "--dry-run", "--", "echo", "ü→"], 0),
    (["exec", "ü→"], 2),
    (["colaunch", "--grid", "a=ü,→", "--dry-run", "--", "ü→.py", "{a}"], 0),
    (["presets"], 0),
    (["presets", "show", "hang-debug"], 0),
    (["presets", "--json"], 0),
    (["status"], 0),
    (["status", "--json"], 0),
    (["status", "ü→"], 2),
    (["dump", "nosuchü→"], 2),
    (["dump", "ü→"], 2),
    (["diagnose", "ü→"], 0),
    (["diagnose", "ü→", "--json"], 0),
    (["diagnose", "ü→", "-j"], 0),
    (["diagnose", "nosuchü→"], 2),
    (["explain"], 0),
    (["explain", "busy-loop"], 0),
    (["explain", "ü→"], 2),
    (["record", "ü→"], 2),
    (["reproduce", "ü→"], 0),
    (["reproduce", "nosuchü→"], 2),
    (["doctor", "--ü→"], 2),
    (["gpus"], 0),
    (["gpus", "--json"], 0),
    (["completion", "bash"], 0),
    (["completion", "--values", "presets"], 0),
    (["help"], 0),
    (["help", "status"], 0),
]
EXPECTED = [(words, code) for words, code in EXPECTED if words[:1] == [] or words[0] not in MISSING]
LINES = [words for words, _ in EXPECTED]
POSIX = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_command_lines_cover_every_subcommand() -> None:
    assert {words[0] for words in LINES if words} >= COMMANDS.keys() - addons.COMMANDS.keys()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    dumps(tmp_path / "ü→", mismatching())
    (tmp_path / "ü→.py").write_text("")
    return tmp_path


def codes_of(here: Path, shell: str = '"$@"', **environ: str) -> tuple[dict[str, int], str]:
    """Returns the exit code of each line, and all output.

    Args:
        shell: Shell code that runs the program, as ``"$@"``.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SAFELAUNCH_", "PYTHON", "LC_"))}
    variables = {"LINES": json.dumps(LINES), "CODES": os.fspath(here / "codes"), "XDG_RUNTIME_DIR": os.fspath(here)}
    done = subprocess.run(
        ["bash", "-c", shell, "sh", sys.executable, "-c", FORKS],
        cwd=here,
        env={**kept, **variables, **environ},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
    )
    printed = (done.stdout + done.stderr).decode("utf-8", "replace")
    assert (here / "codes").is_file(), printed
    codes: dict[str, int] = json.loads((here / "codes").read_text())
    return codes, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [{"LC_ALL": "C"}, POSIX, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii:strict"}],
    ids=["C", "POSIX", "latin-1", "ascii"],
)
def test_every_command_works_with_any_encoding(environ: dict[str, str], here: Path) -> None:
    codes, printed = codes_of(here, **environ)
    assert "Traceback" not in printed and "Exception" not in printed, printed
    assert codes == {" ".join(words): code for words, code in EXPECTED}
    assert "Rank 2 waits in all_gather" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell",
    ['"$@" >&-', '"$@" 2>&-', '"$@" <&- >&- 2>&-', '"$@" >/dev/full', '"$@" 2>/dev/full', '"$@" | true'],
    ids=["stdout closed", "stderr closed", "all closed", "stdout full", "stderr full", "pipe broken"],
)
def test_every_command_tolerates_unusable_streams(shell: str, here: Path) -> None:
    codes, printed = codes_of(here, shell)
    assert "Traceback" not in printed and "Exception" not in printed, printed
    assert set(codes.values()) <= {0, 1, 2}, codes
