"""Runs the commands of README and docs, page by page; ``pages.py`` says which, and how a page is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, blocks
from tests.docs.shell import Shell

# One group: the last test looks at what the first has left.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240), pytest.mark.xdist_group("docs")]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("docs"))
    yield shell
    shell.clean_up()


IN_CI = ("README.md", "docs/tutorial.md")
WITH_COMMANDS = [page for page in PAGES if any(block.language == "bash" for block in blocks(page))]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in IN_CI else [pytest.mark.nightly]) for page in WITH_COMMANDS]
)
def test_the_commands_of(page: str, shell: Shell) -> None:
    shell.page(page)


def test_the_readme_shows_what_its_job_prints(shell: Shell) -> None:
    """The sentence of the verdict, as README and the bundle have it."""
    place = shell.page("README.md")
    verdict = (place / "safelaunch-bundles" / "latest" / "verdict.json").read_text()
    screen = next(block.text for block in blocks("README.md") if "safelaunch: the job hangs" in block.text)
    words = " ".join(line.removeprefix("safelaunch: ") for line in screen.splitlines())
    assert verdict.split('"summary": "', 1)[1].split('"', 1)[0] in words
