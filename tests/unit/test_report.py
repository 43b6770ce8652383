"""Screen, Markdown and HTML of a verdict: complete, short enough, and safe for hostile jobs."""

from __future__ import annotations

import json
import re

import pytest
from markdown_it import MarkdownIt
from msgspec.structs import replace

from safelaunch.model import (
    Artifact,
    Claim,
    Evidence,
    Frame,
    Launched,
    NextStep,
    ProofEdge,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.report import markdown, page, screen, sentences, template
from safelaunch.report.stacks import culprit_lines
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    EVIL,
    WORKER_IDLE,
    at,
    behind,
    in_loader,
    in_user,
    in_worker,
    job,
    process,
    rank,
    waiting,
)

BUNDLE = "/home/me/safelaunch-bundles/train-20261120T102233Z-hang"


def sleeping(world: int = 4) -> Evidence:
    ranks = [waiting(n) for n in range(world)]
    ranks[1] = rank(1, in_user(7, "load"), "sleep", flight=behind(), more={"log_tail": "epoch 3\nloss 0.1\n"})
    return job(*ranks)


def hostile() -> Evidence:
    evil = Frame(f"/home/me/{EVIL}.py", 7, EVIL)
    exception = RankException(EVIL, EVIL, 100.0, (evil,), EVIL)
    culprit = rank(
        0, (evil,), "sleep", seen=True, more={"exception": exception, "exit": RankExit(1, 100.0), "log_tail": EVIL}
    )
    return job(culprit, waiting(1), outcome="crash")


def show(evidence: Evidence, **fields: object) -> str:
    return screen.screen(diagnose(evidence), bundle_path=BUNDLE, **fields)  # type: ignore[arg-type]


def test_screen_has_cause_rank_place_and_next_step() -> None:
    text = show(sleeping(), read_line=lambda path, line: "    time.sleep(3600)")
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(line.startswith("safelaunch: ") for line in lines)
    assert lines[0] == "safelaunch: the job hangs: stuck-in-user-code (confidence: high)"
    assert lines[-1] == f"safelaunch: bundle: {BUNDLE}"
    flat = " ".join(line.removeprefix("safelaunch: ").strip() for line in lines)
    assert "rank 1 (pid 1010, step 60, on node1) at /home/me/train.py:7 in load" in flat
    assert "> time.sleep(3600)" in flat
    assert "ranks 0,2-3 wait in all_reduce" in flat
    assert "blocked by it: ranks 0,2-3" in flat
    assert "[ranks/1/stack.txt]" in flat
    assert "next: " in flat


def test_screen_of_unsure_verdict_names_doubt() -> None:
    """The hang can be proved while its cause is a guess."""
    guess = replace(diagnose(sleeping()), confidence="low", doubts=("No record tells.",), proof=())
    proof = (ProofEdge("rank 0", ("rank 1",), "never joins", ""), ProofEdge("rank 1", ("rank 0",), "never joins", ""))
    shown = [screen.screen(verdict, bundle_path=BUNDLE) for verdict in (guess, replace(guess, proof=proof))]
    assert "unsure: No record tells." in shown[0] and "proved" not in shown[0]
    assert "unsure of the cause: No record tells." in shown[1] and "proved: " in shown[1]


@pytest.mark.parametrize(
    ("who", "why", "words"),
    [
        ("rank 1", "a thread to put something", "rank 1 needs a thread to put something, and nothing is left that"),
        ("process 70 of rank 0", "a thread to end it", "process 70 of rank 0 needs a thread to end it, and nothing is"),
        ("rank 1, process 70 of rank 0", "an answer", "rank 1, process 70 of rank 0 need an answer, and nothing is"),
        ("broadcast #6 of group '0'", "ranks name different roots", "this wait can never end: ranks name different"),
    ],
)
def test_screen_states_unsatisfiable_wait_in_sentence(who: str, why: str, words: str) -> None:
    proved = replace(diagnose(sleeping()), proof=(ProofEdge(who, (), why, ""),))
    assert words in " ".join(screen.screen(proved, bundle_path=BUNDLE).split())


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("culprits", [1, 2, 9])
def test_screen_fits_height_and_width(width: int, culprits: int) -> None:
    ranks = [rank(n, in_user(7, "a_rather_long_function_name"), "sleep", flight=behind()) for n in range(culprits)]
    text = show(job(*ranks, waiting(culprits)), width=width, read_line=lambda path, line: "x" * 500)
    lines = text.splitlines()
    assert len(lines) <= screen.MAX_LINES
    assert max(map(len, lines[:-1])) <= width
    assert lines[-1].endswith(BUNDLE)


