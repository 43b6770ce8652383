"""Healthy training jobs of other shapes than ``rhythms.py`` has (``--how``): usual activities between steps.

Each is quiet for some seconds now and then, and alive all the time. ``--starved`` makes it short of CPU: ``nice`` lets
busy neighbours go first, ``crowd`` shares the cores with more of them, ``quota`` limits the control group (root).
"""

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, Dataset
from training import Training, parser

parser.add_argument("--starved", default="", choices=("", "nice", "crowd", "quota"))
options = parser.parse_args()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SCRATCH = Path(options.scratch)
STEPS = 90
BURN = "import time\nend = time.time() + {}\nwhile time.time() < end: pass"
LINES = "import sys, time\nfor n in range({}):\n time.sleep(1)\n print('{{:060d}}'.format(n), flush=True)\nprint('end', flush=True)"


def compute(seconds: float) -> None:
    end, weights = time.monotonic() + seconds, torch.randn(64, 64)
    while time.monotonic() < end:
        weights = (weights @ weights).clamp(-1, 1)


def train(job: Training, steps: int = STEPS, length: float = 0.05):
    for step, batch in job.batches():
        if step > steps:
            return
        job.train(batch)
        time.sleep(length)
        yield step


def in_background(code: str, *more: str) -> subprocess.Popen[bytes]:
    """Starts a process that isn't a child of the job: it writes where ``more`` says."""
    return subprocess.Popen([sys.executable, "-c", code, *more], start_new_session=True)


# --- checkpoints and evaluations --------------------------------------------------------------------------------------


def saves_in_a_thread(job: Training) -> None:
    """The next save waits for the one before, which is slow."""
    saving = None

    def save(state: dict, number: int) -> None:
        with open(SCRATCH / f"async-{RANK}-{number}", "wb") as file:
            for _ in range(16):
                torch.save(state, file)
                os.fsync(file.fileno())
                time.sleep(0.4)

    for step in train(job):
        if step % 20 == 0:
            if saving is not None:
                saving.join()
            state = {name: value.clone() for name, value in job.model.state_dict().items()}
            saving = threading.Thread(target=save, args=(state, step))
            saving.start()
    saving.join()


def polls_for_the_evaluation(job: Training) -> None:
    """Rank 0 evaluates, and the others look every half second whether its result is there."""
    for step in train(job):
        if step % 45:
            continue
        result = SCRATCH / f"metrics-{step}"
        if RANK == 0:
            compute(7.0)
            result.write_text("0.93")
        while not result.exists():
            time.sleep(0.5)


def writes_a_large_file(job: Training) -> None:
    for step in train(job):
        if step % 45 == 0 and RANK == WORLD - 1:
            with open(SCRATCH / "large", "wb") as file:
                for _ in range(24):
                    file.write(os.urandom(4 << 20))
                    file.flush()
                    os.fsync(file.fileno())
                    time.sleep(0.25)


