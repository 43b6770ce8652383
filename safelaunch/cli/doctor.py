"""``safelaunch doctor``: checks whether safelaunch can watch jobs on this node, and shows fixes.

``doctor_node`` collects facts, ``doctor_rules`` judges them, and ``examine`` runs all checks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from safelaunch import __version__
from safelaunch.bundle.publication import check_directory
from safelaunch.capture import gpu
from safelaunch.capture.gather import gather
from safelaunch.cli import doctor_node as node
from safelaunch.cli import doctor_rules as rules
from safelaunch.cli.doctor_rules import RESULTS, Check, CheckResult, failed, warning
from safelaunch.cli.parsing import Parser
from safelaunch.job import paths, torchrun
from safelaunch.settings.config import INTERNAL_ENV, resolve
from safelaunch.supervise.control.discover import roots
from safelaunch.system.console import display, show, show_json, wrapped
from safelaunch.system.errors import SafelaunchError
from safelaunch.system.printable import clean

DEADLINE_S = 90.0
_LEAST_DETAIL = 30
_COLOURS = {"ok": "32", "warning": "33", "failed": "31"}


def main(argv: list[str]) -> int:
    """Prints the result of every check; returns 1 if a check failed, else 0."""
    words = parser().parse_args(argv)
    checks = examine(dict(os.environ), os.getuid(), Path.cwd())
    if words.json:
        show_json(msgspec.to_builtins(document(checks)))
    else:
        shown = display(1, os.environ)
        show(text(checks, width=min(120, shown.width), colour=shown.color), color=shown.color)
    return 1 if worst(checks) == "failed" else 0


def parser() -> Parser:
    command_line = Parser(
        "doctor",
        description="Checks whether safelaunch can watch jobs on this node and in this environment, and shows the fix "
        "for each check that fails. Run it where the jobs run, as the user who runs them.",
    )
    command_line.add_argument("--json", action="store_true", help="print one JSON document")
    return command_line


class Document(msgspec.Struct, frozen=True):
    schema: Literal[1]
    safelaunch: str
    host: str
    user: int
    result: CheckResult  # of the worst check
    checks: list[Check]


def document(checks: tuple[Check, ...]) -> Document:
    return Document(1, __version__, socket.gethostname(), os.getuid(), worst(checks), list(checks))


def text(checks: Sequence[Check], *, width: int, colour: bool) -> str:
    """Returns one line per check, its fix below, and a summary. On a narrow terminal, details get their own lines."""
    column = max((len(check.name) for check in checks), default=0)
    indent = 9 + column + 2 if width >= 9 + column + 2 + _LEAST_DETAIL else 11
    lines: list[str] = []
    for check in checks:
        head = f"{check.result:<7}  {check.name:<{column}}  "
        first, *more = wrapped(clean(check.detail), width, " " * indent, " " * indent) or [""]
        first = head + first[indent:] if indent == len(head) else f"{head.rstrip()}\n{first}"
        lines += [f"\x1b[{_COLOURS[check.result]}m{first[:7]}\x1b[0m{first[7:]}" if colour else first, *more]
        if check.fix and check.result != "ok":
            fix, *rest = check.fix.splitlines()
            lines += wrapped(fix, width, " " * 9 + "-> ", " " * 12)
            lines += [part for line in rest for part in wrapped(line, width, " " * 12, " " * 12)]
    counts = [f"{sum(check.result == result for check in checks)} {result}" for result in RESULTS]
    return "\n".join([*lines, "", f"{len(checks)} checks: {', '.join(counts)}"])


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoctorSubject:
    environ: Mapping[str, str]
    uid: int
    cwd: Path
    torch: torchrun.TorchInstallation | None
    no_torch: SafelaunchError | None  # why torch wasn't found

    @property
    def python(self) -> str:
        return self.torch.python if self.torch is not None else sys.executable


def examine(environ: Mapping[str, str], uid: int, cwd: Path) -> tuple[Check, ...]:
    """Runs all checks, which takes some seconds. A check that can't run becomes a warning."""
    torch, problem = None, None
    try:
        torch = torchrun.find(environ)
    except SafelaunchError as error:
        problem = error
    subject = DoctorSubject(environ, uid, cwd, torch, problem)
    looks: dict[str, Callable[[DoctorSubject], tuple[Check | None, ...]]] = {
        "reading stacks": _tracing,
        "torch": _torch,
        "disks": _disks,
        "node": _node,
        "configuration": _configuration,
    }
    calls = [partial(_guarded, name, look, subject) for name, look in looks.items()]
    results = gather(calls, deadline_s=DEADLINE_S)
    found: list[Check] = []
    for name, checks in zip(looks, results, strict=True):
        found += checks if checks is not None else [warning(name, f"the check did not finish within {DEADLINE_S:g} s")]
    return tuple(found)


