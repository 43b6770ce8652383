"""Launches that fail or do something unintended."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from safelaunch.job import mistakes, torchrun
from safelaunch.job.argv import CommandLine, split
from safelaunch.job.missing_script import why_missing
from safelaunch.job.torchrun import KNOWN
from safelaunch.settings.options import BY_FLAG
from safelaunch.supervise import preflight


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
def test_standalone_with_several_nodes_never_meets(words: str, environ: dict[str, str], never: bool) -> None:
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
def test_port_to_serve_follows_options(words: str, environ: dict[str, str], port: int | None) -> None:
    assert mistakes.port_to_serve(command(words), options(words), environ) == port


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/usr/bin/python3.11 -u train.py", "train.py"),
        ("python -m train x.py", ""),
        ("python -c pass x.py", ""),
        ("python", ""),
        ("bash run.sh train.py", ""),
        ("accelerate launch train.py", ""),
        ("python train", ""),
    ],
)
def test_python_script_is_found_in_command(words: str, script: str) -> None:
    assert mistakes.python_script(words.split()) == script


INIT = "dist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        (INIT, True),
        ("from torch.distributed import init_process_group\ninit_process_group(backend='nccl', timeout=t)", True),
        ("rank = int(os.environ['RANK'])", True),
        ("torch.cuda.set_device(int(environ['LOCAL_RANK']))", True),
        (f"local = int(os.environ.get('LOCAL_RANK', 0))\n{INIT}", True),
        (f"os.environ['MASTER_ADDR'] = 'localhost'\n{INIT}", True),
        ("print(1)", False),
        ("dist.init_process_group('gloo', rank=0, world_size=1)", False),
        ("dist.init_process_group('gloo', 'tcp://localhost:1')", False),
        ("dist.init_process_group('gloo', store=store)", False),
        ("dist.init_process_group(**options)", False),
        (f"os.environ['RANK'] = '0'\n{INIT}", False),
        (f"os.environ.update(RANK='0')\n{INIT}", False),
        (f"os.environ.setdefault('RANK', '0')\n{INIT}", False),
        ("if 'RANK' in os.environ:\n    rank = int(os.environ['RANK'])\n    " + INIT, False),
        (f"if int(os.environ.get('WORLD_SIZE', 1)) > 1:\n    {INIT}", False),
        (f"import torch.multiprocessing as mp\n{INIT}mp.spawn(main)", False),
        (f"subprocess.Popen(['torchrun'])\n{INIT}", False),
        ("size = config['WORLD_SIZE']", False),
    ],
)
def test_script_that_needs_rank_variables_is_recognized(source: str, lacking: bool) -> None:
    assert bool(mistakes.lacks_rank_variables("train.py", ast.parse(source))) is lacking


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("dist.init_process_group('nccl')", True),
        ("dist.init_process_group(backend='nccl', device_id=0)", True),
        ("dist.init_process_group('gloo')", False),
        ("dist.init_process_group('cpu:gloo,cuda:nccl')", False),
        ("dist.init_process_group(args.backend)", False),
        ("dist.init_process_group()", False),
        ("if cuda:\n    dist.init_process_group('nccl')\nelse:\n    dist.init_process_group('gloo')", False),
        ("print('nccl')", False),
    ],
)
def test_script_that_needs_nccl_is_recognized(source: str, lacking: bool) -> None:
    assert bool(mistakes.lacks_nccl("train.py", ast.parse(source), "2.13.0+cpu")) is lacking


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("__version__ = '2.6.0+cu124'\ncuda = '12.4'\nhip = None\n", True),
        ("__version__ = '2.9.0+rocm6'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", True),
        ("__version__ = '3'\n", True),
        (None, True),
    ],
)
def test_torch_build_without_cuda_has_no_nccl(text: str | None, there: bool, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    assert torchrun.has_nccl(tmp_path) is there


@pytest.mark.parametrize(
    ("words", "environ", "nobody_said"),
    [
        ("", {}, True),
        ("--nproc-per-node=1", {}, False),
        ("--np 4", {}, False),
        ("", {"PET_NPROC_PER_NODE": "4"}, False),
    ],
)
def test_missing_number_of_processes_is_noticed(words: str, environ: dict[str, str], nobody_said: bool) -> None:
    assert mistakes.has_no_number_of_processes(command(words), environ) is nobody_said


# --- missing scripts are found before anything starts; what python accepts is accepted --------------------------------

ENVIRON = {"PATH": os.environ.get("PATH", os.defpath)}


def why(*script: str, options: Collection[str] = (), environ: Mapping[str, str] = ENVIRON) -> str:
    return why_missing(script, options, environ, sys.executable)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with everything that Python can run."""
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
def test_script_that_python_runs_is_accepted(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-u", *words], input="{}", text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    options = {"-m"} if words[0] == "-m" else set()
    assert why(*(words[1:] if options else words), options=options) == ""


@pytest.mark.parametrize("word", ["trian.py", "nothing", "nowhere/train.py", "app/missing.py"])
def test_script_that_does_not_exist_is_reported(word: str) -> None:
    done = subprocess.run([sys.executable, word], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert why(word).startswith(f"{word} does not exist")
    assert "\n" not in why(word)


def test_missing_script_names_nearest_file(here: Path) -> None:
    assert why("trian.py") == f"trian.py does not exist in {here}; did you mean 'train.py'?"
    assert why("app/__mian__.py").endswith("did you mean 'app/__main__.py'?")
    assert why("nothing") == f"nothing does not exist in {here}"


def test_script_path_inside_file_is_left_to_python() -> None:
    assert why("train.py/x") == ""


@pytest.mark.parametrize("word", ["sh", "./program", "/bin/sh"])
def test_program_without_python_is_accepted(word: str) -> None:
    assert why(word, options={"--no-python"}) == ""
    assert why(word, environ={**ENVIRON, "PET_NO_PYTHON": "1"}) == ""


def test_program_that_does_not_exist_is_reported() -> None:
    assert why("no-such-program", options={"--no_python"}) == "no-such-program: command not found"
    assert why("./no-such-program", options={"--no-python"}) == "./no-such-program does not exist"


def test_module_that_does_not_exist_is_reported(here: Path) -> None:
    assert why("no_such_module", options={"--module"}).startswith(f"there is no module no_such_module (in {here}")
    assert why("no_such_module.part", environ={**ENVIRON, "PET_MODULE": "1"})
    assert why("app.whatever", options={"-m"}) == "", "a package may extend its path"
    assert str(here) not in sys.path


def test_script_for_unknown_interpreter_is_accepted() -> None:
    assert why() == ""
    assert why("whatever", environ={**ENVIRON, "PYTHON_EXEC": "nsys"}) == "", "torchrun starts that instead of Python"
    assert why_missing(["no_such_module"], {"-m"}, ENVIRON, "/another/python") == "", "it may be installed there"


# --- own options after the script -------------------------------------------------------------------------------------


def late(words: str, source: str = "") -> list[str]:
    return mistakes.misplaced(words.split(), BY_FLAG, lambda: source)


@pytest.mark.parametrize("flag", sorted(BY_FLAG))
def test_own_option_after_script_is_noticed(flag: str) -> None:
    assert late(f"train.py --lr 1 {flag}=5") == late(f"train.py {flag} 5") == [flag]
    assert late(f"train.py {flag}", f"parser.add_argument('{flag}')") == []


def test_other_words_after_script_are_not_noticed() -> None:
    assert late("--stall-timeout.py") == late("train.py --dry-runs --dry --lr 1") == late("train.py -- --dry-run") == []
    assert mistakes.misplaced((), BY_FLAG, lambda: "") == []
    assert late("train.py --wait --bundle-dir b --dry-run") == ["--bundle-dir", "--dry-run", "--wait"]


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("parser.add_argument('--dry-run', action='store_true')", True),
        ('parser.add_argument("-n", "--dry_run")', True),
        ("@click.option('--dry-run/--no-dry-run')", True),
        ("@dataclass\nclass Arguments:\n    dry_run: bool = False", True),
        ("def main(lr=1, dry_run=False): ...", True),
        ("flags.DEFINE_bool('dry_run', False, 'help')", True),
        ("# --dry-runs, my-dry-run: nothing of the kind", False),
        ("args = parser.parse_args()", False),
        ("if args.dry_run == 1: ...", False),
        ("", False),
    ],
)
def test_option_that_script_reads_is_not_noticed(source: str, reads: bool) -> None:
    assert mistakes.reads_option(source, "--dry-run") is reads


