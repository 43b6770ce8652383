"""The page of a report: what its data say, and what a person finds in Chromium, by mouse or keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import browser
import incidents
import pytest
from evidence import behind, entry, in_user, job, past, rank, record, waiting
from msgspec.structs import replace

from safelaunch.diagnose import diagnose
from safelaunch.model import Frame, RankException, RankExit
from safelaunch.report import page
from safelaunch.report.about import About, NodeFiles

pytestmark = pytest.mark.xdist_group("chromium")  # one Chromium, and each page made once

Show = Callable[[str], "browser.Browser"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    program = browser.found()
    if program is None:
        pytest.skip("no Chromium on this machine (scripts/setup.sh installs it as root)")
    with browser.Browser(program) as opened:
        yield opened


@pytest.fixture
def show(chromium: browser.Browser, tmp_path: Path) -> Show:
    """Opens the page of a made-up incident, on a screen of usual size."""

    def opened(name: str) -> browser.Browser:
        path = tmp_path / f"{name}.html"
        path.write_text(html_of(name), encoding="utf-8")
        chromium.size(1280)
        chromium.medium()
        chromium.open(path)
        assert chromium.value("document.documentElement.dataset.drawn") == "yes", chromium.errors
        return chromium

    return opened


@cache
def incident_page(name: str) -> dict[str, Any]:
    one = incidents.ALL[name]()
    return page.content(one.verdict, one.evidence, one.artifacts, read_source=incidents.read_source, about=one.about)


@cache
def html_of(name: str) -> str:
    return page.render(incident_page(name))


def marked(side: dict[str, Any], mark: str) -> list[str]:
    return [line[1].strip() for place in side["places"] for line in place["lines"] if line[2] == mark]


# --- the data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two", "four", "sixty-four"])
def test_the_code_shows_each_side_with_its_guard_whatever_the_number_of_ranks(name: str) -> None:
    made = incident_page(name)
    world = made["head"]["facts"]
    culprit, *others = made["code"]
    assert ("world size" in dict(world)) and culprit["r"] == "0" and culprit["c"]
    assert marked(culprit, "here")[0].startswith("dist.all_gather(")
    assert marked(others[0], "here") == ["dist.all_reduce(loss)"]
    for side in (culprit, others[0]):
        assert "if step % 25 == 0 and rank == 0:" in marked(side, "guard")
        assert "if batch is None:" in marked(side, "way")  # an early way out of the round
        assert any(text.startswith("for step, batch in") for text in marked(side, "guard"))  # which asks for the rank
    notes = [line[3] for place in culprit["places"] for line in place["lines"] if line[3]]
    assert any("keeps rank" in note and "from here" in note for note in notes)


def test_ranks_that_are_alike_are_one_lane_and_one_row() -> None:
    made = incident_page("sixty-four")
    assert [row["r"] for row in made["rows"]] == ["0", "1-63"]
    lanes = made["timeline"]["lanes"]
    assert [(lane["r"], lane["c"]) for lane in lanes] == [("0", 1), ("8-63", 0), ("1-7", 0)]
    group, number = made["timeline"]["part"]
    assert (made["timeline"]["groups"][group][0], number) == ("default_pg", 75)


def test_lanes_show_the_calls_of_their_own_ranks() -> None:
    """Also where records are plain tuples, each of which gets a table of kinds of its own."""
    sizes = range(1, 41)
    entries = [record(*past(2), entry("all_reduce", 3, line=50, size=(size,))) for size in sizes]
    evidence = job(*(waiting(rank, seq=3, flight=one) for rank, one in enumerate(entries)))
    made = page.content(diagnose(evidence), evidence)["timeline"]
    shown = {int(lane["r"]): [made["kinds"][kind][2] for kind in lane["k"]] for lane in made["lanes"]}
    assert shown == {rank: ["4", "4", str(size)] for rank, size in enumerate(sizes)}
    assert {made["kinds"][lane["k"][-1]][5] for lane in made["lanes"]} == {"waits"}


def test_a_rank_that_never_entered_the_call_is_marked_in_its_lane() -> None:
    evidence = job(waiting(0), rank(1, in_user(7), "sleep", flight=behind()), waiting(2))
    made = page.content(diagnose(evidence), evidence)["timeline"]
    assert made["part"] == [0, 4]
    assert [(lane["r"], lane["a"]) for lane in made["lanes"]] == [("1", 1), ("0,2", 0)]


def test_thousands_of_ranks_make_a_small_page() -> None:
    text = html_of("thousands")
    assert len(text.encode()) < 5_000_000
    made = json.loads(data_of(text))
    assert len(made["ranks"]) == 4096 and len(made["rows"]) == 2
    assert [side["r"] for side in made["code"]] == ["0", "1-4095"]


def data_of(text: str) -> str:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    text = html_of("four")
    shell = text.replace(data_of(text), "")
    assert "default-src 'none'" in shell and "'unsafe-inline'" not in shell
    assert not re.search(
        r"(?:src|action)\s*=\s*[\"']|url\(|@import|fetch\(|XMLHttp|innerHTML|insertAdjacentHTML", shell
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_nothing_of_the_job_can_end_the_block_that_it_stands_in() -> None:
    text = html_of("hostile")
    assert "<" not in data_of(text) and "&" not in data_of(text)
    assert text.count("<script") == 2 and "<img" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_a_crash_shows_the_users_traceback_and_no_frame_of_ours() -> None:
    made = incident_page("crash")
    assert not [frame for frame in made["frames"] if "safelaunch" in frame[0]]
    culprit = made["code"][0]
    assert marked(culprit, "here") == ["loss = model(batch).pow(2).mean()"]
    failed = next(one for one in made["ranks"] if one["r"] == 1)
    assert failed["trace"][-1].startswith("RuntimeError: mat1") and failed["raised"].startswith("RuntimeError")
    assert made["frames"][made["stacks"][failed["st"]][0]][2] == "forward"


def test_an_exception_whose_traceback_is_lost_still_shows_a_page() -> None:
    error = RankException("ValueError", "no frames", 100.0)
    evidence = job(
        rank(
            0,
            (Frame("/x/safelaunch/beacon/faults.py", 1, "wait"),),
            "sleep",
            more={"exception": error, "exit": RankExit(1, 1.0)},
        ),
        waiting(1),
        outcome="crash",
    )
    made = page.content(diagnose(evidence), evidence)
    assert not [frame for frame in made["frames"] if "safelaunch" in frame[0]]


def test_secrets_are_taken_out_of_source_lines() -> None:
    one = incidents.hang(2)
    said = lambda text: text.replace("all_reduce", "REDACTED")  # noqa: E731
    made = page.content(one.verdict, one.evidence, read_source=incidents.read_source, said=said)
    assert "dist.REDACTED(loss)" in marked(made["code"][1], "here")


def test_the_issue_is_markdown_that_a_job_cannot_break_out_of() -> None:
    text = incident_page("hostile")["head"]["issue"]
    assert "<script" not in re.sub(r"`[^`\n]*`|```.*?```", "", text, flags=re.DOTALL).replace("\\<", "")
    plain = incident_page("four")["head"]["issue"]
    assert plain.startswith("### The job hangs: collective-mismatch (confidence: high)")
    assert (
        ">    12" in plain and "| command | `torchrun --nproc-per-node 8 train.py --data '/data/My Corpus'` |" in plain
    )


# --- in Chromium ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in incidents.ALL if name != "hostile"])
def test_every_page_is_drawn_without_an_error_and_fits_a_phone(show: Show, name: str) -> None:
    opened = show(name)
    assert opened.text("#cause") == incident_page(name)["head"]["cause"]
    for width in (1920, 390):
        opened.size(width)
        opened.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert opened.value("document.documentElement.scrollWidth") <= width
    opened.medium(dark=True)
    opened.medium(printed=True)
    assert opened.errors == []


def test_a_page_of_thousands_is_painted_at_once_and_its_culprit_is_found(show: Show) -> None:
    opened = show("thousands")
    assert opened.texts("[data-lane]") == ["rank 0", "ranks 8-4095", "ranks 1-7"]
    opened.focus("#search")
    opened.press(*"3071")
    assert opened.text("#count") == "1 rank in 1 row"
    opened.focus("#ranks .who")
    opened.press("Enter")
    assert "Rank 3071" in opened.text("[data-rank='3071']")
    assert "on node384" in opened.text("[data-rank='3071']")
    assert opened.errors == []


def test_what_hung_is_read_from_top_to_bottom(show: Show) -> None:
    opened = show("four")
    assert opened.text("#summary").startswith("Rank 0 waits in all_gather at train.py:12 (evaluate)")
    assert "Confidence: high" in opened.text("#confidence")
    head = opened.text("#head")
    for word in (
        "Nothing had moved for 30 s",
        "2.13.0",
        "hang-debug",
        "4 ranks",
        "node1",
        "torchrun --nproc-per-node 8",
    ):
        assert word in head
    assert "dist.all_gather(" in opened.text(".side.culprit .here")
    assert "keeps ranks 1-3 from here" in opened.text(".side.culprit")
    assert opened.texts("[data-lane]") == ["rank 0", "ranks 1-3"]
    assert "last step" in opened.text("#steps") and "suspected after" in opened.value(
        "document.querySelector('#steps').textContent"
    )
    links = opened.value("[...document.querySelectorAll('a[href^=\"./\"]')].map(a => a.getAttribute('href'))")
    assert "./timeline.perfetto.json" in links and "./ranks/0/stack.txt" in links
    assert opened.errors == []


def test_the_timeline_is_walked_zoomed_and_switched_by_keyboard(show: Show) -> None:
    opened = show("four")
    said = "#timeline-said"
    opened.focus("#timeline canvas")
    opened.press("End")
    assert opened.text(said).startswith("all_gather of Float 1 · #75, default_pg · rank 0 · train.py:12 (evaluate)")
    assert "pending for 30.0 s" in opened.text(said) and "here the ranks part" in opened.text(said)
    opened.press("ArrowDown")
    assert opened.text(said).startswith("all_reduce of Float 1 · #75")
    opened.press("ArrowLeft", "+", "+", "-", "0", "Home")
    assert "#1, " in opened.text(said)
    picture = "document.querySelector('#timeline canvas').toDataURL()"
    before = opened.value(picture)
    opened.focus("[data-by='time']")
    opened.press("Enter")
    assert opened.value("document.querySelector('[data-by=time]').getAttribute('aria-pressed')") == "true"
    assert opened.value(picture) != before
    box = opened.value(
        "(() => { const b = document.querySelector('#timeline canvas').getBoundingClientRect(); return [b.x, b.y]; })()"
    )
    opened.hover(box[0] + 40, box[1] + 36)
    assert opened.value("document.querySelector('.tip').hidden") is False
    assert opened.errors == []


def test_stacks_fold_and_ranks_unfold_by_keyboard(show: Show) -> None:
    opened = show("crash")
    assert "Ranks 0,2-3" in opened.text(".tree")
    opened.focus(".tree details details summary")
    opened.press("Enter")
    assert opened.value("document.querySelector('.tree details details').open") is False
    opened.focus(".flame .culprit")
    opened.press("Enter")
    assert "train.py:27" not in opened.text(".flame")
    opened.value("document.querySelector('#only').value = 'at fault'")
    opened.value("document.querySelector('#only').dispatchEvent(new Event('change'))")
    assert opened.text("#count") == "1 rank in 1 row"
    opened.focus("#ranks .who")
    opened.press("Enter")
    panel = opened.text("[data-rank='1']")
    assert "Raised at" in panel and "mat1 and mat2 shapes" in panel and "epoch 1" in panel
    assert "safelaunch/" not in panel and "_safelaunch" not in opened.value(
        "document.querySelector('#main').textContent"
    )
    assert opened.errors == []


def test_copy_as_issue_puts_markdown_on_the_clipboard(show: Show) -> None:
    opened = show("four")
    opened.value(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => { window.copied = text;"
        " return Promise.resolve(); }}}); [...document.querySelectorAll('button')]"
        ".find((b) => b.textContent === 'Copy as issue').focus()"
    )
    opened.press("Enter")
    assert opened.value("window.copied").startswith("### The job hangs: collective-mismatch")
    assert (
        opened.value("new Promise((done) => setTimeout(done)).then(() => document.activeElement.textContent)")
        == "Copied"
    )


def test_hostile_names_stay_text(show: Show) -> None:
    opened = show("hostile")
    opened.value("document.querySelectorAll('.who, .plain').forEach((button) => button.click())")
    opened.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert opened.value("document.title").startswith("rank-exception")
    assert opened.value("document.querySelectorAll('img, #main script, iframe, style:not(head style)').length") == 0
    assert "<img src=x" in opened.text("#summary")
    assert opened.value("document.documentElement.scrollWidth") <= 1280
    assert opened.value("[...document.links].every((a) => /^(#|\\.\\/)/.test(a.getAttribute('href')))") is True
    assert opened.errors == []


def test_numbers_that_a_page_cannot_hold_are_left_out() -> None:
    evidence = replace(incidents.hang(2).evidence, stall_s=float("inf"), threshold_s=float("nan"))
    about = About(at_unix_s=float("inf"), nodes=(NodeFiles("a", load=(float("nan"), float("inf"))),))
    text = page.html(diagnose(evidence), evidence, about=about)
    json.loads(data_of(text), parse_constant=pytest.fail)
