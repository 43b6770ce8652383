"""Bytes that come or go slowly: downloads, pipes, files, checkpoints, and pages that are touched for the first time."""

import base64
import hashlib
import http.client
import http.server
import io
import mmap
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

from .table import Outside, Spell, case, until

DRIPS = 40


class _Web(http.server.BaseHTTPRequestHandler):
    """``/drip``: 40 bytes over the spell. ``/large``: 20 KB five times a second. ``/late``: nothing, and then all.

    ``/busy``: 503 until the spell is over, then 200.
    """

    quiet = 0.0
    protocol_version = "HTTP/1.1"
    first_s = 0.0

    def do_GET(self) -> None:
        cls = type(self)
        cls.first_s = cls.first_s or time.monotonic()
        if self.path.startswith("/ws"):
            return self._websocket()
        if self.path.startswith("/busy") or "bucket" in self.path:
            over = time.monotonic() > cls.first_s + self.quiet
            return self._answer(200 if over else 503, b"ready" if over else b"busy")
        if self.path == "/late":
            time.sleep(max(0.0, cls.first_s + self.quiet - time.monotonic()))
            return self._answer(200, b"late")
        pieces, piece = (DRIPS, b"x") if self.path == "/drip" else (int(self.quiet * 5), b"x" * 20_000)
        self.send_response(200)
        self.send_header("Content-Length", str(pieces * len(piece)))
        self.end_headers()
        for _ in range(pieces):
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(self.quiet / pieces)
        return None

    do_POST = do_PUT = do_GET

    def _answer(self, code: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _websocket(self) -> None:
        key = (self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
        self.end_headers()
        time.sleep(self.quiet)
        self.wfile.write(b"\x81\x04done")
        self.rfile.read(8)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def web(outside: Outside) -> None:
    """A server that is slow in every way."""
    _Web.quiet = outside.quiet
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web) as server:
        outside.say("port", server.server_port)
        server.serve_forever()


# --- downloads --------------------------------------------------------------------------------------------------------


@case(outside=web)
def urllib_of_single_bytes(spell: Spell) -> None:
    assert len(urllib.request.urlopen(f"http://127.0.0.1:{spell.port}/drip").read()) == DRIPS


@case(outside=web, works=True)
def a_download_of_100_kb_a_second(spell: Spell) -> None:
    body = urllib.request.urlopen(f"http://127.0.0.1:{spell.port}/large").read()
    assert len(body) == int(spell.quiet * 5) * 20_000


@case(outside=web)
def a_long_poll(spell: Spell) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", spell.port)
    connection.request("GET", "/late")
    assert connection.getresponse().read() == b"late"


@case(outside=web)
def urllib_with_timeouts(spell: Spell) -> None:
    """Each try is given up after 2 s."""
    while True:
        try:
            assert urllib.request.urlopen(f"http://127.0.0.1:{spell.port}/late", timeout=2.0).read() == b"late"
            return
        except OSError:
            pass


# --- between processes ------------------------------------------------------------------------------------------------


def _feeds(outside: Outside) -> None:
    outside.begun()
    with socket.create_server(("127.0.0.1", 0)) as server:
        outside.say("port", server.getsockname()[1])
        connection = server.accept()[0]
        for _ in range(int(outside.quiet * 4)):
            connection.sendall(os.urandom(25_000))
            time.sleep(0.25)
        connection.close()


@case(outside=_feeds, works=True)
def recv_into_a_file(spell: Spell) -> None:
    with socket.create_connection(("127.0.0.1", spell.port)) as source, open(spell.scratch / "copy", "wb") as file:
        while block := source.recv(1 << 20):
            file.write(block)
    assert os.path.getsize(spell.scratch / "copy") == int(spell.quiet * 4) * 25_000


@case(outside=_feeds, works=True)
def makefile_readexactly(spell: Spell) -> None:
    """One read of all bytes, as a client library reads a message of known length."""
    want = int(spell.quiet * 4) * 25_000
    with socket.create_connection(("127.0.0.1", spell.port)) as source, source.makefile("rb", want) as file:
        assert len(file.read(want)) == want


def _drinks(outside: Outside) -> None:
    outside.begun()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        outside.say("port", server.getsockname()[1])
        connection, total = server.accept()[0], 0
        while block := connection.recv(100_000):
            total += len(block)
            time.sleep(len(block) / 1e6)
        outside.say("total", total)


@case(outside=_drinks, works=True)
def an_upload_with_sendfile(spell: Spell) -> None:
    size = int(spell.quiet * 1e6)
    (spell.scratch / "large").write_bytes(bytes(size))
    with socket.create_connection(("127.0.0.1", spell.port)) as sink, open(spell.scratch / "large", "rb") as file:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sink.sendfile(file)
    assert spell.said("total") == str(size)


@case(outside=_drinks, works=True)
def a_checkpoint_to_a_slow_sink(spell: Spell) -> None:
    """torch.save into a socket."""
    import torch

    with socket.create_connection(("127.0.0.1", spell.port)) as sink, sink.makefile("wb") as file:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        torch.save(torch.zeros(int(spell.quiet * 1e6 / 4)), file)
    assert int(spell.said("total")) > spell.quiet * 1e6 * 0.99


THROTTLE = (
    "import sys, time\n"
    "while block := sys.stdin.buffer.read1(65536):\n"
    " sys.stdout.buffer.write(block); sys.stdout.buffer.flush(); time.sleep(len(block) / 1e6)"
)


@case(works=True)
def a_copy_through_a_throttled_pipe(spell: Spell) -> None:
    """Copies like scp, rsync or pv; the rank waits for the end of the pipeline."""
    size = int(spell.quiet * 1e6)
    (spell.scratch / "large").write_bytes(bytes(size))
    line = f"'{sys.executable}' -c \"$CODE\" < '{spell.scratch}/large' > '{spell.scratch}/copy'"
    subprocess.run(line, shell=True, check=True, env={**os.environ, "CODE": THROTTLE})
    assert os.path.getsize(spell.scratch / "copy") == size


@case(works=True)
def writes_to_a_slow_child(spell: Spell) -> None:
    """torch.save into the standard input of a child that uploads."""
    import torch

    with (
        open(os.devnull, "wb") as nowhere,
        subprocess.Popen([sys.executable, "-c", THROTTLE], stdin=subprocess.PIPE, stdout=nowhere) as child,
    ):
        assert child.stdin is not None
        torch.save(torch.zeros(int(spell.quiet * 1e6 / 4)), child.stdin)
        child.stdin.close()
        assert child.wait() == 0


PIECES_PER_S = 10


def _sends(outside: Outside, send: Callable[[bytes], object], size: int) -> None:
    for _ in range(int(outside.quiet * PIECES_PER_S)):
        send(bytes(size))
        time.sleep(1 / PIECES_PER_S)


def _sends_on_a_unix_socket(outside: Outside) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0spell-{os.getpid()}")  # a path might be too long
        server.listen()
        outside.say("listens", os.getpid())
        connection = server.accept()[0]
        _sends(outside, connection.sendall, 65_000)
        connection.close()


@case(outside=_sends_on_a_unix_socket, works=True)
def a_selector_and_a_unix_socket(spell: Spell) -> None:
    """Reads from a service on the same machine, like asyncio and gRPC."""
    pid = spell.said("listens")
    got, buffer = 0, bytearray(1 << 20)
    with socket.socket(socket.AF_UNIX) as source, selectors.DefaultSelector() as selector:
        source.connect(f"\0spell-{pid}")
        source.setblocking(False)
        selector.register(source, selectors.EVENT_READ)
        while selector.select() and (number := source.recv_into(buffer)):
            got += number
    assert got == int(spell.quiet * PIECES_PER_S) * 65_000


def _sends_datagrams(outside: Outside) -> None:
    outside.begun()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        port = int(outside.said("receives"))
        _sends(outside, lambda data: sender.sendto(data, ("127.0.0.1", port)), 8000)
        until(lambda: sender.sendto(b"", ("127.0.0.1", port)) or (outside.scratch / "received").exists())


@case(outside=_sends_datagrams, works=True)
def recv_of_datagrams(spell: Spell) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        spell.say("receives", receiver.getsockname()[1])
        got = 0
        while data := receiver.recv(1 << 16):
            got += len(data)
        spell.say("received")
    assert got > spell.quiet * PIECES_PER_S * 8000 / 2


def _feeds_a_named_pipe(outside: Outside) -> None:
    outside.said("made")
    with open(outside.scratch / "pipe", "wb", buffering=0) as pipe:
        _sends(outside, pipe.write, 60_000)


@case(outside=_feeds_a_named_pipe, works=True)
def splices_a_pipe_into_a_file(spell: Spell) -> None:
    os.mkfifo(spell.scratch / "pipe")
    spell.say("made")
    with open(spell.scratch / "pipe", "rb", buffering=0) as source, open(spell.scratch / "copy", "wb") as file:
        while os.splice(source.fileno(), file.fileno(), 1 << 20):
            pass
    assert os.path.getsize(spell.scratch / "copy") == int(spell.quiet * PIECES_PER_S) * 60_000


WRITER = (
    "import sys, time\n"
    "with open(sys.argv[1], 'wb', buffering=0) as file:\n"
    " for _ in range(int(float(sys.argv[2]) * 5)): file.write(bytes(1200)); time.sleep(0.2)"
)


@case(works=True)
def a_child_that_writes_6_kb_a_second(spell: Spell) -> None:
    place = spell.scratch / "growing"
    subprocess.run([sys.executable, "-c", WRITER, place, str(spell.quiet)], check=True)
    assert os.path.getsize(place) == int(spell.quiet * 5) * 1200


def _dribbles(outside: Outside) -> None:
    with open(outside.scratch / "growing", "wb") as file:
        outside.say("grows")
        outside.begun()
        for _ in range(int(outside.quiet * 2)):
            file.write(bytes(10_000))
            file.flush()
            time.sleep(0.5)
    outside.say("grown")


@case(outside=_dribbles)
def a_size_watched(spell: Spell) -> None:
    """Until a file that something else writes has its size."""
    spell.said("grows")
    while os.stat(spell.scratch / "growing").st_size < int(spell.quiet * 2) * 10_000:
        time.sleep(0.5)


# --- files ------------------------------------------------------------------------------------------------------------


@case(works=True)
def reads_of_a_map(spell: Spell) -> None:
    dice, found = random.Random(1), 0
    (spell.scratch / "data").write_bytes(os.urandom(1 << 20) * 64)
    with open(spell.scratch / "data", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        while spell.lasts:
            at = dice.randrange(len(pages) - 8)
            found ^= struct.unpack("q", pages[at : at + 8])[0]


@case(works=True)
def a_sparse_file_copied(spell: Spell) -> None:
    with open(spell.scratch / "sparse", "wb") as file:
        file.truncate(1 << 30)
    with open(spell.scratch / "sparse", "rb") as source:
        while spell.lasts:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            source.seek(0)
            for _ in range(64):
                source.read(1 << 24)
                if not spell.lasts:
                    break


@case(works=True)
def synced_writes(spell: Spell) -> None:
    with open(spell.scratch / "log", "wb") as file:
        while spell.lasts:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)


@case(works=True)
def many_small_files(spell: Spell) -> None:
    number = 0
    while spell.lasts:
        path = spell.scratch / f"small-{number % 100}"
        path.write_text(str(number))
        number += 1
        time.sleep(0.01)


@case(works=True)
def a_walk_of_a_tree(spell: Spell) -> None:
    while spell.lasts:
        for _, _, files in os.walk("/usr/lib"):
            if len(files) < 0 or not spell.lasts:
                break


@case(works=True)
def pages_touched_slowly(spell: Spell) -> None:
    with mmap.mmap(-1, 400 << 20) as memory:
        each = max(1, int(len(memory) / 4096 / (spell.quiet / 0.1)))
        at = 0
        while spell.lasts:
            for _ in range(each):
                if at < len(memory):
                    memory[at] = 1
                    at += 4096
            time.sleep(0.1)


@case()
def a_checkpoint_in_a_thread(spell: Spell) -> None:
    """ThreadPoolExecutor.submit(torch.save, ...).result(), to a file object that is slow."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    class Slow(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:  # type: ignore[no-untyped-def]
            time.sleep(min(1.0, max(0.0, spell.end_s - time.monotonic())))
            return len(data)

    with ThreadPoolExecutor(1) as pool:
        tensors = {str(n): torch.zeros(1000) for n in range(int(spell.quiet))}
        pool.submit(torch.save, tensors, Slow()).result()


@case(works=True)
def a_thread_downloads_while_the_rank_waits(spell: Spell) -> None:
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def feed() -> None:
        while spell.lasts:
            theirs.sendall(bytes(20_000))
            time.sleep(0.1)
        theirs.close()

    def fetch() -> None:
        while ours.recv(1 << 16):
            pass
        done.set()

    for target in (feed, fetch):
        threading.Thread(target=target).start()
    done.wait()
