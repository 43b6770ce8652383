"""One rank fails between two steps while its peers wait for it in the next all-reduce."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from training import Training, parser

parser.add_argument("--attempts", type=int, default=1_000_000, help="number of attempts that fail")
options = parser.parse_args()


def validate(loss: torch.Tensor) -> None:
    if loss.isfinite():
        raise ValueError("loss 3.2 is above the limit")  # FAILS: exception


def leave() -> None:
    os._exit(4)  # FAILS: exit


def share(loss: torch.Tensor) -> None:
    longer = 4096 if int(os.environ["RANK"]) == options.culprit else 16
    dist.all_reduce(loss.repeat(longer))  # FAILS: size


def kill_myself(signum: int) -> None:
    os.kill(os.getpid(), signum)  # FAILS: signal


class Samples(Dataset):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise OSError("sample 40 is truncated")  # FAILS: loader
        return torch.zeros(32)


def batches(job: Training):
    if options.how == "loader":
        samples = Samples(40 if job.rank == options.culprit else -1)
        yield from enumerate(DataLoader(samples, batch_size=8, num_workers=1), 1)
    else:
        yield from job.batches()


def main() -> None:
    fails = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < options.attempts
    with Training(options) as job:
        for step, batch in batches(job):
            loss = job.train(batch)
            if not fails or step != options.after or (job.rank != options.culprit and options.how != "size"):
                continue
            time.sleep(0.5)  # long enough for the peers to reach their next all-reduce
            if options.how == "size":
                share(loss)
            elif options.how == "exception":
                validate(loss)
            elif options.how == "exit":
                leave()
            elif options.how in ("SIGKILL", "SIGSEGV", "SIGABRT"):
                kill_myself(signal.Signals[options.how])


if __name__ == "__main__":
    main()
