"""The long checks: how to run each, how to read its results, and the file that records them for the documents.

``figures.json`` holds a ``Record`` for each check: commit, date and machine of its run, and a table ready to print.
``verify.py`` writes the file. ``figures.py`` copies its tables into README and docs.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "figures.json"
PRODUCT = ("safelaunch", "configs", "pyproject.toml")
PYTHON = sys.executable
SOON_S = 15.0  # from the last progress to the right line on the screen


class CheckError(Exception):
    """A check or the file of figures is unusable."""


# --- what was found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The result of one check. ``result``: a line. ``head`` and ``rows``: the table for the documents."""

    result: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Record:
    """One run of a check. ``commit``: the last one that changed what it measures. ``exit``: its last exit code."""

    commit: str
    date: str
    machine: str
    seconds: float
    exit: int
    result: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def passed(self) -> bool:
        return self.exit == 0


def load(path: Path) -> dict[str, Record]:
    """Returns name → record. Raises CheckError if the file has another format."""
    if not path.exists():
        return {}
    try:
        return {name: _record(fields) for name, fields in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckError(f"{path} holds no figures: {error}") from error


def _record(fields: dict[str, Any]) -> Record:
    rows = tuple(tuple(row) for row in fields.pop("rows"))
    return Record(head=tuple(fields.pop("head")), rows=rows, **fields)


def save(path: Path, records: dict[str, Record]) -> None:
    """Writes the file atomically: an interruption leaves the old one."""
    whole = path.with_suffix(".partial")
    whole.write_text(json.dumps({name: asdict(records[name]) for name in sorted(records)}, indent=1) + "\n")
    whole.replace(path)


# --- reading what the scripts save ------------------------------------------------------------------------------------


def read_bench(files: Sequence[Path]) -> Found:
    """Returns the figures with an aim and their sub-figures. A missed aim is marked in the table and is no failure."""
    figures = [figure for file in files for figure in json.loads(file.read_text())["figures"]]
    blocks: list[list[dict[str, Any]]] = []
    for figure in figures:
        if figure["name"].startswith(" ") and blocks:
            blocks[-1].append(figure)
        else:
            blocks.append([figure])
    shown = [figure for block in blocks if any(one["target"] for one in block) for figure in block]
    rows = tuple((_name(one), _measured(one), _aim(one)) for one in shown)
    met = [one["met"] for one in figures if one["target"]]
    return Found(f"{sum(met)} of {len(met)} aims met", ("", "measured", "aim"), rows)


def _name(figure: dict[str, Any]) -> str:
    name = figure["name"]
    return f"– {name.strip()}" if name.startswith(" ") else name


def _measured(figure: dict[str, Any]) -> str:
    values, unit = figure["values"], f" {figure['unit']}" if figure["unit"] else ""
    low, middle, high = _numbers(min(values), median(values), max(values))
    return f"{middle}{unit}" if len(values) == 1 else f"{middle}{unit} ({low} to {high})"


def _aim(figure: dict[str, Any]) -> str:
    if not figure["target"]:
        return ""
    sign, limit = figure["target"].split()
    aim = f"{'≤' if sign == '<=' else '≥'} {limit} {figure['unit']}".rstrip()
    return aim if figure["met"] else f"{aim}: missed"


def _numbers(*values: float) -> list[str]:
    """Formats each number with about three digits."""
    return [f"{one:.{3 if abs(one) < 2 else 2 if abs(one) < 10 else 1 if abs(one) < 100 else 0}f}" for one in values]


def read_zoo(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    ran = [row for row in rows if not row.get("not run")]
    wrong = [row for row in ran if row["wrong"]]
    classes, absent = {row["class"] for row in ran}, {row["class"] for row in rows} - {row["class"] for row in ran}
    where = f" of {nodes} nodes" if (nodes := max(row.get("nodes", 1) for row in rows)) > 1 else ""
    what = f"the hang zoo: {len(classes)} classes, the culprit on each rank{where} in turn"
    what += f" ({len(absent)} more cannot run here)" if absent else ""
    seen = f"{len(ran) - len(wrong)} of {len(ran)} right: cause, rank, line"
    return Found(seen, ("", "seen"), ((what, seen), *(
        (f"– {row['class']}, rank {row['culprit']} of {row['ranks']}", "; ".join(row["wrong"])) for row in wrong
    )))  # fmt: skip


def read_first_word(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    times = sorted(row["seconds"] for row in rows if not row["wrong"])
    soon = sum(seconds <= SOON_S for seconds in times)
    what = f"the hang zoo with nothing configured: the right ranks on the screen within {SOON_S:g} s of the stop"
    seen = f"{soon} of {len(rows)}" + (f"; median {median(times):.1f} s" if times else "")
    wrong = tuple(
        (f"– {row['class']}, rank {row['culprit']} of {row['ranks']}", "; ".join(row["wrong"]) or f"{row['seconds']} s")
        for row in rows
        if row["wrong"] or row["seconds"] > SOON_S
    )
    return Found(seen, ("", "seen"), ((what, seen), *wrong))


def read_reproductions(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    table, counts = [], []
    for kind, words in (
        ("zoo", "from bundles of the zoo"),
        ("no stacks", "from generated dumps of NCCL form"),
        ("window", "the same, rings wrapped"),
        ("sends", "the same, with sends"),
    ):
        mine = [row for row in rows if [*row["case"].split(", ", 1), "zoo"][1].split(",")[0] == kind]
        wrong = [row for row in mine if row["why_not"]]
        said = sum(bool(row["in_part"]) and not row["why_not"] for row in mine)
        seen = f"{len(mine) - len(wrong) - said} of {len(mine)}"
        seen += f"; {said} at the same calls, with a different verdict, as the script's header notes" if said else ""
        table += [(f"scripts of `reproduce`, {words}: the same cause and ranks", seen)]
        table += [(f"– {row['name']}", row["why_not"][:120]) for row in wrong]
        counts.append((len(mine), said, len(wrong)))
    total, said, wrong_of_all = (sum(numbers) for numbers in zip(*counts, strict=True))
    result = f"{total - said - wrong_of_all} of {total} lead to the same verdict, {said} differ as said"
    return Found(f"{result}, {wrong_of_all} differ", ("", "seen"), tuple(table))


def read_consistency(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    healthy = [row for row in rows if row["healthy"]]
    alarms = [row for row in healthy if not row["right"]]
    faults = [row for row in rows if not row["healthy"]]
    right = sum(row["right"] for row in faults)
    table = [(f"{len(healthy)} healthy programs", f"{len(alarms)} alarms")]
    table += [(f"– {row['about']}", "; ".join(row["said"])[:120] or "failed") for row in alarms]
    found = [row["about"] for row in faults if row["right"]]
    table += (
        [(f"{len(found)} planted faults: {'; '.join(found)}", "found, with the right step and rank")] if found else []
    )
    table += [(row["about"], "**missed**") for row in faults if not row["right"]]
    seen = f"{len(alarms)} alarms of {len(healthy)} healthy programs; {right} of {len(faults)} faults found"
    return Found(seen, ("`--check-every 3`", "seen"), tuple(table))


def read_soak(files: Sequence[Path]) -> Found:
    rows = [row for file in files for row in json.loads(file.read_text())]
    table, parts = [], []
    for kind, words, bad in (("healthy", "healthy jobs of every rhythm", "ended or disturbed"),
                            ("frozen", "frozen jobs", "missed or misjudged")):  # fmt: skip
        mine = [row for row in rows if row["kind"] == kind]
        wrong = [row for row in mine if row["wrong"]]
        seen = f"{len(wrong) or 'none'} {bad}"
        table += [(f"{len(mine)} {words}", seen), *((f"– {row['name']}", "; ".join(row["wrong"])) for row in wrong)]
        parts.append(f"{len(mine)} {kind}: {seen}")
    return Found("; ".join(parts), ("", "seen"), tuple(table))


def read_faults(files: Sequence[Path]) -> Found:
    return _of_rows(files, "the fault matrix: no job, process or bundle lost")


def read_node_faults(files: Sequence[Path]) -> Found:
    return _of_rows(files, "the fault matrix for nodes: no job or process lost, nobody innocent named")


def _of_rows(files: Sequence[Path], what: str) -> Found:
    rows = json.loads(files[0].read_text())
    ran = [row for row in rows if not row["promise"].startswith("not run")]
    if not ran:
        return Found(rows[0]["promise"], ("", "seen"), ((what, rows[0]["promise"]),))
    broken = [row for row in ran if row["promise"] != "kept"]
    seen = f"{len(ran) - len(broken)} of {len(ran)} kept"
    what += f" ({len(rows) - len(ran)} rows cannot run here)" if len(ran) < len(rows) else ""
    return Found(seen, ("", "seen"), ((what, seen), *(
        (f"– {row['fault']}, {row['moment']}, {row['job or node']}", row["promise"]) for row in broken
    )))  # fmt: skip


def read_slurm(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    ran = [row for row in rows if not row["promise"].startswith("not run")]
    if not ran:
        return Found(rows[0]["promise"], ("", "seen"), (("sweeps through Slurm", rows[0]["promise"]),))
    seen = f"{sum(row['promise'] == 'kept' for row in ran)} of {len(ran)} kept"
    what = "sweeps through a real Slurm: no job lost or run twice, every outcome reported correctly"
    return Found(seen, ("", "seen"), ((what, seen), *(
        (f"– {row['name']}", row["promise"].split("\n")[0][:120]) for row in rows if row["promise"] != "kept"
    )))  # fmt: skip


def read_compat(files: Sequence[Path]) -> Found:
    outcomes = json.loads(files[0].read_text())
    rows = []
    for one in outcomes:
        features = one["features"]
        counts = f"{one['passed']} passed, {one['failed']} failed, {one['skipped']} skipped"
        rows.append((features.get("torch", one["version"]), *(features.get(name, "?") for name in (
            "python", "server", "gloo")), one["problem"].replace("\n", " ") or counts))  # fmt: skip
    good = sum(bool(one["passed"] and not one["failed"] and not one["problem"]) for one in outcomes)
    head = ("torch", "Python", "worker server", "its Flight Recorder tells of gloo", "smoke set")
    return Found(f"{good} of {len(outcomes)} versions", head, tuple(rows))


def read_attack(files: Sequence[Path]) -> Found:
    document = json.loads(files[0].read_text())
    rows = []
    for area, one in document["areas"].items():
        fallen, skipped = len(one["fallen"]), sum(one["skipped"].values())
        seen = f"{fallen or 'none'} got through" + (f"; {skipped} could not run here" if skipped else "")
        rows += [(f"{area}: {one['tried']} attacks", seen), *((f"– {line}", "") for line in one["fallen"])]
    fallen = sum(len(one["fallen"]) for one in document["areas"].values())
    tried = sum(one["tried"] for one in document["areas"].values())
    return Found(f"{tried} tried, {fallen} got through (seed {document['seed']})", ("", "seen"), tuple(rows))


def read_rhythm(files: Sequence[Path]) -> Found:
    rows = json.loads(files[0].read_text())
    table = tuple(
        (row["kind"], str(row["histories"]), str(row["suspected"]), f"{row['delay_s']:.1f} s",
         f"{row['by_best_fixed']:.2f}") for row in rows
    )  # fmt: skip
    head = ("step histories", "number", "closer looks", "delay", "by the best fixed timeout")
    return Found(f"{rows[-1]['histories']} histories, {rows[-1]['suspected']} closer looks", head, table)


def read_junit(files: Sequence[Path]) -> Found:
    """Reads pytest's ``--junitxml``: a row for each test."""
    cases = list(ElementTree.parse(files[0]).iter("testcase"))
    rows = tuple((_title(case.get("name", "")), _outcome(case)) for case in cases)
    return Found(_counts(cases), ("", "seen"), rows)


def read_paper(files: Sequence[Path]) -> Found:
    cases = list(ElementTree.parse(files[0]).iter("testcase"))
    failed = tuple((f"– {_title(case.get('name', ''))}", "failed") for case in cases if _outcome(case) == "failed")
    what = f"random jobs on paper, up to 512 ranks, one fault each: {len(cases)} families"
    seen = f"a wrong verdict in {len(failed)}" if failed else "no innocent rank named"
    return Found(_counts(cases), ("", "seen"), ((what, seen), *failed))


def _counts(cases: Sequence[ElementTree.Element]) -> str:
    outcomes = Counter(_outcome(case) for case in cases)
    return ", ".join(f"{outcomes[name]} {name}" for name in ("passed", "failed", "skipped"))


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def _title(name: str) -> str:
    function, _, parameters = name.partition("[")
    words = function.removeprefix("test_").replace("_", " ")
    return f"{parameters.rstrip(']')}: {words}" if parameters else words


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One long check. ``commands`` run in order, each with ``{out}`` replaced by the file for its results.

    ``inputs``: the files that it measures with, besides the product. A change of one makes a record outdated.
    ``minutes``: duration on 2 cores. ``resumes``: it keeps the rows of its commit that an interrupted run has left.
    """

    commands: tuple[tuple[str, ...], ...]
    read: Callable[[Sequence[Path]], Found]
    inputs: tuple[str, ...]
    minutes: int
    env: dict[str, str] = field(default_factory=dict)
    resumes: bool = False


def _module(script: str) -> str:
    return script.removesuffix(".py").replace("/", ".")


def _bench(name: str, minutes: int, *arguments: tuple[str, ...]) -> Check:
    script = f"scripts/bench/{name}.py"
    commands = tuple((PYTHON, "-m", _module(script), *words, "--json", "{out}") for words in arguments or ((),))
    return Check(commands, read_bench, (script, "scripts/bench/lib.py"), minutes)


def _script(
    script: str, minutes: int, read: Callable[[Sequence[Path]], Found], *inputs: str, words: tuple[str, ...] = ()
) -> Check:
    return Check(((PYTHON, "-m", _module(script), *words, "--json", "{out}"),), read, (script, *inputs), minutes)


_JOBS = ("tests/support/jobs.py", "tests/qa/programs")

CHECKS = {
    "launch": _bench("launch", 6),
    "overhead": _bench("overhead", 15),
    "detect": _bench("detect", 6, (), ("--auto",)),
    "diagnose": _bench("diagnose", 5, ("--many", "4096", "--live")),
    "colaunch": _bench("colaunch", 1),
    "leases": _bench("leases", 1),
    "nodes": _bench("nodes", 4),
    "record": _bench("record", 12),
    "detect-nodes": _bench("detect_nodes", 6),
    "rhythm": _script("scripts/research/rhythm.py", 1, read_rhythm, "tests/support/histories.py"),
    "paper": Check(
        ((PYTHON, "-m", "pytest", "-q", "-n", "2", "tests/unit/test_verdict_synthetic.py", "--junitxml", "{out}"),),
        read_paper,
        ("tests/unit/test_verdict_synthetic.py", "tests/support/synthetic.py"),
        60,
        {"SAFELAUNCH_EXAMPLES": "1000"},
    ),
    "zoo": _script("scripts/qa/zoo.py", 20, read_zoo, "tests/qa/zoo.py", *_JOBS),
    "zoo-nodes": _script(
        "scripts/qa/zoo.py", 30, read_zoo, "tests/qa/zoo.py", "tests/qa/faults", *_JOBS, words=("--nodes", "2")
    ),
    "reproductions": replace(
        _script(
            "scripts/qa/reproductions.py",
            30,
            read_reproductions,
            "tests/qa/reproducing.py",
            "tests/qa/zoo.py",
            "tests/support/synthetic.py",
            *_JOBS,
        ),
        resumes=True,
    ),
    "consistency": _script(
        "scripts/qa/consistency.py", 8, read_consistency, *_JOBS, words=("--record", "build/verify/consistency.rows")
    ),
    "consistency-cost": _bench("checks", 5),
    "first-word": _script(
        "scripts/qa/zoo.py", 30, read_first_word, "tests/qa/zoo.py", *_JOBS, words=("--first-word", "--jobs", "3")
    ),
    "rare": Check(
        (
            (
                PYTHON,
                "-m",
                "pytest",
                "-q",
                "-n",
                "3",
                "--dist",
                "loadgroup",
                "--whole",
                "-m",
                "rare",
                "tests/e2e",
                "tests/component",
                "tests/qa",
                "--junitxml",
                "{out}",
            ),
        ),
        read_junit,
        ("tests/e2e", "tests/component", "tests/qa"),
        10,
        {"OMP_NUM_THREADS": "1"},
    ),
    "soak": _script("scripts/qa/soak.py", 30, read_soak, "tests/qa/soak.py", *_JOBS),
    "soak-nodes": Check(
        tuple((PYTHON, "-m", "scripts.qa.soak", "--nodes", nodes, "--json", "{out}") for nodes in ("2", "3")),
        read_soak,
        ("scripts/qa/soak.py", "tests/qa/soak.py", "tests/qa/soak_nodes.py", "tests/support/netns.py", *_JOBS),
        90,
    ),
    "faults": _script("scripts/qa/faults.py", 45, read_faults, "tests/qa/faults", *_JOBS),
    "faults-nodes": _script(
        "scripts/qa/faults.py", 60, read_node_faults, "tests/qa/faults", *_JOBS, words=("--nodes", "--jobs", "3")
    ),
    "slurm": _script("scripts/qa/slurm.py", 8, read_slurm, "tests/qa/slurm.py", "docs/schedulers.md"),
    "slurm-cost": Check(
        ((PYTHON, "-m", "scripts.qa.slurm", "--bench", "--json", "{out}"),),
        read_bench,
        ("scripts/qa/slurm.py", "scripts/bench/lib.py", "tests/qa/slurm.py"),
        4,
    ),
    "attack": _script("scripts/qa/attacks.py", 60, read_attack, "tests/qa/attacks", *_JOBS),
    "frameworks": Check(
        (("bash", "scripts/qa/frameworks.sh", "--junitxml", "{out}"),),
        read_junit,
        ("scripts/qa/frameworks.sh", "tests/qa/frameworks.py", "tests/qa/test_frameworks.py", *_JOBS),
        6,
    ),
    "compat": _script("scripts/qa/compat.py", 45, read_compat, "tests/unit", "tests/e2e"),
}


# --- where and of what ------------------------------------------------------------------------------------------------


def commit_of(check: Check, root: Path = ROOT) -> str:
    """Returns the last commit that changed the product or the check, plus ``+changes`` if any is uncommitted."""
    paths = [path for path in (*PRODUCT, *check.inputs) if (root / path).exists()]
    commit = _git(root, "log", "-1", "--format=%h", "--abbrev=9", "--", *paths)
    if not commit:
        raise CheckError(f"{root} is no git repository with a commit of these: {', '.join(paths)}")
    return f"{commit}+changes" if _git(root, "status", "--porcelain", "--", *paths) else commit


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return (
        f"{cores} cores, {memory:.0f} GiB, {f'{gpus} GPUs' if gpus else 'no GPU'}, "
        f"Python {platform.python_version()}, torch {torch}"
    )
