"""The smaller parts of colaunch: metrics, slots, outcomes, steps, the command line, what is shown and summed up."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path, PurePath

import msgspec
import pytest

from safelaunch.addons.sweep import metrics, summary
from safelaunch.addons.sweep import pool as units
from safelaunch.addons.sweep.command import OURS, check_jobs, make_pool, parse
from safelaunch.addons.sweep.engine import RunningAttempt, state_of
from safelaunch.addons.sweep.jobs import AttemptOutcome, Pace, SweepJob, Track, ranks, threads
from safelaunch.addons.sweep.local import exit_code
from safelaunch.addons.sweep.paths import SweepPaths, newest, verdict_of
from safelaunch.addons.sweep.pool import CpuSlots, GpuPool, Share, check_fits, default_slots
from safelaunch.addons.sweep.screen import (
    _LESS_WANTED,
    COLUMNS,
    bundles,
    cause,
    cells,
    choose,
    describe,
    headline,
    picture,
    summary_lines,
    time_left_s,
)
from safelaunch.addons.sweep.steps import slowest, wrong_cause
from safelaunch.addons.sweep.view import JobStatus, Snapshot
from safelaunch.cli.table import TextTable
from safelaunch.leases.choose import Inventory, LeasableGpu
from safelaunch.leases.store import LeaseStore
from safelaunch.model import Progress, WrongResult, format_ranks
from safelaunch.system.console import folded
from safelaunch.system.errors import UsageError
from tests.support import golden
from tests.support.nvml import stub


def job(name: str = "a", *words: str, **more: object) -> SweepJob:
    return SweepJob(name, words or ("t.py",), "sweep.yaml:3", **more)  # type: ignore[arg-type]


def test_wrong_result_is_read_from_run_directory(tmp_path: Path) -> None:
    assert wrong_cause(tmp_path / "wrong.json") == ""
    (tmp_path / "wrong.json").write_text("[{")
    assert wrong_cause(tmp_path / "wrong.json") == ""
    found = [WrongResult("loss", 1.0, step=3), WrongResult("replicas-diverged", 2.0, step=9)]
    (tmp_path / "wrong.json").write_bytes(msgspec.json.encode(found))
    assert wrong_cause(tmp_path / "wrong.json") == "loss-diverged"


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("val_loss=([0-9.]+)", ("val_loss",)),
        ("  acc: (.*)%", ("acc",)),
        ("eval/loss = (\\S+)", ("eval/loss",)),
        ("(?P<loss>\\S+) is the loss", ("loss",)),
        ("(?P<a>.) (?P<b>.)", ("a", "b")),
    ],
)
def test_metric_pattern_gives_metric_names(pattern: str, names: tuple[str, ...]) -> None:
    assert metrics.check_pattern(pattern) == names


@pytest.mark.parametrize("pattern", ["(", "loss", "([0-9]+)", "a=(.) b=(.)", "=(.)"])
def test_metric_pattern_without_name_or_value_is_rejected(pattern: str) -> None:
    with pytest.raises(UsageError, match="metric"):
        metrics.check_pattern(pattern)


def test_metric_last_value_counts_even_after_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"loss=9\nstep 1 loss=3\rstep 2 loss=2.5 acc=1e-2\xff\nloss=nan\nloss=2 loss=1.25\nacc=none")
    assert metrics.from_log(log, ["loss=([0-9.]+)", "acc=(\\S+)"]) == {"loss": 1.25, "acc": "none"}
    assert metrics.from_log(log, ["loss=(\\w+)"])["loss"] == 1.0
    assert metrics.from_log(tmp_path / "none", ["loss=(.)"]) == {}


def test_metric_pattern_that_never_ends_is_given_up_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling with each digit: 40 of them would take hours."""
    log = tmp_path / "job" / "attempt-1.log"
    log.parent.mkdir()
    log.write_text("acc=7\n" + "loss=" + "1" * 40 + "\n")
    said: list[str] = []
    begin = time.process_time()
    monkeypatch.setattr(metrics, "MOST_CPU_S", 0.5)
    found = metrics.from_log(log, ["loss=((?:[0-9]+)+!)", "acc=([0-9]+)"], said.append)
    assert found == {"acc": 7.0}
    assert time.process_time() - begin < 2 * metrics.MOST_CPU_S
    assert said == [
        "job: no value for 'loss=((?:[0-9]+)+!)': searching attempt-1.log takes too long",
    ]