def test_screen_never_cuts_advice() -> None:
    """Evidence, a long summary and many ranks at fault don't cut it."""
    advice = " ".join(f"word{number}" for number in range(60))
    verdict = replace(
        diagnose(sleeping()),
        summary=" ".join(["long"] * 300),
        missing=("nothing",) * 40,
        doubts=("a doubt " * 40,),
        confidence="low",
        suggestions=(advice, advice),
    )
    verdict = replace(verdict, culprits=verdict.culprits * 9)
    lines = screen.screen(verdict, bundle_path=BUNDLE, width=60).splitlines()
    assert f"next: {advice}" in " ".join(line.removeprefix("safelaunch: ").strip() for line in lines)
    assert len(lines) <= screen.MAX_LINES and lines[0].startswith("safelaunch: the job hangs")


def test_typed_command_is_not_repeated_as_next_step() -> None:
    typed = ("safelaunch", "--nproc-per-node=2", "--node-rank=3", "train.py", "--name", "my run")
    verdict = replace(diagnose(sleeping()), command=typed)
    shown = "safelaunch --nproc-per-node=2 --node-rank=N train.py --name 'my run'"
    for command, is_shown in ((shown, False), (f"{shown} --preset nccl-debug", True), ("a 'torn", True)):
        step = NextStep("Once that is fixed", command)
        assert (step.why in screen.screen(replace(verdict, next=step), bundle_path=BUNDLE)) == is_shown
        assert (step.why in markdown.markdown(replace(verdict, next=step), sleeping(), ())) == is_shown


def test_proved_hang_shows_confidence_of_cause_only() -> None:
    proof = (ProofEdge("rank 0", ("rank 1",), "rank 1 to join", ""),)
    verdict = replace(diagnose(sleeping()), confidence="medium", doubts=("No record tells.",), proof=proof)
    first = screen.screen(verdict, bundle_path=BUNDLE).splitlines()[0]
    assert first.endswith("(proved hang; cause: medium confidence)")
    assert "Proved hang · cause: **medium** confidence." in markdown.markdown(verdict, sleeping(), ())
    assert "Medium confidence" not in markdown.markdown(replace(verdict, confidence="high"), sleeping(), ())


def test_suspect_report_says_what_to_do_now() -> None:
    verdict = replace(diagnose(replace(sleeping(), outcome="suspect")), run="my run")
    screen = " ".join(line.removeprefix("safelaunch: ").strip() for line in show_verdict(verdict))
    for text in (screen, markdown.markdown(verdict, sleeping(), ())):
        assert "the job was left running" in text.lower() and "`safelaunch dump 'my run'`" in text
        assert "`safelaunch status 'my run'`" in text and "Ctrl-C where it runs ends it" in text
    assert "now:" not in show(sleeping())


def show_verdict(verdict: Verdict) -> list[str]:
    return screen.screen(verdict, bundle_path=BUNDLE).splitlines()


