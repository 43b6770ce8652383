"""What README and docs say agrees with the code, and is written so that its commands can be tested."""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

import pytest
import yaml

from safelaunch.cli import COMMANDS, main
from safelaunch.cli.help import EXIT_CODES
from safelaunch.model import Culprit, Verdict
from safelaunch.settings.config import HOOK_ENV, INTERNAL_ENV, PLACES_ENV
from safelaunch.settings.options import BY_NAME, MAX_STALL_FACTOR, OWN_OPTIONS, STARTUP_MAX_STALL_S, Option, Settings
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.rules import OWN, RULES
from scripts.build import docs_tables
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, github_anchors, links, prose, table

RUN, NOT_RUN = {"bash"}, {"console"}
FRAGMENTS = {"text", "python", "yaml", "json", "toml", "ini", "dockerfile", "sh"}
TEXTS = {name: page.read_text() for name, page in PAGES.items()}
EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]


# --- how pages are written --------------------------------------------------------------------------------------------


def test_every_block_is_of_a_known_kind() -> None:
    for block in EVERY_BLOCK:
        assert block.language in {"setup", *RUN, *NOT_RUN, *FRAGMENTS}, f"{block.where}: {block.language!r}"
        assert not block.rest, f"{block.where}: {block.rest!r}"


def test_a_titled_block_is_a_file_below_the_pages_own_directory() -> None:
    """The tests write it there, and never into a directory of the machine."""
    assert [block.where for block in EVERY_BLOCK if block.title and "/" in block.title] == []


def test_every_command_that_is_not_run_says_why() -> None:
    for block in EVERY_BLOCK:
        if block.language in NOT_RUN:
            assert block.comment.startswith("not run: "), block.where


def test_fragments_parse() -> None:
    for block in EVERY_BLOCK:
        if block.language == "python":
            ast.parse(block.text, block.where)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "json":
            json.loads(block.text)


LINKED = {**PAGES, **{name: ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}}


def test_links_lead_to_a_file_and_a_heading_on_github() -> None:
    dead = [
        f"{name}: {path}#{anchor}"
        for name, page in LINKED.items()
        for path, anchor in links(page)
        if not path.exists() or (anchor and anchor not in github_anchors(path))
    ]
    assert dead == []


def test_links_between_pages_lead_to_a_heading_in_the_site(site_anchors: dict[Path, set[str]]) -> None:
    pages = [(page, path, anchor) for page in site_anchors for path, anchor in links(page)]
    dead = [
        f"{page.name}: {path.name}#{anchor}"
        for page, path, anchor in pages
        if path.is_relative_to(DOCS) and anchor and anchor not in site_anchors[path]
    ]
    assert dead == []
    assert [f"{page.name}: {path}" for page, path, _ in pages if not path.is_relative_to(DOCS)] == []
    assert len(pages) > 150


def test_headings_have_the_same_anchors_on_github_and_in_the_site(site_anchors: dict[Path, set[str]]) -> None:
    assert {page: github_anchors(page) for page in site_anchors} == site_anchors


@pytest.fixture(scope="module")
def site_anchors() -> dict[Path, set[str]]:
    """The anchors of each page's headings, made by the Markdown extensions of ``mkdocs.yml``."""
    markdown = pytest.importorskip("markdown")
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"))
    found = {}
    for page in DOCS.glob("**/*.md"):
        parser = markdown.Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
        found[page] = set(re.findall(r'<h[1-6] id="([^"]+)"', parser.convert(page.read_text())))
    return found


def test_no_page_has_syntax_that_github_prints() -> None:
    """Attributes of a heading, admonitions and tabs of MkDocs."""
    lines = [(name, line) for name, page in LINKED.items() for line in prose(page).splitlines()]
    assert [one for one in lines if re.search(r"^(!!!|\?\?\?|===) |\{:? ?[#.][\w-]+ ?\}", one[1])] == []


def test_no_table_of_the_site_shows_the_backslash_of_an_escaped_pipe() -> None:
    """In backticks, GitHub drops it and MkDocs does not."""
    rows = [line for page in DOCS.glob("**/*.md") for line in prose(page).splitlines() if line.startswith("|")]
    assert rows and [row for row in rows if re.search(r"`[^`]*\\\|[^`]*`", row)] == []