def test_metric_infinity_and_nan_stay_text() -> None:
    found = metrics.from_lines(["a=nan b=inf c=-1e400 d=7"], ["a=(\\S+)", "b=(\\S+)", "c=(\\S+)", "d=(\\S+)"])
    assert found == {"a": "nan", "b": "inf", "c": "-1e400", "d": 7.0}


# --- slots and GPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "units", "at_most", "slots"),
    [(64, [1] * 10, None, 10), (8, [1] * 10, None, 8), (64, [1] * 10, 2, 2), (2, [4, 1], None, 4), (8, [1], None, 1)],
)
def test_default_slots_fit_jobs_and_cores(cores: int, units: list[int], at_most: int | None, slots: int) -> None:
    assert default_slots(cores, units, at_most) == slots


def test_slots_are_assigned_once_and_released() -> None:
    pool = CpuSlots(3, 6)
    first, second = pool.take(job(gpus=2)), pool.take(job(gpus=0))
    assert first == Share((0, 1), "0-1", cores=4)
    assert second == Share((2,), "2", cores=2)
    assert (pool.free(), pool.take(job())) == (0, None)
    pool.release(first)
    assert (pool.free(), pool.units(0), pool.units(3)) == (2, 1, 3)
    shared = CpuSlots(4, 2).take(job())
    assert shared is not None and shared.cores == 1, "more slots than cores share them"


