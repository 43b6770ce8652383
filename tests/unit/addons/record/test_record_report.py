"""A recording as a screen, a page and files for viewers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.addons.record.comparison import compare
from safelaunch.addons.record.page import content, script
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.rows import RecordingReport, places
from safelaunch.addons.record.screen import markdown, screen
from safelaunch.addons.record.slowness import verdict_of
from safelaunch.addons.record.speedscope import speedscope
from safelaunch.model import Frame
from safelaunch.report import template
from tests.support.browser import Browser, found
from tests.unit.addons.record.recordings import ALL_REDUCE, AUGMENT, BACKWARD, FORWARD, recorded, recording

NAMES = ("straggler", "loader", "gil", "healthy", "nodes")
WAITS = {FORWARD: 0.2, BACKWARD: 0.2, ALL_REDUCE: 0.6}


def of(one: Recording, earlier: Recording | None = None) -> RecordingReport:
    return RecordingReport(one, verdict_of(one), compare(earlier, one) if earlier is not None else None, "earlier")


def weight(branches: list[dict[str, Any]]) -> int:
    return sum(one["n"] for one in branches)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 80, 140])
def test_record_screen_starts_with_the_verdict_and_fits(name: str, width: int) -> None:
    shown = of(recorded(name), recorded("healthy"))
    lines = screen(shown, width).split("\n")
    assert shown.slowness.headline.startswith(lines[0])
    assert max(map(len, lines)) <= width
    assert any(line.split()[:1] == ["rank"] for line in lines)


def test_similar_ranks_share_a_row_in_large_jobs() -> None:
    late = {FORWARD: 0.2, BACKWARD: 0.2, AUGMENT: 0.6}
    lines = screen(of(recording(*[WAITS] * 300, late, *[WAITS] * 211)), 120).split("\n")
    assert [line.split()[0] for line in lines if line.split()[:1] in (["0-299,301-511"], ["300"])] == [
        "0-299,301-511",
        "300",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_flame_graph_contains_the_whole_time(name: str) -> None:
    tree = content(of(recorded(name)))["tree"]
    assert weight(tree) == pytest.approx(10_000, rel=0.02)
    stack = list(tree)
    while stack:
        one = stack.pop()
        assert weight(one["b"]) <= one["n"] + len(one["b"])
        stack += one["b"]


@pytest.mark.parametrize("name", NAMES)
def test_speedscope_profile_is_consistent(name: str) -> None:
    one = recorded(name)
    scope = speedscope(one)
    for profile in scope["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
        assert all(number < len(scope["shared"]["frames"]) for sample in profile["samples"] for number in sample)


def test_hostile_names_are_escaped_in_reports() -> None:
    bad = "</script><img src=x onerror=alert(1)>\x1b[31m```"
    one = recording({(Frame(f"/x/{bad}.py", 3, bad),): 1.0})
    one = replace(one, name=bad, command=[bad], notes=[bad])
    html = template.render(content(of(one)), script())
    assert "<img" not in html and "\x1b" not in html
    assert "\x1b" not in screen(of(one), 100)
    assert markdown(of(one)).count("```") == 2


@pytest.mark.skipif(found() is None, reason="no Chromium on this machine")
def test_record_page_renders_without_errors(tmp_path: Path) -> None:
    path = tmp_path / "record.html"
    path.write_text(template.render(content(of(recorded("straggler"), recorded("healthy"))), script()))
    program = found()
    assert program is not None
    with Browser(program) as browser:
        browser.open(path)
        assert not browser.errors
        assert browser.value("document.documentElement.dataset.drawn") == "yes"
        sections = browser.value("[...document.querySelectorAll('section')].map((one) => one.id).join()")
        assert sections == "ranks,waits,work,compared,stacks"
        assert browser.value("document.querySelectorAll('.flame button.culprit').length") > 0


def test_record_page_data_is_json() -> None:
    json.dumps(content(of(recorded("loader"))))


def test_lines_of_one_function_are_distinguished() -> None:
    """All of a script is one function: most of its time is in a line, not all."""
    outer, other = AUGMENT[:-1], AUGMENT[-1]
    second = (*outer, replace(other, line=other.line + 1))
    one = recording(*[{AUGMENT: 0.5, second: 0.3, FORWARD: 0.2}] * 2)
    assert "80% of the time goes to lines around data.py:12" in verdict_of(one).headline
    rows = {frame.line: round(share, 2) for _, share, frame, _ in places(verdict_of(one).times, waits=False) if frame}
    assert rows[other.line] == 0.5 and rows[other.line + 1] == 0.3
