"""Waits of the standard library: for time, for a thread, for something outside."""

import asyncio
import concurrent.futures
import ctypes
import fcntl
import logging
import logging.handlers
import os
import queue
import sched
import select
import selectors
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .table import Outside, Spell, case, until

# --- time -------------------------------------------------------------------------------------------------------------


@case()
def one_sleep(spell: Spell) -> None:
    time.sleep(spell.quiet)


@case(on="all")
def all_sleep(spell: Spell) -> None:
    time.sleep(spell.quiet)


@case(ranks=4)
def sleeps_in_a_loop(spell: Spell) -> None:
    while spell.lasts:
        time.sleep(0.5)


@case()
def usleep_in_c(spell: Spell) -> None:
    libc = ctypes.CDLL(None)
    while spell.lasts:
        libc.usleep(900_000)


@case()
def a_scheduler(spell: Spell) -> None:
    done = []
    plan = sched.scheduler()
    for number in range(4):
        plan.enter(spell.quiet * (number + 1) / 4, 1, done.append, (number,))
    plan.run()
    assert done == [0, 1, 2, 3]


@case()
def select_as_a_sleep(spell: Spell) -> None:
    select.select([], [], [], spell.quiet)


@case()
def a_deadline_of_backoff(spell: Spell) -> None:
    """Tries again after 1, 2, 4, ... seconds."""
    pause = 1.0
    while spell.lasts:
        time.sleep(min(pause, max(0.0, spell.end_s - time.monotonic())))
        pause *= 2


# --- threads ----------------------------------------------------------------------------------------------------------


@case()
def a_future_polled(spell: Spell) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(time.sleep, spell.quiet)
        while not future.done():
            time.sleep(0.05)


@case()
def a_future_waited_for(spell: Spell) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(time.sleep, spell.quiet / 2), pool.submit(time.sleep, spell.quiet)]
        assert not concurrent.futures.wait(futures).not_done


@case()
def futures_as_completed(spell: Spell) -> None:
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(time.sleep, spell.quiet * part / 3) for part in (1, 2, 3)]
        assert sum(1 for _ in concurrent.futures.as_completed(futures)) == 3


@case()
def a_map_of_threads(spell: Spell) -> None:
    def shard(number: int) -> int:
        time.sleep(spell.quiet / 2)
        return number

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(shard, range(4))) == [0, 1, 2, 3]


@case()
def a_queue_from_a_thread(spell: Spell) -> None:
    batches: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: (time.sleep(spell.quiet), batches.put(7))).start()
    assert batches.get() == 7


@case()
def a_queue_with_timeouts(spell: Spell) -> None:
    batches: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: (time.sleep(spell.quiet), batches.put(7))).start()
    while True:
        try:
            assert batches.get(timeout=1.0) == 7
            return
        except queue.Empty:
            pass


@case()
def a_full_queue(spell: Spell) -> None:
    """The producer waits for the slow consumer."""
    items: queue.Queue[int] = queue.Queue(1)
    got = []

    def consume() -> None:
        for _ in range(4):
            time.sleep(spell.quiet / 4)
            got.append(items.get())

    consumer = threading.Thread(target=consume)
    consumer.start()
    for number in range(4):
        items.put(number)
    consumer.join()
    assert got == [0, 1, 2, 3]


@case()
def an_event_set_by_a_timer(spell: Spell) -> None:
    event = threading.Event()
    threading.Timer(spell.quiet, event.set).start()
    assert event.wait()


@case()
def a_condition_with_a_slow_partner(spell: Spell) -> None:
    ready, condition = [], threading.Condition()

    def partner() -> None:
        time.sleep(spell.quiet)
        with condition:
            ready.append(1)
            condition.notify()

    threading.Thread(target=partner).start()
    with condition:
        assert condition.wait_for(lambda: ready)


