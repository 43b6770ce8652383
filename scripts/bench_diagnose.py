"""What a verdict from a folder of Flight Recorder dumps costs, beside torchfrtrace and beside unpickling alone.

    python scripts/bench_diagnose.py [--ranks 256] [--entries 2000] [--rounds 3] [--json FILE]

The dumps are written as the recorder of NCCL writes them: version 2.10, eight frames an entry, shared between entries.
One rank calls another operation than its peers at the end. CPU times, each program in a process of its own.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchlib import BenchError, Figure, environment, figure, program, progress, run_bench, workplace

LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
UNPICKLE = """
import pathlib, pickle, sys
for path in pathlib.Path(sys.argv[1]).iterdir():
    with path.open("rb") as file:
        pickle.load(file)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    return run_bench("bench_diagnose", parser, measure)


def measure(options: argparse.Namespace) -> list[Figure]:
    with workplace(unpickle=UNPICKLE) as here:
        folder = here / "dumps"
        folder.mkdir()
        progress(f"writing {options.ranks} dumps")
        odd = options.ranks // 3
        for rank in range(options.ranks):
            dump = make(rank, options.ranks, options.entries, odd=rank == odd)
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        ours = [program("safelaunch"), "diagnose", str(folder), "--json"]
        theirs = [program("torchfrtrace"), str(folder), "-p", "nccl_trace_rank_"]
        alone = [sys.executable, str(here / "unpickle.py"), str(folder)]
        found: dict[str, list[tuple[float, float]]] = {"safelaunch": [], "torchfrtrace": [], "unpickling": []}
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for name, argv in zip(found, (ours, theirs, alone), strict=True):
                found[name].append(cost(argv, here))
    cpu = {name: [row[0] for row in rows] for name, rows in found.items()}
    times = f"{median(cpu['torchfrtrace']) / median(cpu['safelaunch']):.1f} x"
    above = f"{median(cpu['safelaunch']) / median(cpu['unpickling']):.1f} x"
    size = f"{options.ranks} ranks x {options.entries} entries"
    return [
        figure(f"safelaunch diagnose, {size}: CPU", cpu["safelaunch"], "s", note=f"{above} unpickling alone"),
        figure("  peak memory", [row[1] for row in found["safelaunch"]], "MB", "<= 300"),
        figure("torchfrtrace: CPU", cpu["torchfrtrace"], "s", note=f"{times} safelaunch's"),
        figure("  peak memory", [row[1] for row in found["torchfrtrace"]], "MB"),
        figure("unpickling the same files alone: CPU", cpu["unpickling"], "s"),
    ]


def cost(argv: Sequence[str], here: Path) -> tuple[float, float]:
    """CPU seconds and peak resident MB of one command, measured by a parent of its own."""
    script = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:], stdout=-3, stderr=-3).returncode\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=here, env=environment(), capture_output=True, text=True, check=True
    )
    code, cpu_s, megabytes = done.stdout.split()
    if code != "0":
        raise BenchError(f"{' '.join(argv[:2])} ... ended with {code}")
    return float(cpu_s), float(megabytes)


def make(rank: int, world: int, entries: int, *, odd: bool) -> dict[str, object]:
    """One rank's dump; ``odd``: its last collective is another one."""
    inner = [
        {"name": "all_reduce", "filename": f"{LIBRARY}/distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": f"{LIBRARY}/c10d_logger.py", "line": 83},
    ]
    places = [
        [*inner, *({"name": f"f{n}", "filename": "/home/me/train.py", "line": line + n} for n in range(6))]
        for line in (30, 35, 40, 50, 60)
    ]
    made = []
    for number in range(entries):
        done, place, at_ns = number < entries - 1, number % len(places), 1_724_779_239_936_775_119 + number * 10**6
        made.append({
            "frames": places[place], "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1,
            "profiling_name": "nccl:all_gather" if odd and not done else "nccl:all_reduce",
            "time_created_ns": at_ns, "time_discovered_started_ns": at_ns if done else None,
            "time_discovered_completed_ns": at_ns if done else None,
            "input_sizes": [[1024 * (place + 1)]], "input_dtypes": ["Float"],
            "output_sizes": [[1024 * (place + 1)]], "output_dtypes": ["Float"],
            "state": "completed" if done else "scheduled", "retired": done, "timeout_ms": 600_000, "is_p2p": False,
            "thread_id": "140298925697920", "thread_name": "python3",
        })  # fmt: skip
    last = {"last_enqueued_collective": entries, "last_started_collective": entries - 1}
    return {
        "version": "2.10",
        "entries": made,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {"0": {**last, "last_completed_collective": entries - 1}},
    }


if __name__ == "__main__":
    sys.exit(main())
