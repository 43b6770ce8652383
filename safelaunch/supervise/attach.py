"""Looks at a job that safelaunch did not start, from outside and once: evidence, verdict and bundle, as of a live run.

Its ranks have no beacon, so there are no steps: what tells a slow job from a stuck one is what moves while it is looked
at.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from msgspec import structs

from safelaunch import __version__
from safelaunch.bundle.staging import owner_under_sudo
from safelaunch.capture import collect, ptrace, stacks
from safelaunch.capture.jobs import SERVER, FoundJob, command_of, name_of_user, packages_of
from safelaunch.capture.look import ProcessLook, RankLook, Target
from safelaunch.capture.rank_output import ends_of_files
from safelaunch.capture.result import Result
from safelaunch.job.paths import local_bundles, run_root
from safelaunch.job.plan import name_of_command
from safelaunch.stacks.frames import is_user, python_frames
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise.collecting import JobSnapshot, Timeline
from safelaunch.supervise.job_context import JobContext, user_name
from safelaunch.supervise.judge import wait_for_each_other, work_in
from safelaunch.supervise.kinds import ATTACH
from safelaunch.supervise.looks import Looks, look_at, main_thread
from safelaunch.supervise.publishing import Report
from safelaunch.supervise.watch.work import Background, Peak
from safelaunch.system import procstat
from safelaunch.system.console import COMMAND
from safelaunch.system.errors import AccessDenied, CaptureError, SafelaunchError
from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redactor import Redactor
from safelaunch.verdict.rhythm import MIN_STALL_S

_OF_TORCH = "/torch/"
SPINS = 0.5  # of the time on a core: a thread that asks its device or its peers again and again never sleeps
NO_OUTPUT: Result[str] = Result(None, "standard output", 0.0, missing="it goes to no file that is this rank's alone")


def attach(job: FoundJob, bundle_dir: Path) -> Report:
    """Writes the bundle of ``job``, which continues.

    Raises AccessDenied if no stack may be read, and SafelaunchError without py-spy.
    """
    _find_py_spy()
    context, timeline = _context(job, bundle_dir), Timeline().plus("first look")
    packages = next(filter(None, (packages_of(rank.process.pid) for rank in job.ranks.values())), "")
    roots = (packages,) if packages else ()
    looks = _look(_targets(job), roots)
    moving, stood_s = movement(looks)
    outputs = ends_of_files({rank: one.process.pid for rank, one in job.ranks.items()})
    known = {
        rank: collect.RankBasics(
            pid=one.process.pid,
            code_roots=roots,
            output=_joined(outputs.get((rank,), ())),
        )
        for rank, one in job.ranks.items()
    }
    try:
        found = collecting.take_evidence(
            ATTACH,
            looks,
            JobSnapshot(known, job.world_size, ()),
            context,
            timeline=timeline,
        ).knowing(stall_s=stood_s if moving else 0.0, moving=moving)
        if found.without_stacks and _is_denied(looks):
            facts = ptrace.tracing_facts(job.ranks[min(job.ranks)].process.pid)
            why = ptrace.explain("permission denied", facts).message
            raise AccessDenied(f"dump: no stack could be read: {why}.")
        common = _joined(result for ranks, several in outputs.items() if len(ranks) > 1 for result in several)
        if common.value is not None:
            found.staging.add(common.artifact(f"node/{context.host}/output.log"), context.redactor.said(common.value))
        return publishing.finish(found)
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
    texts = [one.value for one in several if one.value]
    if texts:
        return Result("\n".join(texts), NO_OUTPUT.how, sum(one.duration_s for one in several))
    return several[0] if several else NO_OUTPUT


def _targets(job: FoundJob) -> list[Target]:
    found = []
    for rank, one in job.ranks.items():
        server = Path((one.process.env or {}).get(SERVER, ""))
        socket_path = server if server.is_socket() else None
        found.append(Target(rank, one.local_rank, one.process.pid, one.process.start_ticks, socket=socket_path))
    return found


# --- what moves -------------------------------------------------------------------------------------------------------


def _look(targets: list[Target], roots: tuple[str, ...]) -> Looks:
    """Two looks; a third one later if something works while a rank stands: it may wait for who is slow."""
    looks = look_at(targets, None, collectives=True, deadline_s=ATTACH.look_s)
    time.sleep(ATTACH.between_s)
    looks = with_leads(look_at(targets, looks, collectives=True, deadline_s=ATTACH.look_s), roots)
    moving, stood_s = movement(looks)
    if moving and stood_s:
        time.sleep(max(0.0, MIN_STALL_S + 0.5 - stood_s))
        looks = with_leads(look_at(targets, looks, collectives=True, deadline_s=ATTACH.look_s), roots)
    return looks


def with_leads(looks: Looks, roots: tuple[str, ...]) -> Looks:
    """The looks, knowing of ranks whose script runs in another thread than the first (Ray's workers) in which.

    ``roots``: see ``frames.Stack``.
    """
    leads = {rank: tid for rank, one in looks.taken[-1].ranks.items() if (tid := _leads(one.main, roots))}

    def known(rank: RankLook) -> RankLook:
        if rank.main is None or rank.rank not in leads:
            return rank
        tid, main = leads[rank.rank], rank.main
        state = structs.replace(main.state, leads=tid) if main.state is not None else None
        sample = structs.replace(main.stack.value, leads=tid) if main.stack.value is not None else None
        return replace(rank, main=replace(main, state=state, stack=replace(main.stack, value=sample)))

    taken = (replace(look, ranks={rank: known(one) for rank, one in look.ranks.items()}) for look in looks.taken)
    return replace(looks, taken=tuple(taken))


def _leads(look: ProcessLook | None, roots: tuple[str, ...]) -> int:
    """The thread with the user's code, if there is one such, and neither that nor torch's is in the first; else 0."""
    sample = look.stack.value if look is not None else None
    first = sample.main_thread if sample is not None else None
    if (
        sample is None
        or first is None
        or any(_OF_TORCH in frame.file or is_user(frame, roots) for frame in first.frames)
    ):
        return 0
    found = [
        thread.os_tid for thread in sample.threads if any(is_user(frame, roots) for frame in python_frames(thread))
    ]
    return (found[0] or 0) if len(found) == 1 else 0


def movement(looks: Looks) -> tuple[bool, float]:
    """Whether anything in the job moves, and for how many seconds some rank was seen to stand; 0.0: none was.

    A rank stands if its main thread was at one place at every look, and got no core meanwhile or kept one busy all the
    time. How it waits for peers or its GPU does not count as work: it may spin. Nor does what other threads do, where
    every main one waits for its peers, or sleeps while they wait. Where a rank was not seen, that it moves is not
    known.
    """
    mains = [
        [look.ranks[target.rank].main for look in looks.taken if target.rank in look.ranks] for target in looks.targets
    ]
    pairs = [[_stood(before, after) for before, after in pairwise(several)] for several in mains]
    stand = any(several and all(several) for several in pairs)
    left = any(_left(before, after) for several in mains for before, after in pairwise(several))
    all_stand = all(several and all(several) for several in pairs)
    all_seen = all(several and None not in several for several in pairs)
    spins = Peak(per_s=float("inf"))
    last = {target.rank: looks.taken[-1].ranks.get(target.rank) for target in looks.targets}
    states = {rank: one.main.state for rank, one in last.items() if one and one.main and one.main.state}
    threads = {rank: state.leads or state.pid for rank, state in states.items()}
    waits = Background(
        {("cpu", target.pid, target.start_ticks, threads.get(target.rank, 0)): spins for target in looks.targets}
    )
    alone = all_stand and wait_for_each_other([one for one in last.values() if one])
    works = looks.collectives_moved or (not alone and bool(work_in(looks, waits)))
    stood_s = looks.taken[-1].begin_s - looks.taken[0].end_s if stand else 0.0
    return left or works or (all_seen and not stand), stood_s


def _left(before: ProcessLook | None, after: ProcessLook | None) -> bool:
    """The main thread is at another place, as whole reads show."""
    threads = [main_thread(before), main_thread(after)]
    places = [python_frames(thread) for thread in threads if thread is not None and not thread.torn]
    return len(places) == len(threads) and places[0] != places[1]


def _stood(before: ProcessLook | None, after: ProcessLook | None) -> bool | None:
    """None: not known."""
    if before is None or after is None or before.state is None or after.state is None:
        return None
    if after.state.state in "TtD" and before.state.state == after.state.state:
        return True
    first, last = before.state.main_thread, after.state.main_thread
    thread, later = main_thread(before), main_thread(after)
    if first is None or last is None or first.slices is None or thread is None or later is None:
        return None
    busy_ms = last.cpu_ms - first.cpu_ms + (last.queued_ms or 0) - (first.queued_ms or 0)
    spun = busy_ms > SPINS * 1000 * (after.state.at_s - before.state.at_s)
    return python_frames(thread) == python_frames(later) and (spun or first.slices == last.slices)


def _is_denied(looks: Looks) -> bool:
    mains = [rank.main for look in looks.taken for rank in look.ranks.values()]
    return any(main is not None and main.stack.kind == "denied" for main in mains)


# --- the job, for its bundle ------------------------------------------------------------------------------------------


def _context(job: FoundJob, bundle_dir: Path) -> JobContext:
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
        run_dir=run_root({}, os.getuid()) / f"r{os.getpid()}",  # which is not there: nobody wrote into it
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
