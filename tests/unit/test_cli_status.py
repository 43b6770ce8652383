"""Runs that ``safelaunch status`` and ``dump`` choose, and how status shows them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from safelaunch.beacon.page import start_ticks
from safelaunch.cli import dump, status
from safelaunch.cli.status_screen import COLUMNS, rows, stragglers, told
from safelaunch.job.process import ProcessId
from safelaunch.model import Progress
from safelaunch.model.words import rate, since
from safelaunch.supervise.control import discover
from safelaunch.supervise.control.discover import Run, select
from safelaunch.supervise.control.protocol import DumpAnswer, NodeStatus, RankStatus, RunStatus
from safelaunch.supervise.status import state_of
from safelaunch.system.errors import SafelaunchError, UsageError
from tests.support.runs import RUNS, rank, run, run_status


def test_status_lists_nodes_of_job() -> None:
    nodes = [
        NodeStatus("n1", "0-7", 1047, doing="watching", leads=True, here=True),
        NodeStatus("n2", "8-15", None, "silent", doing="watching"),
        NodeStatus("n3", "16", 12, "ended", doing="ended", trouble="rank 16 was ended by SIGKILL"),
    ]
    shown = status.text([Run(Path("/r10"), ProcessId(10, 1), run_status(rank(0), nodes=nodes))], 0.0)
    assert shown.splitlines()[-4:] == [
        "  node  ranks  step  state   doing     note",
        "  n1    0-7    1047  heard   watching  this node, leads",
        "  n2    8-15      -  silent  -         -",
        "  n3    16       12  ended   -         rank 16 was ended by SIGKILL",
    ]


def test_status_says_why_other_nodes_are_unknown() -> None:
    details = status.details(run_status(rank(0), alone="no store at n1:29700: refused"))
    assert details[-1] == "the state of the other nodes is unknown: no store at n1:29700: refused"


def cell(record: RunStatus, number: int, column: str) -> str:
    return rows(record)[number].cells[COLUMNS.index(column)]


@pytest.mark.parametrize(
    ("page", "state"),
    [
        ({"state": "started"}, "starting"),
        ({"state": "started", "step": 947}, "running"),  # a script without torch that calls safelaunch.step()
        ({"state": "started", "phase": "eval"}, "running"),
        ({"state": "torch", "step": 3}, "running"),
        ({"state": "exception"}, "failed"),
        ({"state": "started", "step": 3, "paused": True}, "paused"),
        ({"state": "exited", "step": 3}, "exited"),
    ],
)
def test_status_rank_state_follows_progress(page: dict[str, Any], state: str) -> None:
    assert state_of(msgspec.structs.replace(Progress(0, 0, 1, 0, 7, 5, "started"), **page)) == state


# --- single rank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "mood", "note"),
    [
        (rank(1), "good", "-"),
        (rank(1, step=59), "good", "-"),
        (rank(1, step=58), "behind", "2 steps behind"),
        (rank(1, step=35), "behind", "25 steps behind"),
        (rank(1, age_s=299.0), "good", "-"),
        (rank(1, age_s=301.0), "late", "50% of the threshold"),
        (rank(1, step=35, age_s=540.0), "late", "25 steps behind, 90% of the threshold"),
        (rank(1, step=None, steps_per_s=None), "good", "-"),
        (rank(1, step=35, state="exited", age_s=500.0), "quiet", "-"),
        (rank(1, step=35, state="paused", age_s=500.0), "quiet", "-"),
        (RankStatus(1, 101, "no beacon", signals="none"), "quiet", "-"),
    ],
)
def test_status_row_marks_slow_or_late_rank(other: RankStatus, mood: str, note: str) -> None:
    record = run_status(rank(0), other)
    assert rows(record)[1].mood == mood
    assert cell(record, 1, "note") == note
    assert rows(record)[0].mood == "good"


def test_status_unknown_values_are_dashes() -> None:
    record = run_status(RankStatus(0, 100, "no beacon"))
    assert rows(record)[0].cells == ("0", "100", "no beacon", "-", "-", "-", "-", "-", "-")


def test_status_rows_are_in_rank_order() -> None:
    assert [row.cells[0] for row in rows(run_status(rank(2), rank(10), rank(0)))] == ["0", "2", "10"]


def test_status_first_line_names_stragglers_and_silence() -> None:
    ranks = (rank(0), rank(1, step=30), rank(2, step=20, state="exited"), rank(3, step=None))
    assert stragglers(ranks) == (1,)
    assert told(run_status(*ranks)) == "watching; behind the others: rank 1"
    quiet = [rank(number, age_s=41.0 + number) for number in range(2)]
    assert told(run_status(*quiet, usual_step_s=0.1)) == "watching; no step for 41s (usual 0.1 s)"
    assert told(run_status(*quiet)) == "watching", "the usual step is not known"
    assert told(run_status(*quiet, usual_step_s=10.0)) == "watching", "a few usual steps"
    assert told(run_status(*quiet, rank(2), usual_step_s=0.1)) == "watching", "one still makes steps"
    announced = rank(2, age_s=41.0, phase="eval")
    assert told(run_status(*quiet, announced, usual_step_s=0.1)) == "watching"
    assert told(run_status(rank(0), rank(1), watch="undecided")).startswith("undecided: no step")
    many = [rank(number, step=0 if number else 60) for number in range(12)]
    assert told(run_status(*many)).endswith("1, 2, 3, 4, 5, 6, 7, 8, ...")


@pytest.mark.parametrize(
    ("steps_per_s", "shown"),
    [(0, "0/s"), (-1, "0/s"), (123.4, "123/s"), (12.34, "12.3/s"), (1, "1/s"), (0.5, "30/min"), (0.01, "36/h")],
)
def test_status_rate_is_shown_in_readable_unit(steps_per_s: float, shown: str) -> None:
    assert rate(steps_per_s) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-0.1, "0.0s"),
        (0.34, "0.3s"),
        (9.94, "9.9s"),
        (9.99, "9s"),
        (42, "42s"),
        (192, "3m12s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_status_duration_is_shown_in_readable_unit(seconds: float, shown: str) -> None:
    assert since(seconds) == shown


# --- all runs ---------------------------------------------------------------------------------------------------------


def test_status_text_columns_are_aligned() -> None:
    lines = status.text([run(10, run_status(rank(0), rank(1, step=9)))], 1042.0).splitlines()
    assert lines[0] == "r10  train  watching; behind the others: rank 1  (2 ranks, up 42s, pid 10)"
    assert lines[1] == "  train.py --lr 3  (in /work)"
    assert lines[2] == "  suspects a hang after 600 s without a step (auto)"
    header, first, second = lines[3:]
    assert header.split() == list(COLUMNS)
    for name in ("rank", "pid", "step", "rate", "age"):
        end = header.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end] == " " for line in (first, second)), name
    for name in ("state", "phase", "note", "signals"):
        start = header.index(name)
        assert all(line[start] != " " and line[start - 1] == " " for line in (first, second)), name


def test_status_of_run_without_ranks_or_answer_is_one_line() -> None:
    silent = run(11, problem="its supervisor is stopped by a signal: kill -CONT 11 lets it watch on")
    shown = status.text([run(10, run_status()), silent], 1042.0)
    assert "no rank has started yet" in shown
    assert shown.endswith("\n\nr11  its supervisor is stopped by a signal: kill -CONT 11 lets it watch on")


def test_status_headline_has_attempt_and_world_size() -> None:
    line = status.headline(run_status(rank(0), rank(1), world_size=16, attempt=2), 1000.0)
    assert "2 of 16 ranks" in line and "attempt 2" in line
    assert "1 rank," in status.headline(run_status(rank(0)), 1000.0)


def test_status_removes_escape_sequences_of_job() -> None:
    evil = "\x1b[2J\x1b]0;title\x07evil\r\n"
    record = run_status(rank(0, phase=evil, signals=evil), name=evil, cwd=evil, command=[evil], threshold_why=evil)
    shown = status.text([run(10, record), run(11, problem=evil)], 1000.0)
    assert "evil" in shown and not [char for char in shown if ord(char) < 32 and char != "\n"]


def test_status_json_has_every_run_and_field() -> None:
    answering, silent = run(10, run_status(rank(0))), run(11, problem="gone", alive=False)
    document = json.loads(json.dumps([status.document(item) for item in (answering, silent)]))
    assert document[0]["ranks"][0]["step"] == 60 and document[0]["threshold_s"] == 600.0
    assert set(RunStatus.__struct_encode_fields__) | {"directory", "alive", "problem"} == set(document[0])
    assert document[1] == {
        "run": "r11",
        "supervisor_pid": 11,
        "directory": "/tmp/s/r11",
        "alive": False,
        "problem": "gone",
    }


# --- choice of runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "pids"),
    [
        (None, [10, 11, 12, 13]),
        ("r11", [11]),
        ("11", [11]),
        ("eval", [11]),
        ("train", [10, 12]),
        ("r1", []),
        ("tra", []),
        ("", []),
    ],
)
def test_select_finds_run_by_id_pid_or_name(word: str | None, pids: list[int]) -> None:
    assert [item.pid for item in select(RUNS, word)] == pids


def test_status_of_unknown_run_lists_live_runs() -> None:
    with pytest.raises(UsageError) as caught:
        status.choose(RUNS[:2], "nope")
    assert "r10 (train in /work), r11 (eval in /work)" in str(caught.value)
    with pytest.raises(UsageError, match="You have no runs"):
        status.choose((), "nope")


def test_status_notes_name_of_several_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(status.choose(RUNS, "train")) == 2
    assert "2 runs are called 'train': r10, r12" in capfd.readouterr().err


def in_directory(pid: int, cwd: Path | str, **fields: object) -> Run:
    return run(pid, msgspec.structs.replace(run_status(rank(0)), cwd=str(cwd), **fields))


def test_dump_chooses_run_of_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, elsewhere = in_directory(20, tmp_path), in_directory(21, "/elsewhere", name="eval")
    assert dump.choose((elsewhere, here), None) is here
    with pytest.raises(UsageError, match="no live run was started in this directory") as none:
        dump.choose((elsewhere,), None)
    assert none.value.fix == "Your runs: r21 (eval in /elsewhere)."
    with pytest.raises(UsageError, match="several live runs were started in this directory") as several:
        dump.choose((elsewhere, here, in_directory(22, tmp_path)), None)
    assert "r20" in several.value.fix and "r22" in several.value.fix and "r21" not in several.value.fix


def test_dump_chooses_either_supervisor_of_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both = [in_directory(pid, tmp_path, job="localhost:29500 safelaunch/1/a") for pid in (30, 31)]
    other = in_directory(32, tmp_path, job="localhost:29501 safelaunch/1/a")
    assert dump.choose(both, None) in both
    assert dump.choose(both, "train") in both
    assert dump.choose([*both, other], "30") is both[0]
    for several in ([*both, other], [in_directory(33, tmp_path), in_directory(34, tmp_path)]):
        with pytest.raises(UsageError, match="several live runs are called 'train'"):
            dump.choose(several, "train")


def test_dump_needs_single_live_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "working_directory", lambda: Path("/work"))
    assert dump.choose(RUNS[:1], None) is RUNS[0]
    assert dump.choose(RUNS, "eval") is RUNS[1]
    dead = run(14, problem="gone", alive=False)
    assert dump.choose((RUNS[0], dead), None) is RUNS[0]
    with pytest.raises(UsageError, match="several live runs were started") as several:
        dump.choose(RUNS, None)
    assert "r10 (train in /work), r11 (eval in /work)" in several.value.fix
    with pytest.raises(UsageError, match="called 'train'"):
        dump.choose(RUNS, "train")
    with pytest.raises(UsageError, match="no live run is called 'r14'"):
        dump.choose((RUNS[0], dead), "r14")
    with pytest.raises(SafelaunchError, match="you have no live run") as none:
        dump.choose((dead,), None)
    assert none.value.exit_code == 1
    with pytest.raises(SafelaunchError, match="is stopped") as silent:
        dump.choose((run(15, problem="its supervisor is stopped"),), None)
    assert silent.value.exit_code == 1


def test_dump_prints_only_path_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    answer = DumpAnswer("/b/train-Z-dump", "Progress\x1b[2J is made.", "disk full")
    assert dump._show(RUNS[0], answer, as_json=False) == 0
    out, err = capfd.readouterr()
    assert out == "/b/train-Z-dump\n"
    assert "safelaunch: Progress is made.\n" in err and "disk full" in err
    assert dump._show(RUNS[0], answer, as_json=True) == 0
    assert json.loads(capfd.readouterr().out)["bundle"] == "/b/train-Z-dump"
    with pytest.raises(SafelaunchError, match="OSError: no room"):
        dump._show(RUNS[0], DumpAnswer(problem="OSError: no room"), as_json=False)
    assert dump._show(RUNS[0], DumpAnswer(problem="OSError: no room"), as_json=True) == 1


# --- discovery --------------------------------------------------------------------------------------------------------


def directory(root: Path, name: str, owner: str) -> Path:
    made = root / name
    made.mkdir(parents=True)
    if owner:
        (made / "owner").write_text(owner)
    return made


def hold(made: Path) -> None:
    """Holds the lock as a living supervisor does, until this process ends."""
    fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)


def test_discover_reports_run_directories_of_ended_supervisors(tmp_path: Path) -> None:
    directory(tmp_path, "r1", "1 12345\n")
    directory(tmp_path, "r2", "")
    directory(tmp_path, "r3", "not numbers\n")
    (tmp_path / "bundles").mkdir()
    runs = {item.id: item for item in discover.look([tmp_path])}
    assert set(runs) == {"r1", "r2", "r3"}
    assert not any(item.alive for item in runs.values())
    assert "gone" in runs["r1"].problem and "no owner" in runs["r2"].problem
    assert discover.look([tmp_path / "nothing"]) == ()


def test_discover_queries_silent_supervisors_in_parallel(tmp_path: Path) -> None:
    """Ten supervisors that accept no question are queried in parallel."""
    me = f"{os.getpid()} {start_ticks(os.getpid())}\n"
    listeners = []
    for number in range(10):
        made = directory(tmp_path, f"r{number}", me)
        hold(made)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.fspath(made / "control"))
        listener.listen(1)
        listeners.append(listener)
    begin = time.monotonic()
    runs = discover.look([tmp_path], deadline_s=2.0)
    took_s = time.monotonic() - begin
    for listener in listeners:
        listener.close()
    assert len(runs) == 10 and all(item.alive and item.status is None for item in runs)
    assert all("does not answer" in item.problem for item in runs)
    assert took_s < 18.0, "one after the other would take 20 s"


def test_discover_shows_live_run_without_socket(tmp_path: Path) -> None:
    hold(directory(tmp_path, "r1", f"{os.getpid()} {start_ticks(os.getpid())}\n"))
    (only,) = discover.look([tmp_path])
    assert only.alive and "control socket" in only.problem


def test_discover_reads_only_private_directories_of_user(tmp_path: Path) -> None:
    uid = os.getuid()
    runtime = tmp_path / "runtime"
    place = runtime / "safelaunch"
    place.mkdir(parents=True, mode=0o700)
    assert place in discover.roots({"XDG_RUNTIME_DIR": os.fspath(runtime)}, uid)
    place.chmod(0o755)
    assert place not in discover.roots({"XDG_RUNTIME_DIR": os.fspath(runtime)}, uid)
    place.chmod(0o700)
    assert place not in discover.roots({"XDG_RUNTIME_DIR": os.fspath(runtime)}, uid + 1)
    link = tmp_path / "elsewhere"
    link.mkdir()
    (link / "safelaunch").symlink_to(place)
    assert link / "safelaunch" not in discover.roots({"XDG_RUNTIME_DIR": os.fspath(link)}, uid)
    assert place not in discover.roots({}, uid)


def test_status_without_runs_is_one_line_and_exits_0(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "our_roots", lambda: ())
    assert status.main([]) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"safelaunch: {status.NONE_LIVE}\n")
    assert status.main(["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == []
    with pytest.raises(UsageError):
        status.main(["--json", "--watch"])


# --- end of a watched run ---------------------------------------------------------------------------------------------


def left(directory: Path, name: str, **verdict: object) -> Path:
    bundle = directory / name
    bundle.mkdir(parents=True)
    fields = {"run": "train", "time": "1970-01-01T00:20:00Z", "cause": "busy-loop", "summary": "Rank 1 spins."}
    (bundle / "verdict.json").write_text(json.dumps({**fields, **verdict}))
    return bundle


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ({}, ["has ended; it left no bundle of a hang or crash"]),
        ({"train-19700101T002000Z-hang": {"outcome": "hang"}}, ["has ended: hang, busy-loop", "Rank 1 spins."]),
        ({"train-19700101T002000Z-dump": {"outcome": "dump"}}, ["left no bundle"]),
        ({"other-19700101T002000Z-hang": {"outcome": "hang", "run": "other"}}, ["left no bundle"]),
        (
            {"train-19700101T001000Z-hang": {"outcome": "hang", "time": "1970-01-01T00:10:00Z"}},
            ["left no bundle"],  # from an earlier run of that name
        ),
        (
            {
                "train-19700101T001900Z-suspect": {"outcome": "suspect"},
                "train-19700101T002000Z-crash": {"outcome": "crash", "cause": "rank-killed"},
                "train-19700101T002100Z-crash": "damaged",
            },
            ["has ended: crash, rank-killed", "train-19700101T002000Z-crash"],
        ),
    ],
)
def test_status_watch_ends_with_outcome_of_run(
    bundles: dict[str, Any], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, verdict in bundles.items():
        if verdict == "damaged":
            (left(tmp_path, name) / "verdict.json").write_text("{")
        else:
            left(tmp_path, name, **verdict)
    looks = [(run(10, run_status(rank(0), bundle_dir=os.fspath(tmp_path))),)] * 2
    monkeypatch.setattr(status, "look", lambda places: looks.pop() if looks else ())
    monkeypatch.setattr(status, "PLAIN_REFRESH_S", 0.0)
    assert status.main(["--watch", "train"]) == 0
    err = capfd.readouterr().err
    assert "r10 (train)" in err
    for text in said:
        assert text in err


def test_status_watch_of_silent_run_says_it_ended() -> None:
    assert status.ending(run(11)) == ["r11 has ended"]
