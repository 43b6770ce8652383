"""Waits for children and grandchildren."""

import http.client
import lzma
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

from .table import Spell, case, until

SPIN = (
    "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: sum(range(1000))\nprint('done')"
)


def spin(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return "done"


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


# --- subprocess and its like ------------------------------------------------------------------------------------------


@case()
def lines_of_a_child(spell: Spell) -> None:
    code = f"for n in 1 2 3; do sleep {spell.quiet / 3}; echo line $n; done"
    with subprocess.Popen(["bash", "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)][-1] == "line 3\n"


@case()
def run_of_a_sleep(spell: Spell) -> None:
    subprocess.run(["sleep", str(spell.quiet)], check=True)


@case(works=True)
def check_output_of_a_spinning_child(spell: Spell) -> None:
    assert subprocess.check_output([sys.executable, "-c", SPIN, str(spell.quiet)]) == b"done\n"


@case()
def communicate_with_input(spell: Spell) -> None:
    with subprocess.Popen(
        ["sh", "-c", f"sleep {spell.quiet}; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.communicate(b"text")[0] == b"text"


@case()
def wait_with_timeouts(spell: Spell) -> None:
    with subprocess.Popen(["sleep", str(spell.quiet)]) as child:
        while True:
            try:
                assert child.wait(timeout=1.0) == 0
                return
            except subprocess.TimeoutExpired:
                pass


@case()
def a_child_polled(spell: Spell) -> None:
    with subprocess.Popen(["sleep", str(spell.quiet)]) as child:
        while child.poll() is None:
            time.sleep(0.5)


@case()
def a_pipeline_of_the_shell(spell: Spell) -> None:
    line = f"(sleep {spell.quiet}; echo 3; echo 1) | sort | head -n 1"
    assert subprocess.run(line, shell=True, stdout=subprocess.PIPE, check=True).stdout == b"1\n"


@case()
def os_system(spell: Spell) -> None:
    assert os.system(f"sleep {spell.quiet}") == 0


@case()
def os_popen(spell: Spell) -> None:
    assert os.popen(f"sleep {spell.quiet}; echo done").read() == "done\n"


@case()
def fork_and_waitpid(spell: Spell) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(spell.quiet)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@case()
def posix_spawn_and_waitid(spell: Spell) -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", str(spell.quiet)], os.environ)
    assert os.waitid(os.P_PID, child, os.WEXITED).si_status == 0


@case()
def a_pidfd(spell: Spell) -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", str(spell.quiet)], os.environ)
    assert select.select([os.pidfd_open(child)], [], [])[0]
    os.waitpid(child, 0)


@case()
def a_daemon_of_two_forks(spell: Spell) -> None:
    """It leaves its result in a file."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(spell.quiet)
            spell.say("daemon", "result")
        os._exit(0)
    os.waitpid(child, 0)
    assert spell.said("daemon") == "result"


@case()
def a_signal_of_a_child(spell: Spell) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGCHLD, lambda *_: ended.set())
    with subprocess.Popen(["sleep", str(spell.quiet)]):
        ended.wait()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@case()
def a_socketpair_with_a_fork(spell: Spell) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        time.sleep(spell.quiet)
        theirs.send(b"done")
        os._exit(0)
    assert ours.recv(16) == b"done"
    os.waitpid(child, 0)


@case(needs=("pexpect",))
def pexpect_expects(spell: Spell) -> None:
    import pexpect

    child = pexpect.spawn(
        "bash", ["-c", f"sleep {spell.quiet}; echo password:; read answer; echo $answer"], timeout=600
    )
    child.expect("password:")
    child.sendline("word")
    child.expect(pexpect.EOF)


@case()
def http_answer_of_a_child(spell: Spell) -> None:
    """The service that it started answers late."""
    code = (
        "import http.server, sys, time\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        " def do_GET(self):\n"
        "  time.sleep(float(sys.argv[1])); self.send_response(200); self.end_headers(); self.wfile.write(b'0.93')\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Answer)\n"
        "print(server.server_port, flush=True); server.handle_request()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(spell.quiet)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(child.stdout.readline()))
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"0.93"


# --- multiprocessing --------------------------------------------------------------------------------------------------


def _put(items, seconds: float) -> None:  # type: ignore[no-untyped-def]
    time.sleep(seconds)
    items.put(7)


@case()
def a_queue_of_a_spawned_process(spell: Spell) -> None:
    context = multiprocessing.get_context("spawn")
    items = context.Queue()
    child = context.Process(target=_put, args=(items, spell.quiet))
    child.start()
    assert items.get() == 7
    child.join()


def _set(ready, seconds: float) -> None:  # type: ignore[no-untyped-def]
    time.sleep(seconds)
    ready.set()


@case()
def an_event_of_a_spawned_process(spell: Spell) -> None:
    """A server that loads before it is ready."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_set, args=(ready, spell.quiet))
    child.start()
    ready.wait()
    child.join()


def _release(lock, seconds: float) -> None:  # type: ignore[no-untyped-def]
    time.sleep(seconds)
    lock.release()


@case()
def a_lock_of_a_forkserver(spell: Spell) -> None:
    context = multiprocessing.get_context("forkserver")
    lock = context.Lock()
    lock.acquire()
    child = context.Process(target=_release, args=(lock, spell.quiet))
    child.start()
    lock.acquire()
    child.join()


def _probe(connection, seconds: float) -> None:  # type: ignore[no-untyped-def]
    signal.setitimer(signal.ITIMER_REAL, seconds)  # without a handler: it ends this process
    connection.recv()


@case()
def a_child_that_its_timer_ends(spell: Spell) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_probe, args=(theirs, spell.quiet))
    child.start()
    child.join()
    ours.close()
    assert child.exitcode == -signal.SIGALRM


@case()
def a_command_under_a_time_budget(spell: Spell) -> None:
    with subprocess.Popen(["timeout", str(spell.quiet), "cat"], stdin=subprocess.PIPE) as command:
        assert command.wait() == 124


@case()
def a_manager(spell: Spell) -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        items = manager.Queue()
        thread = threading.Timer(spell.quiet, items.put, (7,))
        thread.start()
        assert items.get() == 7
        thread.join()


@case()
def imap_of_a_pool(spell: Spell) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert list(pool.imap(nap, [spell.quiet / 2] * 4)) == [spell.quiet / 2] * 4


def _compress(seconds: float) -> int:
    end, data, total = time.monotonic() + seconds, os.urandom(1 << 18), 0
    while time.monotonic() < end:
        total = len(lzma.compress(data))
    return total


@case(works=True)
def a_pool_compresses(spell: Spell) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert all(pool.map(_compress, [spell.quiet] * 2))


@case()
def map_async_polled(spell: Spell) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        result = pool.map_async(nap, [spell.quiet] * 2)
        while not result.ready():
            result.wait(1.0)
        assert result.get() == [spell.quiet] * 2


@case()
def a_process_joined(spell: Spell) -> None:
    child = multiprocessing.get_context("fork").Process(target=nap, args=(spell.quiet,))
    child.start()
    child.join()
    assert child.exitcode == 0


def _send(pipe, seconds: float) -> None:  # type: ignore[no-untyped-def]
    time.sleep(seconds)
    pipe.send({"loss": 0.1})


@case()
def a_pipe_polled(spell: Spell) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, spell.quiet))
    child.start()
    while not ours.poll(1.0):
        pass
    assert ours.recv() == {"loss": 0.1}
    child.join()


def _set(event, seconds: float) -> None:  # type: ignore[no-untyped-def]
    time.sleep(seconds)
    event.set()


@case()
def an_event_of_a_process(spell: Spell) -> None:
    context = multiprocessing.get_context("fork")
    event = context.Event()
    child = context.Process(target=_set, args=(event, spell.quiet))
    child.start()
    assert event.wait(600)
    child.join()


@case()
def a_semaphore_of_an_orphan(spell: Spell) -> None:
    """The rank's child has started it, and has ended."""
    semaphore = multiprocessing.get_context("fork").Semaphore(0)
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(spell.quiet)
            semaphore.release()
        os._exit(0)
    os.wait()
    semaphore.acquire()


@case()
def an_executor_of_processes_naps(spell: Spell) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(nap, spell.quiet).result() == spell.quiet


@case(works=True)
def a_queue_from_a_thread_from_a_pool(spell: Spell) -> None:
    """The main thread waits for a queue, its filler for a pool, and the pool computes."""
    batches: queue.Queue[str] = queue.Queue()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        threading.Thread(target=lambda: batches.put(pool.submit(spin, spell.quiet).result())).start()
        assert batches.get() == "done"


@case()
def a_queue_from_a_thread_from_a_child(spell: Spell) -> None:
    lines: queue.Queue[bytes] = queue.Queue()
    with subprocess.Popen(["sh", "-c", f"sleep {spell.quiet}; echo done"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        threading.Thread(target=lambda: lines.put(child.stdout.readline())).start()  # type: ignore[union-attr]
        assert lines.get() == b"done\n"


# --- many of them -----------------------------------------------------------------------------------------------------


def _children(spell: Spell, number: int) -> None:
    children = [subprocess.Popen(["sleep", str(spell.quiet)]) for _ in range(number)]
    assert [child.wait() for child in children] == [0] * number


@case()
def thirty_two_children(spell: Spell) -> None:
    _children(spell, 32)


@case(on="all", ranks=4)
def sixty_children_of_each(spell: Spell) -> None:
    _children(spell, 60)


@case(works=True)
def a_storm_of_forks(spell: Spell) -> None:
    while spell.lasts:
        subprocess.run(["true"], check=True)


@case(works=True)
def bare_forks(spell: Spell) -> None:
    while spell.lasts:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.005)


@case(works=True)
def a_shell_loop(spell: Spell) -> None:
    """A preprocessing script of many short commands."""
    line = (
        f"end=$(($(date +%s) + {int(spell.quiet)})); while [ $(date +%s) -lt $end ]; do ls / | wc -l >/dev/null; done"
    )
    subprocess.run(["bash", "-c", line], check=True)


@case()
def a_child_that_naps_between_spins(spell: Spell) -> None:
    code = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end:\n sum(range(10**6)); time.sleep(2)"
    subprocess.run([sys.executable, "-c", code, str(spell.quiet)], check=True)


@case()
def a_grandchild_waited_for_by_file(spell: Spell) -> None:
    done = spell.scratch / "grandchild"
    subprocess.run(["sh", "-c", f"(sleep {spell.quiet}; touch {done}) & true"], check=True)
    until(done.exists, 600)
