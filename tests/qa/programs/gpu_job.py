"""The GPU programs of ``scripts/qa/gpu_check.py``, each in a process or rank that uses one GPU.

    gpu_job.py hold|compute|spin|spin-wide READY      one state of the GPU, until this process is ended
    gpu_job.py train FILE SECONDS                     trains; at its end, FILE has the end and duration of each step
    gpu_job.py blocked FILE SECONDS                   trains briefly; then a long kernel holds up an all_reduce

READY appears once the GPU is in that state, FILE of ``train`` after the first step, and FILE of ``blocked`` just before
the long kernel is launched.
"""

import json
import os
import pathlib
import sys
import time

import torch

WIDE = 24  # streams, each with a kernel of one thread: about as many multiprocessors as a collective uses
WARM_UP_S, LONGEST_S = 2.0, 120.0


def cycles_per_s():
    torch.cuda._sleep(10**8)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(10**9)
    torch.cuda.synchronize()
    return 10**9 / (time.perf_counter() - begin)


def repeat(work, ready):
    begin = time.monotonic()
    while time.monotonic() - begin < LONGEST_S:
        work()
        torch.cuda.synchronize()
        if time.monotonic() - begin > WARM_UP_S:
            ready.touch()


def show_state(state, ready):
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    streams = [torch.cuda.Stream() for _ in range(WIDE if state == "spin-wide" else 1)]
    quarter = int(cycles_per_s() / 4) if state.startswith("spin") else 0

    def compute():
        for _ in range(20):
            torch.mm(matrix, matrix)

    def spin():
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(quarter)

    repeat({"hold": lambda: time.sleep(0.1), "compute": compute}.get(state, spin), ready)


def steps():
    """Yields after each step of a training that is large enough to keep the GPU busy for a millisecond or more."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    layers = [torch.nn.Linear(4096, 4096) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    while True:
        optimizer.zero_grad()
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        yield


def train(file, seconds):
    times, begin = [], time.perf_counter()
    end = begin + seconds
    for _ in steps():
        now = time.perf_counter()
        times.append((round(time.time(), 4), round(now - begin, 6)))
        begin = now
        file.touch()
        if now > end:
            break
    file.write_text(json.dumps(times))
    torch.distributed.destroy_process_group()


def blocked(file, seconds):
    training = steps()
    for _ in range(200):
        next(training)
        time.sleep(0.02)
    cycles = int(seconds * cycles_per_s())
    total = torch.ones(1, device="cuda")
    file.touch()
    torch.cuda._sleep(cycles)
    torch.distributed.all_reduce(total)
    torch.cuda.synchronize()  # BLOCKED
    torch.distributed.destroy_process_group()


how, file = sys.argv[1], pathlib.Path(sys.argv[2])
if how in ("train", "blocked"):
    {"train": train, "blocked": blocked}[how](file, float(sys.argv[3]))
else:
    show_state(how, file)
