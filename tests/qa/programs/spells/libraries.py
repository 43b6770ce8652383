"""Waits and work inside libraries that people use. What a case needs is installed apart (``alive.py``)."""

import multiprocessing
import os

import subprocess
import sys
import threading
import time

from .children import nap, spin
from .table import Outside, Spell, case
from .transfers import DRIPS, web
from .waits import _holds_flock


def _url(spell: Spell, path: str) -> str:
    return f"http://127.0.0.1:{spell.port}/{path}"


# --- HTTP -------------------------------------------------------------------------------------------------------------


@case(needs=("requests",), outside=web)
def requests_of_single_bytes(spell: Spell) -> None:
    import requests

    assert len(requests.get(_url(spell, "drip"), timeout=600).content) == DRIPS


@case(needs=("requests",), outside=web, works=True)
def requests_streams_to_a_file(spell: Spell) -> None:
    import requests

    with (
        requests.get(_url(spell, "large"), stream=True, timeout=600) as answer,
        open(spell.scratch / "it", "wb") as file,
    ):
        for block in answer.iter_content(8192):
            file.write(block)
    assert os.path.getsize(spell.scratch / "it") == int(spell.quiet * 5) * 20_000


@case(needs=("requests",), outside=web)
def requests_retries_503(spell: Spell) -> None:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util.retry import Retry

    session = requests.Session()
    session.mount(
        "http://", HTTPAdapter(max_retries=Retry(30, status_forcelist=[503], backoff_factor=1, backoff_max=8))
    )
    assert session.get(_url(spell, "busy"), timeout=600).text == "ready"


@case(needs=("requests",), outside=web)
def urllib3_retries_read_timeouts(spell: Spell) -> None:
    import urllib3

    pool = urllib3.PoolManager(timeout=urllib3.Timeout(read=2.0), retries=urllib3.Retry(200, backoff_factor=0))
    assert pool.request("GET", _url(spell, "late")).data == b"late"


@case(needs=("requests",))
def requests_until_there_is_a_server(spell: Spell) -> None:
    """Refused until then."""
    import http.server

    import requests

    def serve() -> None:
        time.sleep(spell.quiet)
        with http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler) as server:
            server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[attr-defined]
            server.handle_request()

    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    thread = threading.Thread(target=serve)
    thread.start()
    while True:
        try:
            assert requests.get(f"http://127.0.0.1:{port}/", timeout=600).ok
            break
        except requests.ConnectionError:
            time.sleep(1.0)
    thread.join()


@case(needs=("aiohttp",), outside=web)
def aiohttp_of_single_bytes(spell: Spell) -> None:
    import asyncio

    import aiohttp

    async def main() -> bytes:
        async with aiohttp.ClientSession() as session, session.get(_url(spell, "drip")) as answer:
            return await answer.read()

    assert len(asyncio.run(main())) == DRIPS


@case(needs=("aiohttp",), outside=web, on="all")
def aiohttp_gathers(spell: Spell) -> None:
    import asyncio

    import aiohttp

    async def main() -> list[bytes]:
        async with aiohttp.ClientSession() as session:

            async def one() -> bytes:
                async with session.get(_url(spell, "late")) as answer:
                    return await answer.read()

            return await asyncio.gather(*(one() for _ in range(6)))

    assert asyncio.run(main()) == [b"late"] * 6


@case(needs=("websockets",), outside=web)
def a_websocket(spell: Spell) -> None:
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{spell.port}/ws", ping_interval=None) as socket:  # the server sleeps
        assert socket.recv() == "done"


@case(needs=("boto3",), outside=web)
def boto3_backs_off(spell: Spell) -> None:
    import boto3
    from botocore.config import Config

    config = Config(retries={"max_attempts": 40, "mode": "standard"}, s3={"addressing_style": "path"})
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "eu-north-1"}
    client = boto3.client("s3", endpoint_url=_url(spell, ""), config=config, **keys)
    assert client.get_object(Bucket="bucket", Key="shard")["Body"].read() == b"ready"


# --- RPC and messages -------------------------------------------------------------------------------------------------


