"""Training that writes secrets to every source of a bundle. Then one rank crashes or hangs."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from training import Training, parser

import safelaunch

parser.add_argument("--api-key")
parser.add_argument("--auth-token")
parser.add_argument("--store")
parser.add_argument("--lines", type=int, default=0)
options = parser.parse_args()
planted = json.loads(os.environ.pop("PLANTED"))


def tell(text: str) -> None:
    print(f"out: {text}", flush=True)
    print(f"err: {text}", file=sys.stderr, flush=True)


def leak() -> None:
    for name, secret in planted.items():
        tell(f"{name} is {secret}")
        tell(repr({"the": secret}))
    for number in range(options.lines):
        print(f"line {number} of the output of this rank", flush=True)
    log = Path(os.environ["NCCL_DEBUG_FILE"]).parent / f"nccl.node.{os.getpid()}.log"
    log.write_text("".join(f"NCCL INFO {name}: {secret}\n" for name, secret in planted.items()))
    for secret in planted.values():
        threading.Thread(target=time.sleep, args=(86_400,), name=f"to {secret}"[:60], daemon=True).start()
    command = [sys.executable, "-c", "import time; time.sleep(86_400)", "--password", planted["by its name"]]
    subprocess.Popen([*command, "--header", f"Authorization: Bearer {planted['a bearer']}"])


def waits_for_ever(where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    fifo = where / f"rank{os.environ['RANK']}-{planted['by its name']}"
    os.mkfifo(fifo)
    fifo.read_text()  # HANGS: leaky


def main() -> None:
    with Training(options) as job, safelaunch.phase(f"phase {planted['by its name']}"):
        group = dist.new_group(group_desc=f"group {planted['by its name']}")
        for step, batch in job.batches():
            job.train(batch)
            dist.barrier(group)
            if step != options.after:
                continue
            leak()
            if job.rank == options.culprit and options.how == "hangs":
                waits_for_ever(Path(options.scratch))
            if job.rank == options.culprit:
                time.sleep(0.5)
                try:
                    raise KeyError(planted["a URL"])
                except KeyError as error:
                    raise ValueError(" ".join(planted.values())) from error  # password="hard-coded-in-the-source"


if __name__ == "__main__":
    main()
