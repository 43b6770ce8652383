"""Checks safelaunch on a machine with an NVIDIA GPU, in at most ten minutes, and prints one table.

python -m scripts.qa gpu-check --out DIR     # DIR gets gpu_check.json (all readings), table.txt and bundles.tar.gz
python -m scripts.qa gpu-check --clocks      # also limits the clock for 20 s, and removes the limit again

Without --clocks, it changes no setting of the GPU. It needs torch with CUDA, psutil, safelaunch's dependencies, and no
installed safelaunch. The exit code is 1 if a row differs, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from safelaunch.leases.inventory import LIBRARY, inventory
from tests.qa import gpu_readings
from tests.qa.gpu_check import CHECKS, DIFFERS, Machine, table
from tests.support.paths import ROOT

LIMIT_S = 560.0
KEPT = "SAFELAUNCH_LEASE_DIR"  # of safelaunch's variables: it belongs to the machine


def main() -> int:
    words = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs end, and the table is printed
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        until_s = time.monotonic() + words.limit
        machine = Machine(_environment(), Path(scratch), words.gpu, words.sample, words.clocks, until_s)
        machine.gpus = inventory(machine.environ)
        machine.torch = _torch(machine)
        if not machine.gpus.gpus and not machine.torch.get("gpus"):
            print(f"no NVIDIA GPU here: looked for the driver's files, {LIBRARY} in LD_LIBRARY_PATH, and torch's GPUs")
            print(f"NVML: {machine.gpus.missing}; torch {machine.torch['torch']} sees no GPU")
            return 2
        words.out.mkdir(parents=True, exist_ok=True)
        rows = []
        try:
            for check in CHECKS:
                print(f"{time.strftime('%H:%M:%S')} {check.name}", file=sys.stderr, flush=True)
                rows.append(check.row(machine))
                document = {"rows": [asdict(row) for row in rows], **machine.values}
                (words.out / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
                (words.out / "table.txt").write_text(table(rows) + "\n")
        finally:
            with tarfile.open(words.out / "bundles.tar.gz", "w:gz") as archive:
                archive.add(scratch, arcname="bundles")
            print(table(rows), flush=True)
    return int(any(row.verdict == DIFFERS for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT") or "gpu_check")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="[$OUT, else ./gpu_check]")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="NVML's number of the GPU to use [0]")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=f"for all rows [{LIMIT_S:g}]")
    parser.add_argument("--sample", type=float, default=10.0, metavar="SECONDS", help="readings of each state [10]")
    parser.add_argument("--clocks", action="store_true", help="also limit the clock for 20 s, then remove any limit")
    return parser.parse_args()


def _environment() -> dict[str, str]:
    names = ("SAFELAUNCH_", "PET_", "TORCHELASTIC_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if name == KEPT or not name.startswith(names)}
    paths = [os.fspath(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _torch(machine: Machine) -> dict[str, object]:
    try:
        facts: dict[str, object] = gpu_readings.ask("torch", env=machine.environ)
    except Exception as error:  # noqa: BLE001 - most rows need no torch
        return {"torch": f"({error})"}
    return facts


if __name__ == "__main__":
    sys.exit(main())