@case()
def a_semaphore(spell: Spell) -> None:
    """All permits are with threads that talk to a slow service."""
    permits = threading.Semaphore(2)

    def ask() -> None:
        with permits:
            time.sleep(spell.quiet)

    for _ in range(2):
        threading.Thread(target=ask).start()
    time.sleep(0.2)
    with permits:
        pass


@case()
def a_barrier_of_threads(spell: Spell) -> None:
    barrier = threading.Barrier(3)
    for seconds in (0.1, spell.quiet):
        threading.Thread(target=lambda s=seconds: (time.sleep(s), barrier.wait())).start()
    barrier.wait()


@case()
def a_lock_of_a_sleeping_thread(spell: Spell) -> None:
    lock = threading.Lock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(spell.quiet)

    threading.Thread(target=hold).start()
    held.wait()
    with lock:
        pass


@case(works=True)
def a_lock_of_a_computing_thread(spell: Spell) -> None:
    lock = threading.RLock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            while spell.lasts:
                sum(range(10_000))

    threading.Thread(target=hold).start()
    held.wait()
    with lock:
        pass


@case()
def a_lock_of_a_thread_that_reads(spell: Spell) -> None:
    """Waits for a cache that is filled under its lock, from a slow source."""
    lock, held = threading.Lock(), threading.Event()
    ours, theirs = socket.socketpair()
    threading.Timer(spell.quiet, lambda: theirs.send(b"page")).start()
    found = []

    def fill() -> None:
        with lock:
            held.set()
            found.append(ours.recv(16))

    threading.Thread(target=fill).start()
    held.wait()
    with lock:
        assert found == [b"page"]


@case()
def joins_with_timeouts(spell: Spell) -> None:
    thread = threading.Thread(target=time.sleep, args=(spell.quiet,))
    thread.start()
    while thread.is_alive():
        thread.join(1.0)


@case()
def a_logger_with_a_slow_handler(spell: Spell) -> None:
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    shipped = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(spell.quiet / 4)
            shipped.append(record.getMessage())

    listener = logging.handlers.QueueListener(records, Slow())
    listener.start()
    logger = logging.getLogger("shipped")
    logger.addHandler(logging.handlers.QueueHandler(records))
    for number in range(4):
        logger.warning("metric %d", number)
    listener.stop()
    assert len(shipped) == 4


@case()
def loggings_lock_of_a_slow_handler(spell: Spell) -> None:
    """A thread logs to a slow sink under the handler's lock, and the main thread wants to log, too."""

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(spell.quiet / 2)

    logger = logging.getLogger("slow sink")
    logger.addHandler(Slow())
    thread = threading.Thread(target=logger.warning, args=("from the thread",))
    thread.start()
    time.sleep(0.1)
    logger.warning("from the main thread")
    thread.join()


@case(on="all", ranks=4)
def three_hundred_threads(spell: Spell) -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(300)]
    for thread in threads:
        thread.start()
    time.sleep(spell.quiet)
    done.set()
    for thread in threads:
        thread.join()


# --- asyncio ----------------------------------------------------------------------------------------------------------


@case()
def asyncio_sleep(spell: Spell) -> None:
    asyncio.run(asyncio.sleep(spell.quiet))


@case()
def asyncio_gather_of_threads(spell: Spell) -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(time.sleep, spell.quiet * part / 3) for part in (1, 2, 3)))

    asyncio.run(main())


@case()
def asyncio_event(spell: Spell) -> None:
    async def main() -> None:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(spell.quiet, event.set)
        await event.wait()

    asyncio.run(main())


@case()
def asyncio_queue(spell: Spell) -> None:
    async def main() -> list[int]:
        items: asyncio.Queue[int] = asyncio.Queue()

        async def produce() -> None:
            for number in range(3):
                await asyncio.sleep(spell.quiet / 3)
                await items.put(number)

        task = asyncio.create_task(produce())
        found = [await items.get() for _ in range(3)]
        await task
        return found

    assert asyncio.run(main()) == [0, 1, 2]


