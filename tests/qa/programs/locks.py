"""One rank's training thread waits for another thread of its process."""

import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from training import parser, train_until

options = parser.parse_args()
weights_lock = threading.Lock()
stats_lock = threading.Lock()
prefetched: "queue.Queue[int]" = queue.Queue()


def publish_stats() -> None:
    with stats_lock:
        time.sleep(0.5)
        with weights_lock:
            pass


def update_weights() -> None:
    threading.Thread(target=publish_stats, name="stats", daemon=True).start()
    with weights_lock:
        time.sleep(0.5)
        with stats_lock:  # HANGS: order
            pass


def upload(pipe: int) -> None:
    os.read(pipe, 1)  # HANGS: join


def wait_for_upload() -> None:
    reading, _writing = os.pipe()
    uploader = threading.Thread(target=upload, args=(reading,), name="uploader", daemon=True)
    uploader.start()
    uploader.join()


def fetch(pipe: int) -> bytes:
    return os.read(pipe, 1)  # HANGS: future


def fetched() -> bytes:
    reading, _writing = os.pipe()
    with ThreadPoolExecutor(2, thread_name_prefix="fetch") as pool:
        return pool.submit(fetch, reading).result()


def next_prefetched() -> int:
    return prefetched.get()  # HANGS: queue


CALLS = {"order": update_weights, "join": wait_for_upload, "queue": next_prefetched, "future": fetched}

if __name__ == "__main__":
    train_until(options, CALLS)
