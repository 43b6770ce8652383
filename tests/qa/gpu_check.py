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
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any, Literal

from safelaunch.bundle.reading import locate
from safelaunch.capture import gpu
from safelaunch.leases.choose import Inventory
from scripts.bench.lib import started
from tests.qa import gpu_readings as readings
from tests.qa.gpu_readings import Spread, spreads
from tests.support.paths import PROGRAMS, ROOT

PROGRAM = PROGRAMS / "gpu_job.py"
SAFELAUNCH = (sys.executable, "-m", "safelaunch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN_S, START_S = 8.0, 60.0
STATES: dict[str, readings.State] = {
    "hold": "idle",
    "compute": "computing",
    "spin": "spinning",
    "spin-wide": "spinning",
}
EARLY_S = 15.0
Judgement = Literal["ok", "differs", "not possible here"]


class NotPossible(Exception):
    """This machine can't show what a row is about."""


@dataclass(frozen=True)
class Row:
    name: str
    expected: str
    measured: str
    verdict: Judgement


@dataclass(frozen=True)
class Measured:
    text: str
    problems: Sequence[str] = ()


@dataclass
class Machine:
    """What the rows share.

    Attributes:
        environ: Environment of all processes, without safelaunch's own options.
        scratch: Directory for bundles and output.
        index: NVML's number of the GPU that the rows use.
        sample_s: Duration of the readings of each state.
        gpus: The inventory of leases.
        torch: Facts about torch, with the GPUs that it sees; ``missing`` says why there are none.
        values: Everything measured, for the JSON file.
        until_s: When the time is up (CLOCK_MONOTONIC).
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
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    @property
    def uuid(self) -> str:
        """UUID of the GPU that the rows use, or of its first MIG instance."""
        found = [each.uuid for each in self.gpus.gpus if each.index == str(self.index)]
        if not found:
            raise NotPossible(f"the inventory has no GPU {self.index}: {self.gpus.missing or 'only other numbers'}")
        return found[0]

    @property
    def job_environ(self) -> dict[str, str]:
        return {**self.environ, "CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    def sample(self, times: int = 1) -> list[dict[str, Any]]:
        seconds = times * self.sample_s
        words = ("sample", str(self.index), str(seconds))
        taken: list[dict[str, Any]] = readings.ask(*words, env=self.environ, seconds=seconds)
        return taken


@dataclass(frozen=True)
class Check:
    """One row to be measured. ``needs_s`` is the most that it usually takes."""

    name: str
    expected: str
    needs_s: float
    measure: Callable[[Machine], Measured]
    cuda: bool = True

    def row(self, machine: Machine) -> Row:
        """Never raises: a check that fails is a row that differs."""
        try:
            if self.cuda and not machine.torch.get("gpus"):
                raise NotPossible(f"torch sees no GPU: {machine.torch.get('missing', '')}")
            if machine.left_s < self.needs_s:
                raise NotPossible(f"{machine.left_s:.0f} s are left, and it needs {self.needs_s:.0f} s")
            found = self.measure(machine)
        except NotPossible as reason:
            return Row(self.name, self.expected, str(reason), "not possible here")
        except Exception as error:
            return Row(self.name, self.expected, f"the check failed: {type(error).__name__}: {error}", "differs")
        return Row(self.name, self.expected, "; ".join((found.text, *found.problems)), verdict_on(found))


def verdict_on(found: Measured) -> Judgement:
    return "differs" if found.problems else "ok"


def table(rows: Sequence[Row], widths: Sequence[int] = (22, 36, 52, 17)) -> str:
    """Returns the rows in columns, with wrapped cells and a rule below each row."""
    rule = "  ".join("-" * width for width in widths)
    lines = []
    head = ("check", "expected", "measured", "verdict")
    for cells in (head, *((row.name, row.expected, row.measured, row.verdict) for row in rows)):
        wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
        lines.append(rule)
    return "\n".join(lines)


# --- inventory and leases ---------------------------------------------------------------------------------------------


def same_gpus(machine: Machine) -> Measured:
    seen = gpu.gpus()
    driver = [each.uuid or each.error for each in (seen.value.gpus if seen.value else ())]
    leasable = list(dict.fromkeys(each.parent or each.uuid for each in machine.gpus.gpus))
    machine.values["inventory"] = {"NVML": driver, "leases": leasable, "torch": machine.torch.get("gpus")}
    problems = [f"NVML lists {driver}, the leases {leasable}"] if driver != leasable else []
    problems += [seen.missing] if seen.missing else []
    problems += [each.error for each in machine.gpus.gpus if each.error]
    return Measured(f"{len(driver)} by NVML, {len(leasable)} by the leases", problems)


def same_gpus_in_torch(machine: Machine) -> Measured:
    leasable = [each.uuid for each in machine.gpus.gpus]
    seen = [each.removeprefix("GPU-") for each in machine.torch["gpus"]]
    known = [each for each in seen if any(each in uuid for uuid in leasable)]
    return Measured(f"{len(seen)} by torch", [] if known == seen else [f"torch lists {seen}, the leases {leasable}"])


def leases(machine: Machine) -> Measured:
    """Runs a job that holds the GPU, one that doesn't wait for it, and one that does."""
    label = next(each.label for each in machine.gpus.gpus if each.uuid == machine.uuid)
    release = machine.scratch / "release"
    holds = f"import os, time\nwhile not os.path.exists({os.fspath(release)!r}): time.sleep(0.05)"

    def words(*more: str) -> list[str]:
        own = [f"--bundle-dir={machine.scratch / 'bundles'}", f"--gpus={label},"]
        return [*SAFELAUNCH, "exec", *own, *more, "--", sys.executable, "-c"]

    problems = []
    with Job([*words(), holds], machine.scratch, machine.environ) as first:
        first.until(lambda: _lease_state(machine) == "leased", "the lease")
        second = Job.run([*words(), "pass"], machine.scratch, machine.environ, START_S)
        with Job([*words("--wait=60s"), "pass"], machine.scratch, machine.environ) as third:
            third.until(lambda: third.text, "the message of the job that waits")
            if not third.runs or "waiting for" not in third.text:
                problems.append(f"the third job didn't wait: {third.text}")
            release.touch()
            codes = [first.wait(START_S), second.code, third.wait(START_S)]
    state = _lease_state(machine)
    problems += [] if codes == [0, 2, 0] else [f"exit codes {codes}: {first.text} {second.text} {third.text}"]
    problems += [] if "not available now" in second.text else [f"the second job printed {second.text!r}"]
    problems += [] if state == "free" else [f"afterwards it is {state}"]
    return Measured(f"exit codes {codes}, afterwards {state}", problems)


def _lease_state(machine: Machine) -> str:
    words = [*SAFELAUNCH, "gpus", "--json"]
    done = subprocess.run(words, cwd=ROOT, env=machine.environ, capture_output=True, timeout=START_S)
    return next(str(each["state"]) for each in json.loads(done.stdout)["gpus"] if each["uuid"] == machine.uuid)


# --- states of the GPU ------------------------------------------------------------------------------------------------


def idle(machine: Machine) -> Measured:
    taken = machine.values.setdefault("states", {})["no process"] = machine.sample()
    seen = spreads(taken)
    absent = [words for name, words in readings.FIELDS.items() if name not in seen]
    absent += ["Xid events"] if taken[-1]["xids"] is None else []
    xids = [number for each in taken for number in each["xids"] or ()]
    problems = [f"not reported: {', '.join(absent)}"] if absent else []
    problems += [f"Xid events {xids}"] if xids else []
    return Measured(_words(seen), problems)


def states(machine: Machine) -> Measured:
    states = machine.values.setdefault("states", {})
    for name in STATES:
        ready = machine.scratch / f"{name}.ready"
        with Job([sys.executable, PROGRAM, name, ready], machine.scratch, machine.job_environ) as job:
            job.until(ready.exists, f"the state {name}")
            if not job.runs:
                raise RuntimeError(f"{name}: {job.text[-300:]}")
            states[name] = machine.sample()
    pairs = [("hold", "compute"), ("hold", "spin"), ("compute", "spin"), ("compute", "spin-wide")]
    marks = {pair: readings.distinguishing(*(states[name] for name in pair)) for pair in pairs}
    text = "; ".join(f"{name}: {_words(spreads(states[name]))}" for name in STATES)
    apart = "; ".join(f"{a}/{b} by {', '.join(readings.FIELDS[f] for f in by)}" for (a, b), by in marks.items() if by)
    return Measured(f"{text}; {apart}", [f"{a} and {b} look the same" for (a, b), by in marks.items() if not by])


def rule(machine: Machine) -> Measured:
    """Applies the rule of ``gpu_readings.state_of`` to the readings of ``states``."""
    taken = machine.values.get("states", {})
    if not STATES.keys() <= taken.keys():
        raise NotPossible("not every state was measured")
    seen = {name: spreads(taken[name]) for name in STATES}
    power = seen["hold"]["power_w"].middle, seen["compute"]["power_w"].middle
    named = {name: readings.state_of(seen[name], *power) for name in STATES}
    wrong = [f"{name} is taken for {named[name]}" for name, state in STATES.items() if named[name] != state]
    return Measured(", ".join(f"{name}: {state}" for name, state in named.items()), wrong)


def _words(seen: Mapping[str, Spread]) -> str:
    return ", ".join(f"{readings.FIELDS[name]} {spread}" for name, spread in seen.items())


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
DEFAULTS = BlockedJob("defaults", (), kernel_s=90, patience_s=110, outcome="suspect", code=0)
EXPLICIT = BlockedJob("explicit", ("--stall-timeout=20",), kernel_s=300, patience_s=60, outcome="hang", code=124)


def blocked(case: BlockedJob, machine: Machine) -> Measured:
    place = machine.scratch / case.name
    place.mkdir()
    mark, bundle_dir = place / "mark", place / "bundles"
    words = [*SAFELAUNCH, f"--bundle-dir={bundle_dir}", *case.options, "--standalone", "--nproc-per-node=1"]
    with Job([*words, PROGRAM, "blocked", mark, str(case.kernel_s)], place, machine.job_environ) as job:
        job.until(mark.exists, "the long kernel")
        if not job.runs:
            raise RuntimeError(f"the job ended early: {job.text[-300:]}")
        since_s = mark.stat().st_mtime
        code = job.wait(case.patience_s)
        messages = [(round(at - since_s, 1), line) for at, line in job.lines if "safelaunch:" in line and at >= since_s]
    bundles = [path.parent for path in bundle_dir.glob("*/verdict.json") if not path.parent.is_symlink()]
    verdicts = [json.loads((bundle / "verdict.json").read_text()) for bundle in bundles]
    machine.values[f"blocked, {case.name}"] = {"messages": messages, "verdicts": verdicts, "exit code": code}
    early_s = next((at for at, line in messages if "quiet for" in line), None)
    first = f"first message after {early_s} s" if early_s is not None else "no early message"
    text = "; ".join((f"{first}, exit code {code}", *map(_last_call, bundles)))
    return Measured(text, problems_of_blocked(case, early_s, verdicts, code))


def problems_of_blocked(
    case: BlockedJob, early_s: float | None, verdicts: Sequence[Mapping[str, Any]], code: int | None
) -> list[str]:
    """Returns how the first message, the bundles and the exit code differ from what is expected."""
    line = next(n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if text.endswith("# BLOCKED"))
    problems = [] if early_s is not None and early_s <= EARLY_S else [f"no message within {EARLY_S:g} s"]
    problems += [] if code == case.code else [f"exit code {code}, expected {case.code}"]
    problems += [] if len(verdicts) == 1 else [f"{len(verdicts)} bundles"]
    for verdict in verdicts:
        lines = [(culprit.get("frame") or {}).get("line") for culprit in verdict["culprits"]]
        if (verdict["outcome"], verdict["cause"], lines) != (case.outcome, "gpu-kernel", [line]):
            found = f"{verdict['outcome']}, {verdict['cause']} ({verdict['confidence']}) at lines {lines}"
            problems.append(f"{found}: {verdict['summary']}")
    return problems


def _last_call(bundle: Path) -> str:
    """Returns the Flight Recorder's last entry, for the call that waits behind the long kernel."""
    records = [rank.flight_record for rank in locate.read(bundle).evidence.ranks]
    calls = [call for record in records if record is not None for call in record.entries]
    if not calls:
        return "no Flight Recorder entries"
    last = max(calls, key=lambda call: call.record_id)
    return f"{last.op} #{last.seq} {last.state or 'without a state'}, started: {last.started}"


# --- overhead and clocks ----------------------------------------------------------------------------------------------


def overhead(machine: Machine) -> Measured:
    """Trains under torchrun, safelaunch, torchrun and safelaunch."""
    runs = [_steps(machine, name, TRAIN_S, number) for number in (1, 2) for name in ("torchrun", "safelaunch")]
    machine.values["step times"] = runs
    middles = [1000 * median(run) for run in runs]
    ratio = (middles[1] + middles[3]) / (middles[0] + middles[2])
    scatter = abs(middles[0] - middles[2]) / min(middles)
    ranges = [[1000 * value for value in quantiles(run, n=20)] for run in runs]
    text = ", ".join(f"{m:.3f} [{r[0]:.3f}..{r[-1]:.3f}]" for m, r in zip(middles, ranges, strict=True))
    text = f"ratio {ratio:.4f}; torchrun against itself {scatter:.2%}; ms a step in order: {text}"
    return Measured(text, ["slower than by chance"] if ratio > 1 + max(0.01, scatter) else [])


def _steps(machine: Machine, launcher: str, seconds: float, number: int) -> list[float]:
    place = machine.scratch / f"{launcher}-{number}"
    place.mkdir()
    own: Sequence[str] = (*SAFELAUNCH, f"--bundle-dir={place}") if launcher == "safelaunch" else TORCHRUN
    words = [*own, "--standalone", "--nproc-per-node=1", PROGRAM, "train", place / "times", str(seconds)]
    job = Job.run(words, place, machine.job_environ, seconds + START_S)
    if job.code != 0:
        raise RuntimeError(f"{launcher} ended with {job.code}: {job.text[-300:]}")
    times = [took for _, took in json.loads((place / "times").read_text())]
    return times[len(times) // 5 :]  # without the warm-up


def clocks(machine: Machine) -> Measured:
    """Limits the clock in the middle of a job that safelaunch watches."""
    if not machine.clocks:
        raise NotPossible("it would change the clock of this GPU: run it with --clocks if you may")
    place = machine.scratch / "clocks"
    place.mkdir()
    words = [
        *SAFELAUNCH,
        f"--bundle-dir={place}",
        "--standalone",
        "--nproc-per-node=1",
        PROGRAM,
        "train",
        place / "times",
    ]
    marks = []
    with Job([*words, str(5 * machine.sample_s)], place, machine.job_environ) as job:
        job.until((place / "times").exists, "the first step")
        before = machine.sample()
        marks.append(time.time())
        with limited_clock(machine.uuid, int(spreads(before)["sm_clock_mhz"].high / 2)):
            limited = machine.sample(2)
        marks.append(time.time())
        code = job.wait(START_S)
    times = json.loads((place / "times").read_text())
    bounds = zip((0.0, *marks), (*marks, 1e12), strict=True)
    parts = [[took for at, took in times if low < at <= high] for low, high in bounds]
    middles = [1000 * median(part) for part in parts]
    told = [line for _, line in job.lines if "safelaunch:" in line]
    machine.values["clocks"] = {"before": before, "limited": limited, "messages": told, "step times": times}
    text = f"ms a step before, limited, after: {', '.join(f'{m:.3f}' for m in middles)}; exit code {code}; "
    text += f"{_words(spreads(limited))}; safelaunch: {' '.join(told) or 'nothing'}"
    return Measured(text, [] if middles[1] > 1.15 * middles[0] else ["the limit slowed the job by less than 15 %"])


@contextmanager
def limited_clock(uuid: str, mhz: int) -> Iterator[None]:
    """Limits the clock of a GPU during the block. Raises NotPossible if that isn't permitted.

    A process in its own session removes the limit once its standard input is closed: by this function, or by the kernel
    if this process is killed.
    """
    if shutil.which("nvidia-smi") is None:
        raise NotPossible("nvidia-smi isn't installed")
    undo = subprocess.Popen(
        ["sh", "-c", 'read -r _; exec nvidia-smi -i "$0" -rgc', uuid],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
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


def versions(machine: Machine) -> Measured:
    facts = {**readings.ask("about", env=machine.environ), **machine.torch}
    machine.values["versions"] = facts
    shown = {name: value for name, value in facts.items() if name not in ("gpus", "missing")}
    absent = [name for name, value in shown.items() if value is None or (name == "persistence" and None in value)]
    text = ", ".join(f"{name} {value}" for name, value in shown.items())
    return Measured(text, [f"unknown: {', '.join(absent)}"] if absent else [])


def lost(machine: Machine) -> Measured:
    raise NotPossible("losing a GPU can't be planted without harm to the machine")


CHECKS = (
    Check("1 inventory", "NVML and the leases list the same GPUs", 20, same_gpus, cuda=False),
    Check("1 torch", "torch sees GPUs that can be leased", 0, same_gpus_in_torch),
    Check("1 leases", "second job refused (exit code 2), third waits and runs; then free", 60, leases, cuda=False),
    Check("2 idle", "all readings are reported; no Xid", 30, idle, cuda=False),
    Check("2 states", "each pair of idle, computing and spinning differs in a reading", 100, states),
    Check("2 rule", "utilisation, memory utilisation and power reveal the state", 0, rule),
    Check(
        "3 blocked, defaults",
        f"message within {EARLY_S:g} s; suspect, gpu-kernel, line of the synchronize; job continues, exit code 0",
        170,
        partial(blocked, DEFAULTS),
    ),
    Check(
        f"3 blocked, {EXPLICIT.options[0]}",
        f"message within {EARLY_S:g} s; hang, gpu-kernel, line of the synchronize; exit code {EXPLICIT.code}",
        120,
        partial(blocked, EXPLICIT),
    ),
    Check("4 lost GPU", "gpu-lost, with the driver's error", 0, lost, cuda=False),
    Check("5 overhead", "steps as fast as under torchrun, within 1 % or torchrun's own scatter", 100, overhead),
    Check("6 clock limit", "half the clock slows the steps, and is undone", 130, clocks),
    Check("7 versions", "all known", 20, versions, cuda=False),
)


# --- processes --------------------------------------------------------------------------------------------------------


class Job:
    """A process that is ended with the block, and the lines that it writes to stderr, with their times (Unix)."""

    def __init__(self, words: Sequence[object], cwd: Path, environ: Mapping[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.code: int | None = None
        self._started = started(list(map(str, words)), cwd, environ, stderr=subprocess.PIPE)

    @classmethod
    def run(cls, words: Sequence[object], cwd: Path, environ: Mapping[str, str], timeout_s: float) -> Job:
        with cls(words, cwd, environ) as job:
            job.wait(timeout_s)
        return job

    def __enter__(self) -> Job:
        self._process = self._started.__enter__()
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._started.__exit__(*error)
        self._reader.join(5.0)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append((time.time(), line.decode(errors="replace").rstrip()))

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in tuple(self.lines))

    def until(self, reached: Callable[[], object], what: str) -> None:
        """Waits until ``reached`` is true or the process has ended."""
        deadline = time.monotonic() + START_S
        while self.runs and not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {START_S:g} s for {what}")
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit code; None if the process still runs after ``timeout_s``."""
        try:
            self.code = self._process.wait(timeout_s)
            self._reader.join(5.0)
        except subprocess.TimeoutExpired:
            pass
        return self.code
