"""One rank answers the others over HTTP, and keeps itself from it: by a lock that it holds, or in its event loop."""

import asyncio
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()
weights = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with weights:
            self.send_response(200)
            self.end_headers()


def tell(port: int) -> int:
    told = torch.tensor([port])
    dist.broadcast(told, src=options.culprit)
    return int(told)


def serve_under_a_lock() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with weights:
        tell(server.server_port)
        dist.barrier()  # HANGS: lock


async def serve_in_a_loop() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    tell(server.sockets[0].getsockname()[1])
    dist.barrier()  # HANGS: loop


def ask() -> None:
    client = http.client.HTTPConnection("127.0.0.1", tell(0))
    client.request("GET", "/")
    client.getresponse()
    dist.barrier()


with Training(options) as job:
    for step, batch in job.batches():
        job.train(batch)
        if step != options.after:
            continue
        if job.rank != options.culprit:
            ask()
        elif options.how == "lock":
            serve_under_a_lock()
        else:
            asyncio.run(serve_in_a_loop())
