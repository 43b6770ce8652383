"""Runs healthy programs and planted faults under ``--check-every``, and prints what was found of each.

    python -m scripts.qa consistency [--only NAME,NAME] [--part 1/4] [--jobs 2] [--record FILE] [--json FILE]

Every row is a real job of ``replicas.py`` or ``replicas_more.py`` in ``tests/qa/programs``. Its steps are
checked three by three, so a fault in step 7 shows at step 9. Where it says so, it runs on two nodes: two supervisors on
this host. ``--record`` keeps each row as it comes; the next run on the same commit makes only the rows that are not
right there, so that parts and interrupted runs add up to one table. ``scripts/bench/checks.py`` measures the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.qa.commits import product_commit

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "qa" / "programs"
EVERY = 3
LONGEST_S = 120.0
LINE = r"wrong result: (.+)|(internal error.*|nothing (?:inconsistent|compared).*|the consistency checks.*)"


@dataclass(frozen=True)
class Case:
    """One program. ``expected`` matches the line that reports its fault; empty for a healthy program."""

    kind: str
    ranks: int
    about: str
    expected: str = ""
    nodes: int = 1
    more: bool = False

    @property
    def name(self) -> str:
        return self.kind if self.nodes == 1 else f"{self.kind}, {self.nodes} nodes"


LATER = "diverged between steps 6 and 9: "
HEALTHY = (
    Case("ddp", 2, "DDP with BatchNorm"),
    Case("no-sync", 2, "gradient accumulation under no_sync"),
    Case("two-optimizers", 2, "two optimizers of one model"),
    Case("ema", 2, "an EMA model on rank 0 alone"),
    Case("scaler", 2, "mixed precision with a GradScaler that skips steps"),
    Case("lora", 2, "frozen layers, as in LoRA"),
    Case("local-sgd", 2, "local SGD"),
    Case("alone", 2, "independent models"),
    Case("fsdp2", 2, "FSDP2"),
    Case("hsdp", 4, "HSDP"),
    Case("tp", 2, "tensor parallel"),
    Case("ddp", 2, "DDP", nodes=2),
    Case("hsdp", 4, "HSDP, replicas on either node", nodes=2),
    Case("tied", 2, "tied weights", more=True),
    Case("compiled", 2, "torch.compile around DDP", more=True),
    Case("zero", 2, "ZeroRedundancyOptimizer", more=True),
    Case("checkpointed", 2, "activation checkpointing and dropout", more=True),
    Case("backbone", 2, "a frozen backbone", more=True),
    Case("outside", 2, "a parameter outside the model", more=True),
    Case("pipeline", 2, "pipeline stages", more=True),
    Case("pipeline-and-data", 4, "pipeline stages with DDP each", more=True),
    Case("actors", 3, "learners and an actor", more=True),
    Case("uneven", 2, "uneven inputs under Join", more=True),
    Case("gan", 2, "a GAN, at two paces", more=True),
    Case("averaged", 2, "AveragedModel on rank 0 alone", more=True),
    Case("grown", 2, "layers added later", more=True),
    Case("experts", 2, "experts that DDP ignores", more=True),
    Case("unshared-buffers", 2, "DDP without broadcast_buffers", more=True),
    Case("compressed", 2, "PowerSGD", more=True),
    Case("scripted", 2, "a scripted layer", more=True),
    Case("closures", 2, "LBFGS", more=True),
    Case("2d", 4, "tensor parallel under FSDP2 in bfloat16", more=True),
    Case("fsdp1-whole", 2, "FSDP1, NO_SHARD", more=True),
    Case("fsdp1-hybrid", 4, "FSDP1, HYBRID_SHARD", more=True),
    Case("fsdp1-sharded", 2, "FSDP1, FULL_SHARD", more=True),
    Case("synced-norm", 2, "BatchNorm over all ranks", more=True),
    Case("own-steps", 2, "steps of rank 0 alone that change nothing", more=True),
    Case("folds", 2, "twenty models one after the other", more=True),
    Case("thawing", 2, "layers that thaw on the way", more=True),
)
FAULTS = (
    Case("seed", 3, "a seed that differs", r"diverged at step 1: .* parameters, the first is 0\.weight"),
    Case(
        "forgotten-broadcast",
        3,
        "a forgotten broadcast",
        r"diverged at step 1: rank 0 differs from the others in 2\.weight",
    ),
    Case("left-out", 2, "a parameter left out of DDP", r"diverged at step 1: rank 0 against rank 1 in .*4\.weight"),
    # AdamW's first step is its rate times the gradient's sign. The ranks' gradients differ here by up to a quarter, and
    # no sign does, so after that step all bits are still equal: the second one is the first that can be seen.
    Case(
        "left-out-adam",
        2,
        "the same under AdamW, whose first step hides it",
        r"diverged between steps 1 and 3: rank 0 against rank 1 in .*4\.weight",
    ),
    Case("missing-sync", 2, "an all_reduce missing under no_sync", LATER + r"rank 0 against rank 1 in .*0\.weight"),
    Case("bit-flip", 3, "a bit flipped in one replica", LATER + r"rank 2 differs from the others in .*2\.weight"),
    Case("hsdp-flip", 4, "the same under HSDP", LATER + r"rank 0 against rank 2 in .*0\.weight"),
    Case("hsdp-flip", 4, "the same, replicas on either node", LATER + r"rank 0 against rank 2 in .*0\.weight", 2),
    Case("tp-flip", 4, "the same in a norm under tensor parallel", LATER + r"rank 2 differs .*0\.weight"),
    Case("fsdp1-flip", 3, "the same under FSDP1", LATER + r"rank 2 differs from the others", more=True),
    Case("fsdp1-hybrid-flip", 4, "the same, HYBRID_SHARD", LATER + r"rank 1 against rank 3", more=True),
    Case("nan", 3, "a NaN on one rank", r"not finite on rank 1 since step 7.*one rank diverged"),
    Case("nan", 4, "the same on two nodes", r"not finite on rank 1 since step 7.*one rank diverged", 2),
    Case("fsdp2-nan", 3, "the same under FSDP2", r"not finite on rank 1 since step 7.*one rank diverged", more=True),
    Case("batch-norm", 2, "BatchNorm buffers that drift", r"buffers that should be replicas diverged .*running_mean"),
    Case("restored", 3, "a rank restored to an older state", LATER + r"rank 1 differs from the others", more=True),
    Case("compiled-restored", 3, "the same under torch.compile", LATER + r"rank 1 differs from the others", more=True),
    Case(
        "ends-apart", 3, "replicas that differ at the job's end", LATER + "rank 0 against rank 1 in weight", more=True
    ),
    Case("other-optimizer", 2, "optimizer state loaded on one rank", r"diverged at step 1: rank 0 against", more=True),
    Case("adapter-flip", 2, "a bit flipped next to an adapter of one rank", LATER + r".* in 3\.weight", more=True),
    Case("ema-flip", 2, "the same with an EMA copy that has an optimizer", LATER + r".* in 3\.weight", more=True),
    Case("skipped-step", 2, "a step that one rank skips", LATER + "rank 0 against rank 1", more=True),
    Case("loss", 3, "a loss that diverges", r"loss: rank 1 diverged"),
)


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    about: str
    healthy: bool
    right: bool
    said: tuple[str, ...]


def run(case: Case, steps: int = 60) -> Row:
    """Runs one program. A job that does not end is ended here, and its row is wrong."""
    program = PROGRAMS / ("replicas_more.py" if case.more else "replicas.py")
    meet = [f"--nnodes={case.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}"]
    command = [sys.executable, "-m", "safelaunch", "--check-every", str(EVERY), *(meet if case.nodes > 1 else ())]
    command += [f"--nproc-per-node={case.ranks // case.nodes}", os.fspath(program), case.kind]
    # On several nodes, the steps of the time that these take to meet are compared later, and not all of them.
    command += [str(steps if case.nodes == 1 else 4 * steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if case.nodes > 1 else {})}
    nodes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(case.nodes)
    ]
    said = [_output(node) for node in nodes]
    code = max(abs(node.returncode) for node in nodes)
    if code:
        print(*said, file=sys.stderr)
    lines = list(dict.fromkeys(a or b for text in said for a, b in re.findall(LINE, text)))
    right = not code and (_says(case, lines) if case.expected else _is_quiet(lines))
    return Row(case.name, case.ranks, case.about, not case.expected, right, tuple(lines))


def _output(node: subprocess.Popen[str]) -> str:
    try:
        return node.communicate(timeout=LONGEST_S)[0]
    except subprocess.TimeoutExpired:
        node.terminate()  # the supervisor ends its job
        return node.communicate()[0]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def table(cases: Sequence[Case], jobs: int, record: Path | None) -> list[Row]:
    """Runs the programs that ``record`` doesn't have as right, and prints a row for each."""
    print("| program | ranks | right | what safelaunch said |\n|---|---|---|---|")
    commit = product_commit("scripts/qa/consistency.py", "tests/support/jobs.py", "tests/qa/programs")
    known = _recorded(record, commit)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {case: pool.submit(run, case) for case in cases if (case.name, case.about) not in known}
        rows = []
        for case in cases:
            row = waiting[case].result() if case in waiting else known[case.name, case.about]
            rows.append(row)
            print(
                f"| {row.name} | {row.ranks} | {'yes' if row.right else '**no**'} | {'<br>'.join(row.said)} |",
                flush=True,
            )
            if record is not None and case in waiting:
                with record.open("a") as file:
                    file.write(json.dumps({"commit": commit, **asdict(row)}) + "\n")
    return rows


