"""Training frameworks under safelaunch, with unmodified launchers and scripts, healthy and with planted hangs.

Frameworks that are not installed are skipped. ``scripts/qa/frameworks.sh`` installs all of them (the extra
``frameworks``) and runs every row.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.support.jobs import Job, Result
from tests.support.paths import PROGRAMS

EXIT_HUNG = 124
_ALONE = {"asleep": "stuck-in-user-code", "fifo": "blocking-io", "loader": "data-loading"}


@dataclass(frozen=True)
class Framework:
    """One framework. ``hangs`` maps a way to hang to its cause; ``launcher`` is for ``safelaunch exec``."""

    name: str
    hangs: dict[str, str]
    needs: str = "torch"
    launcher: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def script(self) -> Path:
        return PROGRAMS / f"framework_{self.name}.py"

    def installed(self) -> bool:
        return find_spec(self.needs) is not None

    def lines(self, how: str) -> set[int]:
        """Returns the lines at which it hangs."""
        lines = enumerate(self.script.read_text().splitlines(), 1)
        return {number for number, line in lines if line.partition("# HANGS: ")[2] == how}


_BESIDE = Path(sys.executable).parent
# Without a GPU, its launcher starts several ranks on one machine only if a variable claims several GPUs.
_ACCELERATE = ("launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")
FRAMEWORKS = (
    Framework("fsdp", {"asleep": "stuck-in-user-code", "eval": "collective-mismatch"}),
    Framework("pipeline", {"fifo": "blocking-io", "skip": "uneven-batches"}),
    Framework(
        "trainer",
        {"asleep": "stuck-in-user-code", "barrier": "collective-mismatch", "loader": "data-loading"},
        "transformers",
    ),
    Framework("lightning", {"asleep": "stuck-in-user-code", "gather": "collective-mismatch"}, "lightning"),
    Framework(
        "accelerate",
        {"asleep": "stuck-in-user-code", "gather": "collective-mismatch"},
        "accelerate",
        (str(_BESIDE / "accelerate"), *_ACCELERATE),
    ),
    Framework(
        "deepspeed",
        {"asleep": "stuck-in-user-code", "barrier": "collective-mismatch"},
        "deepspeed",
        (str(_BESIDE / "deepspeed"), "--num_accelerators=2"),
        (("DS_ACCELERATOR", "cpu"),),
    ),
)
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}


def run(framework: Framework, scratch: Path, how: str = "none", culprit: int = -1) -> Result:
    """Runs one job of two ranks to its end. ``how`` "none": a healthy one."""
    words = [f"--how={how}", f"--culprit={culprit}", f"--scratch={scratch}"]
    own = ["--stall-timeout=5"]
    if framework.launcher:
        command: list[str | Path] = ["exec", *own, "--", *framework.launcher, framework.script, *words]
    else:
        command = [*own, "--nproc-per-node=2", framework.script, *words]
    path = f"{_BESIDE}:/usr/local/bin:/usr/bin:/bin"  # launchers find programs by name
    with Job(command, scratch, env={"PATH": path, **dict(framework.env)}) as job:
        return job.wait(170.0)


def judge_healthy(result: Result) -> list[str]:
    wrong = [f"exit code {result.code}"] if result.code else []
    return wrong + [f"a bundle: {bundle.path.name}" for bundle in result.bundles] + [*result.leftovers]


def judge_hang(framework: Framework, how: str, culprit: int, result: Result) -> list[str]:
    """Returns what is wrong. If two ranks are in two different collectives, the verdict can name both."""
    wrong = [f"exit code {result.code}"] if result.code != EXIT_HUNG else []
    wrong += [f"left behind: {what}" for what in result.leftovers]
    if len(result.bundles) != 1:
        return [*wrong, f"{len(result.bundles)} bundles"]
    wrong += result.bundle.problems()
    verdict = result.verdict
    if verdict["cause"] != framework.hangs[how]:
        wrong.append(f"cause {verdict['cause']}")
    named = {item["rank"]: item["frame"] for item in verdict["culprits"]}
    allowed: Collection[set[int]] = [{culprit}] if how in _ALONE else [{culprit}, {0, 1}]
    if set(named) not in allowed:
        wrong.append(f"culprits {sorted(named)}")
    lines = framework.lines(how)
    frame = named.get(culprit)
    if lines and (frame is None or frame["line"] not in lines or not frame["file"].endswith(framework.script.name)):
        wrong.append(f"frame {frame}")
    return wrong