def test_victim_error_is_shown_as_consequence() -> None:
    """The lost peer is named only if there is a single other rank."""
    message = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7913."
    lost = RankException("RuntimeError", message, 101.0, (Frame("/home/me/train.py", 9, "step"),))
    raised = RankException("ValueError", "bad batch", 100.0, (Frame("/home/me/train.py", 7, "load"),))
    for world, peer in ((2, "rank 1"), (3, "a peer")):
        ranks = [rank(n, seen=False, more={"exception": lost, "exit": RankExit(1, 102.0)}) for n in range(world)]
        ranks[1] = rank(1, seen=False, more={"exception": raised, "exit": RankExit(1, 100.0)})
        evidence = job(*ranks, outcome="crash")
        verdict = diagnose(evidence)
        assert [culprit.rank for culprit in verdict.culprits] == [1]
        lines = screen.screen(verdict, bundle_path=BUNDLE, evidence=evidence)
        assert f"lost its connection to {peer} (a consequence)" in lines and "pair.cc" not in lines
        assert "pair.cc" in markdown.markdown(verdict, evidence, ()), "the report keeps the message"


def test_markdown_begins_with_job_facts() -> None:
    launched = Launched(("--nproc-per-node=4", "train.py"), run_name="train", host="node1", safelaunch="1.2")
    evidence = replace(sleeping(), launched=launched, time="2026-11-28T16:05:15Z", versions={"python": "3.11"})
    verdict = diagnose(evidence)
    assert (verdict.run, verdict.host, verdict.world_size) == ("train", "node1", 4)
    head = markdown.markdown(verdict, evidence, ()).split("Rank 1 is asleep")[0]
    for cell in (
        "| time | 2026-11-28 16:05:15 UTC |",
        "| run | train |",
        "| ranks | 4 on node1 |",
        "| versions | safelaunch 1.2, python 3.11 |",
        "| command | safelaunch --nproc-per-node=4 train.py |",
    ):
        assert cell in head


def test_markdown_shows_each_stack_once() -> None:
    """The same holds for several ranks at fault. Stacks of other ranks are folded."""
    ranks = [waiting(n) for n in range(4)]
    for n in (1, 2):
        ranks[n] = rank(n, in_user(7, "load"), "sleep", flight=behind())
    evidence = job(*ranks)
    text = markdown.markdown(diagnose(evidence), evidence, ())
    assert text.count("→ /home/me/train.py:7 load") == 1 and "The same stack as rank 1." in text
    assert "Ranks 1-2: the stack of rank 1, above." in text
    assert "<details><summary>ranks 0,3</summary>" in text and text.count("</details>") == 1


def test_every_cause_has_advice() -> None:
    assert all(cause.advice for cause in CAUSES.values())


@pytest.mark.parametrize("advice", sorted({item.text for cause in CAUSES.values() for item in cause.advice}))
def test_screen_shows_each_advice_in_full(advice: str) -> None:
    verdict = replace(diagnose(sleeping()), suggestions=(advice,))
    shown = screen.screen(verdict, bundle_path=BUNDLE, width=80)
    assert f"next: {advice}" in " ".join(line.removeprefix("safelaunch: ").strip() for line in shown.splitlines())


def test_screen_shows_claims_in_full_if_they_fit() -> None:
    text = show(sleeping())
    assert "…" not in text
    flat = " ".join(line.removeprefix("safelaunch: ").strip() for line in text.splitlines())
    assert all(f"{c.claim} [{c.file}]" in " ".join(flat.split()) for c in diagnose(sleeping()).evidence[:2])


@pytest.mark.parametrize("width", [80, 100])
def test_screen_omits_claims_rather_than_cutting_them(width: int) -> None:
    """Half a file name is useless, and report.md has all claims."""
    function = "a_rather_long_function_name"
    asleep = [rank(n, in_user(7, function), "sleep", flight=behind()) for n in range(2)]
    verdict = diagnose(job(*asleep, waiting(2)))
    lines = screen.screen(verdict, bundle_path=BUNDLE, width=width).splitlines()
    flat = [line.removeprefix("safelaunch: ").strip() for line in lines]
    shown = flat[flat.index("evidence:") + 1 : next(n for n, line in enumerate(flat) if line.startswith("blocked"))]
    assert shown and not any("…" in line for line in shown)
    shown_text = " ".join(shown)
    claims = sentences.merged_claims(verdict.evidence, verdict.summary)
    assert sum(f"{text} [{', '.join(files)}]" in " ".join(shown_text.split()) for text, files in claims) >= 1


