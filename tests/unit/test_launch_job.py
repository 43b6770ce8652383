"""The job's processes as the supervisor sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from safelaunch.launch.job import JobProcesses
from safelaunch.launch.process import Children, ProcessId


class FakeGuardian:
    """``adopts_orphans``: whether the first guardian, the job's parent, still lives."""

    pid = 0
    group = None
    adopts_orphans = True

    def __init__(self) -> None:
        self.adopted: list[ProcessId] = []

    def adopt(self, member: ProcessId) -> None:
        self.adopted.append(member)


def test_orphans_are_looked_for_once_the_first_guardian_is_gone() -> None:
    guardian = FakeGuardian()
    processes = JobProcesses(ProcessId(os.getpid(), 0), guardian)  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as orphan:  # not ours: in a session of its own
        processes.look_for_orphans()
        assert guardian.adopted == []
        guardian.adopts_orphans = False
        processes.look_for_orphans()
        processes.look_for_orphans()
        assert [one.pid for one in guardian.adopted] == [orphan.pid], "once"
        orphan.kill()


def test_children_are_listed_again_when_one_has_come_or_gone() -> None:
    """In a process of its own: this one may have threads, whose children another list has."""
    source = """
        import os, signal
        from safelaunch.launch.process import Children
        children = Children()
        print(children.new())
        first = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        print(children.new() == [first], children.new())
        more = [os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}) for _ in range(600)]  # longer than one read
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


def test_a_kernel_without_lists_of_children_is_searched() -> None:
    children = Children()
    children._list = os.open(os.devnull, os.O_WRONLY)  # cannot be read
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert child.pid in children.new()
        child.kill()
    os.close(children._list)