def test_the_site_is_built_from_the_pages_alone() -> None:
    """A hook would make text that readers on GitHub don't see, and would need what the product imports."""
    assert "hooks:" not in (ROOT / "mkdocs.yml").read_text()


def test_the_picture_is_of_the_readmes_job() -> None:
    """If this fails, run ``python -m scripts.build.picture``."""
    picture = (DOCS / "pictures" / "verdict.svg").read_text("utf-8")
    assert not re.findall(r"@import|url\((?!#)|href=", picture), "it loads nothing"
    words = " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", picture, flags=re.DOTALL)).split())
    screen = next(block.text for block in blocks("README.md") if "safelaunch: the job hangs" in block.text)
    shown = [line for line in screen.splitlines() if not re.search(r"quiet|no progress|pid|bundle:", line)]
    lacking = [line for line in shown if _squeezed(line.removeprefix("safelaunch:")) not in _squeezed(words)]
    assert lacking == []
    for page in ("README.md", "docs/index.md"):
        assert "pictures/verdict.svg" in PAGES[page].read_text()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().split()) < 1000


def test_a_reader_with_a_frozen_job_finds_the_lines_to_paste_first() -> None:
    text = PAGES["README.md"].read_text()
    block = next(block for block in blocks("README.md") if "dump --all" in block.text)
    assert block.line < 30 and "**Frozen right now?** Leave it running." in text.split("## Install")[0]
    make, install, look = (shlex.split(line, comments=True) for line in block.text.splitlines())
    assert make == ["python3", "-m", "venv", "~/.safelaunch"], "the system's own Python may refuse to install"
    assert install == ["~/.safelaunch/bin/pip", "install", f"git+{docs_tables.address()}"]
    assert look == ["sudo", "~/.safelaunch/bin/safelaunch", "dump", "--all"], "sudo does not have the user's PATH"


def test_the_readme_begins_with_its_promise_and_the_two_commands_of_a_clone() -> None:
    first = PAGES["README.md"].read_text().split("\n\n")[1]
    assert first.startswith("**A job is ended only if it is proved dead.**")
    assert f"git clone {docs_tables.address()} && cd safelaunch" in TEXTS["README.md"]
    assert all(f"bash scripts/{name}.sh" in TEXTS["README.md"] for name in ("demo", "test"))


def test_the_address_of_the_repository_is_set_in_one_place() -> None:
    """A page names the address that ``[project.urls]`` of pyproject.toml sets, and no other one."""
    source = docs_tables.address()
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert all(url == source or url.startswith(f"{source}/") for url in project.values())
    named = {name: re.findall(r"(?:git clone |git\+)(https?://[^\s`@'\"]+)", text) for name, text in TEXTS.items()}
    assert {url for urls in named.values() for url in urls} == {source}
    assert {"README.md", "docs/attach.md", "docs/install.md"} <= {name for name, urls in named.items() if urls}
    assert not [name for name, text in TEXTS.items() if re.search(r"https://HOST|/path/to/safelaunch@", text)]


def test_the_address_of_the_repository_is_replaced_in_commands() -> None:
    made = docs_tables.filled("git clone https://old.example/x && cd x\npip install git+https://old.example/x@v1\n")
    source = docs_tables.address()
    assert made == f"git clone {source} && cd x\npip install git+{source}@v1\n"


def test_every_page_is_in_the_navigation() -> None:
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md"))


@pytest.mark.parametrize(
    ("symptom", "page"),
    [
        ("stuck at 0 %", "frozen"),
        ("hangs after one epoch", "frozen"),
        ("all ranks at 100 % GPU but no progress", "frozen"),
        ("DataLoader freezes", "frozen"),
        ("TORCH_CPP_LOG_LEVEL", "frozen"),
        ("100 % SM and 0 % memory", "frozen"),
        ("0 % `mem`", "frozen"),
        ("fabric manager", "frozen"),
        ("MTU", "frozen"),
        ("NCCL timeout", "errors"),
        ("Watchdog caught collective operation timeout", "errors"),
        ("system not yet initialized", "errors"),
        ("CUDA out of memory", "errors"),
        ("Every epoch has the same order", "training"),
        ("loss repeats each epoch", "training"),
        ("sampler.set_epoch(epoch)", "training"),
        ("every epoch has the same order, the loss repeats each epoch", "results"),
        ("Loss is NaN", "results"),
        ("EADDRINUSE", "starting"),
        ("invalid device ordinal", "starting"),
        ("straggler", "slow"),
        ("kubectl debug", "pods"),
        ("PodSecurity", "pods"),
        ("OpenShift", "pods"),
        ("GKE Autopilot", "pods"),
        ("gVisor", "pods"),
        ("Apptainer", "pods"),
        ("Rootless Podman", "pods"),
        ("Kubeflow", "pods"),
        ("mp.spawn", "migration"),
        ("mpirun", "migration"),
        ("ROCm", "install"),
        ("macOS", "install"),
    ],
)
def test_a_symptom_is_named_where_its_owner_looks(symptom: str, page: str) -> None:
    assert symptom in " ".join(PAGES[f"docs/{page}.md"].read_text().split())


