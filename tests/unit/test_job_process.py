"""Signals to real processes of the job, and only to these."""

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

from safelaunch.job import process
from safelaunch.job.process import ProcessId, descendants, end_all, identify
from tests.support.waiting import until

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts Python programs; each prints the pids of its children on a line when all are ready."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(source)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        below = descendants([child.pid])
        child.kill()
        for left in below:
            left.send(signal.SIGKILL)
        child.communicate()


SLEEP = "import time; time.sleep(1000)"


def python(source: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def who(child: subprocess.Popen[str]) -> ProcessId:
    identity = identify(child.pid)
    assert identity is not None
    return identity


def line(child: subprocess.Popen[str]) -> list[int]:
    """Reads the pids that a program printed when it was ready."""
    assert child.stdout is not None
    return [int(word) for word in child.stdout.readline().split()]


# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ignored", "hears"), [("SIG_IGN", False), ("SIG_DFL", True)])
def test_job_under_nohup_ignores_sighup(ignored: str, hears: bool) -> None:
    """torchrun handles SIGHUP even if ``nohup`` ignores it, and ends the job."""
    code = f"""if True:
        import os, signal
        from safelaunch.job.process import block_signals
        signal.signal(signal.SIGHUP, signal.{ignored})
        block_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        print(signal.SIGHUP in signal.sigpending())
    """
    assert python(code).stdout == f"{hears}\n"


def test_own_process_is_identified_and_alive() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.pid == os.getpid()
    assert me.is_alive()
    assert not me.is_stopped()
    with open("/proc/self/stat", "rb") as file:
        assert me.start_ticks == int(file.read().rpartition(b")")[2].split()[19])


def test_nonexistent_process_is_neither_identified_nor_alive() -> None:
    assert identify(2**22 + 1) is None
    assert not ProcessId(2**22 + 1, 1).is_alive()
    assert not ProcessId(2**22 + 1, 1).is_stopped()
    assert not ProcessId(2**22 + 1, 1).send(signal.SIGKILL)


def test_process_named_like_stat_format_is_identified(run: Run) -> None:
    child = run("""
        import ctypes, time
        ctypes.CDLL(None).prctl(15, b") Z 1 1 (", 0, 0, 0)  # PR_SET_NAME
        print(1, flush=True)
        time.sleep(1000)
    """)
    line(child)
    with open(f"/proc/{child.pid}/comm") as file:
        assert file.read() == ") Z 1 1 (\n"
    assert who(child).is_alive()
    assert ProcessId(child.pid, who(child).start_ticks) in descendants([os.getpid()])


@pytest.mark.parametrize("off", [-1, +1])
@pytest.mark.parametrize("pidfd", [True, False])
def test_recycled_pid_is_never_signalled(run: Run, off: int, pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the same pid and another start time is another process."""
    if not pidfd:  # kernel older than 5.3

        def missing(pid: int, flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)
    child = run(SLEEP)
    impostor = ProcessId(child.pid, who(child).start_ticks + off)
    assert not impostor.is_alive()
    assert not impostor.send(signal.SIGKILL)
    assert not end_all(impostor, list, grace_s=0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    assert who(child).send(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL


def test_process_that_ends_before_signal_is_not_signalled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run(SLEEP)
    target = who(child)
    alive = ProcessId.is_alive

    def then_gone(self: ProcessId) -> bool:
        answer = alive(self)
        child.kill()
        child.wait(30)
        return answer

    monkeypatch.setattr(ProcessId, "is_alive", then_gone)
    assert not target.send(signal.SIGTERM)


def test_zombie_is_neither_alive_nor_signalled(run: Run) -> None:
    child = run("")
    zombie = who(child)
    until(lambda: not zombie.is_alive())
    assert identify(child.pid) == zombie, "it still has its identity"
    assert not zombie.send(signal.SIGTERM)


def test_stopped_process_is_alive_and_stopped(run: Run) -> None:
    child = run(SLEEP)
    target = who(child)
    assert target.send(signal.SIGSTOP)
    until(target.is_stopped)
    assert target.is_alive()
    assert target.send(signal.SIGCONT)
    until(lambda: not target.is_stopped())


# --- descendants ------------------------------------------------------------------------------------------------------

TREE = """
    import os, subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    middle = '''if True:
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(1000)
    '''
    other = subprocess.Popen(sleep)
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
    grandchild = int(parent.stdout.readline())
    print(other.pid, parent.pid, grandchild, flush=True)
    time.sleep(1000)
"""


def test_descendants_list_parents_first(run: Run) -> None:
    top = run(TREE)
    other, parent, grandchild = line(top)
    pids = [p.pid for p in descendants([top.pid])]
    assert sorted(pids) == sorted([other, parent, grandchild])
    assert pids.index(parent) < pids.index(grandchild)
    assert [p.pid for p in descendants([parent])] == [grandchild]
    assert [p.pid for p in descendants([parent, top.pid])].count(grandchild) == 1
    assert {p.pid for p in descendants([top.pid], exclude=[parent])} == {other}
    assert all(p == identify(p.pid) for p in descendants([top.pid]))


def test_process_without_children_has_no_descendants(run: Run) -> None:
    child = run("print(1, flush=True);" + SLEEP)
    line(child)
    assert descendants([child.pid]) == ()


def test_descendants_are_breadth_first_and_end_on_cycle() -> None:
    table = {1: (0, 5), 2: (1, 10), 3: (1, 11), 4: (2, 12), 5: (4, 13), 9: (8, 1), 8: (9, 1)}
    assert descendants([1], table=table) == (ProcessId(2, 10), ProcessId(3, 11), ProcessId(4, 12), ProcessId(5, 13))
    assert [descendant.pid for descendant in descendants([9], table=table)] == [8, 9]
    assert descendants([77], table=table) == ()


# --- ending a tree ----------------------------------------------------------------------------------------------------

STUBBORN = """
    import os, signal, subprocess, sys, time
    def start(source, **more):
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal, time\\n" + source + "\\nprint(1, flush=True)\\ntime.sleep(1000)"],
            stdout=subprocess.PIPE, **more,
        )
        child.stdout.readline()
        return child.pid
    signal.signal(signal.SIGTERM, {on_term})
    deaf = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    stopped = start("")
    away = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)", start_new_session=True)
    os.kill(stopped, signal.SIGSTOP)
    print(deaf, stopped, away, flush=True)
    time.sleep(1000)
