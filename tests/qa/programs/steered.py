"""Training that files in its scratch directory control: ``finish`` ends it, ``hang`` makes the culprit hang.

It hangs in its first attempt only. ``--odd`` selects what the culprit does to itself at start-up or during training.
"""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from training import Training, parser

parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each rank; one of them hangs then")
parser.add_argument("--odd", default="", help="what the culprit does to itself")
parser.add_argument("--when", default="training", choices=["start-up", "training"])
options = parser.parse_args()
RANK = int(os.environ["RANK"])
at_the_end = []
FIRST_ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def there(name: str) -> bool:
    return os.path.exists(os.path.join(options.scratch, name))


def leave(name: str, text: object = "") -> None:
    with open(os.path.join(options.scratch, name), "w") as file:
        file.write(str(text))


def wait_for_licence() -> None:
    time.sleep(86_400)  # HANGS: asleep


# --- what a rank can do to itself -------------------------------------------------------------------------------------


def overwrite(begin: int, end: int) -> None:
    """Blanks the memory between two fields of ``stat``, like libraries that change the process title."""
    with open("/proc/self/stat") as file:
        fields = [0, 0, 0, *file.read().rpartition(")")[2].split()]
    first, last = int(fields[begin]), int(fields[end])
    ctypes.memset(first, ord("x"), last - first - 1)


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def forks_and_exits() -> None:
    if os.fork():
        os._exit(0)
    leave(f"forked-{RANK}", os.getpid())


def closes_its_descriptors() -> None:
    os.closerange(3, 65536)


def changes_directory() -> None:
    place = os.path.join(options.scratch, f"gone-{os.getpid()}")
    os.mkdir(place)
    os.chdir(place)  # not removed: torch reads it during its import


def changes_its_title() -> None:
    overwrite(48, 49)
    ctypes.CDLL(None).prctl(15, b") S 1 1 (", 0, 0, 0)  # PR_SET_NAME: a name that a careless parser takes for fields


def unsets_its_environment() -> None:
    overwrite(50, 51)
    if options.when == "training":  # before that it says how to meet the others
        os.environ.clear()
    if (child := os.fork()) == 0:  # can't be found by its environment
        os.execve("/bin/sleep", ["sleep", "3604"], {})
    at_the_end.append(lambda: os.kill(child, signal.SIGKILL))


ODDITIES = {
    "ignores SIGTERM": ignores_sigterm,
    "forks and exits": forks_and_exits,
    "closes descriptors": closes_its_descriptors,
    "chdirs": changes_directory,
    "changes its title": changes_its_title,
    "unsets its environment": unsets_its_environment,
}


def behave_oddly(moment: str) -> None:
    if options.odd and options.when == moment and options.culprit == RANK:
        ODDITIES[options.odd]()
        leave(f"odd-{RANK}")


# --- the training -----------------------------------------------------------------------------------------------------


class Samples(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(1.0)  # as DataLoaders do when they open files
        if options.culprit == RANK and FIRST_ATTEMPT and there("hang"):
            wait_for_licence()
        return torch.zeros(32)


def batches(job: Training):
    if options.workers:
        yield from enumerate(DataLoader(Samples(), batch_size=1, num_workers=options.workers), 1)
    else:
        yield from job.batches()


def agreed(name: str) -> bool:
    """Returns whether the file exists, with the same answer on all ranks."""
    found = torch.tensor(float(there(name)))
    dist.all_reduce(found)
    return bool(found)


def main() -> None:
    behave_oddly("start-up")
    with Training(options) as job:
        for step, batch in batches(job):
            job.train(batch)
            if step == options.after:
                leave(f"training-{RANK}")
                behave_oddly("training")
            if agreed("finish"):
                break
            if not options.workers and FIRST_ATTEMPT and agreed("hang") and options.culprit == RANK:
                wait_for_licence()
            time.sleep(0.01)
        for action in at_the_end:
            action()
        leave(f"trained-{RANK}")
        print(f"rank {RANK} trained\n", end="", flush=True)  # one write: ranks share the file


if __name__ == "__main__":
    sys.exit(main())