def test_gpus_are_assigned_once_and_visible_to_their_job_only(node: stub.Node) -> None:
    pool = GpuPool({**os.environ, **node.environ, "CUDA_VISIBLE_DEVICES": "1,2,5"})
    assert (pool.kind, pool.capacity, pool.units(2), pool.free()) == ("GPU", 3, 2, 3)
    first, none = pool.take(job(gpus=2)), pool.take(job(gpus=0))
    assert first is not None and (first.label, first.gpus) == ("1-2", (stub.uuid(1), stub.uuid(2)))
    assert first.env == {"CUDA_VISIBLE_DEVICES": ",".join(first.gpus)} and set(first.lease.keys) == set(first.gpus)
    assert none == Share(label="none", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (pool.free(), pool.take(job(gpus=2))) == (1, None)
    pool.release(first)
    assert LeaseStore(os.fspath(node.lease_dir)).look(first.gpus) == {}


def test_gpus_in_use_by_others_are_queued_for_once(node: stub.Node) -> None:
    node.write(used=[5])
    here = GpuPool({**os.environ, **node.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert (here.capacity, here.free()) == (4, 3)
    taken = here.take(job("job-1", gpus=2))
    assert taken is not None and taken.label == "4,6"
    assert here.free() == 1 and here.take(job("job-2", gpus=2)) is None
    assert here.wait(job("job-2", gpus=2), []) == (
        "  GPU 5    used without a lease by an invisible process (10240 MiB in use)"
    ), "what others have, not what its own jobs have"
    held = LeaseStore(os.fspath(node.lease_dir))
    assert [one.name for one in held.waiting()] == ["job-2"]
    assert here.wait(job("job-3"), []) and len(held.waiting()) == 1, "one place for all of its jobs"
    other = GpuPool({**os.environ, **node.environ})
    assert (other.free(), other.take(job("of somebody else"))) == (0, None)
    assert here.free() == 1
    small = here.take(job("job-3"))
    assert small is not None and held.waiting() == [] and other.free() == 4
    assert {one.name for one in held.look([stub.uuid(4)]).values()} == {"job-1"}
    here.wait(job("job-2", gpus=2), [])
    here.leave()
    assert held.waiting() == []
    taken.lease.release(), small.lease.release()


def test_pool_never_waits_for_driver(node: stub.Node) -> None:
    """It is asked again when a job has ended; until it answers, the free GPUs are unknown."""
    node.write(used=[0], gpus=2)
    here = GpuPool({**os.environ, **node.environ})
    assert here.free() == 1
    node.write(gpus=2)
    here.release(Share())
    assert (here.free(), here.take(job())) == (None, None)
    deadline = time.monotonic() + 60
    while (free := here.free()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert free == 2
    node.write("hang nvmlInitWithFlags", gpus=2)
    here.release(Share())
    assert here.free() is None, "and a driver that hangs holds nothing up"
    here.leave()


def test_job_that_never_fits_is_rejected_at_start() -> None:
    with pytest.raises(UsageError, match="the job big needs 4 slots, but this node has 2"):
        check_fits({"big": 4}, CpuSlots(2, 2))


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0,2-3,9"), ([5, 4], "4-5")]
)
def test_unit_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert format_ranks(numbers) == text


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [(None, ["GPU-0", "GPU-1", "GPU-2"]), ("2,0", ["GPU-2", "GPU-0"]), ("GPU-1", ["GPU-1"]), ("1", ["GPU-1"])],
)
def test_pool_respects_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, chosen: list[str]
) -> None:
    found = Inventory(tuple(LeasableGpu(str(number), f"GPU-{number}") for number in range(3)))
    monkeypatch.setattr(units, "inventory", lambda environ: found)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environ["SAFELAUNCH_LEASE_DIR"] = os.fspath(tmp_path / "leases")
    pool = make_pool([job()], None, None, environ)
    assert pool.kind == "GPU"
    share = pool.take(job(gpus=len(chosen)))
    assert share is not None
    assert list(share.gpus) == chosen
    pool.release(share)


def test_pool_without_gpus_consists_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "inventory", lambda environ: Inventory(missing="no NVIDIA driver on this node"))
    assert make_pool([job()], None, None, {}).kind == "slot"
    assert make_pool([job()], 3, None, {}).capacity == 3
    monkeypatch.setattr(units, "inventory", lambda environ: Inventory((LeasableGpu("0", "GPU-0"),)))
    assert make_pool([job()], 3, None, {}).kind == "slot"
    assert make_pool([job()], None, None, {"CUDA_VISIBLE_DEVICES": ""}).kind == "slot"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("t.py", 1),
        ("--nproc-per-node=4 t.py", 4),
        ("--nproc_per_node 2 t.py", 2),
        ("--nproc-per-node=auto t.py", 1),
        ("t.py --nproc-per-node=8", 1),
        ("--nproc-per-node", 1),
        ("--nproc-per-node=0 t.py", 1),
    ],
)
def test_rank_count_is_read_from_command(words: str, count: int) -> None:
    assert ranks(words.split()) == count
    assert threads(words.split(), 8) == 8 // count
    assert threads(words.split(), 1) == 1


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "verdict", "by_us", "state"),
    [
        (0, "", None, "succeeded"),
        (0, "", "cancelled", "succeeded"),
        (0, "dump", None, "succeeded"),
        (1, "", None, "failed"),
        (1, "crash", None, "failed"),
        (124, "hang", None, "hung"),
        (124, "", None, "hung"),
        (124, "crash", None, "failed"),
        (125, "hang", None, "hung"),
        (125, "crash", None, "failed"),
        (125, "", None, "failed"),
        (1, "hang", None, "failed"),
        (143, "", "cancelled", "cancelled"),
        (1, "", "timed-out", "timed-out"),
    ],
)
def test_attempt_state_follows_code_and_verdict(code: int, verdict: str, by_us: str | None, state: str) -> None:
    assert state_of(code, verdict, by_us) == state  # type: ignore[arg-type]


def test_exit_code_is_as_a_shell_shows_it() -> None:
    assert [exit_code(status) for status in (0, 256, 124 << 8, signal.SIGKILL)] == [0, 1, 124, 137]