def joins_uneven_inputs(job: Training) -> None:
    """Rank 0 has twice as many batches; the others shadow its collectives."""
    with Join([job.model]):
        for _ in train(job, STEPS if RANK == 0 else STEPS // 2):
            if RANK == 0:
                time.sleep(0.1)


# --- data -------------------------------------------------------------------------------------------------------------


def reads_a_slow_tokenizer(job: Training) -> None:
    for step in train(job):
        if step % 45 == 0:
            with subprocess.Popen([sys.executable, "-c", LINES.format(9)], stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                while child.stdout.readline() != "end\n":
                    pass


def reads_a_slow_pipe(job: Training) -> None:
    """A line of 60 bytes each second, from a process that is not the rank's."""
    for step in train(job):
        if step == 45 and RANK == 0:
            fifo = SCRATCH / "lines"
            os.mkfifo(fifo)
            in_background(f"import sys\nsys.stdout = open(sys.argv[1], 'w')\n{LINES.format(12)}", str(fifo))
            with open(fifo) as lines:
                while lines.readline() != "end\n":
                    pass


def tails_a_growing_file(job: Training) -> None:
    for step in train(job):
        if step == 45 and RANK == WORLD - 1:
            grown = SCRATCH / "growing"
            grown.touch()
            in_background(f"import sys\nsys.stdout = open(sys.argv[1], 'a')\n{LINES.format(12)}", str(grown))
            with open(grown) as lines:
                while (line := lines.readline()) != "end\n":
                    if not line:
                        time.sleep(0.4)


class Items(Dataset):
    def __init__(self, first_s: float = 0.0) -> None:
        self.first_s = first_s

    def __len__(self) -> int:
        return 8 * 30

    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(int(self.first_s / 0.5) if index == 0 else 0):
            time.sleep(0.5)
        return torch.zeros(32)


def has_a_slow_first_batch(job: Training) -> None:
    loader = DataLoader(Items(7.0), batch_size=8, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for batch in loader:
            job.train(batch)
            time.sleep(0.05)


def makes_a_loader_each_epoch(job: Training) -> None:
    for _ in range(4):
        for batch in DataLoader(Items(), batch_size=8, num_workers=2, worker_init_fn=lambda _: time.sleep(1.5)):
            job.train(batch)
            time.sleep(0.05)


def reads_a_mapped_file(job: Training) -> None:
    path = SCRATCH / f"mapped-{RANK}"
    path.write_bytes(os.urandom(32 << 20))
    for step in train(job):
        if step % 45 == 0:
            end = time.monotonic() + 6.0
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                while time.monotonic() < end:
                    sum(pages[at] for at in range(0, len(pages), 4096))


# --- the loop itself --------------------------------------------------------------------------------------------------


def accumulates_without_sync(job: Training) -> None:
    for step in train(job, 30):
        for _ in range(8):
            with job.model.no_sync():
                job.model(torch.randn(8, 32)).sum().backward()
            time.sleep(0.1 if step % 10 else 0.7)


def trains_in_a_thread(job: Training) -> None:
    def loop() -> None:
        for step in train(job):
            if step % 45 == 0:
                compute(6.0)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def throttles_itself(job: Training) -> None:
    for step in train(job, 60):
        for _ in range(12 if step % 20 == 0 else 1):
            time.sleep(0.3)


def seeks_a_learning_rate(job: Training) -> None:
    """Makes no step of the optimizer."""
    for step in train(job):
        if step % 45 == 0:
            for _ in range(20):
                loss = job.model(torch.randn(8, 32)).pow(2).mean()
                loss.backward()
                dist.all_reduce(loss.detach())
                compute(0.3)


def compiles_in_a_pool(job: Training) -> None:
    for step in train(job):
        if step == 45:
            with ProcessPoolExecutor(1) as pool:
                pool.submit(compute, 7.0).result()


def runs_an_event_loop(job: Training) -> None:
    async def rollouts() -> None:
        async def one() -> None:
            for _ in range(28):
                await asyncio.sleep(0.2)
                sum(range(200_000))

        await asyncio.gather(*(one() for _ in range(6)))

    for step in train(job):
        if step % 45 == 0:
            asyncio.run(rollouts())


def has_a_timer(job: Training) -> None:
    """A signal every 0.2 s, as a sampling profiler uses it."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    for step in train(job):
        if step % 45 == 0:
            compute(6.0)
    signal.setitimer(signal.ITIMER_REAL, 0)


# --- between ranks ----------------------------------------------------------------------------------------------------


def passes_objects(job: Training) -> None:
    for step in train(job):
        if step % 20 == 0:
            found: list[object] = [None] * WORLD
            dist.all_gather_object(found, {"rank": RANK, "loss": 0.1 * step})
            if RANK == 0:
                compute(5.5)
            dist.broadcast_object_list(found, src=0)


def talks_through_sockets(job: Training) -> None:
    """Rank 0 answers each other rank's line, and thinks for a while about some."""
    place = SCRATCH / "port"
    if RANK == 0:
        server = socket.create_server(("127.0.0.1", 0))
        (SCRATCH / "port.new").write_text(str(server.getsockname()[1]))
        os.rename(SCRATCH / "port.new", place)
        others = [server.accept()[0].makefile("rw") for _ in range(WORLD - 1)]
    else:
        while not place.exists():
            time.sleep(0.1)
        others = [socket.create_connection(("127.0.0.1", int(place.read_text()))).makefile("rw")]
    for step in train(job):
        if RANK == 0 and step % 45 == 0:
            compute(6.0)
        for other in others:
            if RANK:
                other.write(f"{step}\n")
                other.flush()
                other.readline()
            else:
                other.write(other.readline())
                other.flush()


def waits_for_a_key(job: Training) -> None:
    store = dist.distributed_c10d._get_default_store()
    for step in train(job):
        if step % 45 == 0:
            if RANK == WORLD - 1:
                compute(6.0)
                store.set(f"vocabulary-{step}", "made")
            store.wait([f"vocabulary-{step}"])


def sweeps() -> None:
    """Three trainings in one process, each with a separate process group."""
    for number in range(3):
        store = dist.FileStore(str(SCRATCH / f"store-{number}"), WORLD)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0**-number)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 32)).pow(2).mean().backward()
            optimizer.step()
            time.sleep(0.05)
        compute(5.5)
        dist.barrier()
        time.sleep(0.2)
        dist.destroy_process_group()


SHAPES = {
    "async-checkpoint": saves_in_a_thread, "polled-evaluation": polls_for_the_evaluation,
    "large-file": writes_a_large_file, "uneven-join": joins_uneven_inputs, "tokenizer": reads_a_slow_tokenizer,
    "slow-pipe": reads_a_slow_pipe, "growing-file": tails_a_growing_file, "first-batch": has_a_slow_first_batch,
    "new-loader": makes_a_loader_each_epoch, "mapped-file": reads_a_mapped_file,
    "no-sync": accumulates_without_sync, "thread": trains_in_a_thread, "throttle": throttles_itself,
    "rate-finder": seeks_a_learning_rate, "pool": compiles_in_a_pool, "event-loop": runs_an_event_loop,
    "timer": has_a_timer, "objects": passes_objects, "sockets": talks_through_sockets, "key": waits_for_a_key,
}  # fmt: skip


@contextlib.contextmanager
def starved(how: str):
    """``nice`` and ``crowd``: rank 0 starts busy neighbours, more than there are cores."""
    number = {"nice": 2, "crowd": 6}.get(how, 0) if RANK == 0 else 0
    busy = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"
    neighbours = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(number)]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [(one.kill(), one.wait()) for one in neighbours])
        if how == "nice":
            os.nice(19)
        if how == "quota":
            stack.enter_context(half_a_core())
        yield


@contextlib.contextmanager
def half_a_core():
    """Limits this rank, if permitted."""
    groups = Path("/sys/fs/cgroup")
    mine = groups / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    limited = mine / f"everyday-{os.getpid()}"
    try:
        limited.mkdir()
        (limited / "cpu.max").write_text("50000 100000")
        (limited / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with contextlib.suppress(OSError):
            limited.rmdir()
        yield
        return
    try:
        yield
    finally:
        (mine / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            limited.rmdir()


def main() -> None:
    with starved(options.starved):
        if options.how == "sweep":
            sweeps()
        else:
            with Training(options) as job:
                SHAPES[options.how](job)
                dist.barrier()
        print(f"rank {RANK} trained\n", end="", flush=True)


if __name__ == "__main__":
    main()
