"""Each case of tests/data/verdicts is decided as it says. ``tests/support/verdict_cases.py`` reads and updates them."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.verdict.causes import CAUSES
from tests.support import verdict_cases
from tests.support.evidence import MODULE, SCRIPT, at, in_c10d, process
from tests.support.verdict_cases import CaseError, CaseText, all_cases, calls_in, cases_in, decision_of, stack_in

CASES = all_cases()
CASE = """\
# A comment.

a sleeping rank
  rank 0: in all_reduce < :50 | calls 0@50x3 0@50*
  rank 1: in :7 load [sleep] | calls 0@50x3
"""
DECISION = "stuck-in-user-code, high: rank 1 at train.py:7; victims 0"


def written(folder: Path, text: str, name: str = "stuck-in-user-code") -> CaseText:
    path = folder / f"{name}.txt"
    path.write_text(text)
    [case] = cases_in(path)
    return case


def check(case: CaseText) -> None:
    decision = decision_of(case.read().verdict)
    assert decision == case.decision, str(case)
    assert decision.startswith(f"{case.path.stem},"), f"{case} belongs in {decision.partition(',')[0]}.txt"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_is_decided_as_recorded(case: CaseText) -> None:
    check(case)


def test_case_files_match_causes_and_names_are_unique() -> None:
    assert {case.path.stem for case in CASES} <= CAUSES.keys()
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "wrong",
    [
        DECISION.replace("stuck-in-user-code", "busy-loop"),
        DECISION.replace("high", "medium"),
        DECISION.replace("high", "high, proved"),
        DECISION.replace("rank 1", "rank 0"),
        DECISION.replace(":7", ":8"),
        DECISION.replace("victims 0", "victims 0-1"),
        "",
    ],
)
def test_case_with_a_wrong_decision_fails(tmp_path: Path, wrong: str) -> None:
    case = written(tmp_path, CASE)
    check(case.decided(DECISION))
    with pytest.raises(AssertionError, match=r"stuck-in-user-code\.txt:3 a sleeping rank"):
        check(case.decided(wrong))


def test_case_in_the_file_of_another_cause_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"belongs in stuck-in-user-code\.txt"):
        check(written(tmp_path, CASE, "busy-loop").decided(DECISION))


def test_update_writes_decisions_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path, f"{CASE}  => busy-loop, low: no culprit\n", "busy-loop")
    assert verdict_cases.update(tmp_path) == 1
    [path] = tmp_path.iterdir()
    assert path.name == "stuck-in-user-code.txt"
    assert path.read_text().endswith(f"\n\n{CASE.partition('.')[2].lstrip()}  => {DECISION}\n")
    before = path.read_text()
    assert verdict_cases.update(tmp_path) == 0
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  rank 0: in :7 | frobs {a: 1}", r"RankEvidence has no field 'frobs'"),
        ("  rank 0: in :7 | exit {returncode: 1, time_unix_s: 1.0, code: 2}", "does not describe an exit"),
        ("  rank 0: in :7 | fatal {message: Aborted, words: x}", r"FatalError has no field 'words'"),
        ("  rank 0: in :7 [slep]", "is not a thread"),
        ("  rank 0: in all_redcue < :7", "is not a frame"),
        ("  rank 0: in :7 | calls 0@50 all_reduce", "does not begin with a call"),
        ("  job: hangs", "does not describe a job"),
        ("  rank 0: in :7 | holds", "is not a part of a rank"),
    ],
)
def test_meaningless_line_is_an_error_with_its_location(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(CaseError, match=rf"^stuck-in-user-code\.txt:3: .*{problem}"):
        written(tmp_path, f"\na case\n{line}\n").read()


def test_renamed_field_is_mapped_to_its_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = written(tmp_path, "a case\n  rank 0: in :7 | old_name {message: Aborted, frames: ':9 load'}\n")
    monkeypatch.setitem(verdict_cases.RENAMED, "old_name", "fatal")
    [rank] = case.read().evidence.ranks
    assert rank.fatal is not None
    assert rank.fatal.frames == (at(9, "load"), MODULE)


def test_stack_text_is_parsed_into_frames() -> None:
    assert stack_in("all_reduce < :50") == in_c10d("all_reduce", 50)
    queue = at(171, "Queue.get", "/usr/lib/python3.11/queue.py")
    assert stack_in("python/queue.py:171 Queue.get < :7 load < .") == (queue, at(7, "load"))
    assert stack_in(":50 <module>") == (at(50, "<module>"),)
    assert stack_in("none") == ()


def test_calls_are_numbered_per_group() -> None:
    calls = calls_in("[0@50 1@(:60 log)]x2 nccl:barrier:0@70#9/8,2~77* send:0@-{is_p2p: true}")
    assert [(call.group, call.seq, call.record_id) for call in calls] == [
        ("0", 1, 1),
        ("1", 1, 2),
        ("0", 2, 3),
        ("1", 2, 4),
        ("0", 9, 5),
        ("0", 10, 6),
    ]
    barrier, send = calls[4:]
    assert (barrier.op, barrier.completed) == ("nccl:barrier", False)
    assert (barrier.input_sizes, barrier.thread) == (((8, 2),), 77)
    assert [frame.line for frame in calls[1].frames if frame.file == SCRIPT] == [60, 100]
    assert (send.op, send.is_p2p, send.p2p_seq, send.frames) == ("gloo:send", True, 10, ())


def test_thread_owns_the_attributes_that_follow_it(tmp_path: Path) -> None:
    parts = "in :7 | ident 1 | thread saver in :8 save [pipe {inode: 1, ends: [7]}] | ident 2 | holds gil"
    main = written(tmp_path, f"a case\n  rank 0: {parts}\n").read().evidence.ranks[0].main
    assert main is not None
    assert [(thread.ident, thread.owns_gil) for thread in main.stacks[-1].threads] == [(1, False), (2, True)]
    [expected] = process(1000, kernel="pipe", samples=1).states[-1].threads
    assert main.states[-1].threads[1].wchan == expected.wchan
    assert [end.pid for end in main.states[-1].threads[1].ends or ()] == [7]
