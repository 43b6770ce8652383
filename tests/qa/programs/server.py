"""Inference: some batches, then rank 0 waits for requests and its peers for rank 0. No request comes."""

import http.server
import os
import threading
import time

import torch
import torch.distributed as dist
from training import parser

options = parser.parse_args()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        threading.Thread(target=self.server.shutdown).start()


def main() -> None:
    dist.init_process_group("gloo")
    request = torch.zeros(4)
    for _ in range(options.after):
        dist.all_reduce(request)
        time.sleep(0.1)
    if dist.get_rank() == 0:
        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
            with open(os.path.join(options.scratch, "port.partial"), "w") as file:
                file.write(str(server.server_address[1]))
            os.rename(file.name, os.path.join(options.scratch, "port"))
            server.serve_forever()
    dist.broadcast(request, src=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
