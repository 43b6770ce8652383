"""Two nodes whose supervisors are connected."""

from __future__ import annotations

from typing import Any

from tests.support.jobs import Bundle, Job, Result
from tests.support.nodes import TwoNodes

QUICK = ["--stall-timeout=3", "--max-stall=120"]
TOGETHER = "together with 1 other node"


def whole_and_half(results: list[Result]) -> tuple[Bundle, Bundle]:
    bundles = sorted((result.bundle for result in results), key=lambda bundle: not bundle.verdict["bundle"]["whole"])
    return bundles[0], bundles[1]


def said_the_same(bundles: tuple[Bundle, Bundle]) -> dict[str, Any]:
    """The verdict, without the place of the bundle, which is each one's own."""
    first, second = ({k: v for k, v in one.verdict.items() if k != "bundle"} for one in bundles)
    assert first == second
    return first


def training(nodes: TwoNodes) -> tuple[Job, Job]:
    """The nodes with the ranks 0 and 2, once they train and have met."""
    first, second = nodes.with_rank(0)
    for job in (first, second):
        job.until(lambda job=job: TOGETHER in job.stderr, "the nodes to meet")  # type: ignore[misc]
    first.until(lambda: (nodes.scratch / "evaluated").exists(), "the first steps")
    return first, second
