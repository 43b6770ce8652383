"""``report.html``: the picture of an incident, as one file that loads nothing.

:func:`content` makes the page's data out of verdict and evidence. It is pure, and folds what is alike, so that a job of
thousands of ranks makes a page of a few hundred kilobytes. :func:`render` puts the data, escaped, into the template.
The scripts of the page write every text of the job as text: names and messages are a stranger's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from math import isfinite
from typing import Any

from safelaunch.model import Artifact, Evidence, RankEvidence, Verdict, format_ranks, rank_words
from safelaunch.report import code, nodes, overview, ranks, timeline
from safelaunch.report.about import ReportHeader
from safelaunch.report.overview import StackBranch, merged_stacks, range_of
from safelaunch.report.report import (
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
from safelaunch.report.tables import Frames, Paths, hosts_word
from safelaunch.stacks.source import ReadSource
from safelaunch.system.printable import clean, clean_json
from safelaunch.verdict.groups import mesh
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.unnamed import numbered

# --- The steps of all ranks over time: the rate before the stall, who is behind, and the moment it stopped ------------


MOST_LINES = 24
MOST_POINTS = 160
_FEW = 3


def as_page(evidence: Evidence, culprits: Collection[int]) -> dict[str, Any] | None:
    """A line for each class of ranks: those that stopped at the same step. None where no rank has marked any.

    Times are seconds before the evidence was taken, on each host's own clock.
    """
    taken = _taken(evidence)
    seen = {rank.rank: rank for rank in evidence.ranks if rank.progress is not None and rank.progress.step is not None}
    classes: dict[tuple[bool, int], list[RankEvidence]] = {}
    for rank, one in seen.items():
        assert one.progress is not None
        classes.setdefault((rank in culprits, one.progress.step or 0), []).append(one)
    ordered = sorted(classes.items(), key=lambda item: (not item[0][0], item[0][1]))
    lines = [_line(members, culprit, taken) for (culprit, _), members in ordered[:MOST_LINES]]
    lines = [line for line in lines if line["p"]]
    if not lines:
        return None
    return {
        "lines": lines,
        "threshold_s": round(evidence.threshold_s, 3),
        "stall_s": round(evidence.stall_s, 3),
        "left_out": max(0, len(ordered) - MOST_LINES),
    }


def _taken(evidence: Evidence) -> Mapping[str, float]:
    """Host → when its ranks were looked at last, on its clock."""
    found: dict[str, float] = {}
    for rank in evidence.ranks:
        states = rank.main.states if rank.main is not None else ()
        last = max((state.at_s for state in states), default=0.0)
        newest = max(last, rank.progress.last_step_ns / 1e9 if rank.progress is not None else 0.0)
        found[rank.host] = max(found.get(rank.host, 0.0), newest)
    return found


def _line(members: list[RankEvidence], culprit: bool, taken: Mapping[str, float]) -> dict[str, Any]:
    """The one that has told most stands for all of the class."""
    one = max(members, key=lambda rank: len(rank.progress.history) if rank.progress is not None else 0)
    progress = one.progress
    assert progress is not None
    points = [(at / 1e9, step) for at, step in progress.history]
    if progress.first_step_ns and len(points) < _FEW:  # too fast to be seen; of a long run it would squeeze the rest
        points.append((progress.first_step_ns / 1e9, 1))
    if progress.last_step_ns and (not points or points[-1][1] != progress.step):
        points.append((progress.last_step_ns / 1e9, progress.step or 0))
    points = sorted(set(points))
    thinned = points[:: -(-len(points) // MOST_POINTS)] if points else []
    thinned += [points[-1]] if points and thinned[-1] != points[-1] else []
    end = taken.get(one.host, 0.0)
    return {
        "r": format_ranks([rank.rank for rank in members]),
        "n": len(members),
        "c": int(culprit),
        "step": progress.step,
        "p": [[round(at - end, 3), step] for at, step in thinned],
        "rate": _rate(points),
    }


def _rate(points: list[tuple[float, int]]) -> float:
    """Steps a second over the later half of what is known; 0 where that is too little."""
    later = points[len(points) // 2 :] if len(points) > 8 else points
    if len(later) < 2 or later[-1][0] <= later[0][0]:
        return 0.0
    return round((later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0]), 4)


MOST_COMMAND = 4000
_MOST_BRANCHES = 3000
_YEAR_10000 = 253_402_300_800
_STYLE, _SCRIPT, _COMMON = "report.css", "report.js", "common.js"  # COMMON: what all pages draw with


def content(
    verdict: Verdict,
    evidence: Evidence,
    artifacts: Sequence[Artifact] = (),
    *,
    facts: CaseFacts | None = None,
    read_source: ReadSource | None = None,
    said: Callable[[str], str] = str,
    about: ReportHeader | None = None,
) -> dict[str, Any]:
    """The page's data, as JSON has it. ``said`` takes secrets out of a line of source.

    ``facts``: those of ``evidence`` with the source, where they are known already.
    """
    about = about or ReportHeader()
    facts = facts or CaseFacts.of(evidence, read_source)
    verdict, labels = numbered(verdict, evidence), evidence.labels
    culprits = {culprit.rank for culprit in verdict.culprits}
    paths = Paths.of(evidence, about.launch.cwd, code.all_frames(evidence, verdict))
    frames = Frames(paths)
    shown = ranks.ranks(facts, verdict, frames)
    states = {node.host: (format_ranks(node.ranks), node_state(node)) for node in evidence.nodes}
    return {
        "schema": 1,
        "head": _head(verdict, facts, evidence, about),
        "code": [_side(side, frames) for side in code.sides(facts, verdict, said)],
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
        "more": clean(verdict.summary)[len(_first_sentence(clean(verdict.summary))) :].strip(),
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
        "wrong": [
            o.words for o in evidence.wrong_results if o.words[1:] not in verdict.summary
        ],  # what it does not say
        "early": early_lines(evidence),
        "facts": [list(fact) for fact in _facts(verdict, facts, evidence, about)],
        "command": _command(about.launch.as_typed),
        "bundle": about.bundle,
    }


def _first_sentence(text: str) -> str:
    """The title of the page; what follows stands below it."""
    found = re.match(r".+?[.](?= [A-Z`])", text)
    return found[0] if found is not None and len(found[0]) > 20 else text


def _facts(verdict: Verdict, facts: CaseFacts, evidence: Evidence, about: ReportHeader) -> Iterable[tuple[str, str]]:
    """What people ask first, as ``(label, value)``; what is not known is left out."""
    launch = about.launch
    seen = [
        rank.progress.step for rank in evidence.ranks if rank.progress is not None and rank.progress.step is not None
    ]
    hosts = list(dict.fromkeys(rank.host for rank in evidence.ranks if rank.host))
    found = {
        "run": launch.run_name,
        "when": _when(about.at_unix_s),
        "stood still": stalled_words(evidence).rstrip("."),
        "step": range_of(seen),
        "world size": "" if evidence.world_guessed else overview.world(evidence.world_size, mesh(facts)),
        "devices": "; ".join(filter(None, (overview.devices(evidence), nodes.misplaced(facts, about)))),
        "batch": overview.batches(evidence),
        "hosts" if len(hosts) > 1 else "host": hosts_word(hosts),
        "torch": launch.torch or _version(about, "torch"),
        "safelaunch": launch.safelaunch,
        "presets": ", ".join(launch.presets),
        "directory": launch.cwd,
        "held up": rank_words(verdict.victims) if verdict.victims else "",
    }
    return ((label, value) for label, value in found.items() if value)


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s)) if 0 < unix_s < _YEAR_10000 else ""


def _version(about: ReportHeader, package: str) -> str:
    found = {text for node in about.nodes for name, text in node.versions if name == package}
    return ", ".join(sorted(found)[:3])


def _command(words: Sequence[str]) -> str:
    """A command line that a shell reads as these words."""
    text = shlex.join(words)
    return text if len(text) <= MOST_COMMAND else f"{text[:MOST_COMMAND]} …"


def _claims(verdict: Verdict) -> list[list[Any]]:
    """Each claim once, with all files that show it."""
    found: dict[str, list[str]] = {}
    for claim in verdict.evidence:
        found.setdefault(claim.claim, []).append(claim.file)
    return [[claim, *files] for claim, files in found.items()]


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
    """The merged stacks, at most ``_MOST_BRANCHES`` of their branches, breadth first."""
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


# --- the file ---------------------------------------------------------------------------------------------------------


@cache
def _part(name: str) -> str:
    return resources.files("safelaunch.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def prepare() -> None:
    """Reads the templates, which takes a moment on a slow disk."""
    for name in ("report.html", _STYLE, _COMMON, _SCRIPT):
        _part(name)


def render(page: dict[str, Any], script: str | None = None) -> str:
    """The page with ``page`` as its data. Nothing in it can end the block that it stands in, or be taken for markup.

    ``script``: the program that draws it, after what all pages have in common; None: that of an incident.
    """
    code = _part(_COMMON) + (script if script is not None else _part(_SCRIPT))
    data = clean_json(json.dumps(_cleaned(page), ensure_ascii=False, separators=(",", ":")))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head = page["head"]
    values = {
        "title": escape(clean(f"{head['cause']}: {head['summary']}")[:200]),
        "policy": f"default-src 'none'; style-src {_hash(_part(_STYLE))}; script-src {_hash(code)}; "
        "base-uri 'none'; form-action 'none'",
        "outcome": escape(head["words"].capitalize()),
        "cause": escape(head["cause"]),
        "summary": escape(_first_sentence(clean(head["summary"]))),
        "style": _part(_STYLE),
        "data": data,
        "script": code,
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], _part("report.html"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _cleaned(value: Any) -> Any:
    """The same with every text cleaned of what is not shown; spaces stay, as source is indented by them."""
    if isinstance(value, str):
        return value if value.isprintable() else _printable(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if value and all(type(item) is int for item in value) else [_cleaned(item) for item in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _printable(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))