def test_config_option_of_lightning_cli_is_not_noticed() -> None:
    assert mistakes.reads_option("cli = LightningCLI(Model)", "--config")
    assert not mistakes.reads_option("cli = LightningCLI(Model)", "--dry-run")


def test_option_that_imported_module_reads_is_not_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "options").mkdir()
    (tmp_path / "options" / "__init__.py").write_text("")
    (tmp_path / "options" / "of_user.py").write_text("parser.add_argument('--dry-run')")
    (tmp_path / "train.py").write_text("import os, sys\nfrom options import of_user as options\n")
    script = str(tmp_path / "train.py")
    assert preflight.misplaced([script, "--dry-run"]) == []
    assert preflight.misplaced([script, "--run-name=a"]) == [
        f"--run-name comes after {script}, so the script gets it; put safelaunch's options first"
    ]
    monkeypatch.chdir(tmp_path)
    assert preflight.misplaced(["options.of_user", "--dry-run"], is_module=True) == []
    assert len(preflight.misplaced(["options", "--dry-run"], is_module=True)) == 1
    (tmp_path / "train.py").write_text("is (no python")
    assert len(preflight.misplaced([script, "--dry-run"])) == 1
    assert len(preflight.misplaced([str(tmp_path / "none.py"), "--dry-run"])) == 1