def _recorded(record: Path | None, commit: str) -> dict[tuple[str, str], Row]:
    # Rows of uncommitted changes never count.
    if record is None or not record.exists() or commit.endswith("+changes"):
        return {}
    found = [json.loads(line) for line in record.read_text().splitlines()]
    rows = [Row(**{k: v for k, v in one.items() if k != "commit"}) for one in found if one["commit"] == commit]
    return {(row.name, row.about): row for row in rows if row.right}


def _chosen(only: str, part: str) -> list[Case]:
    names = set(filter(None, only.split(",")))
    number, _, of = part.partition("/")
    cases = [case for case in (*HEALTHY, *FAULTS) if not names or case.kind in names]
    return cases[int(number) - 1 :: int(of or 1)]


def _summary(rows: Sequence[Row]) -> str:
    healthy, faults = [row for row in rows if row.healthy], [row for row in rows if not row.healthy]
    alarms, right = sum(not row.right for row in healthy), sum(row.right for row in faults)
    return f"{alarms} alarms of {len(healthy)} healthy programs; {right} of {len(faults)} faults found"


def _says(case: Case, lines: Sequence[str]) -> bool:
    return any(re.search(case.expected, line) for line in lines)


def _is_quiet(lines: Sequence[str]) -> bool:
    return bool(lines) and all(line.startswith(("nothing inconsistent", "nothing compared")) for line in lines)


def main() -> int:
    """Parses the arguments; exits with 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs, with commas between")
    parser.add_argument("--part", default="1/1", metavar="N/M", help="one of M parts of the rows")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent jobs [2]")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the rows in FILE, and run only the others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to FILE")
    words = parser.parse_args()
    rows = table(_chosen(words.only, words.part), words.jobs, words.record)
    print(_summary(rows))
    if words.json:
        words.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
