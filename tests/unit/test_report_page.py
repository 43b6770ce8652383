"""Page of a report: its data, and its behaviour in Chromium by mouse and keyboard."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.bundle.reading import locate
from safelaunch.model import (
    Culprit,
    Evidence,
    Frame,
    Gpu,
    GpuProcess,
    Launched,
    NextStep,
    ProofEdge,
    RankException,
    RankExit,
)
from safelaunch.report import markdown, page, screen, template
from safelaunch.report.about import LaunchFacts, Link, NodeSummary, ReportHeader
from safelaunch.report.rank_rows import RankRow, alike
from safelaunch.report.tables import hosts_word
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import CaseFacts
from tests.support import browser, incidents, nccl_cases, nccl_formats
from tests.support.evidence import behind, entry, in_c10d, in_user, job, past, progress, rank, record, waiting

pytestmark = pytest.mark.xdist_group("chromium")  # a single Chromium, and each page is made once

Show = Callable[[str], "browser.Browser"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    program = browser.found()
    if program is None:
        pytest.skip("no Chromium on this machine (scripts/setup.sh installs it as root)")
    with browser.Browser(program) as opened:
        yield opened


@pytest.fixture
def draw(chromium: browser.Browser, tmp_path: Path) -> Show:
    """Opens a page on a screen of usual size."""

    def opened(text: str) -> browser.Browser:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        chromium.size(1280)
        chromium.medium()
        chromium.open(path)
        assert chromium.value("document.documentElement.dataset.drawn") == "yes", chromium.errors
        return chromium

    return opened


@pytest.fixture
def show(draw: Show) -> Show:
    """Opens the page of a made-up incident."""
    return lambda name: draw(html_of(name))


def page_of(evidence: Evidence, about: ReportHeader | None = None) -> str:
    return template.render(page.content(diagnose(evidence), evidence, about=about))


@cache
def incident_page(name: str) -> dict[str, Any]:
    incident = incidents.ALL[name]()
    return page.content(
        incident.verdict, incident.evidence, incident.artifacts, read_source=incidents.read_source, about=incident.about
    )


@cache
def html_of(name: str) -> str:
    return template.render(incident_page(name))


def parse_ranks(ranges: str) -> set[int]:
    parts = [part.partition("-") for part in ranges.split(",")]
    return {rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)}


def marked(side: dict[str, Any], mark: str) -> list[str]:
    return [line[1].strip() for place in side["places"] for line in place["lines"] if line[2] == mark]


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two", "four", "sixty-four"])
def test_page_code_shows_guard_of_each_side(name: str) -> None:
    made = incident_page(name)
    world = made["head"]["facts"]
    culprit, *peers = made["code"]
    assert ("world size" in dict(world)) and culprit["r"] == "0" and culprit["c"]
    assert marked(culprit, "here")[0].startswith("dist.all_gather(")
    assert marked(peers[0], "here") == ["dist.all_reduce(loss)"]
    for side in (culprit, peers[0]):
        assert "if step % 25 == 0 and rank == 0:" in marked(side, "guard")
        assert "if batch is None:" in marked(side, "way")  # an early way out of the loop
        assert any(text.startswith("for step, batch in") for text in marked(side, "guard"))  # depends on the rank
    notes = [line[3] for place in culprit["places"] for line in place["lines"] if line[3]]
    assert any("keeps rank" in note and "from here" in note for note in notes)


def test_page_shows_next_command_unless_it_was_typed() -> None:
    ranks = [waiting(n, flight=record(*past(3), entry("nccl:all_reduce", 4, line=50))) for n in range(2)]
    evidence = job(*ranks, launched=Launched(("--nproc-per-node=2", "train.py", "--name", "my run"), (), "2.13.0"))
    verdict = diagnose(evidence)
    assert verdict.next is not None
    assert verdict.next.command == "safelaunch --nproc-per-node=2 train.py --name 'my run'"
    assert page.content(verdict, evidence)["head"]["next"] == []
    step = NextStep(verdict.suggestions[0], "safelaunch --preset nccl-debug --nproc-per-node=2 train.py")
    head = page.content(replace(verdict, next=step), evidence)["head"]
    assert head["next"] == [step.why, step.command]
    assert not [text for text in head["suggestions"] if text.startswith(step.why)], "once is enough"
    assert page.content(diagnose(job(*ranks)), evidence)["head"]["next"] == []


@pytest.mark.parametrize(
    ("typed", "shown"),
    [(("--nproc-per-node=2", "my train.py"), "safelaunch --nproc-per-node=2 'my train.py'"), ((), "torchrun train.py")],
)
def test_page_head_has_command_as_typed(typed: tuple[str, ...], shown: str) -> None:
    evidence = job(waiting(0), waiting(1))
    about = ReportHeader(launch=LaunchFacts(command=("torchrun", "train.py"), typed=typed))
    assert page.content(diagnose(evidence), evidence, about=about)["head"]["command"] == shown


def test_page_shows_typed_command_once(draw: Show) -> None:
    typed = ("--nproc-per-node=2", "train.py")
    evidence = job(waiting(0), rank(1, in_user(7), "sleep"), launched=Launched(typed, (), "2.13.0"))
    made = page.content(diagnose(evidence), evidence, about=ReportHeader(launch=LaunchFacts(command=(), typed=typed)))
    opened = draw(template.render(made))
    assert opened.value("document.querySelectorAll('.command').length") == 1
    assert "safelaunch --nproc-per-node=2 train.py" in opened.text("#run")


def test_page_head_says_what_confidence_is_about(draw: Show) -> None:
    evidence = job(waiting(0), rank(1, in_user(7), "sleep"))
    proof = (ProofEdge("rank 0", ("rank 1",), "rank 1 to join", ""),)
    verdict = replace(diagnose(evidence), confidence="medium", doubts=("No record tells.",), proof=proof)
    opened = draw(template.render(page.content(verdict, evidence)))
    assert opened.text("#confidence").startswith("Proved hang · cause: medium confidence")
    bare = page.content(replace(verdict, proof=()), evidence)
    assert bare["head"]["sure"] == "Medium confidence"


def test_page_shows_processes_of_unknown_rank_by_label(draw: Show) -> None:
    ranks = [rank(number, in_user(7) if number == 2 else in_c10d("all_reduce", 9)) for number in range(3)]
    labels = {number: f"process {700 + number}" for number in range(3)}
    opened = draw(page_of(replace(job(*ranks), labels=labels, world_guessed=True)))
    text = opened.value("document.body.innerText")
    assert "process 702" in text.lower()
    assert not re.search(r"\branks? \d", text, re.IGNORECASE)


def test_page_code_shows_ended_rank_at_loop_it_left() -> None:
    """It isn't shown at the line of its peers, and the peers' waits are over."""
    source = "for batch in batches:\n    loss(batch)\n    dist.all_reduce(loss)\n"
    done = {"exit": RankExit(0, 100.0)}
    left = rank(1, (), seen=False, flight=record(*past(3)), more=done)
    lost = RankException("RuntimeError", "gloo: Connection closed by peer", 101.0, in_c10d("all_reduce", 50))
    peers = [replace(waiting(n, seq=4), exit=RankExit(1, 102.0), exception=lost) for n in (0, 2)]
    evidence = job(peers[0], left, peers[1], outcome="crash")
    verdict = diagnose(evidence)
    assert verdict.cause == "uneven-batches"
    (culprit, others) = page.content(verdict, evidence, read_source=lambda path: source * 20)["code"]
    marks = {
        line[1]: (line[2], line[3]) for place in culprit["places"] for line in place["lines"] if line[2] or line[3]
    }
    assert ("here", "left this loop") in marks.values() and ("", "its last recorded call") in marks.values()
    assert "Steps: 60." in others["does"] and others["does"].startswith("Waited in all_reduce")


def test_page_groups_similar_ranks_into_lane_and_row() -> None:
    made = incident_page("sixty-four")
    assert [row["r"] for row in made["rows"]] == ["0", "1-63"]
    lanes = made["timeline"]["lanes"]
    assert [(lane["r"], lane["c"]) for lane in lanes] == [("0", 1), ("8-63", 0), ("1-7", 0)]
    group, number = made["timeline"]["part"]
    assert (made["timeline"]["groups"][group][0], number) == ("default_pg", 75)


def test_page_lane_shows_calls_of_its_ranks() -> None:
    """The same holds if records are plain tuples, each of which gets its own table of kinds."""
    sizes = range(1, 41)
    entries = [record(*past(2), entry("all_reduce", 3, line=50, size=(size,))) for size in sizes]
    evidence = job(*(waiting(rank, seq=3, flight=flight) for rank, flight in enumerate(entries)))
    made = page.content(diagnose(evidence), evidence)["timeline"]
    shown = {int(lane["r"]): [made["kinds"][kind][2] for kind in lane["k"]] for lane in made["lanes"]}
    assert shown == {rank: ["4", "4", str(size)] for rank, size in enumerate(sizes)}
    assert {made["kinds"][lane["k"][-1]][5] for lane in made["lanes"]} == {"waits"}


def test_page_lane_marks_rank_absent_from_call() -> None:
    evidence = job(waiting(0), rank(1, in_user(7), "sleep", flight=behind()), waiting(2))
    made = page.content(diagnose(evidence), evidence)["timeline"]
    assert made["part"] == [0, 4]
    assert [(lane["r"], lane["a"]) for lane in made["lanes"]] == [("1", 1), ("0,2", 0)]


def test_page_keeps_lane_of_culprit_without_record() -> None:
    evidence = job(waiting(0), rank(1, in_user(7), "stop"), waiting(2))
    made = page.content(diagnose(evidence), evidence)["timeline"]
    assert [(lane["r"], lane["c"], len(lane["k"])) for lane in made["lanes"]] == [("1", 1, 0), ("0,2", 0, 4)]


def test_page_timeline_diverges_in_groups_of_culprits() -> None:
    groups = {"0": (0, 1, 2), "1": (1, 2), "2": (1, 2)}
    own_calls = {n: entry("all_reduce", 1, done=False, group=str(n)) for n in (1, 2)}
    ranks = [waiting(0, flight=record(*past(3), entry("all_reduce", 4), groups=groups))]
    ranks += [waiting(n, flight=record(*past(3), own_calls[n], groups=groups)) for n in (1, 2)]
    evidence = job(*ranks)
    verdict = diagnose(evidence)
    assert (verdict.cause, [culprit.rank for culprit in verdict.culprits]) == ("group-order", [1, 2])
    made = page.content(verdict, evidence)["timeline"]
    assert made["mixed"] == 1 and made["groups"][made["part"][0]][0] != "default_pg"


def test_page_timeline_diverges_at_shared_call_with_different_argument() -> None:
    ranks = [waiting(n, "broadcast", flight=record(*past(3), entry("broadcast", 4, done=False))) for n in range(3)]
    evidence = job(*ranks)
    verdict = diagnose(evidence)
    frame = in_user(50)[0]
    named = replace(
        verdict, culprits=(Culprit(0, "node1", 1000, "main", frame, 60, "Rank 0 names rank 1 as the root."),)
    )
    assert page.content(named, evidence)["timeline"]["part"] == [0, 4]


def test_page_steps_of_single_step_are_text(draw: Show) -> None:
    rank_progress = progress(0, 5)
    ranks = [replace(rank(0, in_user(7), "sleep"), progress=replace(rank_progress, last_step_ns=10**9)), waiting(1)]
    opened = draw(page_of(job(*ranks, threshold_s=2.0)))
    assert "Rank 0: step 5" in opened.text("#steps") and not opened.texts("#steps svg")
    assert opened.errors == []


@pytest.mark.slow
def test_page_of_thousands_of_ranks_is_small() -> None:
    text = html_of("thousands")
    assert len(text.encode()) < 5_000_000
    made = json.loads(data_of(text))
    assert len(made["ranks"]) == 4096 and len(made["rows"]) == 2
    assert [side["r"] for side in made["code"]] == ["0", "1-4095"]


def data_of(text: str) -> str:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return match[1]


def test_page_loads_nothing_and_runs_only_its_script() -> None:
    text = html_of("four")
    shell = text.replace(data_of(text), "")
    assert "default-src 'none'" in shell and "'unsafe-inline'" not in shell
    assert not re.search(
        r"(?:src|action)\s*=\s*[\"']|url\(|@import|fetch\(|XMLHttp|innerHTML|insertAdjacentHTML", shell
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_page_data_block_cannot_be_ended_by_job_text() -> None:
    text = html_of("hostile")
    assert "<" not in data_of(text) and "&" not in data_of(text)
    assert text.count("<script") == 2 and "<img" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_page_of_crash_shows_only_user_frames() -> None:
    made = incident_page("crash")
    assert not [frame for frame in made["frames"] if "safelaunch" in frame[0]]
    culprit = made["code"][0]
    assert marked(culprit, "here") == ["loss = model(batch).pow(2).mean()"]
    failed = next(row for row in made["ranks"] if row["r"] == 1)
    assert failed["trace"][-1].startswith("RuntimeError: mat1") and failed["raised"].startswith("RuntimeError")
    assert made["frames"][made["stacks"][failed["st"]][0]][2] == "forward"


def test_page_of_exception_without_traceback_is_made() -> None:
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


@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize("name", nccl_cases.CASES)
def test_page_groups_agree_with_rank_waits(name: str, timing: bool, tmp_path: Path) -> None:
    recorders = nccl_cases.ranks(nccl_formats.NEWEST, timing=timing)
    nccl_cases.CASES[name].play(recorders)
    evidence = locate.read(nccl_formats.write(tmp_path / "dumps", recorders)).evidence
    facts = CaseFacts.of(evidence)
    (group,) = page.content(diagnose(evidence), evidence, facts=facts)["groups"]["rows"]
    assert all(completed <= entered for _, _, entered, completed, _ in group["at"])
    for number, facts_of_rank in facts.ranks.items():
        ((_, _, entered, completed, does),) = [at for at in group["at"] if number in parse_ranks(at[0])]
        if facts_of_rank.wait is not None:
            assert (entered, does.startswith(f"waits in {facts_of_rank.wait.op}")) == (
                facts_of_rank.wait.seq,
                True,
            ) and completed < entered
        elif facts_of_rank.condition is not None and "has queued" in facts_of_rank.condition.reason:
            assert does.startswith("has queued") and entered == completed


def test_reports_of_plain_dumps_omit_empty_columns() -> None:
    made = incident_page("dumps")
    assert {row["state"] for row in made["rows"]} == {""}
    incident = incidents.ALL["dumps"]()
    text = markdown.markdown(incident.verdict, incident.evidence, ())
    assert "| rank | doing | at |" in text and "not seen" not in text and "## Stacks" not in text


def test_page_redacts_source_lines() -> None:
    incident = incidents.hang(2)
    redact = lambda text: text.replace("all_reduce", "REDACTED")  # noqa: E731
    made = page.content(incident.verdict, incident.evidence, read_source=incidents.read_source, redact=redact)
    assert "dist.REDACTED(loss)" in marked(made["code"][1], "here")


def test_page_groups_similar_nodes_and_notes_deviations() -> None:
    made = incident_page("thousands")["nodes"]
    assert [(row["hosts"], row["n"], row["c"]) for row in made["rows"]] == [
        ("node1", 1, 1),
        ("node7", 1, 0),
        ("node[2-6,8-512]", 510, 0),
    ]
    assert made["rows"][0]["notes"] == ["/tmp is nearly full", "the kernel log has a message"]
    assert made["rows"][1]["notes"] == ["mlx5_1/1 is DOWN"]
    rest = made["rows"][2]
    assert (rest["gpus"], rest["network"]) == ("8 × NVIDIA H100 80GB HBM3", "eth0 (100000 Mbit/s), 2 InfiniBand ports")
    assert rest["busy"] == [3.0, 100.0] and rest["load"][0] < rest["load"][1] and rest["r"].startswith("8-47,")
    assert len(made["every"]) == 512 and len(made["versions"]) == 1


def test_page_nodes_with_different_mtu_have_separate_rows() -> None:
    evidence = incidents.hang(2).evidence
    mtus = {"n1": 9000, "n2": 9000, "n3": 1500}
    files = tuple(NodeSummary(host, network=(Link("eth0", "up", f"MTU {mtu}"),)) for host, mtu in mtus.items())
    made = page.content(diagnose(evidence), evidence, about=ReportHeader(nodes=files))
    rows = {row["hosts"]: row["network"] for row in made["nodes"]["rows"] if row["network"]}
    assert rows == {"n[1-2]": "eth0 (MTU 9000)", "n3": "eth0 (MTU 1500)"}


def test_page_with_log_of_every_node_is_small() -> None:
    evidence = incidents.hang(2).evidence
    lines = tuple("x" * 300 for _ in range(40))
    files = tuple(NodeSummary(f"n{at}", kernel_log=(str(at), *lines)) for at in range(512))
    assert len(page_of(evidence, ReportHeader(nodes=files)).encode()) < 5_000_000


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["n1", "n2", "n4"], "n[1-2,4]"),
        (["gpu-007", "gpu-008", "gpu-010"], "gpu-[007-008,010]"),
        (["ip-10-0-0-5", "ip-10-0-0-6"], "ip-10-0-0-[5-6]"),
        (["n1.cluster", "n2.cluster"], "n[1-2].cluster"),
        (list("abcdefgh"), "a, b, c, d, e, f and 2 more"),
    ],
)
def test_host_names_are_folded_like_slurm(hosts: list[str], words: str) -> None:
    assert hosts_word(hosts) == words


def test_page_head_names_ranks_on_wrong_gpu() -> None:
    assert "share" not in dict(incident_page("four")["head"]["facts"]).get("devices", "")
    incident = incidents.hang(2)
    (node,) = incident.about.nodes
    crowded = (Gpu(0, "A100", processes=(GpuProcess(1000), GpuProcess(1010))), Gpu(1, "A100"))
    about = dataclasses.replace(incident.about, nodes=(dataclasses.replace(node, gpus=crowded),))
    ranks = tuple(replace(rank, gpu=str(rank.rank)) for rank in incident.evidence.ranks)
    facts = page.content(incident.verdict, replace(incident.evidence, ranks=ranks), about=about)["head"]["facts"]
    words = dict(facts)["devices"]
    assert words.endswith("; ranks 0-1 share GPU 0; rank 1 has memory on GPU 0 and was given GPU 1")
    assert words.startswith("local rank 0: GPU 0, 1: GPU 1")


def test_page_rows_differing_only_in_numbers_are_merged() -> None:
    rows = [
        RankRow(n, "a", n, 5, "S futex" if n % 2 else "R", f"waits for pid {100 + n}, 3.{n} s", None) for n in range(4)
    ]
    (folded,) = alike(rows, ())
    assert folded.ranks == (0, 1, 2, 3) and folded.doing == "waits for pid …, … s"
    assert (folded.state, folded.step) == ("R (2), S futex (2)", "5")
    assert [row.doing for row in alike(rows, {0})] == ["waits for pid 100, 3.0 s", "waits for pid …, … s"]
    many = [dataclasses.replace(rows[0], rank=n, step=n) for n in range(200)]
    assert [row.step for row in alike(many, ())] == ["0 to 199"]


# --- in Chromium ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in incidents.ALL if name != "hostile"])
def test_page_is_drawn_without_error_and_fits_phone(show: Show, name: str) -> None:
    opened = show(name)
    assert opened.text("#cause") == incident_page(name)["head"]["cause"]
    for width in (1920, 390):
        opened.size(width)
        opened.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert opened.value("document.documentElement.scrollWidth") <= width
    opened.medium(dark=True)
    opened.medium(printed=True)
    assert opened.errors == []


def test_page_of_thousands_is_searchable(show: Show) -> None:
    opened = show("thousands")
    assert opened.texts("[data-lane]") == ["rank 0", "ranks 1-4095"]  # ranks 1-7 differ only in another group
    opened.value("document.querySelector('#timeline select').value = '-1'")
    opened.value("document.querySelector('#timeline select').dispatchEvent(new Event('change'))")
    assert opened.texts("[data-lane]") == ["rank 0", "ranks 8-4095", "ranks 1-7"]
    opened.focus("#search")
    opened.press(*"3071")
    assert opened.text("#count") == "1 rank in 1 row"
    opened.focus("#ranks .who")
    opened.press("Enter")
    assert "Rank 3071" in opened.text("[data-rank='3071']")
    assert "on node384" in opened.text("[data-rank='3071']")
    assert opened.errors == []


@pytest.mark.parametrize("name", ["two", "four", "crash", "sixty-four"])
def test_page_first_screen_shows_code_at_fault(show: Show, name: str) -> None:
    opened = show(name)
    box = "document.querySelector('{}').getBoundingClientRect()"
    code = opened.value(f"{box.format('.side.culprit .source')}.bottom")
    assert 0 < code <= 720
    for below in ("#run .facts", "#command", ".links"):
        assert opened.value(f"{box.format(below)}.top") > code


def test_page_step_axis_is_broken_where_scale_changes(draw: Show) -> None:
    """Steps keep half of the width even if nothing has moved for long; until then the scale is constant."""
    for stood_s, words in ((600.0, "from here on, time is drawn 25 times denser"), (5.0, "")):
        history = tuple((int((1000 - stood_s - 24 + step / 2.5) * 1e9), step) for step in range(61))
        rank_progress = replace(progress(0), step=60, history=history, last_step_ns=history[-1][0])
        ranks = [replace(waiting(n), progress=rank_progress) for n in range(2)]
        opened = draw(page_of(job(*map(incidents.late, ranks), threshold_s=2.0)))
        assert opened.value("document.querySelectorAll('#steps .break').length") == bool(words)
        assert words in opened.value("document.querySelector('#steps').textContent")
        assert opened.errors == []


def test_page_of_healthy_job_is_not_red(show: Show) -> None:
    colour = "getComputedStyle(document.querySelector('#cause')).color"
    ink = "getComputedStyle(document.querySelector('h1')).color"
    opened = show("dump")
    assert opened.text("#cause") == "slow-not-stuck" and opened.value(colour) == opened.value(ink)
    opened = show("four")
    assert opened.value(colour) != opened.value(ink)
    screens = [screen.screen(incidents.ALL[name]().verdict, bundle_path="", color=True) for name in ("dump", "four")]
    assert ["\x1b[1;31m" in text for text in screens] == [False, True]


def test_page_of_hang_has_summary_facts_code_and_links(show: Show) -> None:
    opened = show("four")
    assert opened.text("#summary").startswith("Rank 0 waits in all_gather at train.py:12 (evaluate)")
    assert "High confidence: no conflicting evidence." in opened.text("#confidence")
    head = opened.text("#run")
    for word in (
        "No progress for 30 s",
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


def test_page_timeline_works_by_keyboard(show: Show) -> None:
    opened = show("four")
    status = "#timeline-said"
    opened.focus("#timeline canvas")
    opened.press("End")
    assert opened.text(status).startswith("all_gather of Float 1 · #75, default_pg · rank 0 · train.py:12 (evaluate)")
    assert "pending for 30.0 s" in opened.text(status) and "here the ranks diverge" in opened.text(status)
    opened.press("ArrowDown")
    assert opened.text(status).startswith("all_reduce of Float 1 · #75")
    opened.press("ArrowLeft", "+", "+", "-", "0", "Home")
    assert "#1, " in opened.text(status)
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


def test_page_timeline_keys_skip_lane_without_calls(draw: Show) -> None:
    opened = draw(page_of(job(waiting(0), rank(1, in_user(7), "stop"), waiting(2, line=60))))
    assert opened.texts("[data-lane]")[0] == "rank 1"
    opened.focus("#timeline canvas")
    opened.press("End")
    assert "rank 0" in opened.text("#timeline-said")
    opened.press("ArrowDown")
    assert "rank 2" in opened.text("#timeline-said")
    opened.press("ArrowUp", "ArrowUp")
    assert "rank 0" in opened.text("#timeline-said")
    assert opened.errors == []


def test_page_stacks_and_ranks_unfold_by_keyboard(show: Show) -> None:
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


def test_page_command_can_be_copied(show: Show) -> None:
    opened = show("four")
    opened.value(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => { window.copied = text;"
        " return Promise.resolve(); }}}); [...document.querySelectorAll('button')]"
        ".find((b) => b.textContent === 'Copy command').focus()"
    )
    opened.press("Enter")
    assert opened.value("window.copied") == "torchrun --nproc-per-node 8 train.py --data '/data/My Corpus'"
    assert (
        opened.value("new Promise((done) => setTimeout(done)).then(() => document.activeElement.textContent)")
        == "Copied"
    )


def test_page_shows_hostile_names_as_text(show: Show) -> None:
    opened = show("hostile")
    opened.value("document.querySelectorAll('.who, .plain').forEach((button) => button.click())")
    opened.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert opened.value("document.title").startswith("rank-exception")
    assert opened.value("document.querySelectorAll('img, #main script, iframe, style:not(head style)').length") == 0
    assert "<img src=x" in opened.text("#summary")
    assert opened.value("document.documentElement.scrollWidth") <= 1280
    assert opened.value("[...document.links].every((a) => /^(#|\\.\\/)/.test(a.getAttribute('href')))") is True
    assert opened.errors == []


def test_page_data_omits_nan_and_infinity() -> None:
    evidence = replace(incidents.hang(2).evidence, stall_s=float("inf"), threshold_s=float("nan"))
    about = ReportHeader(at_unix_s=float("inf"), nodes=(NodeSummary("a", load=(float("nan"), float("inf"))),))
    json.loads(data_of(page_of(evidence, about)), parse_constant=pytest.fail)


# --- accessibility ----------------------------------------------------------------------------------------------------

_TEXT_ON = {  # text colours and the backgrounds they are used on
    "ink": ("bg", "card", "soft", "bad-soft", "way"),
    "dim": ("bg", "card", "soft", "bad-soft", "way"),
    "faint": ("bg", "card", "soft", "bad-soft"),
    "bad": ("bg", "card", "soft", "bad-soft"),
    "bg": ("ink",),
}


def palettes() -> list[dict[str, str]]:
    """Returns the colours of the light and of the dark theme."""
    light, dark = re.findall(r":root \{(.*?)\}", template._part("report.css"), re.DOTALL)[:2]
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in (light, dark)]
    assert set(colours[0]) == set(colours[1]) and len(colours[0]) > 15
    return colours


def contrast(first: str, other: str) -> float:
    """Returns the contrast as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_page_text_contrast_meets_wcag(theme: int) -> None:
    colours = palettes()[theme]
    for text, grounds in _TEXT_ON.items():
        for ground in grounds:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for n in range(8):
        assert contrast(colours[f"op{n}"], colours["card"]) >= 3, n  # a shape that must be distinguishable
    for ground in ("bg", "card", "soft"):
        assert contrast(colours["focus"], colours[ground]) >= 3