def test_same_claim_of_several_ranks_is_merged() -> None:
    claims = [Claim(f"rank {n}: exit status 1", "launch.json") for n in range(3)]
    assert sentences.merged_claims(claims) == [("each of ranks 0-2: exit status 1", ("launch.json",))]


def test_screen_shortens_single_claim_that_does_not_fit() -> None:
    verdict = replace(diagnose(sleeping()), evidence=(Claim("x " * 1000, "ranks/1/stack.txt"),))
    lines = screen.screen(verdict, bundle_path=BUNDLE, width=80).splitlines()
    assert any("…" in line and line.endswith("[ranks/1/stack.txt]") for line in lines)


def test_screen_without_culprit_has_cause_and_bundle() -> None:
    text = show(job(*(waiting(n) for n in range(3))))
    assert "no-rank-stands-out" in text
    assert text.splitlines()[-1].endswith(BUNDLE)


def test_screen_is_coloured_only_on_request() -> None:
    assert "\x1b" not in show(sleeping())
    assert "\x1b[1;31m" in show(sleeping(), color=True).splitlines()[0]


def test_screen_removes_control_characters() -> None:
    text = show(hostile(), read_line=lambda path, line: EVIL)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "owned" not in text
    assert all(line.startswith("safelaunch: ") for line in text.splitlines())


def test_markdown_has_all_sections() -> None:
    evidence = sleeping()
    artifacts = [Artifact("ranks/1/flight_recorder.pickle", "worker server", 2.0, missing="no answer within 2 s")]
    text = markdown.markdown(diagnose(evidence), evidence, artifacts, read_line=lambda path, line: "time.sleep(3600)")
    for title in ("## Rank 1", "## What to do", "## Ranks", "## Stacks", "## Evidence", "## Missing artifacts"):
        assert title in text
    assert "→ /home/me/train.py:7 load" in text
    assert "time.sleep(3600)" in text
    assert "loss 0.1" in text
    assert "<details><summary>ranks 0,2-3</summary>" in text  # merged stacks
    assert "table_open" in {token.type for token in MarkdownIt("commonmark").enable("table").parse(text)}
    assert "| 1 | node1 | 1010 | 60 | S clock_nanosleep | is asleep in train.py:7 (load) |" in text
    assert "no answer within 2 s" in text
    assert "`safelaunch explain stuck-in-user-code` explains the cause." in text.splitlines()


def test_markdown_of_worker_omits_parent_frames() -> None:
    workers = [
        process(92, in_worker(12), "sleep", role="dataloader worker"),
        *(process(93 + n, WORKER_IDLE, "poll", role="dataloader worker") for n in range(2)),
    ]
    evidence = job(waiting(0), rank(1, in_loader(30), "poll", flight=behind(), children=workers))
    text = markdown.markdown(diagnose(evidence), evidence, [])
    excerpt = text.split("## What to do")[0]
    assert "→ /home/me/data.py:12 Data.__getitem__" in excerpt
    assert "DataLoader.__iter__" not in excerpt
    assert "2 dataloader workers of rank 1" in text


def test_markdown_escapes_job_text() -> None:
    evidence = hostile()
    text = markdown.markdown(diagnose(evidence), evidence, [Artifact(EVIL, EVIL, 0.0, missing=EVIL)])
    outside = re.sub(r"(`{3,})text\n.*?\n\1", "", text, flags=re.DOTALL)
    assert "\x1b" not in text
    assert "\n# no" not in outside
    outside = re.sub("`[^`]*`", "", outside)
    assert "<script>" not in outside and "*x" not in outside


PIECES = (
    *("all_reduce", "estimate_loss -> 3", "`if a_b > 0 and *c`", "__init__", "<module>", "<b>x</b>", "&lt;", "#31"),
    *("*x y*", "[a b](http://c)", "![a](b)", "`", "``", "\\", "- x", "3. x", "# x", "> x", "a | b", "~~x~~", "_x_"),
)


