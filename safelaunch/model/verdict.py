"""The records that a verdict is made of: the document of ``verdict.json``, and the list of a bundle's files."""

from __future__ import annotations

from typing import Literal

import msgspec

from safelaunch.model.evidence import Outcome
from safelaunch.model.processes import Frame, Record


class Artifact(Record, frozen=True):
    """One file of a bundle, or the reason why it is missing.

    ``path`` is relative to the bundle. ``how``: the source (``py-spy dump --json``). ``missing``: the reason, empty if
    the file exists.
    """

    path: str
    how: str
    duration_s: float
    missing: str = ""
    bytes: int = 0
    note: str = ""


Confidence = Literal["high", "medium", "low"]


class Culprit(Record, frozen=True, omit_defaults=False):
    """One rank at fault."""

    rank: int
    """its global rank"""
    host: str
    """the host it ran on"""
    pid: int
    """the pid of the process at fault"""
    process: str
    """``main``, ``dataloader worker (pid N)``, or another child's role and pid"""
    frame: Frame | None
    """the innermost frame of your own code in that process: ``file``, ``line``, ``function``"""
    step: int | None
    """its last step"""
    reason: str
    """why it is named"""
    gpu: str | msgspec.UnsetType = msgspec.UNSET
    """the UUID of its GPU, only if the GPU itself may be broken"""


class Claim(Record, frozen=True, omit_defaults=False):
    """One piece of evidence: a claim, and the file of the bundle that supports it."""

    claim: str
    file: str


class NodeAtFault(Record, frozen=True, omit_defaults=False):
    """A node that is to blame as a whole. ``ranks``: those on it, as ranges; empty where they are not known."""

    host: str
    ranks: str
    reason: str


class NextStep(Record, frozen=True, omit_defaults=False):
    """A command that can be pasted as it stands, and what for."""

    why: str
    command: str


class BundlePlace(Record, frozen=True, omit_defaults=False):
    """Where the bundle is from which the verdict of several nodes was reached: the claims point at its files.

    ``whole``: it is this one, and holds every rank.
    """

    host: str
    path: str
    whole: bool


class ProofEdge(Record, frozen=True, omit_defaults=False):
    """A wait in a proof. Any one of ``waits_for`` could end it, and all of these wait in turn; empty: nothing can.

    ``why``: what has to happen, and cannot; ``file``: of the bundle, which shows it.
    """

    who: str
    waits_for: tuple[str, ...]
    why: str
    file: str


class Verdict(Record, frozen=True, omit_defaults=False):
    """The document of ``verdict.json``."""

    schema: int
    """1"""
    outcome: Outcome
    """``hang``; ``suspect`` if the job may be hung and was left running; ``crash``; ``dump``"""
    cause: str
    """one of the causes below"""
    confidence: Confidence
    """``high``, ``medium`` or ``low``"""
    summary: str
    """what happened, in one to three sentences"""
    culprits: tuple[Culprit, ...]
    """one entry per rank at fault: all members of a cycle, none if no rank stands out"""
    victims: str
    """the ranks that wait for the culprits, as ranges: ``0-2,5``"""
    evidence: tuple[Claim, ...]
    """each claim, with the file of the bundle that supports it"""
    ruled_out: tuple[str, ...]
    """what was checked on every rank and not found"""
    missing: tuple[str, ...]
    """evidence that could not be collected"""
    suggestions: tuple[str, ...]
    """what to do next"""
    bundle: BundlePlace | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: ``host`` and ``path`` of the bundle with every rank's evidence, to whose files the claims
    refer; ``whole`` is true in that bundle"""
    nodes: tuple[NodeAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: nodes at fault as a whole, with ``host``, ``ranks`` and ``reason``"""
    doubts: tuple[str, ...] = ()
    """why the confidence is not high, one sentence each"""
    next: NextStep | None = None
    """one command to run next, and ``why``; null if the run's command is unknown or contains a secret"""
    blamed_before: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """how many of the last bundles name the same GPU or node, one sentence each"""
    proof: tuple[ProofEdge, ...] = ()
    """the waits that prove the hang: ``who`` waits, ``why``, and the ``file`` that shows it. ``waits_for`` lists what
    could end the wait, all of it stuck as well; it is empty if nothing can. Without a proof, the list is empty"""
    recovered: bool | msgspec.UnsetType = msgspec.UNSET
    """true if the job made progress after this bundle was written"""

    @property
    def nodes_at_fault(self) -> tuple[NodeAtFault, ...]:
        return self.nodes or ()


def format_ranks(ranks: list[int] | tuple[int, ...] | set[int]) -> str:
    """Formats ranks as sorted ranges: ``{0, 1, 2, 5}`` → ``"0-2,5"``; empty → ``""``."""
    parts: list[str] = []
    run: list[int] = []
    for rank in sorted(set(ranks)):
        if run and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts.append(_range(run))
        run = [rank]
    if run:
        parts.append(_range(run))
    return ",".join(parts)


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