def test_bundle_of_attempt_is_the_new_one(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path)
    for name in ("a-20260101T000000Z-crash", "a-20260102T000000Z-hang", ".hidden", "unfinished"):
        (paths.bundles("a") / name).mkdir(parents=True)
        if name != "unfinished":
            (paths.bundles("a") / name / "verdict.json").write_text('{"outcome": "hang"}')
    (paths.bundles("a") / "latest").symlink_to("a-20260102T000000Z-hang")
    found = paths.bundles_of("a")
    assert {Path(path).name for path in found} == {"a-20260101T000000Z-crash", "a-20260102T000000Z-hang"}
    before = {path for path in found if "crash" in path}
    assert Path(newest(found - before)).name == "a-20260102T000000Z-hang"
    assert verdict_of(newest(found - before))[0] == "hang"
    nothing = ("", "")
    assert (newest(set()), verdict_of(""), verdict_of(str(tmp_path))) == ("", nothing, nothing)
    assert paths.bundles_of("nobody") == set()


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        ([], None),
        ([("torch", None)], None),
        ([("torch", 9), ("torch", 7), ("torch", None)], 7),
        ([("exited", 5), ("torch", 7)], 7),
        ([("exited", 5), ("torch", None)], 5),
        ([("exited", 9), ("exited", 8)], 8),
    ],
)
def test_job_step_follows_slowest_stepping_rank(ranks: list[tuple[str, int | None]], step: int | None) -> None:
    assert slowest([Progress(n, n, 4, 0, 10, 1, state, step=at) for n, (state, at) in enumerate(ranks)]) == step


# --- the command line -------------------------------------------------------------------------------------------------


