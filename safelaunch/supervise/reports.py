from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from safelaunch.bundle.staging import (
    OURS,
    Staging,
)
from safelaunch.capture import user_source
from safelaunch.model import (
    Artifact,
    Evidence,
    Verdict,
)
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.report.about import ReportHeader


def add_reports(
    staging: Staging,
    verdict: Verdict,
    evidence: Evidence,
    redactor: Redactor,
    run_name: str,
    about: Callable[[], ReportHeader],
) -> dict[str, int]:
    """Adds all reports and viewer files that can be generated. Returns the dimensions of the job's mesh, by name."""
    from safelaunch.report import HTML, PERFETTO, exports, markdown, page, template
    from safelaunch.verdict.device_mesh import mesh
    from safelaunch.verdict.rank_state import CaseFacts

    redact = redactor.job_text

    def read_line(path: str, number: int) -> str | None:
        line = user_source.line(path, number)
        return redact(line) if line else line

    @cache  # errors aren't cached, so each report fails by itself
    def facts() -> CaseFacts:
        return CaseFacts.of(evidence, user_source.text)

    def report_md() -> str:
        return markdown.markdown(verdict, evidence, staging.settle(), facts=facts(), read_line=read_line)

    def html() -> str:
        return template.render(
            page.content(verdict, evidence, staging.settle(), facts=facts(), redact=redact, about=about())
        )

    def perfetto() -> str:
        return exports.as_json(exports.perfetto(facts(), run_name))

    begin = time.monotonic()
    made = {PERFETTO: perfetto, "report.md": report_md, HTML: html}
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
