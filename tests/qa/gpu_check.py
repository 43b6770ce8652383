"""The rows of ``scripts/qa/gpu_check.py``: what a machine with a GPU shows, next to what is expected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from safelaunch.bundle.reading import locate
from safelaunch.capture import gpu
from safelaunch.leases.choose import Inventory
from scripts.bench.lib import started
from tests.qa import gpu_readings as readings
from tests.qa.gpu_readings import CLOCK, FIELDS, POWER, Spread, spreads
from tests.support.paths import PROGRAMS, ROOT

PROGRAM = PROGRAMS / "gpu_job.py"
SAFELAUNCH = (sys.executable, "-m", "safelaunch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ONE_RANK = ("--standalone", "--nproc-per-node=1", PROGRAM)
START_S, TRAIN_S, EARLY_S = 60.0, 8.0, 15.0
STATES = {"hold": "idle", "compute": "computing", "spin": "spinning", "spin-wide": "spinning"}  # of PROGRAM
PAIRS = (("hold", "compute"), ("hold", "spin"), ("compute", "spin"), ("compute", "spin-wide"))
OK, DIFFERS, NOT_POSSIBLE = "ok", "differs", "not possible here"
Finding = tuple[str, Sequence[str]]
"""measurement as text, and its differences from what is expected"""


class NotPossible(Exception):
    """This machine can't show what a row is about."""


@dataclass(frozen=True)
class Row:
    name: str
    expected: str
    measured: str
    verdict: str


