"""What README and docs say agrees with the code, and is written so that its commands can be tested."""

from __future__ import annotations

import ast
import html
import json
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
import yaml
from pages import DOCS, PAGES, ROOT, blocks, sections, table

from safelaunch.cli import COMMANDS, main
from safelaunch.settings.config import MAX_STALL_FACTOR, Settings
from safelaunch.settings.options import OWN_OPTIONS, Option
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.rules import OWN, RULES

sys.path.insert(0, str(ROOT / "scripts"))

import docs_tables
from checks import CHECKS, Record
from figures import render

RUN, NOT_RUN = {"bash"}, {"console"}
FRAGMENTS = {"text", "python", "yaml", "json", "toml", "ini", "dockerfile", "sh"}
EVERY_PAGE = pytest.mark.parametrize("page", PAGES)


# --- how pages are written --------------------------------------------------------------------------------------------


@EVERY_PAGE
def test_every_block_is_of_a_known_kind(page: str) -> None:
    for block in blocks(page):
        assert block.language in {"setup", *RUN, *NOT_RUN, *FRAGMENTS}, f"{block.where}: {block.language!r}"
        assert not block.rest, f"{block.where}: {block.rest!r}"


@EVERY_PAGE
def test_every_command_that_is_not_run_says_why(page: str) -> None:
    for block in blocks(page):
        if block.language in NOT_RUN:
            assert block.comment.startswith("not run: "), block.where


@EVERY_PAGE
def test_fragments_parse(page: str) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "json":
            json.loads(block.text)


@EVERY_PAGE
def test_links_lead_somewhere(page: str) -> None:
    """MkDocs checks those between pages; README is none of its pages."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page].read_text()):
        if "://" not in target:
            assert (PAGES[page].parent / target).exists(), target


def test_figures_are_marked() -> None:
    """``scripts/figures.py`` finds and replaces them: every marker has its end and names checks, each on one page."""
    record = Record("", "", "", 0.0, 0, "", ("",), (("",),))
    rendered = {page: render(path.read_text(), dict.fromkeys(CHECKS, record)) for page, path in PAGES.items()}
    assert {page: one.problems for page, one in rendered.items() if one.problems} == {}
    names = [name for one in rendered.values() for name in one.names]
    assert len(names) == len(set(names)) >= 10


def test_the_picture_is_of_the_readmes_job() -> None:
    """If this fails, run ``python scripts/picture.py``."""
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


def test_every_page_is_in_the_navigation() -> None:
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md"))


@pytest.mark.parametrize(
    ("symptom", "page"),
    [
        ("TORCH_CPP_LOG_LEVEL", "frozen"),
        ("100 % SM and 0 % memory", "frozen"),
        ("0 % `mem`", "frozen"),
        ("fabric manager", "frozen"),
        ("system not yet initialized", "errors"),
        ("MTU", "frozen"),
        ("same order unless the loop calls `sampler.set_epoch", "results"),
    ],
)
def test_a_symptom_is_named_where_its_owner_looks(symptom: str, page: str) -> None:
    assert symptom in " ".join(PAGES[f"docs/{page}.md"].read_text().split())


@EVERY_PAGE
def test_the_advice_that_a_page_shows_is_still_given(page: str) -> None:
    """If this fails, run ``python scripts/docs_output.py PAGE``."""
    given = {" ".join(advice.shown.split()) for cause in CAUSES.values() for advice in cause.advice}
    for block in blocks(page):
        if block.comment == "verdict":
            words = " ".join(line.removeprefix("safelaunch:").strip() for line in block.text.splitlines())
            for advice in words.split(" next: ")[1:]:
                assert any(advice in one for one in given), f"{block.where}: {advice}"


# --- what they say ----------------------------------------------------------------------------------------------------


def shown(option: Option) -> str:
    return f"`{option.usage}`"


def options_in_docs() -> dict[str, list[str]]:
    rows = [row for heading in sections("docs/options.md") if "options" in heading for row in option_table(heading)]
    return {row[0]: row[1:] for row in rows}


def option_table(heading: str) -> list[list[str]]:
    return table("docs/options.md", f"## {heading}")


def test_every_option_has_its_row() -> None:
    assert sorted(options_in_docs()) == sorted(shown(option) for option in OWN_OPTIONS)


def test_which_subcommands_take_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``docs/options.md`` says it in its beginning."""
    assert all({"run", "exec"} <= option.commands for option in OWN_OPTIONS)
    for command, taken in (("demo", {"--preset", "--bundle-dir"}), ("dump", {"--bundle-dir"})):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert shown & {option.flag for option in OWN_OPTIONS} == taken


