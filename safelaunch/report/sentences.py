"""Forms sentences for the screen, ``report.md`` and the page."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence

from safelaunch.model import (
    Claim,
    Evidence,
    NcclWitness,
    NextStep,
    NodeAtFault,
    NodeEvidence,
    Verdict,
    rank_words,
)
from safelaunch.report.about import in_status
from safelaunch.report.contract import batches, devices, world
from safelaunch.system.printable import clean
from safelaunch.verdict.device_mesh import mesh
from safelaunch.verdict.rank_state import CaseFacts

_NCCL_LINES = 16
OUTCOMES = {
    "hang": "the job hangs",
    "suspect": "the job may be hung",
    "crash": "the job crashed",
    "dump": "snapshot",
    "slow": "a rank slows the job down",
}


def is_healthy(verdict: Verdict) -> bool:
    named = verdict.culprits or verdict.processes_at_fault or verdict.nodes_at_fault
    return verdict.cause == "slow-not-stuck" and not named


def node_words(node: NodeAtFault) -> str:
    """Describes a node at fault: ``node a (ranks 0-7): its safelaunch was not heard for 20 s``."""
    ranks = f" ({rank_words(node.ranks)})" if node.ranks else ""
    return clean(f"node {node.host}{ranks}: {node.reason}")


_OF_RANK = re.compile(r"rank (\d+): ")


def merged_claims(claims: Sequence[Claim], told: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """Returns each claim once, with all files that support it. Equal claims about several ranks become one claim.

    Omits claims that the text ``told`` already quotes.
    """
    files_by_text: dict[str, dict[str, tuple[int, ...]]] = {}
    for claim in claims:
        text = clean(claim.claim)
        of = _OF_RANK.match(text)
        rest, ranks = (text[of.end() :], (int(of[1]),)) if of else (text, ())
        if text.rstrip(".") not in told:
            files, file = files_by_text.setdefault(rest, {}), clean(claim.file)
            files[file] = (*files.get(file, ()), *ranks)
    return [(_of_ranks(rest, files), tuple(files)) for rest, files in files_by_text.items()]


def _of_ranks(text: str, files: Mapping[str, tuple[int, ...]]) -> str:
    ranks = {rank for of in files.values() for rank in of}
    return f"{'each of ' if len(ranks) > 1 else ''}{rank_words(ranks)}: {text}" if ranks else text


def confidence_words(verdict: Verdict) -> str:
    """Describes the confidence: ``confidence: medium``. If the hang is proved, only its cause is in doubt."""
    level = verdict.confidence
    return f"proved hang; cause: {level} confidence" if _is_proved(verdict) else f"confidence: {level}"


def confidence_sentence(verdict: Verdict) -> str:
    """Describes the confidence: ``Medium confidence`` or ``Proved hang · cause: medium confidence``."""
    words = f"{verdict.confidence} confidence"
    return sentence(f"proved hang · cause: {words}" if _is_proved(verdict) else words)


def _is_proved(verdict: Verdict) -> bool:
    # the cause isn't certain
    return bool(verdict.proof) and verdict.confidence != "high"


def now_words(verdict: Verdict) -> str:
    """Returns what to do about a job that might be hung but was left running; "" for any other job."""
    if verdict.outcome != "suspect":
        return ""
    name = f" {shlex.quote(clean(verdict.run))}" if verdict.run else ""
    return (
        f"the job was left running: `safelaunch status{name}` shows whether it has moved since, "
        f"`safelaunch dump{name}` collects the evidence again, and Ctrl-C where it runs ends it."
    )


def proof_words(verdict: Verdict) -> str:
    """Returns why the job can't continue: what ranks wait for, and that nothing can provide it; "" without proof."""
    waits = [f"{_does(edge.who, 'need')} {edge.why}" for edge in verdict.proof if edge.who.startswith("rank")]
    never = next((edge for edge in verdict.proof if not edge.waits_for), None)
    if never is not None and " of group " in never.who:  # a call whose ranks disagree
        return f"proved: this wait can never end: {never.why}"
    if never is not None:
        return f"proved: {_does(never.who, 'need')} {never.why}, and nothing is left that could"
    more = f", and {len(waits) - 3} more {'wait' if len(waits) == 4 else 'waits'}" if len(waits) > 3 else ""
    return (
        f"proved: only the waiting ranks themselves could end these waits: {'; '.join(waits[:3])}{more}"
        if waits
        else ""
    )