def _grpc(outside: Outside) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def unary(request: bytes, context: object) -> bytes:
        time.sleep(outside.quiet)
        return request

    def stream(request: bytes, context: object):  # type: ignore[no-untyped-def]
        for number in range(3):
            time.sleep(outside.quiet / 3)
            yield request + str(number).encode()

    handlers = {"one": grpc.unary_unary_rpc_method_handler(unary), "many": grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("slow", handlers),))
    outside.say("port", server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


@case(needs=("grpcio",), outside=_grpc)
def grpc_of_one_answer(spell: Spell) -> None:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{spell.port}") as channel:
        assert channel.unary_unary("/slow/one")(b"ask") == b"ask"


@case(needs=("grpcio",), outside=_grpc)
def grpc_of_a_stream(spell: Spell) -> None:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{spell.port}") as channel:
        assert list(channel.unary_stream("/slow/many")(b"n")) == [b"n0", b"n1", b"n2"]


def _zmq(outside: Outside) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.REP)
    outside.say("port", socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.recv()
    time.sleep(outside.quiet)
    socket.send(b"answer")
    time.sleep(5)


@case(needs=("pyzmq",), outside=_zmq)
def zmq_asks(spell: Spell) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(f"tcp://127.0.0.1:{spell.port}")
    socket.send(b"ask")
    assert socket.recv() == b"answer"


@case(needs=("pyzmq",), outside=_zmq)
def zmq_polls(spell: Spell) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(f"tcp://127.0.0.1:{spell.port}")
    socket.send(b"ask")
    while not socket.poll(1000):
        pass
    assert socket.recv() == b"answer"


@case(needs=("pyzmq",))
def zmq_of_its_own_child(spell: Spell) -> None:
    import zmq

    code = (
        "import sys, time, zmq\ns = zmq.Context().socket(zmq.PUSH)\ns.connect(sys.argv[1])\n"
        "time.sleep(float(sys.argv[2]))\ns.send(b'batch')"
    )
    socket = zmq.Context().socket(zmq.PULL)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with subprocess.Popen([sys.executable, "-c", code, f"tcp://127.0.0.1:{port}", str(spell.quiet)]):
        assert socket.recv() == b"batch"


# --- pools ------------------------------------------------------------------------------------------------------------


@case(needs=("joblib",))
def joblib_processes_nap(spell: Spell) -> None:
    from joblib import Parallel, delayed

    assert Parallel(2)(delayed(nap)(spell.quiet) for _ in range(2)) == [spell.quiet] * 2


@case(needs=("joblib",), works=True)
def joblib_processes_compute(spell: Spell) -> None:
    from joblib import Parallel, delayed

    assert Parallel(2)(delayed(spin)(spell.quiet) for _ in range(2)) == ["done"] * 2


@case(needs=("joblib",))
def joblib_threads(spell: Spell) -> None:
    from joblib import Parallel, delayed

    assert Parallel(3, backend="threading")(delayed(nap)(spell.quiet) for _ in range(3)) == [spell.quiet] * 3


@case(needs=("dask",))
def dask_threads(spell: Spell) -> None:
    import dask

    results = dask.compute(*(dask.delayed(nap)(spell.quiet) for _ in range(2)), scheduler="threads", num_workers=2)
    assert results == (spell.quiet, spell.quiet)


@case(needs=("dask", "distributed"))
def dask_processes(spell: Spell) -> None:
    import dask

    context = multiprocessing.get_context("fork")
    with dask.config.set({"multiprocessing.context": context.get_start_method()}):
        assert dask.compute(dask.delayed(nap)(spell.quiet), scheduler="processes", num_workers=1) == (spell.quiet,)


@case(needs=("dask", "distributed"))
def dask_distributed(spell: Spell) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(nap, spell.quiet).result() == spell.quiet


# --- event loops ------------------------------------------------------------------------------------------------------


@case(needs=("trio",))
def trio_sleeps(spell: Spell) -> None:
    import trio

    trio.run(trio.sleep, spell.quiet)


@case(needs=("trio",))
def trio_waits_for_a_thread(spell: Spell) -> None:
    import trio

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for part in (1, 2):
                nursery.start_soon(trio.to_thread.run_sync, time.sleep, spell.quiet * part / 2)

    trio.run(main)


@case(needs=("gevent",))
def gevent_sleeps(spell: Spell) -> None:
    import gevent

    gevent.joinall([gevent.spawn(gevent.sleep, spell.quiet * part / 3) for part in (1, 2, 3)])


@case(needs=("anyio",))
def anyio_process(spell: Spell) -> None:
    import anyio

    async def main() -> None:
        assert (await anyio.run_process(["sh", "-c", f"sleep {spell.quiet}; echo done"])).stdout == b"done\n"

    anyio.run(main)


# --- locks and files --------------------------------------------------------------------------------------------------


@case(needs=("filelock",), outside=_holds_flock)
def a_filelock(spell: Spell) -> None:
    import filelock

    spell.said("held")
    with filelock.FileLock(spell.scratch / "lock"):
        pass


@case(needs=("portalocker",), outside=_holds_flock)
def portalocker_with_a_timeout(spell: Spell) -> None:
    import portalocker

    spell.said("held")
    with portalocker.Lock(spell.scratch / "lock", timeout=600, check_interval=0.25):
        pass


def _arrives(outside: Outside) -> None:
    outside.rest()
    outside.say("arrived", 1)


@case(needs=("watchdog",), outside=_arrives)
def a_watched_directory(spell: Spell) -> None:
    """inotify, in the library's thread."""
    from watchdog.events import FileSystemEventHandler
    from watchdog.observers import Observer

    seen = threading.Event()

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event) -> None:  # type: ignore[no-untyped-def]
            if "arrived" in f"{event.src_path} {event.dest_path}":
                seen.set()

    observer = Observer()
    observer.schedule(Handler(), os.fspath(spell.scratch))
    observer.start()
    seen.wait()
    observer.stop()
    observer.join()


