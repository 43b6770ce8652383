"""Builds ``report.html``: an incident in one self-contained file.

:func:`content` (pure) returns the page's data. It folds equal things, so that a job of thousands of ranks takes only a
few hundred kilobytes. The page's scripts insert the job's names and messages, which are untrusted, only as text.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safelaunch.model import Artifact, Evidence, Verdict, format_ranks, rank_words
from safelaunch.report import code, contract, nodes, ranks, timeline
from safelaunch.report.about import ReportHeader
from safelaunch.report.progress_chart import as_page
from safelaunch.report.rank_rows import range_of
from safelaunch.report.sentences import (
    OUTCOMES,
    beside_next,
    confidence_sentence,
    early_lines,
    is_healthy,
    nccl_lines,
    next_step,
    node_state,
    node_words,
    now_words,
    proof_words,
    sentence,
    stalled_words,
)
from safelaunch.report.stack_tree import StackBranch
from safelaunch.report.stacks import merged_stacks
from safelaunch.report.tables import Frames, Paths, hosts_word
from safelaunch.stacks.source import ReadSource
from safelaunch.system.printable import clean
from safelaunch.verdict.device_mesh import mesh
from safelaunch.verdict.phrases import first_sentence
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.unnamed import numbered

MOST_COMMAND = 4000
_MOST_BRANCHES = 3000
_YEAR_10000 = 253_402_300_800


def content(
    verdict: Verdict,
    evidence: Evidence,
    artifacts: Sequence[Artifact] = (),
    *,
    facts: CaseFacts | None = None,
    read_source: ReadSource | None = None,
    redact: Callable[[str], str] = str,
    about: ReportHeader | None = None,
) -> dict[str, Any]:
    """Returns the page's data, to be stored as JSON.

    Args:
        facts: Facts derived from ``evidence`` and the source, if already known.
        redact: Removes secrets from a line of source.
    """
    about = about or ReportHeader()
    facts = facts or CaseFacts.of(evidence, read_source)
    verdict, labels = numbered(verdict, evidence), evidence.labels
    culprits = {culprit.rank for culprit in verdict.culprits}
    paths = Paths.of(evidence, about.launch.cwd, code.all_frames(facts, verdict))
    frames = Frames(paths)
    shown = ranks.ranks(facts, verdict, frames)
    states = {node.host: (format_ranks(node.ranks), node_state(node)) for node in evidence.nodes}
    return {
        "schema": 1,
        "head": _head(verdict, facts, evidence, about),
        "code": [_side(side, frames) for side in code.sides(facts, verdict, redact)],
        "timeline": timeline.timeline(facts, culprits, frames),
        "steps": as_page(evidence, culprits),
        "tree": _branches(merged_stacks(facts), frames, evidence),
        **shown,
        "groups": ranks.groups(facts),
        "nodes": nodes.nodes(facts, about, states, culprits),
        "nccl": nccl_lines(evidence.nccl),
        "claims": _claims(verdict),
        "ruled_out": verdict.ruled_out,
        "missing": verdict.missing,
        "files": ranks.files(artifacts),
        "frames": frames.rows,
        "stacks": list(frames.stacks),
        **({"labels": {str(number): clean(label) for number, label in labels.items()}} if labels else {}),
    }


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(verdict: Verdict, facts: CaseFacts, evidence: Evidence, about: ReportHeader) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome,
        "words": OUTCOMES[verdict.outcome],
        "cause": verdict.cause,
        "summary": verdict.summary,
        "more": clean(verdict.summary)[len(first_sentence(clean(verdict.summary))) :].strip(),
        "confidence": verdict.confidence,
        "sure": confidence_sentence(verdict),
        "now": sentence(now_words(verdict)),
        "healthy": int(is_healthy(verdict)),
        "doubts": verdict.doubts,
        "proof": proof_words(verdict),
        "culprits": format_ranks([culprit.rank for culprit in verdict.culprits]),
        "victims": verdict.victims,
        "nodes_at_fault": [
            *(node_words(node) for node in verdict.nodes_at_fault),
            *map(clean, verdict.blamed_before or ()),
        ],
        "suggestions": beside_next(verdict),
        "next": [step.why, step.command] if (step := next_step(verdict)) is not None else [],
        "notes": [*evidence.notes],
        "wrong": [o.words for o in evidence.wrong_results if o.words[1:] not in verdict.summary],
        "early": early_lines(evidence),
        "facts": [list(fact) for fact in _facts(verdict, facts, evidence, about)],
        "command": _command(about.launch.as_typed),
        "bundle": about.bundle,
    }


def _facts(verdict: Verdict, facts: CaseFacts, evidence: Evidence, about: ReportHeader) -> Iterable[tuple[str, str]]:
    """Yields ``(label, value)`` for the facts that readers look for first."""
    launch = about.launch
    steps = [
        rank.progress.step for rank in evidence.ranks if rank.progress is not None and rank.progress.step is not None
    ]
    hosts = list(dict.fromkeys(rank.host for rank in evidence.ranks if rank.host))
    facts_by_label = {
        "run": launch.run_name,
        "when": _when(about.at_unix_s),
        "stood still": stalled_words(evidence).rstrip("."),
        "step": range_of(steps),
        "world size": "" if evidence.world_guessed else contract.world(evidence.world_size, mesh(facts)),
        "devices": "; ".join(filter(None, (contract.devices(evidence), nodes.misplaced(facts, about)))),
        "batch": contract.batches(evidence),
        "hosts" if len(hosts) > 1 else "host": hosts_word(hosts),
        "torch": launch.torch or _version(about, "torch"),
        "safelaunch": launch.safelaunch,
        "presets": ", ".join(launch.presets),
        "directory": launch.cwd,
        "held up": rank_words(verdict.victims) if verdict.victims else "",
    }
    return ((label, value) for label, value in facts_by_label.items() if value)


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s)) if 0 < unix_s < _YEAR_10000 else ""


def _version(about: ReportHeader, package: str) -> str:
    versions = {text for node in about.nodes for name, text in node.versions if name == package}
    return ", ".join(sorted(versions)[:3])


def _command(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= MOST_COMMAND else f"{text[:MOST_COMMAND]} …"


def _claims(verdict: Verdict) -> list[list[Any]]:
    files_of: dict[str, list[str]] = {}
    for claim in verdict.evidence:
        files_of.setdefault(claim.claim, []).append(claim.file)
    return [[claim, *files] for claim, files in files_of.items()]


# --- code, stacks, nodes ----------------------------------------------------------------------------------------------


def _side(side: code.CallSide, frames: Frames) -> dict[str, Any]:
    return {
        "r": format_ranks(side.ranks),
        "n": len(side.ranks),
        "c": int(side.culprit),
        "does": side.does,
        "places": [
            {
                "f": frames.number(place.frame),
                "whose": place.whose,
                "lines": [[line.number, line.text, line.mark, line.note, int(line.gap)] for line in place.lines],
            }
            for place in side.places
        ],
        "callers": [frames.number(frame) for frame in side.callers],
    }


def _branches(branches: Sequence[StackBranch], frames: Frames, evidence: Evidence) -> list[dict[str, Any]]:
    roots = next((rank.code_roots for rank in evidence.ranks if rank.code_roots), ())
    made: list[dict[str, Any]] = []
    queue: list[tuple[StackBranch, list[dict[str, Any]]]] = [(branch, made) for branch in branches]
    for number, (branch, into) in enumerate(queue):
        if number >= _MOST_BRANCHES:
            break
        below: list[dict[str, Any]] = []
        into.append(
            {
                "f": [frames.number(frame, roots) for frame in branch.frames],
                "r": branch.ranks,
                "n": branch.count,
                "m": branch.missing,
                "b": below,
            }
        )
        queue += [(further, below) for further in branch.branches]
    return made
