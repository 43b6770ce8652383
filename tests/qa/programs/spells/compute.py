"""Work without a step: in Python, in C with and without the GIL, in workers of a loader."""

import bz2
import ctypes
import gc
import hashlib
import json
import lzma
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

from .table import Spell, case

BLOB = bytes(byte % 64 for byte in random.Random(1).randbytes(1 << 20))


def _again(spell: Spell, work) -> None:  # type: ignore[no-untyped-def]
    found = work()
    while spell.lasts:
        assert work() == found


@case(works=True)
def a_busy_loop(spell: Spell) -> None:
    while spell.lasts:
        pass


@case(works=True)
def a_regular_expression(spell: Spell) -> None:
    """One search backtracks for seconds, with the GIL held."""
    _again(spell, lambda: re.match(r"(a+)+$", "a" * 23 + "b"))


@case(works=True)
def zlib_compresses(spell: Spell) -> None:
    _again(spell, lambda: zlib.adler32(zlib.compress(BLOB, 9)))


@case(works=True)
def lzma_compresses(spell: Spell) -> None:
    _again(spell, lambda: len(lzma.compress(BLOB[: 1 << 19])))


@case(works=True, on="all")
def bz2_compresses(spell: Spell) -> None:
    _again(spell, lambda: len(bz2.compress(BLOB)))


@case(works=True)
def a_digest(spell: Spell) -> None:
    data = BLOB * 64
    _again(spell, lambda: hashlib.sha256(data).hexdigest())


@case(works=True)
def a_sort(spell: Spell) -> None:
    dice = random.Random(1)
    items = [dice.random() for _ in range(300_000)]
    _again(spell, lambda: sorted(items)[0])


@case(works=True)
def a_garbage_collection(spell: Spell) -> None:
    held = [[n] for n in range(2_000_000)]
    while spell.lasts:
        gc.collect()
    assert len(held) == 2_000_000


@case(works=True)
def json_of_many(spell: Spell) -> None:
    items = {str(n): {"loss": n / 7} for n in range(200_000)}
    _again(spell, lambda: len(json.dumps(items)))


@case(works=True)
def a_pickle(spell: Spell) -> None:
    items = [{"n": n, "text": str(n)} for n in range(200_000)]
    _again(spell, lambda: len(pickle.loads(pickle.dumps(items))))


@case(works=True)
def numpy_multiplies(spell: Spell) -> None:
    import numpy

    a = numpy.ones((600, 600))
    _again(spell, lambda: float((a @ a).sum()))


@case(works=True, ranks=4)
def torch_multiplies(spell: Spell) -> None:
    import torch

    a = torch.ones(600, 600)
    _again(spell, lambda: float((a @ a).sum()))


@case(works=True)
def an_eigenvalue_problem(spell: Spell) -> None:
    """One call of LAPACK takes seconds."""
    import torch

    a = torch.randn(700, 700)
    while spell.lasts:
        torch.linalg.eigvals(a)


@case(works=True)
def a_generation_loop(spell: Spell) -> None:
    import torch

    model = torch.nn.GRU(64, 64, 2)
    with torch.no_grad():
        state, token = None, torch.zeros(1, 1, 64)
        while spell.lasts:
            token, state = model(token, state)


@case(works=True, on="all")
def evaluation_on_one_rank(spell: Spell) -> None:
    """The others are in a barrier."""
    import torch
    import torch.distributed as dist

    if spell.rank == 0:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).eval()
        with torch.no_grad():
            while spell.lasts:
                model(torch.randn(256, 256)).argmax(1)
    dist.barrier()


@case(works=True, on="all")
def a_very_long_accumulation(spell: Spell) -> None:
    import torch

    with spell.model.no_sync():
        while spell.lasts:
            spell.model(torch.randn(64, 32)).pow(2).mean().backward()
    spell.optimizer.zero_grad()


@case(on="all")  # a millisecond of CPU each second: what a thread that polls takes
def an_accumulation_that_waits_for_data(spell: Spell) -> None:
    import torch

    with spell.model.no_sync():
        while spell.lasts:
            spell.model(torch.randn(64, 32)).pow(2).mean().backward()
            time.sleep(1.0)
    spell.optimizer.zero_grad()


# --- C ----------------------------------------------------------------------------------------------------------------


@case()
def the_gil_held_in_c(spell: Spell) -> None:
    ctypes.PyDLL(None).usleep(int(spell.quiet * 1e6))


