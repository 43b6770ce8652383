"""Healthy programs that wait, compute, transfer or are stopped: safelaunch must end none of them, and accuse none.

``programs/spells`` has them, ``programs/quiet.py`` runs one. Each is judged by its own end: exit code 0, and a line of
each rank that everything it waited for came and was right.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.qa.programs.spells import CASES, Case
from tests.support.jobs import Job, Result
from tests.support.paths import PROGRAMS

__all__ = ["CASES", "Answer", "Case", "How", "cannot", "run"]

SCRIPT = PROGRAMS / "quiet.py"
MODULES = {"grpcio": "grpc", "pyzmq": "zmq"}  # where a package's module has another name
LINK = "2mbps"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LOOKS = 4  # number of attached dumps in the quiet spell
WORD = re.compile(r"^safelaunch: quiet for .*?: (.*)\.\.\. watching$", re.MULTILINE)
ACCUSES = re.compile(r"^safelaunch: .*\bthe job hangs\b.*", re.MULTILINE)
SLOW = re.compile(r"^safelaunch: (.*the other ranks wait.*)$", re.MULTILINE)
TORCH_ABORTS_AT_EXIT = "terminate called without an active exception"  # tests/conftest.py


@dataclass(frozen=True)
class How:
    """How the cases run.

    Attributes:
        own: Options of safelaunch.
        libraries: Directory of packages that cases need, in addition to this Python's.
        plain: Under torchrun, without safelaunch.
        attach: Under torchrun, while ``safelaunch dump --pid`` looks at it repeatedly.
        nodes: Number of nodes, each in a network namespace with its part of the ranks.
    """

    quiet_s: float = 90.0
    own: tuple[str, ...] = ()
    libraries: Path | None = None
    plain: bool = False
    attach: bool = False
    nodes: int = 1


@dataclass(frozen=True)
class Answer:
    """The result of a case.

    Attributes:
        wrong: ``ended``, ``broken`` or ``accused``, and why; empty if the case was left alone.
        looks: Number of attached dumps.
    """

    name: str
    seconds: float
    wrong: str = ""
    word: str = ""
    suspect: str = ""  # a bundle of a suspicion, which does no harm
    slow: str = ""  # message about a slow rank, to be checked by hand
    skipped: str = ""
    looks: int = 0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def cannot(case: Case, how: How) -> str:
    """Returns why the case can't run here; empty if it can."""
    if case.root and os.getuid():
        return "takes root"
    for tool in case.tools:
        if not (Path(tool).exists() if "/" in tool else shutil.which(tool)):
            return f"there is no {tool}"
    if how.nodes > 1 and (case.launch or case.talks or case.ranks % how.nodes):
        return f"not on {how.nodes} nodes"
    if how.attach and case.launch:
        return "not by plain torchrun"
    if case.launch.startswith("py-spy") and sys.prefix == sys.base_prefix:
        return "needs a virtual environment to make another one like it"
    for package in case.needs:
        module = MODULES.get(package, package)
        there = importlib.util.find_spec(module) or (how.libraries and (how.libraries / module).exists())
        if not there:
            return f"{package} is not installed"
    return ""


def run(case: Case, scratch: Path, how: How) -> Answer:
    """Runs the case, twice where the first run met torch's abort at the end of a process."""
    if skipped := cannot(case, how):
        return Answer(case.name, 0.0, skipped=skipped)
    for attempt in (1, 2):
        place = scratch / str(attempt)
        place.mkdir(parents=True)
        try:
            results = _results(case, place, how)
        except AssertionError as error:
            return Answer(case.name, 0.0, wrong=f"broken: {str(error).splitlines()[0]}")
        answer = _answer(case, results, how, place)
        if not (answer.wrong and any(TORCH_ABORTS_AT_EXIT in result.stderr for result in results)):
            break
    return answer


