"""Makes a single diagnosis, from outside, of a job that safelaunch didn't start, and writes its bundle."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from safelaunch import __version__
from safelaunch.bundle.publication import owner_under_sudo
from safelaunch.capture import collect, ptrace, stacks
from safelaunch.capture.jobs import SERVER, RunningJob, command_of, name_of_user, packages_of
from safelaunch.capture.look import Target
from safelaunch.capture.rank_output import ends_of_files
from safelaunch.capture.result import Result
from safelaunch.job.paths import local_bundles, run_root
from safelaunch.job.plan import name_of_command
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise.collecting import JobSnapshot, Timeline
from safelaunch.supervise.job_context import JobContext, user_name
from safelaunch.supervise.kinds import ATTACH
from safelaunch.supervise.looks import Looks, look_at
from safelaunch.supervise.movement import movement, with_leads
from safelaunch.supervise.publishing import Report
from safelaunch.system import procstat
from safelaunch.system.console import COMMAND
from safelaunch.system.errors import AccessDenied, CaptureError, SafelaunchError
from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redactor import Redactor
from safelaunch.verdict.rhythm import MIN_STALL_S

NO_OUTPUT: Result[str] = Result(None, "standard output", 0.0, missing="it goes to no file that is this rank's alone")


def attach(job: RunningJob, bundle_dir: Path) -> Report:
    """Writes a bundle for ``job``, which continues to run.

    Raises AccessDenied if no stack can be read, and SafelaunchError if py-spy is missing.
    """
    _find_py_spy()
    context, timeline = _context(job, bundle_dir), Timeline().plus("first look")
    packages = next(filter(None, (packages_of(rank.process.pid) for rank in job.ranks.values())), "")
    roots = (packages,) if packages else ()
    looks = _look(_targets(job), roots)
    moving, stood_s = movement(looks)
    outputs = ends_of_files({rank: job_rank.process.pid for rank, job_rank in job.ranks.items()})
    basics = {
        rank: collect.RankBasics(
            pid=job_rank.process.pid,
            code_roots=roots,
            output=_joined(outputs.get((rank,), ())),
        )
        for rank, job_rank in job.ranks.items()
    }
    try:
        collected = collecting.take_evidence(
            ATTACH,
            looks,
            JobSnapshot(basics, job.world_size, ()),
            context,
            timeline=timeline,
        ).with_facts(stall_s=stood_s if moving else 0.0, moving=moving)
        if collected.without_stacks and _is_denied(looks):
            facts = ptrace.tracing_facts(job.ranks[min(job.ranks)].process.pid)
            why = ptrace.explain("permission denied", facts).message
            raise AccessDenied(f"dump: no stack could be read: {why}.")
        common = _joined(result for ranks, several in outputs.items() if len(ranks) > 1 for result in several)
        if common.value is not None:
            collected.staging.add(
                common.artifact(f"node/{context.host}/output.log"), context.redactor.job_text(common.value)
            )
        return publishing.finish(collected)
    except BaseException:
        context.unfinished.discard()
        raise


def _find_py_spy() -> None:
    try:
        stacks.find_py_spy()
    except CaptureError as error:
        raise SafelaunchError(f"dump: {error.message}, so no stack can be read.", f"{COMMAND}{error.fix}") from error


def _joined(results: Iterable[Result[str]]) -> Result[str]:
    several = list(results)
    texts = [result.value for result in several if result.value]
    if texts:
        return Result("\n".join(texts), NO_OUTPUT.how, sum(result.duration_s for result in several))
    return several[0] if several else NO_OUTPUT


def _targets(job: RunningJob) -> list[Target]:
    targets = []
    for rank, job_rank in job.ranks.items():
        server = Path((job_rank.process.env or {}).get(SERVER, ""))
        socket_path = server if server.is_socket() else None
        targets.append(
            Target(rank, job_rank.local_rank, job_rank.process.pid, job_rank.process.start_ticks, socket=socket_path)
        )
    return targets


def _look(targets: list[Target], roots: tuple[str, ...]) -> Looks:
    """Looks twice.

    Looks a third time, later, if a rank stands still while others work, because it might be waiting for a slow rank.
    """
    looks = look_at(targets, None, collectives=True, deadline_s=ATTACH.look_s)
    time.sleep(ATTACH.between_s)
    looks = with_leads(look_at(targets, looks, collectives=True, deadline_s=ATTACH.look_s), roots)
    moving, stood_s = movement(looks)
    if moving and stood_s:
        time.sleep(max(0.0, MIN_STALL_S + 0.5 - stood_s))
        looks = with_leads(look_at(targets, looks, collectives=True, deadline_s=ATTACH.look_s), roots)
    return looks


def _is_denied(looks: Looks) -> bool:
    mains = [rank.main for look in looks.taken for rank in look.ranks.values()]
    return any(main is not None and main.stack.kind == "denied" for main in mains)


def _context(job: RunningJob, bundle_dir: Path) -> JobContext:
    first = job.ranks[min(job.ranks)].process
    argv, cwd = command_of(first.pid) or ("job",), _working_directory(first.pid)
    command = command_of(job.agent) or ("job",) if "TORCHELASTIC_RUN_ID" in job.env else argv
    name, host = name_of_command(argv), socket.gethostname()
    ordinary = [cwd, os.fspath(bundle_dir), *argv[:2], name, host, user_name(), name_of_user(first.user)]
    redactor = Redactor(secret_values(job.env, (*command, *argv), ordinary))
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - first.start_ticks * procstat.TICK_NS / 1e9
    launch = {
        "schema": 1,
        "run_name": name,
        "host": host,
        "user": name_of_user(first.user),
        "cwd": cwd,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s)),
        "command": redactor.argv(command),
        "safelaunch": __version__,
        "distributed_debug": job.env.get("TORCH_DISTRIBUTED_DEBUG", ""),
        "agent_pid": job.agent,
    }
    return JobContext(
        run_name=name,
        run_dir=run_root({}, os.getuid()) / f"r{os.getpid()}",  # doesn't exist: there is no supervisor
        bundle_dir=bundle_dir,
        fallback_dir=local_bundles(),
        launch=launch,
        redactor=redactor,
        owner=owner_under_sudo(os.environ),
    )


def _working_directory(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - text
    except OSError:
        return ""
