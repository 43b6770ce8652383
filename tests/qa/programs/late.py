"""One rank never reaches init_process_group, because it hangs while preparing data."""

import os
import time

from training import Training, parser, rank

options = parser.parse_args()


def unpack_dataset() -> None:
    time.sleep(86_400)  # HANGS: asleep


def wait_for_download() -> None:
    path = os.path.join(options.scratch, "download")
    os.mkfifo(path)
    with open(path, "rb") as file:  # HANGS: fifo
        file.read()


def main() -> None:
    if rank() == options.culprit:
        unpack_dataset() if options.how == "asleep" else wait_for_download()
    with Training(options) as job:
        for _, batch in job.batches():
            job.train(batch)


if __name__ == "__main__":
    main()
