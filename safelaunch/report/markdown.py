"""Writes ``report.md``. The job's text is untrusted, so Markdown in it is escaped."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterable, Sequence

from safelaunch.model import (
    Artifact,
    Culprit,
    Evidence,
    NodeEvidence,
    RankEvidence,
    Verdict,
    format_ranks,
    rank_words,
)
from safelaunch.model.words import size as words
from safelaunch.report.rank_rows import Alike, alike, row_of
from safelaunch.report.sentences import (
    OUTCOMES,
    beside_next,
    confidence_sentence,
    contract_words,
    early_lines,
    merged_claims,
    nccl_lines,
    next_step,
    node_state,
    node_words,
    now_words,
    proof_words,
    sentence,
    stalled_words,
)
from safelaunch.report.stack_tree import tree_lines
from safelaunch.report.stacks import (
    ReadLine,
    culprit_lines,
    frame_text,
    frames_at_fault,
    merged_stacks,
    stack_groups,
    stack_lines,
)
from safelaunch.report.tables import hosts_word
from safelaunch.system.printable import clean, clean_lines, is_clean
from safelaunch.verdict.gpu_memory import shortage_of
from safelaunch.verdict.rank_state import CaseFacts

_LOG_LINES = 15
_STACK_GROUPS = 40
_MEMORY_FRAMES = 6


# Possible markup for Markdown or a tracker; not an underscore in the middle of a word.
_MARKUP = re.compile(r"[\\*<~$]|(?<![^\W_])_|_(?![^\W_])|\][(\[:]|&#?\w+;|(?<!\w)[#@]\w")
_FIRST = re.compile(r"(?:[-+=|#]+|\d{1,9}[.)])$|[>\[]")  # at the start of a paragraph or item


def md(text: object) -> str:
    """Converts text to Markdown. Words that might be markup become code, so that they need no escapes.

    Code in ``text``, such as in the verdict's sentences, stays as it is.
    """
    *parts, last = clean(str(text)).strip().split("`")
    if len(parts) % 2:  # an odd backquote
        last = f"{parts.pop()}'{last}"
    shown = ""
    for number, part in enumerate([*parts, last]):
        made = (f"`{part.strip()}`" if part.strip() else "''") if number % 2 else _words(part, first=not number)
        shown += f" {made}" if shown.endswith("`") and made.startswith("`") else made
    return shown


def _words(text: str, *, first: bool) -> str:
    """Converts text without code; adjacent words that might be markup become one piece of code.

    Args:
        first: True if the text begins a paragraph.
    """
    pieces: list[list[str]] = []
    for number, word in enumerate(text.split(" ")):
        begins = first and not number and _FIRST.match(word)
        if word and (begins or _MARKUP.search(word)):
            if pieces and pieces[-1][0]:
                pieces[-1].append(word)
            else:
                pieces.append(["`", word])
        else:
            pieces.append(["", word])
    return " ".join(f"{ticks}{' '.join(words)}{ticks}" for ticks, *words in pieces)


def in_cell(text: object) -> str:
    """Returns ``md(text)`` for a table cell, with each ``|`` replaced."""
    return md(text).replace("|", "¦")


def _fence(lines: Iterable[str]) -> str:
    body = "\n".join(clean(line) for line in lines)
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n{body}\n{ticks}"


def markdown(
    verdict: Verdict,
    evidence: Evidence,
    artifacts: Sequence[Artifact],
    *,
    facts: CaseFacts | None = None,
    read_line: ReadLine | None = None,
) -> str:
    """Returns the text of ``report.md``.

    Args:
        facts: Facts derived from ``evidence``, if already known.
    """
    facts = facts or CaseFacts.of(evidence)
    rows = alike([row_of(rank) for rank in facts.ranks.values()], {culprit.rank for culprit in verdict.culprits})
    tree, step = merged_stacks(facts), next_step(verdict)
    parts = [
        f"# {md(OUTCOMES[verdict.outcome].capitalize())}: {md(verdict.cause)}",
        _md_head(verdict, evidence),
        f"{md(verdict.summary)}",
        confidence_sentence(verdict).replace(verdict.confidence, f"**{verdict.confidence}**")
        + "."
        + (f" Blocked: {md(rank_words(verdict.victims))}." if verdict.victims else ""),
        md(stalled_words(evidence)),
        md(sentence(now_words(verdict))),
        md(proof_words(verdict)),
        md(contract_words(evidence, facts)),
        _md_list("Observed during the run", evidence.notes),
        _md_list("Early looks", early_lines(evidence)),
        _md_list("Wrong results", [result.words for result in evidence.wrong_results]),
        _md_list("Nodes at fault", [node_words(node) for node in verdict.nodes_at_fault]),
        _md_list("Blamed before", verdict.blamed_before or ()),
        *_md_culprits(verdict.culprits, evidence, read_line),
        _md_list("What to do", beside_next(verdict)),
        f"{md(step.why)}:\n\n{_fence([step.command])}" if step is not None else "",
        f"`safelaunch explain {clean(verdict.cause)}` explains the cause.",
        *(_md_memory(rank) for rank in evidence.ranks if shortage_of(rank) is not None),
        _md_nodes(evidence.nodes),
        _md_list("What NCCL says", nccl_lines(evidence.nccl)),
        "## Ranks\n\n" + _md_table(rows),
        "## Where the ranks diverge\n\n" + _fence(tree_lines(tree)) if tree else "",
        _md_stacks(facts, verdict.culprits),
        _md_list("Evidence", [f"{text} ({', '.join(files)})" for text, files in merged_claims(verdict.evidence)]),
        _md_list("Ruled out", verdict.ruled_out),
        _md_list("Not seen", verdict.missing),
        _md_list("Missing artifacts", [f"{a.path}: {a.missing} ({a.how})" for a in artifacts if a.missing]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _md_head(verdict: Verdict, evidence: Evidence) -> str:
    """Returns time, host and job, for people who read only this file."""
    hosts = list(dict.fromkeys(filter(None, (*(rank.host for rank in evidence.ranks), verdict.host))))
    facts = {
        "time": verdict.time.replace("T", " ").replace("Z", " UTC"),
        "run": verdict.run,
        "ranks": f"{verdict.world_size or evidence.world_size}{f' on {hosts_word(hosts)}' if hosts else ''}",
        "versions": ", ".join(f"{name} {version}" for name, version in verdict.versions.items()),
        "command": shlex.join(verdict.command),
    }
    rows = [f"| {name} | {in_cell(text)} |" for name, text in facts.items() if text]
    return "\n".join(("| | |", "|---|---|", *rows))


def _md_list(title: str, items: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {md(item)}" for item in items) if items else ""


def _md_culprits(culprits: Sequence[Culprit], evidence: Evidence, read_line: ReadLine | None) -> list[str]:
    """Returns a section for each rank at fault. A stack that several share is shown only in the first section."""
    sections: list[str] = []
    shown: dict[tuple[str, ...], int] = {}
    for culprit in culprits:
        stack = tuple(culprit_lines(culprit, evidence, read_line))
        first = shown.setdefault(stack, culprit.rank)
        excerpt = [f"The same stack as rank {first}."] if first != culprit.rank else [_fence(stack)]
        sections.append(_md_culprit(culprit, evidence, excerpt if stack else []))
    return sections


def _md_culprit(culprit: Culprit, evidence: Evidence, excerpt: Sequence[str]) -> str:
    step = f", step {culprit.step}" if culprit.step is not None else ""
    title = f"## Rank {culprit.rank}, {md(culprit.process)}, pid {culprit.pid} on {md(culprit.host)}{step}"
    parts = [title, md(culprit.reason), *excerpt]
    text = next((rank.log_tail for rank in evidence.ranks if rank.rank == culprit.rank), "")
    if log := clean_lines(text)[-_LOG_LINES:]:
        raw = f"ranks/{culprit.rank}/log_tail.txt holds its terminal sequences raw, which cat would send on"
        parts.append(f"The end of its output{'' if is_clean(text) else f' ({raw})'}:\n\n" + _fence(log))
    return "\n\n".join(parts)


def _md_memory(rank: RankEvidence) -> str:
    lines = []
    for block in rank.device_memory.blocks if rank.device_memory is not None else ():
        lines.append(f"{words(block.size)} in {block.count} block{'s' * (block.count != 1)}")
        lines += [f"    {frame_text(frame)}" for frame in block.frames[:_MEMORY_FRAMES]]
    return f"## GPU memory of rank {rank.rank}\n\n" + _fence(lines) if lines else ""


def _md_table(rows: Sequence[Alike]) -> str:
    columns: dict[str, list[object]] = {
        "rank": [format_ranks(row.ranks) for row in rows],
        "host": [row.hosts for row in rows],
        "pid": [(row.first.pid or "") if len(row.ranks) == 1 else "" for row in rows],
        "step": [row.step for row in rows],
        "state": [row.state for row in rows],
        "doing": [row.doing for row in rows],
        "at": [frame_text(row.first.frame) for row in rows],
    }
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    head, *rest = (f"| {' | '.join(map(in_cell, line))} |" for line in (filled, *zip(*filled.values(), strict=True)))
    return "\n".join((head, f"|{'---|' * len(filled)}", *rest))


def _md_nodes(nodes: Sequence[NodeEvidence]) -> str:
    head = "## Nodes\n\n| host | ranks | state | torch | safelaunch |\n|---|---|---|---|---|"
    lines = [
        f"| {in_cell(node.host)} | {in_cell(format_ranks(node.ranks))} | {in_cell(node_state(node))} "
        f"| {in_cell(node.torch)} | {in_cell(node.safelaunch)} |"
        for node in nodes
    ]
    return "\n".join([head, *lines]) if lines else ""


def _md_stacks(facts: CaseFacts, culprits: Sequence[Culprit]) -> str:
    """Returns the stacks of all other ranks, folded; equal stacks are shown once."""
    groups, without = stack_groups(facts)
    sides = {rank: state.evidence for rank, state in facts.ranks.items()}
    above = {frames_at_fault(culprit, sides.get(culprit.rank)): culprit.rank for culprit in reversed(culprits)}
    if not groups:
        return ""
    parts = []
    for group in groups[:_STACK_GROUPS]:
        if group.frames in above:
            if group.who != f"rank {above[group.frames]}":
                parts.append(f"{md(sentence(group.who))}: the stack of rank {above[group.frames]}, above.")
            continue
        who = html.escape(clean(group.who))
        parts.append(f"<details><summary>{who}</summary>\n\n{_fence(stack_lines(group))}\n\n</details>")
    if len(groups) > _STACK_GROUPS:
        parts.append(f"{len(groups) - _STACK_GROUPS} more stacks: see ranks/*/stack.txt.")
    if without:
        parts.append(f"No stack: {md(rank_words(without))}.")
    return "\n\n".join(["## Stacks", *parts]) if parts else ""