"""


def everyone(pids: list[int]) -> list[ProcessId]:
    identities = [identify(pid) for pid in pids]
    assert all(identities)
    return [identity for identity in identities if identity is not None]


@pytest.mark.parametrize("on_term", ["signal.SIG_DFL", "signal.SIG_IGN"], ids=["agent obeys", "agent is deaf, too"])
def test_end_all_kills_stubborn_tree(run: Run, on_term: str) -> None:
    """The tree has a child that ignores SIGTERM, a stopped child, and a grandchild in its own session."""
    top = run(STUBBORN.format(on_term=on_term))
    below = everyone(line(top))
    until(below[1].is_stopped)
    agent = who(top)
    obeys = on_term == "signal.SIG_DFL"

    def sleep(seconds: float) -> None:
        if obeys:  # within the grace period, even on a busy machine
            until(lambda: not agent.is_alive())
        time.sleep(seconds)

    left = end_all(
        agent, lambda: descendants([agent.pid]), grace_s=0.05, sleep=sleep, clock=lambda: time.monotonic() / 10
    )
    assert left == ()
    assert not any(p.is_alive() for p in [agent, *below])
    assert top.wait(30) == (-signal.SIGTERM if obeys else -signal.SIGKILL)


def test_end_all_does_not_kill_obedient_tree(run: Run) -> None:
    """The agent gets SIGTERM and enough time to end its children itself."""
    top = run("""
        import signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        def end(signum, frame):
            child.terminate()
            sys.exit(10 if child.wait() == -signal.SIGTERM else 11)
        signal.signal(signal.SIGTERM, end)
        print(child.pid, flush=True)
        time.sleep(1000)
    """)
    (child,) = everyone(line(top))
    agent = who(top)
    assert end_all(agent, lambda: descendants([agent.pid]), grace_s=30.0) == ()
    assert top.wait(30) == 10
    assert not child.is_alive()


def test_end_all_ends_processes_started_during_it(run: Run) -> None:
    """A child handles SIGTERM by starting another process, which ignores it."""
    top = run("""
        import signal, subprocess, sys, time
        def again(signum, frame):
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
            subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        signal.signal(signal.SIGTERM, again)
        print(1, flush=True)
        while True:
            time.sleep(1000)
    """)
    line(top)
    agent = who(top)
    recorded: set[ProcessId] = set()

    def find() -> tuple[ProcessId, ...]:
        members = descendants([agent.pid])
        recorded.update(members)
        return members

    assert end_all(agent, find, grace_s=1.0) == ()
    assert recorded, "it started one"
    assert not any(p.is_alive() for p in [agent, *recorded])


def test_end_all_returns_unkillable_process() -> None:
    """In D state, SIGKILL waits as well. The clock is simulated, so nothing sleeps."""
    clock = iter(range(1000))
    me = identify(os.getpid())
    assert me is not None
    sent: list[int] = []

    class Unkillable(ProcessId):
        __slots__ = ()

        def send(self, signum: int) -> bool:
            sent.append(signum)
            return True

    stuck = Unkillable(me.pid, me.start_ticks)
    left = end_all(stuck, list, grace_s=3.0, sleep=lambda _: None, clock=lambda: float(next(clock)))
    assert left == (stuck,)
    assert sent[0] == signal.SIGTERM
    assert set(sent[1:]) == {signal.SIGKILL}


# --- starting and reaping ---------------------------------------------------------------------------------------------


def test_job_starts_in_own_session_with_default_signals() -> None:
    """A child process is used, because blocked signals would affect the test runner.

    ``cat`` changes no signals itself.
    """
    source = f"""
        import os, signal, sys
        from safelaunch.job import process
        mask = process.block_signals()
        assert set(process.FORWARDED) <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
        argv = [{shutil.which("cat")!r}, "/proc/self/status", "/proc/self/stat", "/proc/self/environ"]
        _, status = os.waitpid(process.start(argv, {{"ONLY": "this"}}, mask), 0)
        sys.exit(process.end_as(status))
    """
    done = python(source)
    assert (done.returncode, done.stderr) == (0, "")
    masks = {name: int(done.stdout.split(f"{name}:\t")[1][:16], 16) for name in ("SigBlk", "SigIgn")}
    # 32 and 33 belong to the C library; pthread_cancel sets them up.
    assert masks["SigBlk"] == 0
    assert masks["SigIgn"] & 0x7FFFFFFF == 0
    pid, _, _, _, group, session = done.stdout.splitlines()[-2].split()[:6]
    assert pid == group == session
    assert done.stdout.endswith("ONLY=this\0")


def test_interrupt_before_exec_reaches_job() -> None:
    """It waits until the child unblocks it, right before the exec."""
    source = f"""
        import os, signal, sys
        from safelaunch.job import process
        mask = process.block_signals()
        interrupt = lambda member: os.kill(member.pid, signal.SIGINT)
        pid = process.start([{shutil.which("sleep")!r}, "60"], {{}}, mask, interrupt)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    done = python(source)
    assert (int(done.stdout), done.stderr) == (-signal.SIGINT, "")


