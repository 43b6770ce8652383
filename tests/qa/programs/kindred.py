"""One rank and processes that it has started wait for each other, or for the end of a pipe that never comes."""

import multiprocessing
import os
import queue
import signal
import subprocess
import threading
import time

from training import parser, train_until

options = parser.parse_args()
forked = multiprocessing.get_context("fork")


def decode(writing: int) -> None:
    os.write(writing, b"frame 1\n")


def idle() -> None:
    time.sleep(86_400)


def read_frames() -> list[bytes]:
    """The decoder ends, and a monitor that was forked as well still has the pipe open."""
    reading, writing = os.pipe()
    decoder = forked.Process(target=decode, args=(writing,))
    decoder.start()
    forked.Process(target=idle, daemon=True).start()
    os.close(writing)
    with open(reading, "rb") as frames:
        return list(frames)  # HANGS: kept-open


def read_report() -> bytes:
    """The child has written its report and ended; this process has never closed its own write end."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"loss 0.5\n")
        os._exit(0)
    report = b""
    while block := os.read(reading, 4096):  # HANGS: own-end
        report += block
    return report


def evaluate() -> str:
    """The errors of a shell's pipeline fill the pipe that is to be read after its end."""
    script = "head -c 300000 /dev/zero | cat >&2; exit 3"
    evaluation = subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE)
    if evaluation.wait() != 0:  # HANGS: full-pipe
        return evaluation.stderr.read().decode()
    return ""


def roll_out(episodes: "multiprocessing.Queue[bytes]", size: int) -> None:
    for _ in range(2):
        episodes.put(bytes(size))


def collect() -> list[bytes]:
    """The actors end only when all that they have put is read, and it is read only after their end."""
    episodes = forked.Queue()
    actors = [forked.Process(target=roll_out, args=(episodes, 500_000)) for _ in range(2)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join()  # HANGS: undrained
    return [episodes.get() for _ in range(4)]


def serve(orders: "multiprocessing.connection.Connection") -> None:
    while True:
        orders.recv()


def shut_down() -> None:
    """The server waits for the next order, and gets no message that it was the last."""
    theirs, ours = forked.Pipe()
    server = forked.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    ours.send("warm up")
    server.join()  # HANGS: no-sentinel


def embed(vectors: "multiprocessing.Queue[list[float]]") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def retrieve() -> list[float]:
    """The worker dies before it has put anything, and the queue does not tell."""
    vectors = forked.Queue()
    forked.Process(target=embed, args=(vectors,)).start()
    return vectors.get()  # HANGS: dead-sender


def compress(samples: "queue.Queue[int]") -> None:
    while True:
        sample = samples.get()
        if sample == 3:
            continue
        samples.task_done()


def flush() -> None:
    """One sample is taken and not reported as done."""
    samples = queue.Queue()
    for name in ("first", "second"):
        threading.Thread(target=compress, args=(samples,), name=name, daemon=True).start()
    for sample in range(6):
        samples.put(sample)
    samples.join()  # HANGS: task-done


CALLS = {
    "kept-open": read_frames,
    "own-end": read_report,
    "full-pipe": evaluate,
    "undrained": collect,
    "no-sentinel": shut_down,
    "dead-sender": retrieve,
    "task-done": flush,
}

if __name__ == "__main__":
    train_until(options, CALLS)
