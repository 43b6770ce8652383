"""Known circumstances of a finding: settings, earlier wrong results, errors of the driver.

They don't change a cause or make a finding more certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Claim,
    RankEvidence,
)
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.exits import kernel_claim
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rules_live import WRONG_RESULTS
from safelaunch.verdict.suggestions import DETAIL_CRASH


def circumstances(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Lists a variable with which torch crashes, driver errors of the failed ranks' GPUs, and earlier wrong results."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    if finding.cause == "rank-killed" and ranks:
        yield from _debug_detail(facts, ranks)
    if finding.cause != "gpu-lost":  # CUDA reports later and with less detail than its driver
        errors = ((rank, line) for rank in ranks for line in rank.gpu_errors)
        yield Annotation(context=tuple(kernel_claim(rank, line, f"rank {rank.rank}: ") for rank, line in errors))
    if finding.cause not in WRONG_RESULTS:
        results = facts.evidence.wrong_results
        yield Annotation(context=tuple(Claim(result.words, WRONG_RESULTS_FILE) for result in results))


def _debug_detail(facts: CaseFacts, ranks: Sequence[RankEvidence]) -> Iterator[Annotation]:
    """Reports the variable with which torch 2.13 and later crash when a DDP model is built."""
    launched = facts.evidence.launched
    if launched is None or launched.distributed_debug != "DETAIL":
        return
    fatal = [fr.stack_of(rank, rank.fatal.frames) for rank in ranks if rank.fatal is not None]
    if fatal and all(calls.purpose(stack) == "ddp-constructor" for stack in fatal):
        text = f"`TORCH_DISTRIBUTED_DEBUG=DETAIL` is set, under which torch {launched.torch or '2.13 and later'}"
        claim = Claim("TORCH_DISTRIBUTED_DEBUG=DETAIL is in the job's environment", "launch.json")
        yield Annotation(f"{text} crashes when a DDP model is created.", (claim,), advice=frozenset({DETAIL_CRASH}))
