"""Files that other programs read: hooks, the package's metadata, the demo."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.qa.__main__ import QUALIFICATIONS
from scripts.qa.compat import VERSIONS
from tests.docs.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_hooks_are_the_tools_of_the_environment() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert {hook["id"] for hook in repo["hooks"]} >= {"ruff", "ruff-format", "mypy"}
    for hook in repo["hooks"]:
        program, *words = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/")
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))


def test_the_workflow_for_each_change_calls_what_ci_calls() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_the_nightly_workflow_runs_known_checks_on_every_supported_python() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    supported = [found for one in project["classifiers"] for found in re.findall(r":: (3\.\d+)$", one)]
    assert jobs["python"]["strategy"]["matrix"]["python"] == supported
    named = jobs["python"]["steps"][-1]["run"].split(" scripts.qa ")[1].split()
    assert named and {*named, *jobs["checks"]["strategy"]["matrix"]["check"]} <= QUALIFICATIONS.keys()


def test_the_nightly_workflow_covers_every_version_of_torch_on_the_oldest_and_the_newest_python() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    matrix = jobs["torch"]["strategy"]["matrix"]
    assert tuple(matrix["torch"]) == VERSIONS
    assert matrix["python"] == [(pythons := jobs["python"]["strategy"]["matrix"]["python"])[0], pythons[-1]]
    assert jobs["torch"]["steps"][-1]["run"] == ".venv/bin/python -m scripts.qa compat --torch ${{ matrix.torch }}"


def test_the_metadata_is_complete() -> None:
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["dynamic"] == ["readme"]
    assert {"description", "license", "license-files", "authors", "keywords", "urls"} <= project.keys()
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= project["urls"].keys()
    needed = " ".join(project["dependencies"])
    assert "py-spy" in needed and "torch" not in needed, "dump, diagnose, status and doctor do without it"
    assert project["optional-dependencies"]["torch"] == ["torch>=2.6"]
    assert "Typing :: Typed" in project["classifiers"]
    assert not [one for one in project["classifiers"] if one.startswith("License ::")], "the licence is an SPDX name"


def imported(module: str) -> set[str]:
    """Returns the packages that a script imports, also through other scripts."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        return set()
    nodes = list(ast.walk(ast.parse(path.with_suffix(".py").read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                node.module,
                *(name for name in parts if ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()),
            }
    own = {name for name in names if name.startswith("scripts.")}
    return {name.partition(".")[0] for name in names - own}.union(*map(imported, own))


def test_the_docs_extra_contains_what_the_tables_of_the_docs_import() -> None:
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = imported("scripts.build.docs_tables") - {"safelaunch", *sys.stdlib_module_names}
    assert {"shtab", "yaml"} <= wanted
    required = [*project["dependencies"], *project["optional-dependencies"]["docs"]]
    installed = {re.split(r"[^\w-]", one)[0].lower() for one in required}
    owners = packages_distributions()
    assert [name for name in sorted(wanted) if not installed & {one.lower() for one in owners.get(name, [name])}] == []


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The build hooks of ``hatch_build.py``, by name."""
    for name, kind in (("metadata.plugin", "MetadataHookInterface"), ("builders.hooks.plugin", "BuildHookInterface")):
        interface = types.ModuleType(f"hatchling.{name}.interface")
        setattr(interface, kind, type(kind, (), {"root": str(ROOT)}))
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = runpy.run_path(str(ROOT / "hatch_build.py"))
    return lambda name: found[name]()


def test_a_wheel_is_built_without_writing_into_the_source_tree(hooks: Callable[[str], Any]) -> None:
    """A clone may be another user's, or on a read-only disk."""
    hook = hooks("Generated")
    added: dict[str, dict[str, str]] = {"force_include": {}}
    hook.initialize("standard", added)
    made = [Path(path) for path in (*added["force_include"], *added["shared_data"])]
    assert len(made) == 5 and not any(path.is_relative_to(ROOT) for path in made)
    assert all(path.exists() for path in made)
    assert added["shared_data"][str(made[1])] == "share/man/man1/safelaunch.1"
    assert list(added["force_include"].values()) == ["safelaunch/cli/completions"]
    hook.finalize("standard", added, "")
    assert not any(path.exists() for path in made)


def test_the_links_of_the_readme_lead_somewhere_on_a_package_index(hooks: Callable[[str], Any]) -> None:
    hook = hooks("AbsoluteLinks")
    metadata: dict[str, Any] = {"urls": {"Source": "https://example.org/safelaunch"}}
    hook.update(metadata)
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", metadata["readme"]["text"])
    assert len(targets) > 20
    for image, target in targets:
        kind, _, path = target.removeprefix("https://example.org/safelaunch/").partition("/main/")
        assert kind == ("raw" if image else "blob")
        assert (ROOT / path.partition("#")[0]).exists(), target


PYTHON = """#!/bin/bash
echo python "$@" >>"$SAID"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    printf '#!/bin/bash\\necho safelaunch "$@" >>"$SAID"' >"$VENV/bin/safelaunch" && chmod +x "$VENV/bin/safelaunch" ;;
esac
"""


def test_the_demo_installs_only_what_it_runs(tmp_path: Path) -> None:
    """Nothing of the system's, none of the tools for tests, lint and docs; and nothing at all the second time."""
    for name in ("bash", "dirname", "id", "mkdir", "cp", "chmod"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for name, text in (("python3", PYTHON), ("apt-get", '#!/bin/bash\necho apt-get "$@" >>"$SAID"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    environ = {"PATH": str(tmp_path), "SAID": str(said), "VENV": str(tmp_path / "venv")}
    for _ in range(2):
        subprocess.run(["bash", ROOT / "scripts/demo.sh", "lock"], env=environ, check=True)
    venv, install, *demos = [line for line in said.read_text().splitlines() if not line.startswith("python -c")]
    assert venv == f"python -m venv {tmp_path / 'venv'}"
    assert install.endswith(" torch==2.13.0 -e .[torch]") and " -q" not in install, "pip shows its progress"
    assert demos == ["safelaunch demo lock"] * 2


def test_contributing_names_only_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = listed or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
    named = set(re.findall(r"`([\w./]+\.(?:py|sh|js|yml|txt))`", text))
    assert len(named) > 50
    assert not {
        name for name in named if "NAME" not in name and not any(f"/{file}".endswith(f"/{name}") for file in files)
    }
