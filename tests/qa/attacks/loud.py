"""A job that writes its secrets everywhere, in every encoding. Then it hangs, crashes, or continues."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import safelaunch

said = Path(os.environ["LOUD"]).read_text()
how = os.environ["LOUD_HOW"]
lines = said.splitlines()


def speak() -> None:
    print(said, flush=True)
    print(repr(said), file=sys.stderr, flush=True)
    for number, line in enumerate(lines[::40]):
        threading.Thread(target=time.sleep, args=(600,), name=line[:100], daemon=True).start()
        dist.new_group(group_desc=line) if number < 8 else None
    place = Path(os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "x")).parent
    if place.is_dir():
        (place / f"nccl.loud.{os.getpid()}.log").write_text(said)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--password", lines[0], *lines[:200:10]])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    speak()
    for _ in range(5):
        dist.all_reduce(torch.zeros(1))
        safelaunch.step()
    Path(os.environ["LOUD"]).with_name(f"loud-{rank}").touch()
    with safelaunch.phase(lines[3][:120]):
        while how == "dump" and not Path(os.environ["LOUD"]).with_name("end").exists():
            time.sleep(0.2)
            safelaunch.step()
        if how == "dump":
            os._exit(0)
        try:
            raise KeyError(lines[5])
        except KeyError as error:
            if how == "crashes" and rank == 1:
                raise ValueError(said) from error
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    main()
