"""Files that other programs read: issue forms, hooks, the Dockerfile, the package's metadata."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT

from safelaunch.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD", "ENV", "USER"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_one(form: Path) -> None:
    found = read(form)
    assert {"name", "description", "body"} <= found.keys()
    assert {field["type"] for field in found["body"]} <= FIELDS
    answers = [field for field in found["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in answers}) == len(answers) > 0
    assert all(field["attributes"]["label"] for field in answers)
    assert all(field["attributes"]["options"] for field in answers if field["type"] == "dropdown")


def test_the_forms_name_commands_that_there_are() -> None:
    named = {word for form in FORMS for word in re.findall(r"`safelaunch ([a-z]+)", form.read_text("utf-8"))}
    assert named
    assert named <= COMMANDS.keys()


def test_the_hooks_are_the_tools_of_the_environment() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert {hook["id"] for hook in repo["hooks"]} >= {"ruff", "ruff-format", "mypy"}
    for hook in repo["hooks"]:
        program, *words = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/")
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole if line.strip())]


def test_the_dockerfile_is_one() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS
    stages = [rest.rpartition(" AS ")[2] for word, rest in found if word == "FROM" and " AS " in rest]
    known = {rest.partition("=")[0] for word, rest in found if word == "ARG"}
    for word, rest in found:
        assert set(re.findall(r"\$\{(\w+)\}", rest)) <= known, f"{word} {rest}"
        if word == "COPY":
            source = next((part.partition("=")[2] for part in rest.split() if part.startswith("--from=")), None)
            assert source in (None, *stages)
        if word in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(part, str) for part in yaml.safe_load(rest))
        if word == "RUN":
            shlex.split(rest)


def test_the_metadata_is_complete() -> None:
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["dynamic"] == ["readme"]
    assert {"description", "license", "license-files", "authors", "keywords", "urls"} <= project.keys()
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= project["urls"].keys()
    assert "Typing :: Typed" in project["classifiers"]
    assert not [one for one in project["classifiers"] if one.startswith("License ::")], "the licence is an SPDX name"


def test_the_links_of_the_readme_lead_somewhere_on_a_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["AbsoluteLinks"]()
    hook.root = str(ROOT)
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
    assert install.endswith(" torch==2.13.0 -e .") and " -q" not in install, "pip shows its progress"
    assert demos == ["safelaunch demo lock"] * 2