def test_defaults() -> None:
    defaults = {flag.strip("`").split()[0]: row[1] for flag, row in options_in_docs().items()}
    settings = Settings()
    assert defaults["--stall-floor"] == f"{settings.stall_floor_s:g} s"
    assert defaults["--startup-timeout"] == f"{settings.startup_timeout_s:g} s"
    assert f"{MAX_STALL_FACTOR} ×" in defaults["--max-stall"]
    assert f"{settings.effective_max_stall_s:g} s" in defaults["--max-stall"]
    assert defaults["--on-stall"] == f"`{settings.on_stall}`"
    assert defaults["--bundle-dir"] == f"`./{settings.bundle_dir}`"


def test_the_options_in_the_readme_are_options() -> None:
    rows = table("README.md", "## Options")
    known = {shown(option) for option in OWN_OPTIONS}
    assert len(rows) == 7
    assert {row[0] for row in rows} <= known


def test_every_cause_has_its_section() -> None:
    found = {title: text for title, text in sections("docs/verdicts.md", 3).items() if title in CAUSES}
    assert list(found) == list(CAUSES)
    for cause, text in found.items():
        for part in ("**What it means.**", "**Example.**", "**Fix.**"):
            assert part in text, f"{cause}: no {part}"
        assert "```text" in text, f"{cause}: no verdict as an example"
        assert f"<!-- advice: {cause} -->" in text.split("**Fix.**")[1], cause


def names(causes: Iterable[str]) -> str:
    return ", ".join(f"`{cause}`" for cause in causes)


def test_the_marks_are_filled() -> None:
    """What MkDocs puts in where a page has a mark."""
    assert f"*its own*: {names(OWN)}." in " ".join(PAGES["docs/how-it-works.md"].read_text().split())
    rules = docs_tables.filled("<!-- table: rules -->")
    assert all(f"| `{rule.name}` | {rule.says} |" in rules for rule in RULES)
    doubts = docs_tables.filled("<!-- table: doubts -->")
    assert all(doubt.why in doubts for doubt in Doubt)
    advice = docs_tables.filled("<!-- advice: collective-mismatch -->")
    assert "- Give the send and its receive the same `tag`.\n" in advice
    for page, place in PAGES.items():
        assert "<!-- table" not in docs_tables.filled(place.read_text()), page


def test_every_preset_has_its_row() -> None:
    said = {row[0].strip("`"): row[1] for row in table("docs/presets.md", "## Shipped presets")}
    there = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")}
    assert set(said) == set(there)
    for name, preset in there.items():
        assert said[name] == preset["description"].splitlines()[0], name


def test_what_a_preset_sets_is_in_its_section() -> None:
    found = sections("docs/presets.md")
    for path in (ROOT / "configs").glob("*.yaml"):
        preset = yaml.safe_load(path.read_text())
        for name, value in preset.get("watchdog", {}).items():
            assert f"`{name}: {str(value).lower()}`" in found[path.stem], f"{path.stem}: {name}"
        for name, setting in preset.get("env", {}).items():
            assert f"`{name}={setting['value']}`" in found[path.stem], f"{path.stem}: {name}"
        if "extends" in preset:
            assert f"[`{preset['extends']}`](#{preset['extends']})" in found[path.stem]


def test_every_subcommand_is_described() -> None:
    said = "\n".join(page.read_text() for page in PAGES.values())
    for command in COMMANDS:
        assert f"safelaunch {command}" in said, command


def test_the_versions_that_compat_installs() -> None:
    versions = re.findall(r"\"(2\.\d+\.\d+)\"", (ROOT / "scripts" / "compat.py").read_text())
    assert versions
    for version in versions:
        assert version in PAGES["docs/compatibility.md"].read_text(), version