@dataclass
class Machine:
    """The GPU, and the measurements so far.

    Attributes:
        environ: Environment of all processes, without safelaunch's own options.
        scratch: Directory for bundles and output.
        index: NVML's number of the GPU that the rows use.
        sample_s: Duration of the readings of each state.
        until_s: When the time is up (CLOCK_MONOTONIC).
        gpus: The inventory of leases.
        torch: Facts about torch and the GPUs that it sees.
        values: Everything measured, for the JSON file.
    """

    environ: Mapping[str, str]
    scratch: Path
    index: int
    sample_s: float
    clocks: bool
    until_s: float
    gpus: Inventory = field(default_factory=Inventory)
    torch: Mapping[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def uuid(self) -> str:
        """UUID of the GPU that the rows use, or of its first MIG instance."""
        found = [each.uuid for each in self.gpus.gpus if each.index == str(self.index) and not each.error]
        if not found:
            raise NotPossible(f"GPU {self.index} can't be leased: {self.gpus.missing or 'absent or lost'}")
        return found[0]

    def sample(self, times: int = 1) -> Any:
        seconds = times * self.sample_s
        return readings.ask("sample", str(self.index), str(seconds), env=self.environ, seconds=seconds)

    def job(self, words: Sequence[object], place: str = "") -> Job:
        """Returns a job that sees only this GPU, in the directory ``place``."""
        directory = self.scratch / place
        directory.mkdir(exist_ok=True)
        more = {"CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        return Job(words, directory, {**self.environ, **more})


@dataclass(frozen=True)
class Check:
    """One row to be measured. ``needs_s`` is the most that it usually takes."""

    name: str
    expected: str
    needs_s: float
    measure: Callable[[Machine], Finding]
    cuda: bool = True

    def row(self, machine: Machine) -> Row:
        """Never raises: a check that fails is a row that differs."""
        left_s = machine.until_s - time.monotonic()
        try:
            if self.cuda and not machine.torch.get("gpus"):
                raise NotPossible(f"torch {machine.torch.get('torch', '')} sees no GPU")
            if left_s < self.needs_s:
                raise NotPossible(f"{left_s:.0f} s are left, and it needs {self.needs_s:.0f} s")
            text, problems = self.measure(machine)
        except NotPossible as reason:
            return Row(self.name, self.expected, str(reason), NOT_POSSIBLE)
        except Exception as error:
            return Row(self.name, self.expected, f"the check failed: {type(error).__name__}: {error}", DIFFERS)
        return Row(self.name, self.expected, "; ".join((text, *problems)), DIFFERS if problems else OK)


def table(rows: Sequence[Row], widths: Sequence[int] = (22, 36, 52, 17)) -> str:
    """Returns the rows in columns, with wrapped cells and a rule below each row."""
    lines = []
    for row in (Row("check", "expected", "measured", "verdict"), *rows):
        wrapped = [textwrap.wrap(cell, width) for cell, width in zip(astuple(row), widths, strict=True)]
        for parts in (*zip_longest(*wrapped, fillvalue=""), ["-" * width for width in widths]):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


# --- inventory and leases ---------------------------------------------------------------------------------------------


def same_gpus(machine: Machine) -> Finding:
    seen = gpu.gpus()
    driver = [each.uuid or each.error for each in (seen.value.gpus if seen.value else ())]
    leasable = list(dict.fromkeys(each.parent or each.uuid for each in machine.gpus.gpus))
    in_torch = [f"GPU-{each.removeprefix('GPU-')}" for each in machine.torch.get("gpus", ())]
    machine.values["inventory"] = {"NVML": driver, "leases": leasable, "torch": in_torch}
    problems = [seen.missing] if seen.missing else []
    problems += [each.error for each in machine.gpus.gpus if each.error]
    if driver != leasable:
        problems.append(f"NVML lists {driver}, the leases {leasable}")
    if machine.torch.get("CUDA of torch") and not (in_torch and set(in_torch) <= set(leasable)):  # it can hide some
        problems.append(f"torch lists {in_torch}, the leases {leasable}")
    return f"{len(driver)} by NVML, {len(leasable)} by the leases, {len(in_torch)} by torch", problems


def leases(machine: Machine) -> Finding:
    """Runs a job that holds the GPU, one that doesn't wait for it, and one that does."""
    label = next(each.label for each in machine.gpus.gpus if each.uuid == machine.uuid)
    release = machine.scratch / "release"
    holds = f"import os, time\nwhile not os.path.exists({os.fspath(release)!r}): time.sleep(0.05)"

    def job(program: str, *options: str) -> Job:
        own = [*SAFELAUNCH, "exec", f"--bundle-dir={machine.scratch / 'bundles'}", f"--gpus={label},", *options]
        return Job([*own, "--", sys.executable, "-c", program], machine.scratch, machine.environ)

    with job(holds) as first:
        first.until(lambda: _lease_state(machine) == "leased", "the lease")
        with job("pass") as second:
            refused = second.wait(START_S)
        with job("pass", "--wait=60s") as third:
            third.until(lambda: third.text, "the message of the job that waits")
            release.touch()
            codes = [first.wait(START_S), refused, third.wait(START_S)]
    state, texts = _lease_state(machine), (first.text, second.text, third.text)
    as_expected = codes == [0, 2, 0] and "not available now" in texts[1] and "waiting for" in texts[2]
    return f"exit codes {codes}, afterwards {state}", [] if as_expected and state == "free" else texts


def _lease_state(machine: Machine) -> str:
    words = [*SAFELAUNCH, "gpus", "--json"]
    done = subprocess.run(words, cwd=ROOT, env=machine.environ, capture_output=True, timeout=START_S)
    return next(str(each["state"]) for each in json.loads(done.stdout)["gpus"] if each["uuid"] == machine.uuid)


# --- states of the GPU ------------------------------------------------------------------------------------------------


def idle(machine: Machine) -> Finding:
    taken = machine.values.setdefault("states", {})["no process"] = machine.sample()
    seen = spreads(taken)
    absent = [*(name for name in FIELDS if name not in seen), *(["Xid"] if taken[0]["Xid"] is None else [])]
    xids = [number for each in taken for number in each["Xid"] or ()]
    return _words(seen), [*(f"{name} isn't reported" for name in absent), *(f"Xid {number}" for number in xids)]


def states(machine: Machine) -> Finding:
    taken = machine.values.setdefault("states", {})
    for name in STATES:
        ready = machine.scratch / f"{name}.ready"
        with machine.job([sys.executable, PROGRAM, name, ready]) as job:
            job.until(ready.exists, f"the state {name}")
            taken[name] = machine.sample()
            if not job.runs:
                raise RuntimeError(f"{name}: {job.text[-300:]}")
    return judge_states(taken)


def judge_states(taken: Mapping[str, Sequence[readings.Reading]]) -> Finding:
    """Compares the readings of the states, and applies the rule of ``gpu_readings.state_of`` to each."""
    seen = {name: spreads(taken[name]) for name in STATES}
    marks = {pair: readings.distinguishing(*(taken[name] for name in pair)) for pair in PAIRS}
    power = seen["hold"][POWER].middle, seen["compute"][POWER].middle
    named = {name: readings.state_of(seen[name], *power) for name in STATES}
    text = [f"{name}: {_words(seen[name])}" for name in STATES]
    text += [f"{first}/{second} by {', '.join(by)}" for (first, second), by in marks.items() if by]
    problems = [f"{first} and {second} look the same" for (first, second), by in marks.items() if not by]
    problems += [f"{name} is taken for {named[name]}" for name, state in STATES.items() if named[name] != state]
    return "; ".join(text), problems


def _words(seen: Mapping[str, Spread]) -> str:
    return ", ".join(f"{name} {each.middle:.0f} [{each.low:.0f}..{each.high:.0f}]" for name, each in seen.items())


# --- a job blocked by its GPU -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockedJob:
    """A one-rank job whose GPU is busy with one kernel, and what safelaunch is expected to do about it.

    Attributes:
        kernel_s: Duration of the kernel.
        patience_s: Time until the job is ended by this check.
    """

    name: str
    options: tuple[str, ...]
    kernel_s: float
    patience_s: float
    outcome: str
    code: int


# The kernel of the first ends after the learned threshold of 60 s, and the job continues.
DEFAULT = BlockedJob("default", (), kernel_s=90, patience_s=110, outcome="suspect", code=0)
EXPLICIT = BlockedJob("explicit", ("--stall-timeout=20",), kernel_s=300, patience_s=60, outcome="hang", code=124)


def blocked(case: BlockedJob, machine: Machine) -> Finding:
    mark, bundle_dir = machine.scratch / case.name / "mark", machine.scratch / case.name / "bundles"
    words = [*SAFELAUNCH, f"--bundle-dir={bundle_dir}", *case.options, *ONE_RANK, "blocked", mark, case.kernel_s]
    with machine.job(words, case.name) as job:
        job.until(mark.exists, "the long kernel")
        code = job.wait(case.patience_s)
    since_s = mark.stat().st_mtime  # fails if the job ended early
    messages = [(round(at - since_s, 1), line) for at, line in job.lines if "safelaunch:" in line and at >= since_s]
    bundles = [path.parent for path in bundle_dir.glob("*/verdict.json") if not path.parent.is_symlink()]
    verdicts = [json.loads((bundle / "verdict.json").read_text()) for bundle in bundles]
    machine.values[f"blocked, {case.name}"] = {"messages": messages, "verdicts": verdicts, "exit code": code}
    early_s = next((at for at, line in messages if "quiet for" in line), None)
    details = (*map(_words_of_verdict, verdicts), *map(_last_call, bundles))
    text = "; ".join((f"first message after {early_s} s, exit code {code}", *details))
    return text, problems_of_blocked(case, early_s, verdicts, code)


def problems_of_blocked(
    case: BlockedJob, early_s: float | None, verdicts: Sequence[Mapping[str, Any]], code: int | None
) -> list[str]:
    """Returns how the first message, the bundles and the exit code differ from what is expected."""
    line = next(n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if text.endswith("# BLOCKED"))
    problems = [] if early_s is not None and early_s <= EARLY_S else [f"no message within {EARLY_S:g} s"]
    problems += [] if code == case.code else [f"exit code {code}, expected {case.code}"]
    problems += [] if len(verdicts) == 1 else [f"{len(verdicts)} bundles"]
    for verdict in verdicts:
        if (verdict["outcome"], verdict["cause"], _lines(verdict)) != (case.outcome, "gpu-kernel", [line]):
            problems.append(f"not {case.outcome}, gpu-kernel at line {line}: {verdict['summary']}")
    return problems


def _lines(verdict: Mapping[str, Any]) -> list[int | None]:
    return [(culprit.get("frame") or {}).get("line") for culprit in verdict["culprits"]]


def _words_of_verdict(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['outcome']}, {verdict['cause']} ({verdict['confidence']}) at lines {_lines(verdict)}"


def _last_call(bundle: Path) -> str:  # the one that the long kernel holds up
    records = [rank.flight_record for rank in locate.read(bundle).evidence.ranks]
    calls = [call for record in records if record is not None for call in record.entries]
    last = max(calls, key=lambda call: call.record_id, default=None)
    return f"{last.op} #{last.seq} {last.state}, started: {last.started}" if last else "no Flight Recorder entries"


# --- overhead and clocks ----------------------------------------------------------------------------------------------


def overhead(machine: Machine) -> Finding:
    """Trains under torchrun, safelaunch, torchrun and safelaunch."""
    launchers = {"torchrun": TORCHRUN, "safelaunch": (*SAFELAUNCH, f"--bundle-dir={machine.scratch}")}
    runs = machine.values["step times"] = []
    for name in (f"{launcher}-{number}" for number in (1, 2) for launcher in launchers):
        times = machine.scratch / name / "times"
        with machine.job([*launchers[name[:-2]], *ONE_RANK, "train", times, TRAIN_S], name) as job:
            code = job.wait(TRAIN_S + START_S)
        if code != 0:
            raise RuntimeError(f"{name} ended with {code}: {job.text[-300:]}")
        runs.append([1000 * took for _, took in json.loads(times.read_text())])
    return judge_overhead([run[len(run) // 5 :] for run in runs])  # without the warm-up


def judge_overhead(runs: Sequence[Sequence[float]]) -> Finding:
    """Compares the step times (ms) of torchrun, safelaunch, torchrun, safelaunch."""
    middles, parts = [median(run) for run in runs], [quantiles(run, n=20) for run in runs]
    ratio, scatter = sum(middles[1::2]) / sum(middles[::2]), abs(middles[0] - middles[2]) / min(middles)
    steps = ", ".join(f"{m:.3f} [{p[0]:.3f}..{p[-1]:.3f}]" for m, p in zip(middles, parts, strict=True))
    text = f"ratio {ratio:.4f}; torchrun against itself {scatter:.2%}; ms a step, in order: {steps}"
    return text, ["slower than by chance"] if ratio > 1 + max(0.01, scatter) else []


def clocks(machine: Machine) -> Finding:
    """Limits the clock in the middle of a job that safelaunch watches."""
    if not machine.clocks:
        raise NotPossible("it would change the clock of this GPU: run it with --clocks if you may")
    times = machine.scratch / "clocks" / "times"
    words = [*SAFELAUNCH, f"--bundle-dir={times.parent}", *ONE_RANK, "train", times, 5 * machine.sample_s]
    with machine.job(words, "clocks") as job:
        job.until(times.exists, "the first step")
        before = machine.sample()
        with limited_clock(machine.uuid, int(spreads(before)[CLOCK].high / 2)):
            limited = machine.sample(2)
        code = job.wait(START_S)
    begin, end = limited[0]["time"], limited[-1]["time"]
    steps = json.loads(times.read_text())
    usual = 1000 * median(took for at, took in steps if at < begin)
    slow = 1000 * median(took for at, took in steps if begin <= at <= end)
    machine.values["clocks"] = {"before": before, "limited": limited, "stderr": job.text, "step times": steps}
    text = f"{usual:.3f} ms a step, limited {slow:.3f}; exit code {code}; {_words(spreads(limited))}; {job.text[-500:]}"
    return text, [] if slow > 1.15 * usual else ["slowed by less than 15 %"]


@contextmanager
def limited_clock(uuid: str, mhz: int) -> Iterator[None]:
    """Limits the clock of a GPU during the block. Raises NotPossible if that isn't permitted.

    A process in its own session removes the limit once its standard input is closed: by this function, or by the kernel
    if this process is killed.
    """
    if shutil.which("nvidia-smi") is None:
        raise NotPossible("nvidia-smi isn't installed")
    remove = ["sh", "-c", 'read -r _; exec nvidia-smi -i "$0" -rgc', uuid]
    undo = subprocess.Popen(remove, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        limit = ["nvidia-smi", "-i", uuid, "-lgc", f"{mhz},{mhz}"]
        done = subprocess.run(limit, capture_output=True, text=True, timeout=START_S)
        if done.returncode != 0:
            undo.kill()  # nothing to undo
            raise NotPossible(f"the clock can't be limited: {(done.stderr or done.stdout).strip()[:200]}")
        yield
    finally:
        assert undo.stdin is not None
        undo.stdin.close()
        if undo.wait(START_S) > 0:
            print(f"THE CLOCK MIGHT STILL BE LIMITED: run nvidia-smi -i {uuid} -rgc", file=sys.stderr)


def versions(machine: Machine) -> Finding:
    facts = machine.values["versions"] = {**readings.ask("about", env=machine.environ), **machine.torch}
    absent = [name for name, value in facts.items() if value in (None, []) or (name == "persistence" and None in value)]
    return ", ".join(f"{name} {value}" for name, value in facts.items()), [f"unknown: {name}" for name in absent]


def lost(machine: Machine) -> Finding:
    raise NotPossible("a lost GPU can't be planted without harm to the machine")


SOON = f"message within {EARLY_S:g} s"
CHECKS = (
    Check("1 inventory", "NVML and leases list the same GPUs, torch no others", 20, same_gpus, cuda=False),
    Check("1 leases", "second job refused (exit code 2), third waits and runs; then free", 60, leases, cuda=False),
    Check("2 idle", "all readings are reported; no Xid", 30, idle, cuda=False),
    Check("2 states", "readings tell idle, computing and spinning apart, and reveal which it is", 100, states),
    Check("3 blocked, default", f"{SOON}; suspect, gpu-kernel, its line; exit code 0", 170, partial(blocked, DEFAULT)),
    Check("3 blocked, explicit", f"{SOON}; hang, gpu-kernel, its line; exit code 124", 120, partial(blocked, EXPLICIT)),
    Check("4 lost GPU", "gpu-lost, with the driver's error", 0, lost, cuda=False),
    Check("5 overhead", "steps as fast as under torchrun, within 1 % or torchrun's own scatter", 100, overhead),
    Check("6 clock limit", "half the clock slows the steps, and is undone", 130, clocks),
    Check("7 versions", "all known", 20, versions, cuda=False),
)


class Job:
    """A process that is ended with the block, and the lines that it writes to stderr, with their times (Unix)."""

    def __init__(self, words: Sequence[object], cwd: Path, environ: Mapping[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._started = started(list(map(str, words)), cwd, environ, stderr=subprocess.PIPE)

    def __enter__(self) -> Job:
        self._process = self._started.__enter__()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._started.__exit__(*error)
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                self.lines.append((time.time(), line.decode(errors="replace").rstrip()))

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in tuple(self.lines))

    def until(self, reached: Callable[[], object], what: str) -> None:
        """Waits until ``reached`` is true or the process has ended. Raises TimeoutError."""
        deadline = time.monotonic() + START_S
        while self.runs and not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {START_S:g} s for {what}: {self.text[-300:]}")
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit code; None if the process still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