def _results(case: Case, scratch: Path, how: How) -> list[Result]:
    mine: list[str | Path] = [SCRIPT, f"--case={case.name}", f"--scratch={scratch}", f"--quiet={how.quiet_s}"]
    env: dict[str, str | None] = {}
    if how.libraries is not None and case.needs:
        env["PYTHONPATH"] = os.fspath(how.libraries)
    with ExitStack() as stack:
        if case.outside is not None:
            stack.enter_context(_outside(mine, scratch, env))
        jobs = _start_nodes(stack, case, mine, scratch, how, env) if how.nodes > 1 else []
        if not jobs:
            interpreter = [] if how.attach else _interpreter(case, scratch, how, mine)
            launcher = TORCHRUN if how.attach else ()
            words = [*_launch(case, how), *mine]
            env |= {"GLOO_SOCKET_IFNAME": "lo"} if case.launch == "slow-link" else {}
            jobs = [stack.enter_context(Job(words, scratch, env=env, interpreter=interpreter, launcher=launcher))]
        if how.attach:
            stack.enter_context(_looking(jobs[0], how.quiet_s / LOOKS))
        return [job.wait(300.0 + 4 * how.quiet_s) for job in jobs]


def _launch(case: Case, how: How) -> list[str | Path]:
    """Returns the words between ``safelaunch`` (or ``python``, if it is plain) and the script."""
    torchrun = [f"--nproc-per-node={case.ranks}"]
    if case.launch == "slow-link":
        torchrun += ["--master-addr=127.0.0.1", "--master-port=29511", "--nnodes=1", "--node-rank=0"]
    if how.attach:
        return list(torchrun)
    if how.plain:
        return ["--no-watch", *torchrun]
    if case.launch == "exec":
        return ["exec", *how.own, *case.own, "--", sys.executable, "-m", "torch.distributed.run", *torchrun]
    return [*how.own, *case.own, *torchrun]


def _interpreter(case: Case, scratch: Path, how: How, mine: Sequence[str | Path]) -> list[str]:
    """Returns the words that start safelaunch."""
    program = [sys.executable, "-m", "safelaunch"]
    kind, _, does = case.launch.partition(": ")
    if kind == "py-spy":
        return [os.fspath(_bare(scratch, does)), "-m", "safelaunch"]
    if kind == "slow-link":
        link = f"ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {LINK} burst 64kb limit 16mb"
        return ["unshare", "--net", "sh", "-c", f'{link} && exec "$@"', "sh", *program]
    if kind.startswith("slow-reader"):
        reader = shlex.join([sys.executable, *map(os.fspath, mine), "--reader"])
        pipes = f"| cat | {reader}" if kind.endswith("cat") else f"| {reader}"
        return ["bash", "-c", f'set -o pipefail; "$@" {pipes}', "bash", *program]
    return program


