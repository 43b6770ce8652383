"""Shows that the core works without its add-ons: deletes them in a copy of the repository and tests what is left.

python -m scripts.build.without_addons          # each in turn: imports and help; all together: tests and a real hang
python -m scripts.build.without_addons --whole  # each in turn: all unit tests of the core and a real hang
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from safelaunch.addons import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("configs", "docs", "man", "safelaunch", "scripts", "tests", "pyproject.toml", "README.md")
TESTS = (
    "test_addons.py",
    "test_layers.py",
    "test_cli.py",
    "test_cli_[!d]*.py",
    "test_cli_diagnose.py",
    "test_settings_config*.py",
    "test_bundle_reading.py",
    "test_model_schemas.py",
    "test_supervise_control_protocol.py",
    "test_supervise_monitors.py",
    "test_supervise_rounds.py",
    "test_supervise_services.py",
)
HELP = (["--help"], ["help"])
OTHERS = (["help", "diagnose"], ["presets"], ["status"], ["explain"], ["gpus", "--json"], ["--nproc-per-node=2", "-h"])
DEMO = ["demo", "lock"]
# Programs that run in the ranks, or in torchrun's interpreter.
IMPORT_ALL = """
import importlib, pkgutil, safelaunch
beside = ("safelaunch.addons.", "safelaunch.beacon.", "safelaunch.cli.demos", "safelaunch.job.launcher")
names = [found.name for found in pkgutil.walk_packages(safelaunch.__path__, "safelaunch.", onerror=lambda name: None)]
core = [name for name in names if not name.startswith(beside) and not name.endswith(("__main__", "store_program"))]
for name in core:
    importlib.import_module(name)
print(len(core), "modules")
"""


class Failed(Exception):
    pass


class Copy:
    """A copy of the repository without some add-ons and their tests, and an environment that imports it."""

    def __init__(self, folder: Path, addons: Sequence[str]) -> None:
        self.root = folder / "repository"
        for name in COPIED:
            source, target = ROOT / name, self.root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copy2(source, target)
        for addon in addons:
            shutil.rmtree(self.root / "safelaunch" / "addons" / addon)
            for kind in ("unit", "component", "e2e"):
                shutil.rmtree(self.root / "tests" / kind / "addons" / addon, ignore_errors=True)
        self._bin = self._environment(folder / "venv")

    def _environment(self, venv: Path) -> Path:
        """Makes an environment with the packages of this one, in which ``safelaunch`` is the copy."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        packages, programs = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("scripts"))
        own = next((venv / "lib").glob("python*")) / "site-packages"
        for package in packages.iterdir():
            if package.suffix != ".pth" and not (own / package.name).exists():  # one of them names the repository
                (own / package.name).symlink_to(package)
        (own / "copy.pth").write_text(f"{self.root}\n")
        for program in programs.iterdir():
            if program.name != "safelaunch" and not (venv / "bin" / program.name).exists():
                (venv / "bin" / program.name).symlink_to(program)
        script = venv / "bin" / "safelaunch"
        script.write_text(f"#!{venv}/bin/python\nfrom safelaunch.cli import entry\nentry()\n")
        script.chmod(0o755)
        return venv / "bin"

    def safelaunch(self, words: Sequence[str]) -> str:
        """Returns what it prints. Raises Failed if it fails."""
        return self._run([self._bin / "safelaunch", *words])

    def import_core(self) -> str:
        return self._run([self._bin / "python", "-c", IMPORT_ALL]).strip()

    def test(self, patterns: Sequence[str], *, slow: bool) -> str:
        """Runs the unit tests in files of these names, with or without the slow ones; returns pytest's last line."""
        files = [path for pattern in patterns for path in sorted((self.root / "tests" / "unit").glob(pattern))]
        command = [self._bin / "python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n2"]
        return self._run([*command, *([] if slow else ["-m", "not slow"]), *files]).strip().rpartition("\n")[2]

    def _run(self, command: Sequence[str | Path]) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SAFELAUNCH_", "PYTHON"))}
        environ |= {"PATH": f"{self._bin}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=self.root, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        return done.stdout


def addons() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "safelaunch" / "addons").glob("*/__init__.py"))


def check(gone: Sequence[str], *, tests: Sequence[str], demo: bool, whole: bool) -> None:
    """Raises Failed if the core doesn't work without these add-ons."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="without-addons-") as folder:
        copy = Copy(Path(folder), gone)
        seen = [copy.import_core()]
        shown = "".join(map(copy.safelaunch, HELP))
        absent = [name for name, (addon, *_) in COMMANDS.items() if addon in gone]
        listed = [name for name in absent if re.search(rf"^  {name} ", shown, re.M)]
        if listed:
            raise Failed(f"without {', '.join(gone)}, the help lists {', '.join(listed)}")
        for words in OTHERS:
            copy.safelaunch(words)
        if tests:
            seen.append(copy.test(tests, slow=whole))
        if demo:
            copy.safelaunch([*DEMO, "--bundle-dir", os.fspath(Path(folder) / "bundles")])
            seen.append(f"safelaunch {' '.join(DEMO)}")
    print(f"without {', '.join(gone)}: {'; '.join(seen)} ({time.monotonic() - begin_s:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="all unit tests and a real hang, without each in turn")
    whole = parser.parse_args().whole
    everything = addons()
    try:
        for addon in everything:
            check([addon], tests=["test_*.py", "addons/*/test_*.py"] if whole else [], demo=whole, whole=whole)
        check(everything, tests=["test_*.py"] if whole else TESTS, demo=True, whole=whole)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