def test_job_does_not_start_if_supervisor_dies_before_recording_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    source = f"""
        import os, signal
        from safelaunch.job import process
        def tell(member):
            print(member.pid, member.start_ticks, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        process.start([{shutil.which("touch")!r}, {str(started)!r}], {{}}, [], tell)
    """
    done = python(source)
    assert done.returncode == -signal.SIGKILL
    member = ProcessId(*map(int, done.stdout.split()))
    until(lambda: not member.is_alive())
    assert not started.exists()


def test_job_that_fails_to_start_reports_reason() -> None:
    source = """
        from safelaunch.job import process
        try:
            process.start(["/no/such/program"], {}, [])
        except OSError as error:
            print(type(error).__name__, error.strerror)
    """
    done = python(source)
    assert (done.stdout, done.stderr) == ("FileNotFoundError No such file or directory\n", "")


def test_reap_returns_status_after_end(run: Run) -> None:
    sleeper = os.posix_spawn(sys.executable, [sys.executable, "-c", SLEEP], dict(os.environ))
    assert process.reap(sleeper) is None
    os.kill(sleeper, signal.SIGKILL)
    status: list[int | None] = []

    def ended() -> bool:
        status.append(process.reap(sleeper))
        return status[-1] is not None

    until(ended)
    assert os.WTERMSIG(status[-1] or 0) == signal.SIGKILL
    assert process.reap(sleeper) == 0, "it is already reaped, and its status is unknown"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT])
def test_end_as_ends_by_same_signal(signum: signal.Signals) -> None:
    source = f"from safelaunch.job.process import end_as; raise SystemExit(end_as({int(signum)}))"
    done = python(source)
    assert (done.returncode, done.stderr) == (-signum, "")


@pytest.mark.parametrize("code", [0, 1, 2, 124, 255])
def test_end_as_returns_exit_code(code: int) -> None:
    assert process.end_as(code << 8) == code


def test_subreaper_adopts_orphans() -> None:
    source = """
        import os, subprocess, sys, time
        from safelaunch.job import process
        process.become_subreaper()
        middle = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '" + \\
            "import time; time.sleep(1000)'], start_new_session=True, stdout=-3, stderr=-3).pid)"
        done = subprocess.run([sys.executable, "-c", middle], capture_output=True, text=True, check=True)
        orphan = int(done.stdout)
        found = {p.pid: p for p in process.descendants([os.getpid()])}
        found[orphan].send(9)
        os.waitpid(orphan, 0)
        print("adopted")
    """
    done = python(source)
    assert (done.stdout, done.stderr) == ("adopted\n", "")