def _does(who: str, verb: str) -> str:
    return f"{who} {verb}" if who.startswith("ranks ") or ", " in who else f"{who} {verb}s"


def beside_next(verdict: Verdict) -> list[str]:
    why = verdict.next.why if verdict.next is not None else ""
    carried_out = (why.startswith(text.partition(": `safelaunch ")[0]) for text in verdict.suggestions)
    return [text for text, done in zip(verdict.suggestions, carried_out, strict=True) if not done]


def next_step(verdict: Verdict) -> NextStep | None:
    """Returns the command to run next; None if there is none, or the user just typed it."""
    step = verdict.next
    try:
        words = shlex.split(step.command) if step is not None else []
    except ValueError:  # another program's bundle
        return step
    is_as_typed = len(words) == len(verdict.command) and all(
        word == typed or word in ("N", f"{typed.partition('=')[0]}=N")
        for word, typed in zip(words, verdict.command, strict=True)
    )
    return None if is_as_typed else step


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def contract_words(evidence: Evidence, facts: CaseFacts) -> str:
    parts = (
        world(evidence.world_size, mesh(facts)),
        f"batch: {batch}" if (batch := batches(evidence)) else "",
        f"devices: {kinds}" if (kinds := devices(evidence)) else "",
    )
    text = "; ".join(filter(None, parts))
    return f"The job: {text}." if text else ""


def node_state(node: NodeEvidence) -> str:
    parts = []
    if node.is_gone:
        parts.append(f"not heard for {node.silent_s:.0f} s" if node.silent_s else "not heard")
    elif node.last in ("failing", "stopping", "ended"):
        parts.append({"failing": "its ranks failed", "stopping": "stopped by a user", "ended": "ended"}[node.last])
    parts += [f"torchrun {node.agent}"] if node.agent in ("stopped", "gone") else []
    parts += [node.trouble] if node.trouble else []
    return "; ".join(parts) or ("this node" if node.here else "heard")


def nccl_lines(witness: NcclWitness | None) -> list[str]:
    if witness is None:
        return []
    everybody = (*witness.processes, *(process for comm in witness.communicators for process in comm.processes))
    states = {(process.host, process.pid, process.gpu): process.state for process in everybody}
    numbers = {
        state: sum(1 for state_of in states.values() if state_of == state)
        for state in ("answers", "unresponsive", "dead")
    }
    answers = [f"answers from {numbers['answers']}"] if witness.communicators else []
    silent = [f"none from {numbers['unresponsive']}", f"{numbers['dead']} given up"]
    head = f"NCCL {witness.version}, of its processes: {', '.join([*answers, *silent])}"
    gone = [(host, pid, gpu, state) for (host, pid, gpu), state in states.items() if state != "answers"]
    lines = [f"pid {pid} on {host}, GPU {gpu}: {state}" for host, pid, gpu, state in gone[:_NCCL_LINES]]
    return [head, *lines, f"The raw answer: {witness.file}"]


def stalled_words(evidence: Evidence) -> str:
    """Returns the time without progress and its limit; empty if the bundle isn't about missing progress."""
    if not evidence.threshold_s:
        return ""
    why = f" ({evidence.threshold_why})" if evidence.threshold_why else ""
    worked = f" Work observed in that time: {'; '.join(evidence.work[:2])}." if evidence.work else ""
    return f"No progress for {evidence.stall_s:.0f} s; suspected after {evidence.threshold_s:.4g} s{why}.{worked}"


def early_lines(evidence: Evidence) -> list[str]:
    return [f"{time.strftime('%H:%M:%S', time.gmtime(look.unix_s))} UTC, {in_status(look)}" for look in evidence.early]
