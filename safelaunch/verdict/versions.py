"""Versions that differ between nodes."""

from __future__ import annotations

from safelaunch.model import (
    Claim,
    Evidence,
)

_COMPARED = ("torch", "safelaunch", "script")


def version_claims(evidence: Evidence) -> tuple[Claim, ...]:
    """Returns claims such as ``torch differs between nodes: 2.9 on a, 2.13 on b``."""
    claims = []
    for what in _COMPARED:
        hosts_of: dict[str, list[str]] = {}
        for node in evidence.nodes:
            if version := getattr(node, what):
                hosts_of.setdefault(version, []).append(node.host)
        if len(hosts_of) > 1:
            each = (
                f"{version} on {', '.join(dict.fromkeys(hosts[:3]))}" for version, hosts in list(hosts_of.items())[:4]
            )
            claims.append(Claim(f"{what} differs between nodes: {'; '.join(each)}", "nodes.json"))
    return tuple(claims)