def _bare(scratch: Path, does: str) -> Path:
    """Returns an interpreter with all packages of this one, and a py-spy next to it that runs this line of shell."""
    home = scratch / "bare"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (home / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (home / "lib").symlink_to(Path(sys.prefix) / "lib")
    (home / "bin" / "py-spy").write_text(f"#!/bin/sh\n{does}\n")
    (home / "bin" / "py-spy").chmod(0o755)
    return home / "bin" / "python"


class _outside:
    """The process that is not of the job, for as long as the job lasts."""

    def __init__(self, mine: Sequence[str | Path], scratch: Path, env: Mapping[str, str | None]) -> None:
        self._words = [sys.executable, *map(os.fspath, mine), "--outside"]
        self._log, self._scratch = scratch / "outside.txt", scratch
        self._env = {**os.environ, **{name: value for name, value in env.items() if value is not None}}

    def __enter__(self) -> _outside:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._words, cwd=self._scratch, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _looking(job: Job, every_s: float) -> Iterator[None]:
    """Attaches to the job repeatedly, from the start of its ranks to its end."""
    ended = threading.Event()
    words = [sys.executable, "-m", "safelaunch", "dump", f"--pid={job.process.pid}", f"--bundle-dir={job.bundle_dir}"]
    own = {**os.environ, "XDG_RUNTIME_DIR": os.fspath(job.runtime)}

    def look() -> None:
        while not ended.wait(every_s) and job.process.poll() is None:
            subprocess.run(words, env=own, capture_output=True, check=False)  # its bundles are counted

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _start_nodes(
    stack: ExitStack, case: Case, mine: Sequence[str | Path], scratch: Path, how: How, env: Mapping[str, str | None]
) -> list[Job]:
    from tests.support import netns

    network = stack.enter_context(netns.Network(how.nodes, scratch))
    jobs = []
    for number in range(how.nodes):
        place = scratch / netns.host(number)
        place.mkdir()
        meeting = [f"--nnodes={how.nodes}", *netns.meeting(number, 29400)]
        own = ["--no-watch"] if how.plain else [*how.own, *case.own]
        words = [*own, *meeting, f"--nproc-per-node={case.ranks // how.nodes}", *mine]
        interpreter = [*network.enter(number), sys.executable, "-m", "safelaunch"]
        its = {**env, "GLOO_SOCKET_IFNAME": netns.DEVICE}
        jobs.append(stack.enter_context(Job(words, place, env=its, interpreter=interpreter)))
    return jobs


def _spell_s(scratch: Path) -> float:
    # Each rank leaves marks when its spell begins and ends.
    marks = [(path, scratch / path.name.replace("begun", "over")) for path in scratch.glob("begun-*")]
    return max((over.stat().st_mtime - begun.stat().st_mtime for begun, over in marks if over.exists()), default=0.0)


def _answer(case: Case, results: Sequence[Result], how: How, scratch: Path) -> Answer:
    stderr = "\n".join(result.stderr for result in results)
    ended = sum(line.endswith(" ended well") for result in results for line in result.stdout.splitlines())
    endings = [bundle.path.name.rpartition("-")[2] for result in results for bundle in result.bundles]
    hangs = [bundle for result in results for bundle in result.bundles if bundle.path.name.endswith("-hang")]
    if how.attach:
        hangs = [bundle for result in results for bundle in result.bundles if bundle.verdict.get("proof")]
    wrong = []
    if hangs and any(result.code for result in results):
        wrong.append(f"ended: {_cause(hangs[0].verdict)}")
    elif any(result.code for result in results):
        last = [line for line in stderr.splitlines() if "Error" in line][-1:]
        wrong.append(f"broken: exit code {[result.code for result in results]} {''.join(last)[:120]}")
    elif ended != case.ranks:
        wrong.append(f"broken: {ended} of {case.ranks} ranks ended well")
    elif case.at == "spell" and (lasted := _spell_s(scratch)) < 0.8 * how.quiet_s:
        wrong.append(f"broken: its spell lasted {lasted:.1f} s")  # it tests nothing
    if hangs and not wrong:
        wrong.append(f"accused: {_cause(hangs[0].verdict)}")
    elif not hangs and (said := ACCUSES.search(stderr)):
        wrong.append(f"accused: {said[0][:120]}")
    wrong += [f"broken: left {left}" for result in results for left in result.leftovers]
    words = WORD.findall(stderr)
    return Answer(
        case.name,
        round(max(result.seconds for result in results), 1),
        wrong="; ".join(wrong),
        word=words[-1] if words else "",
        suspect="" if how.attach else ", ".join(ending for ending in endings if ending != "hang"),
        slow=said[1] if (said := SLOW.search(stderr)) else "",
        looks=len(endings) if how.attach else 0,
    )


def _cause(verdict: Mapping[str, Any]) -> str:
    culprits = ", ".join(str(one["rank"]) for one in verdict["culprits"])
    return f"{verdict['cause']} ({verdict['confidence']}), rank {culprits or '-'}: {verdict['summary']}"