def test_grid_command_line_is_parsed() -> None:
    found = parse(
        ["--grid", "a=1,2", "--grid", "b=0..1", "--gpus-per-job", "2", "--timeout", "2h", "--", "t.py", "--", "{a}"]
    )
    assert [(axis.name, axis.values) for axis in found.grid] == [("a", ("1", "2")), ("b", ("0", "1"))]
    assert (found.command, found.gpus_per_job, found.timeout_s) == (("t.py", "--", "{a}"), 2, 7200.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "a file or a command is missing"),
        ("--grid a=1", "a file or a command is missing"),
        ("--grid a=1 --", "the command after -- is missing"),
        ("s.yaml -- t.py", "either a file or a grid"),
        ("s.yaml --grid a=1", "either a file or a grid"),
        ("s.yaml --gpus-per-job 2", "--gpus-per-job works only with --grid"),
        ("s.yaml --retries 0", "--retries works only with --grid"),
        ("--grid a=1 --grid a=2 -- t.py {a}", "--grid a occurs twice"),
        ("--metric loss -- t.py", "metric 'loss'"),
    ],
)
def test_invalid_command_line_raises_usage_error(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--slots 0", "argument --slots"),
        ("--slots x", "argument --slots"),
        ("--max-parallel 0", "argument --max-parallel"),
        ("--grd a=1", "there is no option --grd; did you mean '--grid'"),
        ("--grid a=1 --stall-timeout=9", "--stall-timeout is an option of the jobs: give it after `--`"),
        ("--grid a=1 --nproc-per-node 2", "--nproc-per-node is an option of the jobs: give it after `--`"),
        ("--timeout -1", "argument --timeout"),
    ],
)
def test_invalid_option_exits_with_two(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse([*words.split(), "--", "t.py"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *[
            ((flag, *(["x"] if flag in ("--run-name", "--bundle-dir", "--gpus") else []), "t.py"), flag)
            for flag in OURS
        ],
        (("--stall-timeout", "soon", "t.py"), "'soon' is not auto or a positive number"),
        (("--stall-timeout",), "needs a value"),
        (("--stall-timout=9", "t.py"), "did you mean safelaunch's --stall-timeout?"),
        (("--preset", "hang-debgu", "t.py"), "did you mean 'hang-debug'"),
        (("--nproc-per-node=2",), "names no script"),
        (("exec", "--stall-timeout", "9"), "names no script"),
        (("exec", "--run-name", "x", "--", "t.py"), "--run-name cannot be given here"),
    ],
)
def test_job_rejected_by_safelaunch_is_reported_at_start(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_jobs([job("a", *words)], "slot", dict(os.environ))
    assert caught.value.message.startswith("sweep.yaml:3: job a: ")
    assert said in str(caught.value)


def test_gpus_set_in_environment_or_configuration_are_rejected(tmp_path: Path) -> None:
    one = job("a", cwd=str(tmp_path))
    with pytest.raises(UsageError, match=r"job a: gpus is set \(environment SAFELAUNCH_GPUS\)"):
        check_jobs([one], "slot", {**os.environ, "SAFELAUNCH_GPUS": "1"})
    (tmp_path / "safelaunch.yaml").write_text("stall-timeout: 5m\ngpus: 1\n")
    with pytest.raises(UsageError, match=r"job a: gpus is set \(safelaunch.yaml:2\)"):
        check_jobs([one], "slot", dict(os.environ))


def test_valid_job_with_similar_script_options_is_accepted(tmp_path: Path) -> None:
    good = [
        job("a", "--stall-timeout", "9", "--nproc-per-node=2", "t.py", "--run-name", "x", cwd=str(tmp_path)),
        job("b", "exec", "--", "python", "t.py", "--gpus", "3", cwd=str(tmp_path)),
    ]
    check_jobs(good, "slot", dict(os.environ))


def test_missing_directory_or_visible_devices_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory /nowhere does not exist"):
        check_jobs([job(cwd="/nowhere")], "slot", dict(os.environ))
    by_hand = job(env=(("CUDA_VISIBLE_DEVICES", "0"),), cwd=str(tmp_path))
    check_jobs([by_hand], "slot", dict(os.environ))
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES cannot be set here"):
        check_jobs([by_hand], "GPU", dict(os.environ))


# --- what is shown ----------------------------------------------------------------------------------------------------

DONE = AttemptOutcome("succeeded", 0, 60.0, 100, metrics={"loss": 0.25})


def view(state: str, name: str = "a", live: RunningAttempt | None = None, **more: object) -> JobStatus:
    track = Track(job(name, params=(("lr", "1e-3"),)), state, 1, outcome=more.pop("outcome", None))  # type: ignore[arg-type]
    track.attempts = int(str(more.pop("attempts", 1)))
    known = live or (RunningAttempt() if state == "running" else None)
    return JobStatus.of(track, known)


def live(
    step: int | None = None, steps_per_s: float | None = None, elapsed_s: float = 0.0, **more: object
) -> RunningAttempt:
    own = {name: more.pop(name) for name in ("on", "ports", "queued_for", "stopping") if name in more}
    return RunningAttempt(elapsed_s=elapsed_s, pace=Pace(step, steps_per_s, **more), **own)  # type: ignore[arg-type]


def test_row_of_running_job_shows_progress() -> None:
    known = live(40, 2.0, 20.0, on="0-1", ports="29401,20000", age_s=0.4)
    running = view("running", live=known, attempts=2)
    row = dict(zip(COLUMNS, cells(running, 60.0), strict=True))
    assert row == {
        "job": "a",
        "parameters": "lr=1e-3",
        "state": "running (attempt 2)",
        "on": "0-1",
        "port": "29401,20000",
        "cause": "-",
        "step": "40",
        "rate": "2/s",
        "age": "0.4s",
        "metric": "-",
        "elapsed": "20s",
        "estimate": "40s",
    }


def test_row_of_quiet_job_has_no_rate_and_no_estimate() -> None:
    still = live(40, 1.84, 70.0, age_s=42.0, quiet=True, cause="data-loading")
    row = dict(zip(COLUMNS, cells(view("running", live=still), 120.0), strict=True))
    shown = [row[name] for name in ("state", "cause", "rate", "age", "estimate")]
    assert shown == ["quiet", "data-loading?", "0/s", "42s", "-"]
    late = dict(zip(COLUMNS, cells(view("running", live=live(40, 1.84, 70.0, age_s=42.0)), 60.0), strict=True))
    assert (late["state"], late["estimate"]) == ("running", "-"), "not 0.0s"
    quiet = view("running", "a", live(quiet=True))
    assert headline(Snapshot((quiet, view("running", "b")))).startswith("0 of 2 done, 2 running (1 quiet)")


def test_row_of_ended_or_waiting_job_is_complete() -> None:
    hung = view("hung", outcome=AttemptOutcome("hung", 124, 90.0, 7, bundle="/b/a-hang", cause="busy-loop"))
    assert cells(hung, 60.0)[2:] == ("hung", "-", "-", "busy-loop", "7", "-", "-", "-", "1m30s", "-")
    wrong = {"wrong": "replicas-diverged"}
    assert cells(view("running", live=live(**wrong)), 60.0)[5] == "replicas-diverged"  # type: ignore[arg-type]
    assert cells(view("running", live=live(**wrong, cause="lock")), 60.0)[5] == "lock?"  # type: ignore[arg-type]
    assert cells(view("succeeded", outcome=DONE), 60.0)[9] == "loss=0.25"
    assert cells(view("waiting"), None)[2:] == ("waiting", *"---------")


def test_headline_has_counts_and_estimate() -> None:
    jobs = (
        view("succeeded", "a", outcome=DONE),
        view("running", "b", live(elapsed_s=20.0)),
        view("running", "c", live()),
        view("waiting", "d"),
    )
    snapshot = Snapshot(jobs)
    assert time_left_s(snapshot) == 80.0
    assert headline(snapshot) == "1 of 4 done, 2 running, 1 waiting; about 1m20s left"
    assert headline(Snapshot(jobs, "stopped by SIGINT")).endswith("1 waiting; stopped by SIGINT")
    assert time_left_s(Snapshot(jobs[1:])) is None


def test_table_without_room_shows_most_important_jobs() -> None:
    states = ["succeeded", "waiting", "running", "failed", "succeeded", "running"]
    snapshot = Snapshot(tuple(view(state, f"j{n}") for n, state in enumerate(states)))
    assert [shown.job.name for shown in choose(snapshot, 3)] == ["j2", "j3", "j5"]
    assert len(choose(snapshot, 99)) == 6


def test_table_fits_terminal_and_reports_omissions() -> None:
    import io

    from rich.console import Console

    snapshot = Snapshot(tuple(view("waiting", f"j{n}") for n in range(40)))
    console = Console(file=io.StringIO(), width=100, height=20)
    console.print(picture(snapshot, 20, 100))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 20
    assert lines[-2].strip() == "... and 25 more"
    assert lines[-1].strip() == "0 of 40 done, 40 waiting"


HUNG = AttemptOutcome(
    "hung", 124, 90.0, 7, bundle=f"/w/s/jobs/lr/bundles/lr-{'x' * 30}-hang", cause="collective-mismatch"
)


def columns(rows: list[tuple[str, ...]], width: int) -> tuple[str, ...]:
    return TextTable(COLUMNS, rows, less_wanted=_LESS_WANTED).fitted(width).columns


def test_table_on_narrow_terminal_drops_columns() -> None:
    running = view("running", "lr-1e-3_seed-1", live(400, 49.4, 6.0, on="0-3", ports="20001", age_s=0.1))
    rows = [cells(each, 60.0) for each in (running, view("hung", "lr-3e-4_seed-1", outcome=HUNG))]
    assert columns(rows, 160) == COLUMNS
    assert {"job", "state", "cause", "age"} <= set(columns(rows, 90))
    assert columns(rows, 10) == ("job", "state", "cause")
    quiet = cells(view("running", "job-with-a-name", live(on="0", elapsed_s=1.0)), None)
    assert columns([quiet], 50) == ("job", "parameters", "state", "on", "elapsed"), "empty ones go first"


def test_row_of_waiting_job_shows_scheduler_reason() -> None:
    queued = view("running", "j", live(queued_for="Resources"))
    assert (queued.state, queued.why, cause(queued)) == ("waiting", "queued", "Resources")
    assert queued.so_far == AttemptOutcome("waiting")
    assert cause(view("waiting", "j")) == "-"


def test_bundle_paths_are_shown_whole_below_table() -> None:
    jobs = [view("hung", f"j{number}", outcome=HUNG) for number in range(9)]
    assert bundles(jobs[:1], 9, PurePath("/w")) == ["j0: collective-mismatch", f"  {HUNG.bundle.removeprefix('/w/')}"]
    assert bundles(jobs[:1], 9, PurePath("/elsewhere"))[1] == f"  {HUNG.bundle}"
    lines = bundles(jobs, 9, PurePath("/w"))
    assert [line for line in lines if line.startswith("j")] == [f"j{n}: collective-mismatch" for n in (5, 6, 7, 8)]
    assert lines[-1] == "and 5 more bundles: see summary.csv" and len(lines) == 9
    assert bundles([view("succeeded", outcome=DONE)], 9, PurePath("/w")) == []
    assert bundles(jobs, 2, PurePath("/w")) == ["and 9 more bundles: see summary.csv"]


def sweep_on_screen() -> Snapshot:
    """One job in each state."""
    names = [f"lr-{lr}_seed-{seed}" for lr, seed in (("1e-3", 0), ("1e-3", 1), ("3e-4", 0), ("3e-4", 1), ("1e-4", 0))]
    bundle = f"{Path.cwd()}/safelaunch-sweeps/sweep/jobs/{names[2]}/bundles/{names[2]}-20261122T191239Z-hang"
    hung = AttemptOutcome("hung", 124, 90.0, 7, bundle=bundle, cause="collective-mismatch", metrics={"loss": 3.5})
    pace = {"ports": "29401", "step": 1047, "steps_per_s": 37.7, "elapsed_s": 31.0}
    return Snapshot(
        (
            view("succeeded", names[0], attempts=1, outcome=DONE),
            view("running", names[1], live(on="0-1", age_s=0.1, **pace)),  # type: ignore[arg-type]
            view("hung", names[2], outcome=hung),
            view("running", names[3], live(on="2-3", age_s=42.0, quiet=True, cause="data-loading", **pace)),  # type: ignore[arg-type]
            view("waiting", names[4]),
        ),
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_on_terminal_matches_golden_file(width: int) -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, height=24)
    console.print(picture(sweep_on_screen(), 24, width))
    shown = "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    golden.compare(f"colaunch_table/{width}.txt", shown)


def test_dry_run_shows_every_job_whole(tmp_path: Path) -> None:
    shown = describe(
        [job("a", "t.py", "a b", env=(("X", "1 2"),), needs=("b",), timeout_s=60.0, retries=2)],
        SweepPaths(tmp_path),
        CpuSlots(1, 1),
        80,
    )
    assert shown[0] == f"1 job on 1 slot, in {tmp_path}"
    assert shown[3] == "  'X=1 2' safelaunch t.py 'a b'"
    assert shown[4] == "  1 slot; in /; needs b; at most 60 s; retries 2"


# --- the summary ------------------------------------------------------------------------------------------------------


def tracks() -> list[Track]:
    failed = AttemptOutcome("failed", 1, 3.25, None, ("GPU-1", "GPU-2"), "/b/x", {"state": "odd"})
    return [
        Track(job("a", params=(("lr", "1e-3"), ("state", "x"))), "succeeded", 1, 1, DONE),
        Track(job("b", params=(("lr", "3e-4"),)), "failed", 2, 2, failed),
        Track(job("c"), "skipped", why="needs b, which failed"),
    ]


def test_summary_has_exactly_these_keys(tmp_path: Path) -> None:
    summary.write_summary(tracks(), SweepPaths(tmp_path))
    document = json.loads((tmp_path / "summary.json").read_text())
    assert list(document) == ["jobs"]
    keys = ["name", "params", "state", "exit_code", "duration_s", "attempts", "last_step", "gpus", "bundle", "metrics"]
    keys += ["cause"]
    assert [list(entry) for entry in document["jobs"]] == [keys] * 3
    assert document["jobs"][0]["params"] == {"lr": "1e-3", "state": "x"}
    assert list(document["jobs"][1].values())[2:] == [
        "failed",
        1,
        3.25,
        2,
        None,
        ["GPU-1", "GPU-2"],
        "/b/x",
        {"state": "odd"},
        None,
    ]
    assert list(document["jobs"][2].values())[2:] == ["skipped", None, None, 0, None, [], None, {}, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.csv", "summary.json"]


def test_csv_has_column_for_each_parameter_and_metric(tmp_path: Path) -> None:
    summary.write_summary(tracks(), SweepPaths(tmp_path))
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["name", "lr", "param.state", *summary.FIXED, "loss", "metric.state"]
    assert (rows[0]["loss"], rows[0]["param.state"], rows[1]["gpus"], rows[1]["metric.state"]) == (
        "0.25",
        "x",
        "GPU-1 GPU-2",
        "odd",
    )
    assert (rows[2]["exit_code"], rows[2]["loss"]) == ("", "")


def test_csv_of_running_sweep_has_current_values(tmp_path: Path) -> None:
    begun = Track(job("d"), "running", 1, 1)
    known = AttemptOutcome("running", None, 12.5, 40, ("GPU-3",), metrics={"loss": 0.75})
    summary.write_csv([*tracks(), begun], SweepPaths(tmp_path), {"d": known})
    with (tmp_path / "summary.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    shown = [row[name] for name in ("state", "exit_code", "duration_s", "last_step", "gpus", "loss")]
    assert shown == ["running", "", "12.5", "40", "GPU-3", "0.75"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.csv"]


def test_final_table_names_causes() -> None:
    lines = summary_lines([*tracks(), Track(job("d"), "hung", 1, 1, HUNG)])
    assert lines[0].split()[:4] == ["job", "parameters", "state", "cause"]
    assert lines[4].split()[2:5] == ["hung", "collective-mismatch", "124"]


def test_final_table_gives_reason_for_each_failed_job(tmp_path: Path) -> None:
    bundle = tmp_path / "bundles" / "x"
    bundle.mkdir(parents=True)
    summary = "Rank 1 raised ValueError: loss is NaN at train.py:7, while ranks 0,2-3 wait in all_reduce at train.py:9."
    (bundle / "verdict.json").write_text(json.dumps({"outcome": "crash", "summary": summary}))
    found = [
        Track(job("a"), "succeeded", 1, 1, DONE),
        Track(job("b"), "failed", 2, 2, AttemptOutcome("failed", 1, 3.25, None, bundle=str(bundle))),
        Track(job("c"), "failed", 3, 1, AttemptOutcome("failed", 7, 3.25)),
        Track(job("d"), "skipped", why="needs b, which failed"),
    ]
    lines = summary_lines(found, SweepPaths(tmp_path))
    assert lines[6:12] == [
        f"b: {summary}",
        f"  {bundle}",
        "c: failed with exit code 7; the end of its log may say why",
        f"  {SweepPaths(tmp_path).log('c', 3)}",
        "d: needs b, which failed",
        "",
    ]
    short = [line for line in folded("\n".join(lines), 80).split("\n") if str(tmp_path) not in line]
    assert max(map(len, short)) <= 80


def test_final_table_matches_golden_file() -> None:
    lines = summary_lines(tracks())
    assert lines[0].split() == [
        "job",
        "parameters",
        "state",
        "exit",
        "took",
        "attempts",
        "step",
        "loss",
        "state",
    ]
    assert lines[1].split() == ["a", "lr=1e-3", "state=x", "succeeded", "0", "1m00s", "1", "100", "0.25", "-"]
    assert [line for line in lines[4:] if ": " in line][-2] == "c: needs b, which failed"
    assert lines[-1] == "3 jobs: 1 succeeded, 1 skipped, 1 failed"
