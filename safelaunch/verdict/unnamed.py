"""Verdicts on processes whose rank is unknown, which are identified by pid, host or actor.

The rules use placeholder numbers for such processes (``Evidence.labels``). Their sentences would show these numbers, so
the text is written again from the facts about each process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from safelaunch.model import Claim, Culprit, Evidence, NodeAtFault, ProcessAtFault, Verdict, format_ranks, rank_words
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.phrases import by_place, capital, wait_words
from safelaunch.verdict.rank_state import CaseFacts

_MOST_NAMES, _MOST_PLACES, _MOST_CLAIMS = 2, 3, 12


def without_labels(evidence: Evidence) -> Evidence:
    """Returns the evidence on known ranks alone."""
    ranks = tuple(rank for rank in evidence.ranks if rank.rank not in evidence.labels)
    world = max((rank.rank + 1 for rank in ranks), default=0) if evidence.world_guessed else evidence.world_size
    rank_numbers = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world) if rank not in rank_numbers)
    return msgspec.structs.replace(evidence, ranks=ranks, world_size=world, missing_ranks=missing, labels={})


def without_invented_ranks(facts: CaseFacts, finding: Finding, verdict: Verdict) -> Verdict:
    """Replaces the placeholder numbers in a verdict by the labels of the processes."""
    labels = facts.evidence.labels
    named = {culprit.rank for culprit in finding.culprits}
    return msgspec.structs.replace(
        verdict,
        summary=_summary(facts, finding),
        culprits=tuple(
            msgspec.structs.replace(culprit, reason=_reason(facts, culprit.rank))
            for culprit in verdict.culprits
            if culprit.rank not in labels
        ),
        processes=tuple(
            ProcessAtFault(
                label=labels[culprit.rank],
                host=culprit.host,
                pid=culprit.pid,
                process=culprit.process,
                frame=culprit.frame,
                step=culprit.step,
                reason=_reason(facts, culprit.rank),
            )
            for culprit in verdict.culprits
            if culprit.rank in labels
        ),
        victims=format_ranks(r for r in facts.ranks if r in facts.waiting and r not in named and r not in labels),
        evidence=tuple(_claims(facts, named)),
        ruled_out=(),
        missing=tuple(_missing(facts)),
        nodes=verdict.nodes and tuple(NodeAtFault(node.host, "", node.reason) for node in verdict.nodes),
        proof=(),
    )


def numbered(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Adds processes at fault without a known rank as culprits, under their stand-in numbers in the evidence."""
    at_fault = {process.label: process for process in verdict.processes_at_fault}
    processes = ((rank, at_fault[label]) for rank, label in evidence.labels.items() if label in at_fault)
    culprits = (
        Culprit(rank, process.host, process.pid, process.process, process.frame, process.step, process.reason)
        for rank, process in processes
    )
    return msgspec.structs.replace(verdict, culprits=(*verdict.culprits, *culprits))


def _sentence(text: str) -> str:
    return capital(text) if text.partition(" ")[0].isalpha() else text


def _called(facts: CaseFacts, ranks: Iterable[int]) -> str:
    """``rank 3``, ``process 7 and process 9``, ``ranks 0-1 and 3 processes``, ``3 of 4 processes``."""
    labels, ranks = facts.evidence.labels, sorted(ranks)
    ranks_known, other_labels = [r for r in ranks if r not in labels], [labels[r] for r in ranks if r in labels]
    words = [rank_words(ranks_known)] if ranks_known else []
    if len(other_labels) <= _MOST_NAMES:
        words += other_labels
    elif words or len(other_labels) < len(facts.ranks):
        words.append(
            f"{len(other_labels)} processes" if words else f"{len(other_labels)} of {len(facts.ranks)} processes"
        )
    else:
        words.append(f"all {len(other_labels)} processes")
    return " and ".join(words)


def _wait(facts: CaseFacts, ranks: Collection[int]) -> str:
    verb = "waited" if facts.gone.issuperset(ranks) else "waits" if len(ranks) == 1 else "wait"
    return f"{_called(facts, ranks)} {verb}"


