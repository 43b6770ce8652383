"""Training in each kind of healthy rhythm (``--how``), to its end or until it freezes (``--freeze``)."""

import atexit
import gzip
import os
import random
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from training import Training, parser

import safelaunch

parser.add_argument("--freeze", default="", help="how it freezes: sleep, lock, read, mismatch, loader, spin, raise")
parser.add_argument("--length", type=float, default=0.1, help="duration of a normal step in seconds")
parser.add_argument("--quiet", type=float, default=0.0, help="duration of an evaluation in seconds")
parser.add_argument("--busy-thread", action="store_true", help="run a logger and profiler thread")
options = parser.parse_args()
RANK = int(os.environ["RANK"])
dice = random.Random(4711)  # the same for all ranks


def compute(seconds: float) -> None:
    end, weights = time.monotonic() + seconds, torch.randn(64, 64)
    while time.monotonic() < end:
        weights = (weights @ weights).clamp(-1, 1)


def save(megabytes: int, name: str) -> None:
    path = os.path.join(options.scratch, f"{name}-{RANK}")
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1 << 20))
    os.unlink(path)


def download(seconds: float) -> None:
    """Waits for a download that looks frozen: no byte arrives before its end."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    there, _ = server.accept()
    threading.Timer(seconds, lambda: there.send(b"x")).start()
    client.recv(1)


class SlowSamples(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if options.freeze == "loader" and index >= 8 * options.after and RANK == options.culprit:
            time.sleep(86_400)  # FREEZES: loader
        if options.how == "slow-loader":
            time.sleep(4.0 if index > 30 else 0.01)
        return torch.zeros(32)


def log_for_ever() -> None:
    with open(os.path.join(options.scratch, f"log-{RANK}"), "w") as file:
        while True:
            file.write(f"{time.time()} utilisation {dice.random()}\n" * 50)
            file.flush()
            sum(i * i for i in range(20_000))
            time.sleep(0.02)


# What a rhythm does in addition to the normal step, by name. Called with the step's number.


def nothing(step: int) -> None:
    time.sleep(options.length)


def bimodal(step: int) -> None:
    time.sleep(options.length * (8 if dice.random() < 0.1 else 1))


def accumulating(step: int) -> None:
    time.sleep(options.length * (6 if step % 8 == 0 else 1))


def curriculum(step: int) -> None:
    time.sleep(options.length * (1 + step / 40))


def evaluating(step: int) -> None:
    nothing(step)
    if step % 40 == 0:
        compute(options.quiet or 6.0)


def evaluating_aloud(step: int) -> None:
    nothing(step)
    if step % 50 == 0:
        for number in range(60):
            compute(0.1)
            print(f"eval {number}", flush=True)


def rank_0_evaluates(step: int) -> None:
    nothing(step)
    if step % 50 == 0:
        if RANK == 0:
            compute(options.quiet or 7.0)
        dist.barrier()


def rank_0_saves(step: int) -> None:
    nothing(step)
    if step % 50 == 0:
        if RANK == 0:
            for _ in range(8):
                save(40, "rank-0")
                compute(0.5)
        dist.barrier()


def all_save(step: int) -> None:
    nothing(step)
    if step % 30 == 0:
        save(60, "all")


def compresses(step: int) -> None:
    nothing(step)
    if step % 60 == 0 and RANK == 0:
        for _ in range(6):
            gzip.compress(os.urandom(8 << 20), 9)


def child_evaluates(step: int) -> None:
    nothing(step)
    if step % 60 == 0 and RANK == 0:
        code = f"import time\ne=time.time()+{options.quiet or 7}\nwhile time.time()<e: pass"
        subprocess.run([sys.executable, "-c", code], check=True)


def timed_phase(step: int) -> None:
    nothing(step)
    if step % 60 == 0:
        with safelaunch.phase("download", timeout=30):
            time.sleep(9.0)


def pausing(step: int) -> None:
    nothing(step)
    if step % 60 == 0:
        with safelaunch.pause():
            time.sleep(9.0)


def one_hiccup(step: int) -> None:
    time.sleep(4.0 if step == 70 else options.length)


def slow_disk(step: int) -> None:
    nothing(step)
    if step % 60 == 0 and RANK == 0:
        with open(os.path.join(options.scratch, "slow"), "wb") as file:
            for _ in range(14):
                file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
                time.sleep(0.5)


def downloading(step: int) -> None:
    nothing(step)
    if step == 60 and RANK == 0:
        download(20.0)


RHYTHMS = {
    "steady": nothing, "bimodal": bimodal, "accumulating": accumulating, "curriculum": curriculum,
    "evaluating": evaluating, "evaluating-aloud": evaluating_aloud, "rank-0-evaluates": rank_0_evaluates,
    "rank-0-saves": rank_0_saves, "all-save": all_save, "compresses": compresses, "child-evaluates": child_evaluates,
    "timed-phase": timed_phase, "pausing": pausing, "one-hiccup": one_hiccup, "slow-disk": slow_disk,
    "downloading": downloading, "long-start": nothing, "long-first-step": nothing, "long-tail": nothing,
    "own-steps": nothing, "no-steps": nothing, "slow-loader": nothing, "collectives": nothing, "chatty": nothing,
}  # fmt: skip


def freeze() -> None:
    how = options.freeze
    if how == "sleep":
        time.sleep(86_400)  # FREEZES: sleep
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # FREEZES: lock
    elif how == "read":
        reading, _writing = os.pipe()
        os.read(reading, 1)  # FREEZES: read
    elif how == "mismatch":
        dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.zeros(3))  # FREEZES: mismatch
    elif how == "raise":
        atexit.register(dist.barrier)  # for which the peers never come
        raise ValueError("loss is not finite")  # FREEZES: raise
    elif how == "spin":
        while True:  # FREEZES: spin
            pass


def batches(job: Training):
    if options.how == "slow-loader" or options.freeze == "loader":
        yield from enumerate(DataLoader(SlowSamples(), batch_size=8 if options.freeze else 1, num_workers=1), 1)
    else:
        yield from job.batches()


def trains(job: Training, step: int, batch: torch.Tensor) -> None:
    if options.how == "own-steps":
        job.model(batch)
        safelaunch.step()
    elif options.how == "collectives":
        for _ in range(20):
            dist.all_reduce(batch)
    elif options.how == "no-steps":
        job.model(batch)
    else:
        job.train(batch)


def evaluate_for_ever() -> None:
    """Runs a rank that never steps and never joins the trainers' collectives. It waits for checkpoints."""
    dist.init_process_group("gloo")
    dist.new_group(list(range(options.trainers)))
    while not os.path.exists(os.path.join(options.scratch, "over")):
        time.sleep(1.0)
    dist.destroy_process_group()


def main() -> None:
    if options.busy_thread:
        threading.Thread(target=log_for_ever, daemon=True).start()
    if options.how == "long-start":
        time.sleep(12.0)
    if options.trainers and options.trainers <= RANK:
        evaluate_for_ever()
        return
    with Training(options) as job:
        for step, batch in batches(job):
            if options.how == "long-first-step" and step == 1:
                compute(10.0)
            trains(job, step, batch)
            RHYTHMS[options.how](step)
            if options.how == "chatty":
                print("x" * 2000, flush=True)
            if options.freeze and job.misbehaves(step):
                freeze()
            if step >= options.steps:
                break
        if options.trainers and RANK == 0:
            open(os.path.join(options.scratch, "over"), "w").close()
        if options.how == "long-tail":
            compute(8.0)
            dist.barrier()
        print(f"rank {job.rank} trained\n", end="", flush=True)


if __name__ == "__main__":
    main()