@case(needs=("h5py",), works=True)
def hdf5_written_and_read(spell: Spell) -> None:
    import h5py
    import numpy

    with h5py.File(spell.scratch / "data.h5", "w") as file:
        data = file.create_dataset("x", (512, 4096), compression="gzip")
        row = numpy.arange(4096)
        while spell.lasts:
            for number in range(64):
                data[number] = row
            assert data[5, 7] == 7


@case(needs=("duckdb",), works=True)
def duckdb_aggregates(spell: Spell) -> None:
    import duckdb

    while spell.lasts:
        found = duckdb.connect().execute("select sum(range * 2) from range(20000000)").fetchall()
        assert int(found[0][0]) == 399999980000000


# --- machine learning -------------------------------------------------------------------------------------------------


@case(needs=("tokenizers",), works=True)
def tokenizers_train_and_encode(spell: Spell) -> None:
    """In threads of Rust."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [f"the {n} quick brown foxes jump over {n * 7 % 1000} lazy dogs" for n in range(20_000)]
    while spell.lasts:
        tokenizer = Tokenizer(models.BPE(unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
        assert len(tokenizer.encode_batch(texts)) == len(texts)


def _slowly(row: dict[str, float]) -> dict[str, float]:
    time.sleep(row["seconds"])
    return row


@case(needs=("datasets",))
def datasets_maps_in_processes(spell: Spell) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"seconds": [spell.quiet / 4] * 8})
    assert len(rows.map(_slowly, num_proc=2, load_from_cache_file=False)) == 8


@case(needs=("wandb",))
def wandb_offline(spell: Spell) -> None:
    import wandb

    run = wandb.init(mode="offline", dir=os.fspath(spell.scratch), settings=wandb.Settings(silent=True))
    for number in range(4):
        time.sleep(spell.quiet / 4)
        run.log({"loss": number})
    run.finish()


@case(needs=("tenacity",))
def tenacity_retries(spell: Spell) -> None:
    import tenacity

    @tenacity.retry(wait=tenacity.wait_exponential(max=8), retry=tenacity.retry_if_exception_type(OSError))
    def fetch() -> str:
        if spell.lasts:
            raise OSError("not yet")
        return "there"

    assert fetch() == "there"


@case(needs=("backoff",))
def backoff_retries(spell: Spell) -> None:
    import backoff

    @backoff.on_exception(backoff.constant, OSError, interval=3, jitter=None)
    def fetch() -> str:
        if spell.lasts:
            raise OSError("not yet")
        return "there"

    assert fetch() == "there"


@case(needs=("tqdm",))
def a_progress_bar_that_stands(spell: Spell) -> None:
    import tqdm

    for _ in tqdm.tqdm(range(2), desc="shards", mininterval=1):
        time.sleep(spell.quiet / 2)