def test_the_advice_that_a_page_shows_is_still_given() -> None:
    """If this fails, run ``python -m scripts.build.docs_output PAGE``."""
    given = {" ".join(advice.shown.split()) for cause in CAUSES.values() for advice in cause.advice}
    for block in EVERY_BLOCK:
        if block.comment == "verdict":
            words = " ".join(line.removeprefix("safelaunch:").strip() for line in block.text.splitlines())
            for advice in words.split(" next: ")[1:]:
                assert any(advice in one for one in given), f"{block.where}: {advice}"


# --- what they say ----------------------------------------------------------------------------------------------------


def test_generated_parts_are_up_to_date() -> None:
    """If this fails, run ``python -m scripts.build.docs_tables``."""
    stale = [name for name, page in PAGES.items() if docs_tables.filled(page.read_text()) != page.read_text()]
    assert not stale, "run python -m scripts.build.docs_tables"


def test_a_generated_part_is_replaced_and_the_rest_of_the_page_kept() -> None:
    made = docs_tables.filled("before\n\n<!-- table: exit codes -->\nstale\n<!-- /table -->\n\nafter\n")
    assert made.startswith("before\n\n<!-- table: exit codes -->\n\n| code | meaning |\n")
    assert made.endswith(" |\n\n<!-- /table -->\n\nafter\n") and "stale" not in made
    assert docs_tables.filled(made) == made


@pytest.mark.parametrize(
    "page",
    [
        "<!-- presets -->\n",
        "<!-- options: GPUs -->\n<!-- options: Other -->\n<!-- /options -->\n",
        "<!-- options: GPUs --> some words\n<!-- /options -->\n",
        "<!-- table: rules -->\n<!-- /options -->\n",
    ],
)
def test_a_generated_part_without_an_end_is_an_error(page: str) -> None:
    with pytest.raises(ValueError):
        docs_tables.filled(page)


def test_an_unknown_generated_part_is_an_error() -> None:
    with pytest.raises(KeyError):
        docs_tables.filled("<!-- options: Nonsense -->\n<!-- /options -->\n")


def shown(option: Option) -> str:
    return f"`{option.usage}`"


def test_every_option_has_its_row() -> None:
    rows = html.unescape(re.sub(r"</?code>", "`", TEXTS["docs/options.md"]))
    assert [option.flag for option in OWN_OPTIONS if f"| {shown(option)} | {option.help} |" not in rows] == []


def test_every_option_has_its_variable() -> None:
    rows = html.unescape(re.sub(r"</?code>", "`", TEXTS["docs/environment.md"]))
    assert [one.flag for one in OWN_OPTIONS if f"| `{one.variable}` | {shown(one)} |" not in rows] == []


def test_every_variable_that_is_no_option_is_described() -> None:
    """``recipes.md`` describes the variables of hooks."""
    page = TEXTS["docs/environment.md"]
    assert [name for name in (*INTERNAL_ENV, *PLACES_ENV) if f"`{name}`" not in page] == []
    assert [name for name in HOOK_ENV if f"`{name}`" not in TEXTS["docs/recipes.md"]] == []


def test_every_exit_code_has_its_row() -> None:
    assert all(f"| {code} | {text} |" in TEXTS["docs/options.md"] for code, text in EXIT_CODES.items())