@case()
def asyncio_child(spell: Spell) -> None:
    async def main() -> bytes:
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", f"sleep {spell.quiet}; echo done", stdout=asyncio.subprocess.PIPE
        )
        return (await child.communicate())[0]

    assert asyncio.run(main()) == b"done\n"


@case()
def asyncio_in_a_thread(spell: Spell) -> None:
    """Asks an event loop in another thread: run_coroutine_threadsafe(...).result()."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(spell.quiet), loop).result()
    loop.call_soon_threadsafe(loop.stop)


# --- descriptors and signals ------------------------------------------------------------------------------------------


@case()
def select_on_a_pipe(spell: Spell) -> None:
    reader, writer = os.pipe()
    threading.Timer(spell.quiet, lambda: os.write(writer, b"x")).start()
    assert select.select([reader], [], [])[0] == [reader]


@case()
def poll_on_a_socket(spell: Spell) -> None:
    ours, theirs = socket.socketpair()
    threading.Timer(spell.quiet, lambda: theirs.send(b"x")).start()
    poller = select.poll()
    poller.register(ours, select.POLLIN)
    assert poller.poll()


@case()
def epoll_with_timeouts(spell: Spell) -> None:
    ours, theirs = socket.socketpair()
    threading.Timer(spell.quiet, lambda: theirs.send(b"x")).start()
    poller = select.epoll()
    poller.register(ours, select.EPOLLIN)
    while not poller.poll(1.0):
        pass


@case()
def selectors_of_many(spell: Spell) -> None:
    selector = selectors.DefaultSelector()
    pairs = [socket.socketpair() for _ in range(8)]
    for ours, _ in pairs:
        selector.register(ours, selectors.EVENT_READ)
    for _, theirs in pairs:
        threading.Timer(spell.quiet, lambda one=theirs: one.send(b"x")).start()
    got = 0
    while got < 8:
        for key, _ in selector.select():
            got += len(key.fileobj.recv(1))  # type: ignore[union-attr]


@case()
def sigtimedwait(spell: Spell) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    assert signal.sigtimedwait({signal.SIGUSR2}, spell.quiet) is None


@case()
def pause_until_an_alarm(spell: Spell) -> None:
    heard = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, spell.quiet)
    while not heard:
        signal.pause()


def _sends(number: int) -> Callable[[Outside], None]:
    def signal_the_rank(outside: Outside) -> None:
        (pid,) = outside.begun()
        time.sleep(outside.quiet)
        os.kill(pid, number)

    return signal_the_rank


@case(outside=_sends(signal.SIGTERM))
def serves_until_sigterm(spell: Spell) -> None:
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    signal.signal(signal.SIGTERM, before)


@case(outside=_sends(signal.SIGWINCH))
def sigwait_for_one_from_outside(spell: Spell) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    assert signal.sigwait({signal.SIGWINCH}) == signal.SIGWINCH


# --- something outside ------------------------------------------------------------------------------------------------


def _holds_flock(outside: Outside) -> None:
    with open(outside.scratch / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outside.say("held")
        outside.rest()


@case(outside=_holds_flock)
def a_file_lock_held_outside(spell: Spell) -> None:
    spell.said("held")
    with open(spell.scratch / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@case(outside=_holds_flock)
def a_file_lock_tried_again(spell: Spell) -> None:
    spell.said("held")
    with open(spell.scratch / "lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.2)


def _holds_lockf(outside: Outside) -> None:
    with open(outside.scratch / "lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        outside.say("held")
        outside.rest()


@case(outside=_holds_lockf, on="all")
def a_record_lock_held_outside(spell: Spell) -> None:
    spell.said("held")
    with open(spell.scratch / "lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)


def _holds_database(outside: Outside) -> None:
    with sqlite3.connect(outside.scratch / "data.db", isolation_level=None) as base:
        base.execute("create table runs (name text)")
        base.execute("begin immediate")
        base.execute("insert into runs values ('outside')")
        outside.say("held")
        outside.rest()
        base.execute("commit")


@case(outside=_holds_database)
def a_busy_database(spell: Spell) -> None:
    spell.said("held")
    with sqlite3.connect(spell.scratch / "data.db", timeout=600) as base:
        base.execute("insert into runs values ('ours')")
    assert base.execute("select count(*) from runs").fetchone() == (2,)


@case(outside=_holds_database)
def a_busy_database_tried_again(spell: Spell) -> None:
    spell.said("held")
    base = sqlite3.connect(spell.scratch / "data.db", timeout=0.2)
    while True:
        try:
            with base:
                base.execute("insert into runs values ('ours')")
            return
        except sqlite3.OperationalError:
            time.sleep(0.5)


def _makes_file(outside: Outside) -> None:
    outside.rest()
    outside.say("made", "yes")


@case(outside=_makes_file, on="all")
def a_file_made_outside(spell: Spell) -> None:
    while not (spell.scratch / "made").exists():
        time.sleep(1.0)


@case(outside=_makes_file)
def a_file_sought_by_glob(spell: Spell) -> None:
    until(lambda: list(spell.scratch.glob("mad*")), 600)


def _writes_fifo(outside: Outside) -> None:
    outside.rest()
    with open(until(lambda: next(outside.scratch.glob("fifo"), None)), "w") as fifo:
        fifo.write("line\n")


@case(outside=_writes_fifo)
def a_fifo_with_a_late_writer(spell: Spell) -> None:
    os.mkfifo(spell.scratch / "fifo")
    with open(spell.scratch / "fifo") as fifo:
        assert fifo.readline() == "line\n"


@case(outside=_writes_fifo)
def input_from_a_slow_person(spell: Spell) -> None:
    os.mkfifo(spell.scratch / "fifo")
    fifo = os.open(spell.scratch / "fifo", os.O_RDWR)
    os.dup2(fifo, 0)
    import sys

    sys.stdin = os.fdopen(0, closefd=False)
    assert input() == "line"


def _connects(outside: Outside) -> None:
    outside.rest()
    with socket.create_connection(("127.0.0.1", int(outside.said("port")))) as connection:
        connection.sendall(b"task")


@case(outside=_connects)
def accept_with_a_late_client(spell: Spell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        spell.say("port", server.getsockname()[1])
        assert server.accept()[0].recv(4) == b"task"


def _sends_datagram(outside: Outside) -> None:
    outside.rest()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"go", ("127.0.0.1", int(outside.said("port"))))


@case(outside=_sends_datagram)
def a_datagram(spell: Spell) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        spell.say("port", receiver.getsockname()[1])
        assert receiver.recv(16) == b"go"


def _serves_unix(outside: Outside) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(outside.scratch / "unix"))
        server.listen()
        outside.say("port", 0)
        connection = server.accept()[0]
        connection.recv(16)
        time.sleep(outside.quiet)
        connection.sendall(b"answer")


@case(outside=_serves_unix)
def a_unix_socket(spell: Spell) -> None:
    assert spell.port == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.relpath(spell.scratch / "unix"))
        client.sendall(b"question")
        assert client.recv(16) == b"answer"


def _speaks_redis(outside: Outside) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outside.say("port", server.getsockname()[1])
        connection = server.accept()[0]
        assert connection.recv(64).startswith(b"*3\r\n$5\r\nBLPOP")
        time.sleep(outside.quiet)
        connection.sendall(b"*2\r\n$5\r\ntasks\r\n$2\r\n42\r\n")
        connection.recv(1)


@case(outside=_speaks_redis)
def a_blocking_pop_of_redis(spell: Spell) -> None:
    with socket.create_connection(("127.0.0.1", spell.port)) as client, client.makefile("rb") as answer:
        client.sendall(b"*3\r\n$5\r\nBLPOP\r\n$5\r\ntasks\r\n$1\r\n0\r\n")
        assert [answer.readline() for _ in range(5)][-1] == b"42\r\n"
