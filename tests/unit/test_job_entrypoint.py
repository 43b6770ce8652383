"""A script that does not exist is found out before anything starts; what Python would accept passes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from safelaunch.job.entrypoint import why_missing

ENVIRON = {"PATH": os.environ.get("PATH", os.defpath)}


def why(*script: str, options: Collection[str] = (), environ: Mapping[str, str] = ENVIRON) -> str:
    return why_missing(script, options, environ, sys.executable)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that Python runs."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "statsu").write_text("")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
        archive.writestr("inside/__main__.py", "")
    (tmp_path / "my_module.py").write_text("")
    (tmp_path / "space" / "part").mkdir(parents=True)
    (tmp_path / "space" / "part" / "__main__.py").write_text("")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["./train.py"],
        ["statsu"],
        ["app"],
        ["app/"],
        ["app.zip"],
        ["app.zip/inside"],
        ["-"],
        ["/dev/null"],
        ["/dev/stdin"],
        ["-c", "pass"],
        ["-m", "my_module"],
        ["-m", "app"],
        ["-m", "space.part"],
        ["-m", "json.tool"],
    ],
)
def test_what_python_runs_passes(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-u", *words], input="{}", text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    options = {"-m"} if words[0] == "-m" else set()
    assert why(*(words[1:] if options else words), options=options) == ""


@pytest.mark.parametrize("word", ["trian.py", "nothing", "nowhere/train.py", "app/missing.py"])
def test_what_does_not_exist(word: str) -> None:
    done = subprocess.run([sys.executable, word], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert why(word).startswith(f"{word} does not exist")
    assert "\n" not in why(word)


def test_the_nearest_file_is_named(here: Path) -> None:
    assert why("trian.py") == f"trian.py does not exist in {here}; did you mean 'train.py'?"
    assert why("app/__mian__.py").endswith("did you mean 'app/__main__.py'?")
    assert why("nothing") == f"nothing does not exist in {here}"


def test_a_file_within_another_file_is_left_to_python() -> None:
    assert why("train.py/x") == ""


@pytest.mark.parametrize("word", ["sh", "./program", "/bin/sh"])
def test_programs(word: str) -> None:
    assert why(word, options={"--no-python"}) == ""
    assert why(word, environ={**ENVIRON, "PET_NO_PYTHON": "1"}) == ""


def test_a_program_that_does_not_exist() -> None:
    assert why("no-such-program", options={"--no_python"}) == "no-such-program: command not found"
    assert why("./no-such-program", options={"--no-python"}) == "./no-such-program does not exist"


def test_modules(here: Path) -> None:
    assert why("no_such_module", options={"--module"}).startswith(f"there is no module no_such_module (in {here}")
    assert why("no_such_module.part", environ={**ENVIRON, "PET_MODULE": "1"})
    assert why("app.whatever", options={"-m"}) == "", "a package may extend its path"
    assert str(here) not in sys.path


def test_what_is_not_known_passes() -> None:
    assert why() == ""
    assert why("whatever", environ={**ENVIRON, "PYTHON_EXEC": "nsys"}) == "", "torchrun starts that instead of Python"
    assert why_missing(["no_such_module"], {"-m"}, ENVIRON, "/another/python") == "", "it may be installed there"
