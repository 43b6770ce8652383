"""Early looks on the screen, in reports, and read back from a bundle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from safelaunch.bundle.reading import locate
from safelaunch.model import EarlyLook, Evidence, Place
from safelaunch.report import markdown, page, template
from safelaunch.report.about import early_line, in_status
from safelaunch.verdict.diagnose import diagnose
from tests.support.bundles import write_bundle, write_json
from tests.support.evidence import EVIL, at, behind, in_user, rank, waiting
from tests.support.evidence import job as job_of

HERE = (Place(1, at(7, "load")),)
LOOK = EarlyLook(1_795_363_200.0, 7.4, 0.048, words="rank 1 is asleep in train.py:7 (load)", places=HERE)


def quiet(*looks: EarlyLook) -> Evidence:
    asleep = rank(1, in_user(7, "load"), "sleep", flight=behind())
    return replace(job_of(waiting(0), asleep, waiting(2), waiting(3)), early=looks)


@pytest.mark.parametrize(
    ("look", "before", "part", "text"),
    [
        (LOOK, None, False, "quiet for 7 s (usual 0.05 s): rank 1 is"),
        (replace(LOOK, usual_s=0.0), None, False, "quiet for 7 s (no usual step known): rank 1 is"),
        (replace(LOOK, usual_s=4.21), None, True, "quiet for 7 s (usual 4.2 s), on this node: rank 1 is"),
        (replace(LOOK, quiet_s=21.0), replace(LOOK, places=()), False, "quiet for 21 s (usual 0.05 s): rank 1 is"),
    ],
)
def test_early_look_line_has_silence_and_words(
    look: EarlyLook, before: EarlyLook | None, part: bool, text: str
) -> None:
    assert early_line(look, before, part=part) == f"{text} asleep in train.py:7 (load)... watching"


def test_early_look_line_does_not_repeat_same_words() -> None:
    again = early_line(replace(LOOK, quiet_s=21.0), LOOK)
    assert again == "quiet for 21 s: nothing has changed since 7 s"


def test_early_look_is_shown_in_status() -> None:
    assert in_status(LOOK) == "quiet for 7 s: rank 1 is asleep in train.py:7 (load)"
    assert in_status(replace(LOOK, lasted_s=30.0)).startswith("quiet for 7 s (over after 30 s): rank 1")


def test_early_looks_are_shown_in_reports() -> None:
    evidence = quiet(LOOK, replace(LOOK, words=EVIL))
    verdict = diagnose(evidence)
    for text in (markdown.markdown(verdict, evidence, ()), template.render(page.content(verdict, evidence))):
        assert "quiet for 7 s: rank 1 is asleep" in text and "UTC" in text
        assert "<script>alert" not in re.sub("`[^`]*`", "", text) and "\x1b" not in text


def test_early_looks_read_back_from_bundle(tmp_path: Path) -> None:
    evidence = quiet(LOOK, replace(LOOK, quiet_s=21.0, movement="active", lasted_s=30.0, said=True))
    root = write_bundle(tmp_path / "b", evidence)
    write_json(root / "early.json", evidence.early)
    assert locate.read(root).evidence == evidence
    (root / "early.json").write_text("{}")
    damaged = locate.read(root)
    assert damaged.evidence.early == () and damaged.problems
