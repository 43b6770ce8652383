"""Guardian without a launcher: how it reports the job's end, which processes it counts, and what remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safelaunch.job import controlgroup, process
from safelaunch.job.controlgroup import ControlGroup, locate
from safelaunch.job.paths import RunPaths, create_run
from safelaunch.job.process import ProcessId
from safelaunch.job.remains import Remains, note, parse
from tests.support.waiting import until

SUPERVISOR = """
    import os, signal, sys, time
    from functools import partial
    from pathlib import Path
    from safelaunch.job import process
    from safelaunch.job.guardian import Guardian
    from safelaunch.job.paths import create_run
    mask = process.block_signals()
    run = create_run(Path({root!r}), os.getpid(), os.getuid())
    guardian = Guardian(run, [], None)
    guardian.fork(partial(process.become_job, {argv!r}, dict(os.environ), mask), at_once=True)
    {before}
    agent = guardian.start()
    {after}
    while (status := guardian.ended()) is None:
        time.sleep(0.01)
    guardian.dismiss()
    sys.exit(process.end_as(status))
"""


def supervise(tmp_path: Path, shell: str, *, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    root = tmp_path / "runs"
    argv = [shutil.which("sh"), "-c", shell]
    source = textwrap.dedent(SUPERVISOR).format(root=os.fspath(root), argv=argv, before=before, after=after)
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)


# --- end of the job ---------------------------------------------------------------------------------------------------

KILL_IT = "os.kill(guardian.pid, signal.SIGKILL)"
REPLACE_IT = f"dead = guardian.pid; {KILL_IT}; exec('while guardian.pid == dead: guardian.ended()')"
GO = "open('go', 'w').close()"
STOP_IT = "os.kill(guardian.pid, signal.SIGSTOP)"


@pytest.mark.parametrize(
    "after", [GO, f"{REPLACE_IT}; {GO}", f"{STOP_IT}; {GO}"], ids=["well", "guardian killed", "guardian stopped"]
)
@pytest.mark.parametrize(("shell", "code"), [("exit 7", 7), ("kill -TERM $$", -15), ("kill -9 $$", -9), ("true", 0)])
def test_guardian_exit_status_equals_job_status(tmp_path: Path, shell: str, code: int, after: str) -> None:
    done = supervise(tmp_path, f"until [ -e go ]; do sleep 0.02; done; {shell}", after=after)
    assert done.returncode == code, done.stderr
    gone = (
        ""
        if REPLACE_IT not in after
        else "safelaunch: the guardian of this job was ended by signal 9; starting a new one\n"
    )
    assert done.stderr == gone


def test_job_inherits_standard_streams_and_no_other_descriptors(tmp_path: Path) -> None:
    """The job has its own session, inherits stdin, stdout and stderr, and has no descriptor of safelaunch."""
    done = supervise(tmp_path, "ls -l /proc/self/fd >&2; cat /proc/$$/stat; readlink /proc/$$/fd/1 >&2")
    pid, _, _, _, group, session = done.stdout.split()[:6]
    assert group == session == pid
    assert "keepers" not in done.stderr and "life" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pipe:")


def test_job_that_fails_to_start_reports_reason(tmp_path: Path) -> None:
    source = textwrap.dedent(SUPERVISOR).format(
        root=os.fspath(tmp_path / "runs"), argv=["/no/such"], before="", after=""
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("FileNotFoundError: [Errno 2] No such file or directory\n")


def test_job_does_not_start_if_supervisor_is_killed_first(tmp_path: Path) -> None:
    done = supervise(tmp_path, f"touch {tmp_path}/started", before="os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    until(lambda: not list((tmp_path / "runs").glob("r*")))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("wait", ["", "time.sleep(0.2)"], ids=["at once", "when the job waits"])
def test_guardian_killed_before_job_start_is_replaced(tmp_path: Path, wait: str) -> None:
    """The job starts only once."""
    done = supervise(tmp_path, "echo $(date) >> started; exit 7", before=f"{wait}; {KILL_IT}".lstrip("; "))
    assert (done.returncode, done.stderr) == (7, "")
    assert len((tmp_path / "started").read_text().splitlines()) == 1


def test_guardian_ends_all_descendants_if_supervisor_is_killed(tmp_path: Path) -> None:
    """The supervisor is killed right when the job has started processes that were not recorded yet."""
    shell = f"exec 9> {tmp_path}/held; setsid sh -c 'trap \"\" TERM; sleep 3600 & sleep 3600' & sleep 3600"
    path = os.fspath(tmp_path / "held")
    after = f"while not os.path.exists({path!r}) or os.kill(os.getpid(), 9): pass"
    done = supervise(tmp_path, shell, after=after)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not list((tmp_path / "runs").glob("r*")))
    assert not [link for link in Path("/proc").glob("[0-9]*/fd/9") if _target(link) == path]


def _target(link: Path) -> str:
    try:
        return os.fspath(link.readlink())
    except OSError:
        return ""


# --- processes of the job ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path / "runs", os.getpid(), os.getuid())


@pytest.fixture
def sleepers() -> Iterator[Callable[..., ProcessId]]:
    """Starts processes; an ``orphan`` is a child of the process that adopts orphans here."""
    started: list[tuple[ProcessId, subprocess.Popen[str]]] = []

    def start(*, orphan: bool = False, **env: str) -> ProcessId:
        way = "setsid sleep 3600 <&- >&- 2>&- & echo $!" if orphan else "echo $$; exec sleep 3600 >&-"
        words = ["sh", "-c", way]
        child = subprocess.Popen(words, env={"PATH": os.environ["PATH"], **env}, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        process_id = process.identify(int(child.stdout.readline()))
        child.stdout.close()
        if orphan:
            child.wait()
        assert process_id is not None
        started.append((process_id, child))
        until(lambda: _name(process_id) == "sleep")
        return process_id

    yield start
    for process_id, child in started:
        process_id.send(signal.SIGKILL)
        child.wait(30)


def _name(process_id: ProcessId) -> str:
    return Path(f"/proc/{process_id.pid}/comm").read_text().strip()


def test_remains_exclude_processes_with_single_sign_of_job(run: RunPaths, sleepers: Callable[..., ProcessId]) -> None:
    mark = {"SAFELAUNCH_RUN_DIR": os.fspath(run.root)}
    before = sleepers(orphan=True, **mark)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    agent = sleepers(orphan=True)
    note(run, "agent", str(agent))
    with_a_parent = sleepers(**mark)
    of_another = sleepers(orphan=True, SAFELAUNCH_RUN_DIR=f"{run.root}x")
    unmarked = sleepers(orphan=True)
    marked = sleepers(orphan=True, **mark)
    recorded = sleepers(orphan=True)
    remains = Remains(run)
    remains.add([recorded])
    members = remains.find()
    assert {agent, marked, recorded} <= members
    assert not members & {before, with_a_parent, of_another, unmarked}


def test_remains_include_session_of_living_agent(run: RunPaths, sleepers: Callable[..., ProcessId]) -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "(env -i sleep 3600 <&- >&- 2>&- & echo $!); exec sleep 3600"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert leader.stdout is not None
        orphan = process.identify(int(leader.stdout.readline()))
        assert orphan is not None
        note(run, "agent", str(process.identify(leader.pid)))
        assert orphan in Remains(run).find()
        orphan.send(signal.SIGKILL)
    finally:
        leader.kill()
        leader.communicate()


def test_remains_ignore_damaged_record(run: RunPaths) -> None:
    run.members.write_bytes(b"agent 1\norphan x y\n\xff\xff\nagent " + b"9" * 40 + b"\ngroup\n")
    remains = Remains(run)
    assert remains.agent is None
    assert remains.find() == set()
    assert Remains(RunPaths(run.root / "nowhere")).agent is None
    assert parse(["1 2", "3", "4 -5", "six 7", " 8  9 "]) == [ProcessId(1, 2), ProcessId(8, 9)]


# --- process name -----------------------------------------------------------------------------------------------------


def test_disguise_changes_process_name() -> None:
    source = """
        from safelaunch.job.guarding import disguise
        disguise("sl-guardian")
        print(open("/proc/self/cmdline").read().rstrip("\\0"), open("/proc/self/comm").read(), end="")
    """
    words = [sys.executable, "-c", textwrap.dedent(source), "safelaunch"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "sl-guardian sl-guardian\n"


# --- control group of the job -----------------------------------------------------------------------------------------

MOUNTS = {
    "hybrid": "31 23 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw",
    "unified": "31 23 0:27 / /sys/fs/cgroup rw,nosuid,nodev,noexec - cgroup2 cgroup2 rw,nsdelegate",
    "of a container": "31 23 0:27 /docker/4711 /sys/fs/cgroup ro - cgroup2 cgroup rw",
    "version 1 alone": "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
}


@pytest.mark.parametrize(
    ("mounts", "membership", "expected"),
    [
        ("hybrid", "4:memory:/a\n0::/", "/sys/fs/cgroup/unified"),
        ("hybrid", "0::/user.slice/x.scope", "/sys/fs/cgroup/unified/user.slice/x.scope"),
        ("unified", "0::/user.slice", "/sys/fs/cgroup/user.slice"),
        ("of a container", "0::/docker/4711", "/sys/fs/cgroup"),
        ("of a container", "0::/docker/4711/job", "/sys/fs/cgroup/job"),
        ("of a container", "0::/docker/47110", None),
        ("of a container", "0::/../other", None),
        ("version 1 alone", "4:memory:/a\n0::/", None),
        ("unified", "4:memory:/a", None),
    ],
)
def test_own_cgroup_is_located_in_mounts(mounts: str, membership: str, expected: str | None) -> None:
    assert locate(membership, MOUNTS[mounts]) == (Path(expected) if expected else None)


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    made = controlgroup.create(f"test-{os.getpid()}")
    if made is None:
        pytest.skip("no control group may be made here")
    yield made
    made.dissolve()


def test_cgroup_kill_ends_all_members(group: ControlGroup) -> None:
    """Members that try to hide are killed as well."""
    shell = "for i in 1 2 3 4 5; do env -i setsid sh -c 'sleep 3600 & sleep 3600' & done; echo; wait"
    child = subprocess.Popen(["sh", "-c", f"read go; {shell}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert group.add(child.pid)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    child.stdout.readline()
    until(lambda: len(group.members()) >= 11)
    group.kill()
    assert child.wait(30) == -signal.SIGKILL
    child.stdout.close()
    until(lambda: not group.members())


def test_cgroup_dissolve_leaves_members_running_outside(
    group: ControlGroup, sleepers: Callable[..., ProcessId]
) -> None:
    daemon = sleepers(orphan=True)
    group.add(daemon.pid)
    (group.path / "of the job's own").mkdir()
    assert group.members() == [daemon.pid]
    group.dissolve()
    assert not group.path.exists()
    assert daemon.is_alive()


def test_cgroup_is_not_created_under_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program must see the same limits under safelaunch."""
    monkeypatch.setattr(controlgroup, "_own", lambda: tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert controlgroup.create("x") is None
    assert not list(tmp_path.glob("safelaunch-*"))
    (tmp_path / "memory.max").write_text("max\n")
    assert controlgroup.create("x") is None, "not a control group at all: it has no cgroup.kill"
    assert not list(tmp_path.glob("safelaunch-*"))


# --- inside the job ---------------------------------------------------------------------------------------------------


def test_rank_is_killed_when_last_keeper_ends(run: RunPaths) -> None:
    """A rank that never releases the GIL is killed too, but not before the last keeper has ended."""
    os.mkfifo(run.keepers)
    source = f"""
        from safelaunch.beacon import lifeline
        lifeline.end_with_keepers({os.fspath(run.root)!r})
        print(flush=True)
        while True:
            pass
    """
    keepers = [os.open(run.keepers, os.O_RDWR | os.O_CLOEXEC) for _ in range(2)]
    rank = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    os.close(keepers[0])
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.2)
    os.close(keepers[1])
    assert rank.wait(30) == -signal.SIGKILL
    rank.stdout.close()


def test_beacon_without_lifelines_logs_nothing(run: RunPaths) -> None:
    source = f"""
        from safelaunch.beacon import lifeline, log
        log.run_dir = {os.fspath(run.root)!r}
        lifeline.end_with_keepers(log.run_dir)
        lifeline.watch(log.run_dir, "rank")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (run.root / "beacon.log").exists()
