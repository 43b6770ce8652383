"""What a bundle says of its job in other words: the reports, the files for viewers, the job's entry in the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from safelaunch.bundle.staging import OURS, Staging
from safelaunch.capture import user_source
from safelaunch.model import Artifact, Evidence, GroupMembers, JobShape, Verdict, format_ranks
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.report.about import About

MOST_GROUPS = 1024  # in the manifest


def job_of(evidence: Evidence, shape: dict[str, int]) -> JobShape:
    """The job's entry in the manifest. ``shape``: the dimensions of its mesh."""
    return JobShape(
        outcome=evidence.outcome,
        world_size=evidence.world_size,
        moving=evidence.moving,
        for_finding=evidence.for_finding,
        mesh=shape,
        groups=_groups(evidence),
        devices={str(rank.rank): rank.gpu for rank in evidence.ranks if rank.gpu},
        computes_on={str(rank.rank): rank.device for rank in evidence.ranks if rank.device is not None},
        batch={str(rank.rank): rank.batch for rank in evidence.ranks if rank.batch is not None},
        global_batch_if_data_parallel=_global_batch(evidence),
        batches={str(rank.rank): rank.gil.batches for rank in evidence.ranks if rank.gil.batches},
    )


def _global_batch(evidence: Evidence) -> int | None:
    """The samples of a step, where all ranks were seen with one batch: each rank's own, if all are data-parallel."""
    batches = [rank.batch for rank in evidence.ranks]
    alike = len(batches) == evidence.world_size and len(set(batches)) == 1
    return batches[0] * evidence.world_size if alike and batches[0] is not None else None


def _groups(evidence: Evidence) -> dict[str, GroupMembers]:
    """The process groups that the ranks told of, by their names: what they are called, and who is in them."""
    found: dict[str, GroupMembers] = {}
    for rank in evidence.ranks:
        for name, members in rank.gil.groups.items():
            if name not in found and len(found) < MOST_GROUPS:
                found[name] = GroupMembers(rank.gil.called.get(name, ""), format_ranks(members))
    return found


def add_reports(
    staging: Staging,
    verdict: Verdict,
    evidence: Evidence,
    redactor: Redactor,
    run_name: str,
    about: Callable[[], About],
) -> dict[str, int]:
    """The reports, and the files for viewers, each of which costs only itself where it fails.

    ``about``: the job and its nodes. Returns the dimensions of the job's mesh, by name.
    """
    from safelaunch.report import HTML, PERFETTO, exports, page, report
    from safelaunch.verdict.belonging import mesh
    from safelaunch.verdict.rank_state import Facts

    said = redactor.said

    def read_line(path: str, number: int) -> str | None:
        line = user_source.line(path, number)
        return said(line) if line else line

    @cache  # the reports read the same; an error is not kept, and costs each of them
    def facts() -> Facts:
        return Facts.of(evidence, user_source.text)

    def markdown() -> str:
        return report.markdown(verdict, evidence, staging.settle(), facts=facts(), read_line=read_line)

    def html() -> str:
        return page.render(page.content(verdict, evidence, staging.settle(), facts=facts(), said=said, about=about()))

    def perfetto() -> str:
        return exports.as_json(exports.perfetto(facts(), run_name))

    begin = time.monotonic()
    made = {PERFETTO: perfetto, "report.md": markdown, HTML: html}
    for path, make in made.items():
        try:
            text: str | None = make()
            missing = ""
        except Exception as error:  # noqa: BLE001 - a failed report costs only itself
            text, missing = None, f"the report could not be rendered: {type(error).__name__}: {error}"
        staging.add_report(Artifact(path, OURS, round(time.monotonic() - begin, 3), missing), text)
    with suppress(Exception):
        return dict(mesh(facts()))
    return {}
