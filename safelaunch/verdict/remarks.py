"""What is added to a finding beside the reason: frames of frameworks, the ranks' own words, earlier looks. Pure.

None of it changes a cause or makes a finding surer: it says which line to look at first.
"""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Claim,
)
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.exits import kernel_claim
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rules_wrong_results import WRONG_RESULTS
from safelaunch.verdict.suggestions import DETAIL_CRASH


def debug_detail(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The variable under which torch 2.13 and later crash where a DDP model is built."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    launched = facts.evidence.launched
    if finding.cause != "rank-killed" or launched is None or launched.distributed_debug != "DETAIL":
        return
    fatal = [fr.stack_of(rank, rank.fatal.frames) for rank in ranks if rank.fatal is not None]
    if fatal and all(calls.purpose(stack) == "ddp-constructor" for stack in fatal):
        text = f"`TORCH_DISTRIBUTED_DEBUG=DETAIL` is set, under which torch {launched.torch or '2.13 and later'}"
        claim = Claim("TORCH_DISTRIBUTED_DEBUG=DETAIL is in the job's environment", "launch.json")
        yield Annotation(f"{text} crashes when a DDP model is created.", (claim,), advice=frozenset({DETAIL_CRASH}))


def wrong_results_before(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Whatever has happened to the job, it had computed wrong results before."""
    if finding.cause not in WRONG_RESULTS:
        yield Annotation(
            context=tuple(Claim(result.words, WRONG_RESULTS_FILE) for result in facts.evidence.wrong_results)
        )


def driver_errors(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """What the driver has reported of the GPUs of ranks that failed: CUDA's own words come later and say less."""
    for rank in (facts.ranks[culprit.rank].evidence for culprit in finding.culprits if finding.cause != "gpu-lost"):
        yield Annotation(context=tuple(kernel_claim(rank, line, f"rank {rank.rank}: ") for line in rank.gpu_errors))