def worst(checks: tuple[Check, ...]) -> CheckResult:
    return max((check.result for check in checks), key=RESULTS.index, default="ok")


def _guarded(
    name: str, look: Callable[[DoctorSubject], tuple[Check | None, ...]], subject: DoctorSubject
) -> list[Check]:
    try:
        return [check for check in look(subject) if check is not None]
    except Exception as error:  # noqa: BLE001 - a failing check is reported, and the others run
        return [warning(name, f"the check failed: {type(error).__name__}: {error}")]


def _tracing(subject: DoctorSubject) -> tuple[Check | None, ...]:
    path, version = node.py_spy()
    installed = rules.py_spy_check(path, version, node.python_of(subject.python))
    if not path:
        return (installed,)
    rights = node.rights(subject.environ)
    rank, stranger, native = node.trials(subject.python)
    checks = [installed, rules.attach_check(rank, rights)]
    if not rank.problem:
        checks += [rules.stranger_check(stranger, rights), rules.native_check(native)]
    return tuple(checks)


def _torch(subject: DoctorSubject) -> tuple[Check | None, ...]:
    if subject.torch is None:
        assert subject.no_torch is not None
        detail = f"{subject.no_torch.message} No job can be started, but dump, diagnose and status work."
        return (failed("torch", detail, subject.no_torch.fix), _gpus(None))
    torch = subject.torch
    try:
        options = torchrun.parse_options((torch.package / "distributed" / "run.py").read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        options = {}
    probe = node.ask(torch.python, subject.environ)
    return (
        rules.version_check(torch.version, os.fspath(torch.package), len(options)),
        rules.import_check(probe),
        rules.beacon_check(probe),
        rules.server_check(probe),
        rules.recorder_check(probe),
        _gpus(probe.cuda),
    )


def _gpus(cuda: str | None) -> Check:
    answer = gpu.gpus()
    count = len(answer.value.gpus) if answer.value is not None else 0
    return rules.gpu_check(count, answer.missing, answer.kind, cuda, node.has_gpu_devices())


def _disks(subject: DoctorSubject) -> tuple[Check | None, ...]:
    root = paths.run_root(subject.environ, subject.uid)
    place = node.rights(subject.environ).place
    return (
        node.run_root(root),
        rules.socket_check(os.fspath(root), node.longest_socket(root)),
        rules.room_check("/tmp", node.disk(Path("/tmp")), "temporary files"),
        rules.shm_check(node.disk(Path("/dev/shm")), place),
        node.left_behind(roots(subject.environ, subject.uid)),
    )


def _node(subject: DoctorSubject) -> tuple[Check | None, ...]:
    return node.ports(), node.host_name()


def _configuration(subject: DoctorSubject) -> tuple[Check | None, ...]:
    """Checks the environment, configuration file and bundle directory that a run started here would use."""
    own = {name: value for name, value in subject.environ.items() if name not in INTERNAL_ENV}
    try:
        version = subject.torch.version if subject.torch is not None else None
        settings = resolve([], own, subject.cwd, lambda: version)
    except SafelaunchError as error:
        return (failed("configuration", error.message, error.fix),)
    problem = check_directory(settings.bundle_dir)
    where = f"bundles go to {settings.bundle_dir}"
    if problem:
        fix = "choose another: --bundle-dir DIR, SAFELAUNCH_BUNDLE_DIR, or bundle-dir in safelaunch.yaml"
        bundles = warning("bundle directory", f"{where}: {problem}; they would stay below the run directory", fix)
    else:
        bundles = rules.bundle_check(node.disk(settings.bundle_dir))
    return (bundles,)
