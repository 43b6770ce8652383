"""Launches that fail, or do not do what was meant."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from safelaunch.job import mistakes
from safelaunch.job.argv import CommandLine, split
from safelaunch.job.mistakes import why_missing
from safelaunch.job.torchrun import KNOWN


def command(words: str) -> CommandLine:
    return split([*words.split(), "train.py"], {}, KNOWN)


def options(words: str) -> set[str]:
    return {word.partition("=")[0] for word in words.split() if word.startswith("--")}


@pytest.mark.parametrize(
    ("words", "environ", "never"),
    [
        ("--standalone --nnodes=2", {}, True),
        ("--standalone --nnodes 2:4", {}, True),
        ("--standalone", {"PET_NNODES": "2"}, True),
        ("--nnodes=3", {"PET_STANDALONE": "1"}, True),
        ("--standalone", {}, False),
        ("--standalone --nnodes=1", {"PET_NNODES": "2"}, False),
        ("--standalone --nnodes=1:2", {}, False),
        ("--nnodes=2", {}, False),
        ("--standalone --nnodes=some", {}, False),
    ],
)
def test_standalone_is_for_one_node(words: str, environ: dict[str, str], never: bool) -> None:
    why = mistakes.nodes_never_meet(command(words), options(words), environ)
    assert bool(why) is never and "\n" not in why


@pytest.mark.parametrize(
    ("words", "environ", "port"),
    [
        ("--master-port=29500", {}, 29500),
        ("--master_port 29500", {}, 29500),
        ("", {"PET_MASTER_PORT": "1234"}, 1234),
        ("--nnodes=2 --node-rank=0 --master-addr=node1 --master-port=29500", {}, 29500),
        ("--nnodes=2 --node-rank=1 --master-addr=node1 --master-port=29500", {}, None),
        ("--nnodes=2 --rdzv-backend=static --rdzv-endpoint=node1:29400", {}, 29400),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:29400", {}, 29400),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0", {}, None),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost", {}, None),
        ("--rdzv-backend=c10d --rdzv-endpoint=node1:29400", {}, None),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400", {}, None),
        ("--standalone --master-port=29500", {}, None),
        ("--master-port=auto", {}, None),
        ("", {}, None),
    ],
)
def test_the_port_that_this_node_shall_serve(words: str, environ: dict[str, str], port: int | None) -> None:
    assert mistakes.port_to_serve(command(words), options(words), environ) == port


@pytest.mark.parametrize(
    ("words", "environ", "nobody_said"),
    [
        ("", {}, True),
        ("--nproc-per-node=1", {}, False),
        ("--np 4", {}, False),
        ("", {"PET_NPROC_PER_NODE": "4"}, False),
    ],
)
def test_the_number_of_processes(words: str, environ: dict[str, str], nobody_said: bool) -> None:
    assert mistakes.has_no_number_of_processes(command(words), environ) is nobody_said


# --- a script that does not exist is found out before anything starts; what python would accept passes ----------------

ENVIRON = {"PATH": os.environ.get("PATH", os.defpath)}


def why(*script: str, options: Collection[str] = (), environ: Mapping[str, str] = ENVIRON) -> str:
    return why_missing(script, options, environ)


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


def test_what_is_not_known_passes() -> None:
    assert why() == ""
    assert why("whatever", environ={**ENVIRON, "PYTHON_EXEC": "nsys"}) == "", "torchrun starts that instead of Python"
    assert why("no_such_module", options={"-m"}) == "", "Python says it"
    assert why("no-such-program", environ={**ENVIRON, "PET_NO_PYTHON": "1"}) == "", "torchrun says it"