_HEADINGS = "[...document.querySelectorAll('h1, h2, h3, h4')].map(e => Number(e.tagName[1]))"
_NAMELESS = """[...document.querySelectorAll('button, a, select, input, summary, canvas, nav, [role=img]')]
  .filter(e => !(e.getAttribute('aria-label') || e.innerText || e.title || '').trim()).map(e => e.outerHTML)"""
_BROKEN_IDS = """(() => {
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id), known = new Set(ids);
  const names = ['aria-controls', 'aria-labelledby', 'aria-describedby'];
  const asked = names.flatMap(n => [...document.querySelectorAll(`[${n}]`)].map(e => e.getAttribute(n)));
  return [ids.length - known.size, asked.filter(id => !known.has(id))];
})()"""


@pytest.mark.parametrize("name", ["four", "crash", "nothing", "thousands"])
def test_page_has_headings_landmarks_and_names_for_screen_readers(show: Show, name: str) -> None:
    opened = show(name)
    opened.value("document.querySelectorAll('.who').forEach((button) => button.click())")
    levels = opened.value(_HEADINGS)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(following <= before + 1 for before, following in pairwise(levels)), levels
    for landmark in ("body > header", "body > main", "nav[aria-label]"):
        assert opened.value(f"document.querySelectorAll('{landmark}').length") == 1
    assert opened.value("document.querySelectorAll('main > section:not([aria-labelledby])').length") == 0
    assert opened.value(_NAMELESS) == []
    assert opened.value(_BROKEN_IDS) == [0, []]
    assert opened.value("[...document.querySelectorAll('[tabindex]')].every(e => e.tabIndex <= 0)") is True
    assert opened.value("[...document.querySelectorAll('th')].every(e => e.scope)") is True
    scrolled = "[...document.querySelectorAll('.source, pre')].filter(e => e.tabIndex < 0).length"
    assert opened.value(scrolled) == 0, "what scrolls is reached by key"
    assert opened.errors == []