def test_help_of_demo_and_dump_lists_only_documented_options(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``docs/options.md`` says it in its beginning."""
    assert all({"run", "exec"} <= option.commands for option in OWN_OPTIONS)
    for command, taken in (("demo", {"--preset", "--bundle-dir"}), ("dump", {"--bundle-dir"})):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert shown & {option.flag for option in OWN_OPTIONS} == taken


def test_option_help_names_defaults() -> None:
    """Those that the help of an option names in brackets."""
    settings = Settings()
    assert f"[{settings.stall_floor_s:g}s]" in BY_NAME["stall-floor"].help
    assert f"[{settings.startup_timeout_s / 60:g}m]" in BY_NAME["startup-timeout"].help
    assert f"[{MAX_STALL_FACTOR} x" in BY_NAME["max-stall"].help
    assert settings.effective_max_stall_s is None and "else never" in BY_NAME["max-stall"].help
    assert f"{STARTUP_MAX_STALL_S / 60:g}m before the first step" in " ".join(BY_NAME["max-stall"].help.split())
    assert f"[{settings.on_stall}]" in BY_NAME["on-stall"].help
    assert f"[./{settings.bundle_dir}]" in BY_NAME["bundle-dir"].help


def test_readme_table_lists_only_existing_options() -> None:
    rows = table("README.md", "## Options")
    known = {shown(option) for option in OWN_OPTIONS}
    assert len(rows) == 7
    assert {row[0] for row in rows} <= known


def test_every_cause_has_its_section_with_its_advice() -> None:
    found = re.split(r"^## `(.+)`$", TEXTS["docs/causes.md"], flags=re.MULTILINE)
    assert found[1::2] == list(CAUSES)
    titles = ["How safelaunch knows", "Example", "What to do", "Not to be confused with"]
    for cause, text in zip(found[1::2], found[2::2], strict=True):
        meaning, *parts = re.split(r"^\*\*(.+)\*\*$", text, flags=re.MULTILINE)
        assert parts[::2] == titles and meaning.strip() and all(part.strip() for part in parts), cause
        assert CAUSES[cause].evidence in text and "```text" not in meaning, cause
        assert all(f"- {advice.shown}" in text for advice in CAUSES[cause].advice), cause
        assert all(f"- [`{other}`](#{other}): " in text for other, _ in CAUSES[cause].unlike), cause


def test_every_cause_that_looks_like_another_exists() -> None:
    for name, cause in CAUSES.items():
        assert cause.unlike and {other for other, _ in cause.unlike} <= CAUSES.keys() - {name}, name


def names(causes: Iterable[str]) -> str:
    return ", ".join(f"`{cause}`" for cause in causes)


def test_the_tables_of_rules_and_doubts() -> None:
    page = TEXTS["docs/how-it-works.md"]
    assert f"by itself and that holds up its peers: {names(OWN)}." in " ".join(page.split())
    assert all(f"| `{rule.name}` |" in page for rule in RULES)
    assert all(doubt.why in TEXTS["docs/verdicts.md"] for doubt in Doubt)


def test_every_field_of_a_verdict_has_its_row() -> None:
    for record in (Verdict, Culprit):
        for field in record.__struct_fields__:
            assert f"| `{field}` |" in TEXTS["docs/verdicts.md"], f"{record.__name__}.{field}"


def test_every_preset_is_shown() -> None:
    found = dict(re.findall(r"^### `([a-z-]+)`\n(.*?)(?=^##)", TEXTS["docs/presets.md"], re.MULTILINE | re.DOTALL))
    there = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")}
    assert found.keys() == there.keys()
    for name, preset in there.items():
        assert preset["description"].strip() in found[name], name
        assert all(f"`{key}: {value}`" in found[name] for key, value in preset.get("watchdog", {}).items()), name
        assert all(f"`{key}={one['value']}`" in found[name] for key, one in preset.get("env", {}).items()), name


def test_every_subcommand_is_described() -> None:
    found = re.findall(r"^## `safelaunch (\w+)`", TEXTS["docs/commands.md"], re.MULTILINE)
    assert found == [command for command in COMMANDS if command != "help"]


def test_the_versions_that_compat_installs() -> None:
    versions = re.findall(r"\"(2\.\d+\.\d+)\"", (ROOT / "scripts" / "qa" / "compat.py").read_text())
    assert versions
    for version in versions:
        assert version in PAGES["docs/install.md"].read_text(), version
