"""Processes of the job as the supervisor sees them, and the signals that it forwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from safelaunch.job import job
from safelaunch.job.job import Forwarder, JobProcesses
from safelaunch.job.process import Children, ProcessId


class FakeGuardian:
    """Stand-in for the guardian. While ``adopts_orphans``, the first guardian still lives."""

    pid = 0
    group = None
    adopts_orphans = True

    def __init__(self) -> None:
        self.adopted: list[ProcessId] = []

    def adopt(self, member: ProcessId) -> None:
        self.adopted.append(member)


def test_orphans_are_adopted_after_first_guardian_ended() -> None:
    guardian = FakeGuardian()
    processes = JobProcesses(ProcessId(os.getpid(), 0), guardian)  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as orphan:  # not of the job: in its own session
        processes.look_for_orphans()
        assert guardian.adopted == []
        guardian.adopts_orphans = False
        processes.look_for_orphans()
        processes.look_for_orphans()
        assert [process_id.pid for process_id in guardian.adopted] == [orphan.pid], "only once"
        orphan.kill()


def test_children_list_changes_when_child_starts_or_ends() -> None:
    """A separate process is used, because threads of this one might have children in other lists."""
    source = """
        import os, signal
        from safelaunch.job.process import Children
        children = Children()
        print(children.new())
        first = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        print(children.new() == [first], children.new())
        more = [os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}) for _ in range(600)]  # longer than a single read
        print(set(children.new()) == {first, *more}, set(children.new()) == {first, *more})
        for pid in more:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(children.new() in ([first], []), children.new())
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        print(children.new(), children.new())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=120)
    assert (done.stdout.splitlines(), done.stderr) == (["[]", "True []", "True True", "True []", "[] []"], "")


def test_children_are_found_without_kernel_list() -> None:
    children = Children()
    children._list = os.open(os.devnull, os.O_WRONLY)  # cannot be read
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert child.pid in children.new()
        child.kill()
    os.close(children._list)


# --- signals to the job -----------------------------------------------------------------------------------------------

GROUP, ALONE = "its group", "the process"
INT, TERM, QUIT, USR1 = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    signals: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "killpg", lambda pid, signum: signals.append((GROUP, signum)))
    monkeypatch.setattr(os, "kill", lambda pid, signum: signals.append((ALONE, signum)))
    return signals


def test_signals_are_forwarded_to_process_or_group(sent: list[tuple[str, int]]) -> None:
    forwarder = Forwarder(4711)
    forwarder.take(USR1, by_terminal=False)
    assert not forwarder.stop_requested
    forwarder.take(INT, by_terminal=True)
    forwarder.take(TERM, by_terminal=False)
    forwarder.take(QUIT, by_terminal=True)
    assert sent == [(ALONE, USR1), (GROUP, INT), (ALONE, TERM), (GROUP, QUIT)] and forwarder.stops == 3


def test_first_ctrl_c_waits_for_evidence_second_does_not(sent: list[tuple[str, int]]) -> None:
    forwarder = Forwarder(4711, hold=lambda: True)
    forwarder.take(INT, by_terminal=True)
    assert forwarder.holding and forwarder.stop_requested and sent == []
    forwarder.take(USR1, by_terminal=False)
    assert sent == [(ALONE, USR1)], "what does not stop the job is not held back"
    forwarder.take(INT, by_terminal=True)
    assert sent[1:] == [(GROUP, INT)] and not forwarder.holding, "once, and at once"
    forwarder.release()
    forwarder.take(INT, by_terminal=True)
    assert sent[2:] == [(GROUP, INT)], "a third one is another one"


def test_held_signal_is_sent_before_next_signal(sent: list[tuple[str, int]]) -> None:
    forwarder = Forwarder(4711, hold=lambda: True)
    forwarder.take(INT, by_terminal=False)
    forwarder.take(TERM, by_terminal=False)
    assert sent == [(ALONE, INT), (ALONE, TERM)]


def test_only_first_ctrl_c_can_be_held(sent: list[tuple[str, int]]) -> None:
    forwarder = Forwarder(4711, hold=lambda: True)
    forwarder.take(TERM, by_terminal=False)
    forwarder.take(INT, by_terminal=True)
    assert sent == [(ALONE, TERM), (GROUP, INT)]
    healthy = Forwarder(4711, hold=lambda: False)
    healthy.take(INT, by_terminal=True)
    assert sent[2:] == [(GROUP, INT)] and not healthy.holding


def test_ctrl_backslash_requests_dump_but_sent_sigquit_does_not(sent: list[tuple[str, int]]) -> None:
    asked: list[str] = []
    forwarder = Forwarder(4711, on_quit=lambda: asked.append("dump"))
    forwarder.take(QUIT, by_terminal=True)
    assert (asked, sent, forwarder.stop_requested) == (["dump"], [], False)
    forwarder.take(QUIT, by_terminal=False)
    assert sent == [(ALONE, QUIT)] and forwarder.stop_requested
    forwarder.take(QUIT, by_terminal=True)
    assert asked == ["dump"] and sent[1:] == [(GROUP, QUIT)], "the user wants it to end by now"


def test_held_signal_is_sent_after_limit(sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "HOLD_S", 0.0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        forwarder = Forwarder(4711, hold=lambda: True)
        forwarder.take(INT, by_terminal=True)
        forwarder.wait(0.001)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert sent == [(GROUP, INT)] and not forwarder.holding


@pytest.mark.parametrize(
    ("signals", "apart_s", "expected"),
    [
        ((signal.SIGINT, signal.SIGINT), 1.0, True),
        ((signal.SIGINT, signal.SIGINT), 0.01, False),  # sent to the process and to its group
        ((signal.SIGTERM, signal.SIGINT), 1.0, False),
        ((signal.SIGINT, signal.SIGTERM), 1.0, False),
        ((signal.SIGTERM, signal.SIGTERM), 1.0, False),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 1.0, True),
    ],
)
def test_second_ctrl_c_insists(
    monkeypatch: pytest.MonkeyPatch, signals: tuple[int, ...], apart_s: float, expected: bool
) -> None:
    now = iter(100.0 + apart_s * number for number in range(100))
    monkeypatch.setattr("safelaunch.job.job.time.monotonic", lambda: next(now))
    forwarder = Forwarder(None)
    for number in signals:
        forwarder.take(number, by_terminal=True)
    assert forwarder.insists is expected