def test_page_tab_order_follows_reading_order(show: Show) -> None:
    opened = show("four")
    opened.press("Tab")
    assert opened.value("document.activeElement.className") == "skip"
    sections = []
    for _ in range(200):
        opened.press("Tab")
        top = opened.value(
            "document.activeElement === document.body ? null : [document.activeElement.closest('section, nav, #head')"
            "?.id || 'nav', document.activeElement.getBoundingClientRect().top + scrollY]"
        )
        if top is None:
            break
        sections.append(top[0])
    order = list(dict.fromkeys(sections))
    assert order == ["nav", "code", "run", "timeline", "stacks", "ranks", "nodes", "evidence", "files"]
    assert sections == sorted(sections, key=order.index)  # each section once


def test_page_tables_on_phone_show_whole_words(show: Show) -> None:
    for name in ("thousands", "four", "crash"):
        opened = show(name)
        opened.size(375, mobile=True)
        opened.value("document.querySelectorAll('.who').forEach((button) => button.click())")
        opened.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        narrow = opened.value(
            "[...document.querySelectorAll('td, dd, li, .place, summary')].filter(e => e.offsetParent"
            " && e.innerText.trim() && e.clientWidth < 120 && e.innerText.trim().length * 5 > e.clientWidth)"
            ".map(e => [e.clientWidth, e.innerText.slice(0, 60)])"
        )
        assert narrow == []
        assert opened.value("document.documentElement.scrollWidth") <= 375


def test_page_nodes_unfold_by_keyboard(show: Show) -> None:
    opened = show("thousands")
    assert opened.texts("#nodes .who") == ["node1", "node7", "node[2-6,8-512]"]
    opened.focus("#nodes tr:nth-child(3) .who")
    opened.press("Enter")
    assert opened.text("[data-host='node7']").count("400 Gb/sec") == 1
    assert "DOWN, 10 Gb/sec (4X SDR), 3 link downed" in opened.text("[data-host='node7']")
    assert opened.value("document.activeElement.getAttribute('aria-expanded')") == "true"
    opened.press("Enter")
    assert opened.value("document.querySelector('[data-host=node7]').offsetParent") is None
    opened.focus("#nodes tr:nth-child(5) .who")
    opened.press("Enter", "Tab", "Tab", "Enter")
    assert "Rank" not in opened.text("[data-host='node3'] h3") and opened.text("[data-host='node3'] h3").startswith(
        "node3"
    )
    assert opened.errors == []
