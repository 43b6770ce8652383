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


def warn_as_nccl() -> None:
    """Writes a warning where NCCL would: to the user's own file."""
    host, pid = os.uname().nodename.partition(".")[0], os.getpid()
    name = os.environ["NCCL_DEBUG_FILE"].replace("%h", host).replace("%p", str(pid))
    with open(name, "w") as log:
        log.write(f"{host}:{pid}:{pid} [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed by b<5>\n")


def validate(loss: torch.Tensor) -> None:
    if "NCCL_DEBUG_FILE" in os.environ:
        warn_as_nccl()
    if loss.isfinite():
        raise ValueError("loss 3.2 is above the limit")  # FAILS: exception


class TrainingError(Exception):
    pass


def train(loss: torch.Tensor) -> None:
    try:
        validate(loss)
    except ValueError as error:
        raise TrainingError("step failed") from error  # BECOMES


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
        if options.how == "size":
            dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for step, batch in batches(job):
            loss = job.train(batch)
            if not fails or step != options.after or (job.rank != options.culprit and options.how != "size"):
                continue
            time.sleep(0.5)  # long enough for the peers to reach their next all-reduce
            if options.how == "size":
                share(loss)
            elif options.how == "exception":
                train(loss)
            elif options.how == "exit":
                leave()
            elif options.how in ("SIGKILL", "SIGSEGV", "SIGABRT"):
                kill_myself(signal.Signals[options.how])


if __name__ == "__main__":
    main()
