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
    """One rank at fault. ``process``: ``main``, ``dataloader worker (pid N)``, or another child's role and pid.

    ``gpu``: the UUID of its GPU, only where that may be broken.
    """

    rank: int
    host: str
    pid: int
    process: str
    frame: Frame | None
    step: int | None
    reason: str
    gpu: str | msgspec.UnsetType = msgspec.UNSET


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
    """The document of ``verdict.json``. ``victims`` is a list of ranks written as ranges (``"0-2,5"``).

    ``bundle``: only where several nodes have reached the verdict together. ``nodes``: only for a job of several nodes.
    ``doubts``: why the confidence is not high, a sentence each. ``next``: None where the run's command line is not
    known. ``blamed_before``: how many of the last bundles have blamed the same GPU or node, a sentence each.
    ``proof``: the closed set of waits that the job cannot leave; empty where nothing proves that it hangs.
    ``recovered``: the job went on after this bundle was written.
    """

    schema: int
    outcome: Outcome
    cause: str
    confidence: Confidence
    summary: str
    culprits: tuple[Culprit, ...]
    victims: str
    evidence: tuple[Claim, ...]
    ruled_out: tuple[str, ...]
    missing: tuple[str, ...]
    suggestions: tuple[str, ...]
    bundle: BundlePlace | msgspec.UnsetType = msgspec.UNSET
    nodes: tuple[NodeAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    doubts: tuple[str, ...] = ()
    next: NextStep | None = None
    blamed_before: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    proof: tuple[ProofEdge, ...] = ()
    recovered: bool | msgspec.UnsetType = msgspec.UNSET

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