NATIVE = r"""
#include <pthread.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ready = PTHREAD_COND_INITIALIZER;
static int done, for_s, works;
static double sink;
static void *work(void *unused) {
    if (works) { time_t end = time(0) + for_s; while (time(0) < end) for (int i = 0; i < 100000; i++) sink += i; }
    else sleep(for_s);
    pthread_mutex_lock(&lock); done = 1; pthread_cond_signal(&ready); pthread_mutex_unlock(&lock);
    return 0;
}
int await(int seconds, int busy) {
    pthread_t thread; for_s = seconds; works = busy;
    pthread_create(&thread, 0, work, 0);
    pthread_mutex_lock(&lock); while (!done) pthread_cond_wait(&ready, &lock); pthread_mutex_unlock(&lock);
    pthread_join(thread, 0);
    return 42;
}
"""


def _native(spell: Spell, works: int) -> None:
    source, library = spell.scratch / "native.c", spell.scratch / "native.so"
    source.write_text("#include <time.h>\n" + NATIVE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    assert getattr(ctypes.CDLL(os.fspath(library)), "await")(int(spell.quiet), works) == 42


@case(tools=("gcc",))
def a_native_thread_sleeps(spell: Spell) -> None:
    """Waits without the GIL, like a client in C++ for its network thread."""
    _native(spell, 0)


@case(tools=("gcc",), works=True)
def a_native_thread_computes(spell: Spell) -> None:
    _native(spell, 1)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Slow:
    def __init__(self, seconds: float, works: bool, length: int = 8) -> None:
        self.seconds, self.works, self.length = seconds, works, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError
        if self.works:
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                sum(range(1000))
        else:
            time.sleep(self.seconds)
        return index


class SlowStream(Slow):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return (self[index] for index in range(self.length))


def _stream(seconds: float):  # type: ignore[no-untyped-def]
    from torch.utils.data import IterableDataset

    return type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(Slow(seconds, False, 4))})()


@case()
def workers_that_sleep_long(spell: Spell) -> None:
    from torch.utils.data import DataLoader

    assert sum(1 for _ in DataLoader(Slow(spell.quiet * 0.9, False, 2), batch_size=1, num_workers=2)) == 2  # type: ignore[arg-type]


@case(works=True)
def workers_that_compute_long(spell: Spell) -> None:
    from torch.utils.data import DataLoader

    assert sum(1 for _ in DataLoader(Slow(spell.quiet / 4, True), batch_size=4, num_workers=2)) == 2  # type: ignore[arg-type]


@case()
def persistent_workers_of_a_stream(spell: Spell) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(_stream(spell.quiet / 8), num_workers=1, persistent_workers=True, batch_size=4)
    assert sum(1 for _ in range(2) for _ in loader) == 2


@case()
def a_loader_without_workers(spell: Spell) -> None:
    from torch.utils.data import DataLoader

    assert sum(1 for _ in DataLoader(Slow(spell.quiet / 4, False, 4), batch_size=4)) == 1  # type: ignore[arg-type]


@case()
def a_pinning_thread_and_workers(spell: Spell) -> None:
    """All workers fetch from a slow store; the rank polls their queue with a timeout."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Slow(spell.quiet / 2, False, 4), batch_size=2, num_workers=2, timeout=600, prefetch_factor=1)  # type: ignore[arg-type]
    assert sum(1 for _ in loader) == 2


PREFETCH = """
import queue, threading, time
class Prefetcher:
    def __init__(self, seconds):
        self.items = queue.Queue(2)
        threading.Thread(target=self._fill, args=(seconds,), daemon=True).start()
    def _fill(self, seconds):
        for number in range(2):
            time.sleep(seconds / 2)
            self.items.put(number)
        self.items.put(None)
    def __iter__(self):
        return iter(self.items.get, None)
"""


@case()
def a_librarys_prefetch_thread(spell: Spell) -> None:
    """Installed, so none of its frames are the user's."""
    place = Path(spell.scratch) / "lib" / "python3" / "site-packages" / "prefetching"
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(PREFETCH)
    sys.path.append(str(place.parent))
    import prefetching  # type: ignore[import-not-found]

    assert list(prefetching.Prefetcher(spell.quiet)) == [0, 1]


@case(on="all")
def a_thread_computes_and_the_rank_joins(spell: Spell) -> None:
    def work() -> None:
        while spell.lasts:
            hashlib.sha256(BLOB).digest()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
