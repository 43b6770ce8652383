"""One rank has fewer batches than its peers and leaves the training loop first."""

import os
import sys
import threading
import time

import torch.distributed as dist
from training import Training, parser

options = parser.parse_args()


def upload_results() -> None:
    time.sleep(86_400)


def main() -> None:
    job = Training(options)
    for step, batch in job.batches():
        job.train(batch)
        if job.misbehaves(step):
            break
    if options.how == "barrier":
        dist.barrier()  # HANGS: barrier
    if options.how == "thread":
        threading.Thread(target=upload_results, name="uploader").start()
        return
    if options.how == "marker":
        while not os.path.exists(os.path.join(options.scratch, "all-done")):
            time.sleep(3600)  # HANGS: marker
    if options.how == "exit":
        sys.exit(0)  # EXITS
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