@pytest.mark.parametrize("first", PIECES)
def test_markdown_shows_job_text_unchanged_without_markup(first: str) -> None:
    """A separate Markdown parser sees only code and text, and no words are lost."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for text in (first, *(f"{first} {other}" for other in PIECES), *(f"{first}{other}" for other in PIECES)):
        opened, inline, closed = reader.parse(markdown.md(text))
        assert (opened.type, closed.type) == ("paragraph_open", "paragraph_close"), text
        assert inline.children is not None and {child.type for child in inline.children} <= {"text", "code_inline"}, (
            text
        )
        shown_text = "".join(child.content for child in inline.children)
        assert re.sub("[`' ]", "", shown_text) == re.sub("[`' ]", "", text)
        row = reader.parse(f"| x | y |\n|---|---|\n| {markdown.in_cell(text)} | end |\n")
        assert [token.content for token in row if token.type == "inline"][-1] == "end", text


def test_markdown_names_and_arrows_need_no_escapes() -> None:
    text = "Rank 0 waits in estimate_loss -> _sum under `if not is_main(rank=a_b) and x < 3`."
    assert markdown.md(text) == text.replace("_sum", "`_sum`")


def test_markdown_fence_is_longer_than_any_inside() -> None:
    evidence = job(rank(0, in_user(7), "sleep", more={"log_tail": "```\n# injected\n````\n"}))
    text = markdown.markdown(diagnose(evidence), evidence, [])
    assert "`````text\n```\n# injected\n````\n`````" in text


def test_clean_removes_terminal_sequences_and_line_breaks() -> None:
    assert screen.clean("a\x1b[31mb\x1b[0m\tc\nd") == "ab c d"
    assert screen.clean(at(1).file) == "/home/me/train.py"
    assert screen.clean("größe → 3") == "größe → 3"


def test_reports_have_suspicion_time_and_reason() -> None:
    evidence = sleeping()
    learned = job(*evidence.ranks, threshold_s=60.0, threshold_why="the floor")
    for render in (markdown.markdown, page_data):
        assert "No progress for 30 s; suspected after 60 s" in render(diagnose(learned), learned, ())
        assert "suspected" not in render(diagnose(evidence), evidence, ())


def page_data(verdict: Verdict, evidence: Evidence, artifacts: tuple[Artifact, ...]) -> str:
    return json.dumps(page.content(verdict, evidence, artifacts))


def test_culprit_line_outside_stack_is_shown_separately() -> None:
    evidence = sleeping()
    culprit = diagnose(evidence).culprits[0]
    assert culprit.frame is not None
    elsewhere = replace(culprit.frame, line=99)
    lines = culprit_lines(replace(culprit, frame=elsewhere), evidence, None)
    assert lines[0].startswith("→ ") and ":99 " in lines[0]
    assert lines[1:3] == ["", "now in:"]
    assert any(":7 load" in line for line in lines[3:])


@pytest.mark.parametrize(
    ("log", "raw"), [("loss 0.1\n\tmore\n", False), ("\x1b[2Jloss 0.1\n", True), ("\x9b2J\n", True)]
)
def test_reports_note_terminal_sequences_in_output(log: str, raw: bool) -> None:
    ranks = [waiting(0), rank(1, in_user(7, "load"), "sleep", flight=behind(), more={"log_tail": log}), waiting(2)]
    evidence = job(*ranks)
    verdict = diagnose(evidence)
    made = markdown.markdown(verdict, evidence, ())
    assert "The end of its output" in made and "\x1b" not in made and "\x9b" not in made
    assert ("terminal sequences raw" in made) == raw
    data = page.content(verdict, evidence)
    assert [("raw" in row) for row in data["ranks"] if "log" in row] == [raw]
    assert "\x1b" not in template.render(data) and "\x9b" not in template.render(data)