def _does(facts: CaseFacts, rank: int) -> str:
    state = facts.ranks[rank]
    if state.condition is not None:
        return state.condition.reason
    verb = "waited" if rank in facts.gone else "waits"
    return f"{verb} in {state.wait.words}" if state.wait is not None else "ended before anything was seen of it"


def _reason(facts: CaseFacts, rank: int) -> str:
    return _sentence(f"{_called(facts, [rank])} {_does(facts, rank)}.")


def _summary(facts: CaseFacts, finding: Finding) -> str:
    """Returns the verdict's summary for processes whose ranks are unknown.

    Example: ``Process 7 waits for its DataLoader at train.py:9, while 3 of 4 processes wait in broadcast at
    train.py:20. Nothing gives its rank.``
    """
    at_fault = {culprit.rank for culprit in finding.culprits}
    waits = wait_words(facts, facts.ranks)
    own = {rank: _does(facts, rank) for rank in at_fault or facts.ranks.keys() - waits.keys()}
    parts = [f"{'each of ' if len(ranks) > 1 else ''}{_called(facts, ranks)} {does}" for does, ranks in by_place(own)]
    peers = {rank: words for rank, words in waits.items() if rank not in own}
    blocked = [f"{_wait(facts, ranks)} in {place}" for place, ranks in by_place(peers)]
    parts, blocked = list(_first(parts)), list(_first(blocked))
    text = ", while ".join(filter(None, ["; ".join(parts), " and ".join(blocked)]))
    text = "; ".join([*(f"node {node.host}: {node.reason}" for node in finding.nodes), *([text] if text else [])])
    return _sentence(f"{text.removesuffix('.')}. {_closing(facts, at_fault)}")


def _first(parts: list[str]) -> Iterator[str]:
    yield from parts[:_MOST_PLACES]
    if more := parts[_MOST_PLACES:]:
        yield f"others are in {len(more)} more {'place' if len(more) == 1 else 'places'}"


def _closing(facts: CaseFacts, at_fault: Collection[int]) -> str:
    unknown = [rank for rank in at_fault if rank in facts.evidence.labels]
    if unknown:
        return "Nothing gives its rank." if len(unknown) == 1 else "Nothing gives their ranks."
    if len(facts.ranks) == 1 and facts.evidence.printed is None:
        return "It is the only process here, so it cannot be compared with its peers."
    if facts.evidence.world_guessed and not at_fault:
        return "No process stands out among these; whether there are others is not known."
    return "" if at_fault else "No process stands out."


def _claims(facts: CaseFacts, named: Collection[int]) -> Iterator[Claim]:
    conditions = {rank: state.condition for rank, state in facts.ranks.items() if state.condition is not None}
    examples = {facts.waiting[rank].words: rank for rank in sorted(facts.waiting, reverse=True)}
    shown: Mapping[int, tuple[Claim, ...]] = {
        **{rank: conditions[rank].claims for rank in conditions if rank in named or not named},
        **{rank: facts.waiting[rank].claims[:2] for rank in sorted(examples.values())},
    }
    claims_found = [
        Claim(f"{_called(facts, [rank])}: {claim.claim}", claim.file)
        for rank, claims in shown.items()
        for claim in claims
    ]
    yield from claims_found[:_MOST_CLAIMS]


def _missing(facts: CaseFacts) -> Iterator[str]:
    labels = [rank for rank in facts.evidence.labels if rank in facts.ranks]
    yield f"the {'rank' if len(labels) == 1 else 'ranks'} of {_called(facts, labels)}"
    if facts.evidence.world_guessed:
        yield "the number of ranks"
    elif facts.unseen:
        yield f"{len(facts.unseen)} of {len(facts.world)} ranks were not seen"
    if facts.evidence.printed is not None:
        return
    without = [rank for rank, state in facts.ranks.items() if state.evidence.main is None]
    if without:
        yield f"no Python stack: {_called(facts, without)}"
