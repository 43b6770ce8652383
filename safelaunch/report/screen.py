"""Shows a verdict on stderr, in at most one screen.

The job's text is untrusted, so its control characters are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from safelaunch.model import (
    Culprit,
    Evidence,
    NextStep,
    ProcessAtFault,
    Verdict,
    rank_words,
)
from safelaunch.report.sentences import (
    OUTCOMES,
    beside_next,
    confidence_words,
    is_healthy,
    merged_claims,
    next_step,
    node_words,
    now_words,
    proof_words,
)
from safelaunch.report.stacks import (
    ReadLine,
)
from safelaunch.system.console import PREFIX, cut, wrapped
from safelaunch.system.printable import clean
from safelaunch.verdict.exceptions import has_lost_a_peer

MAX_LINES = 22
TextStyle = Literal["", "title", "strong", "condition", "command"]
_SGR: Mapping[TextStyle, str] = {"title": "1;31", "strong": "1", "condition": "33", "command": "1;36"}


@dataclass(frozen=True)
class ScreenLine:
    text: str
    style: TextStyle = ""
    whole: bool = False  # for copying

    def shown(self, color: bool) -> str:
        if not color or not self.style:
            return self.text
        inner = self.text.lstrip(" ")
        return f"{' ' * (len(self.text) - len(inner))}{_painted(inner, self.style)}"


def _painted(text: str, style: TextStyle) -> str:
    return f"\x1b[{_SGR[style]}m{text}\x1b[0m"


def screen(
    verdict: Verdict,
    *,
    bundle_path: str,
    place: str = "bundle",
    page: str = "",
    width: int = 100,
    color: bool = False,
    read_line: ReadLine | None = None,
    cwd: str = "",
    evidence: Evidence | None = None,
) -> str:
    """Returns the summary for stderr: at most ``MAX_LINES`` lines, each starting with ``safelaunch: ``.

    Lines break between words. Only long words, paths and commands exceed ``width``. The next command is never broken,
    and neither is the bundle's path, which follows ``place`` on the last line, so that users can copy them.

    Args:
        page: File in the bundle that shows more. It is named above the path, with the command that explains the cause.
        read_line: Reads a line of source.
        cwd: Directory to which the bundle's path is made relative if it doesn't fit otherwise.
        evidence: If given, the error of each rank that merely lost a peer is shortened to one line.
    """
    verdict = verdict if evidence is None else _with_lost_peers(verdict, evidence)
    room = max(width - len(PREFIX), 28)
    title = _wrap(f"{OUTCOMES[verdict.outcome]}: {verdict.cause} ({confidence_words(verdict)})", room)
    summary = _cut(_wrap(clean(verdict.summary), room), _SUMMARY_LINES, room)
    head = list(map(ScreenLine, _quoted(summary) if color else summary))
    named: tuple[Culprit | ProcessAtFault, ...] = (*verdict.culprits, *verdict.processes_at_fault)
    who = [line for culprit in named[:3] for line in _who(culprit, room, read_line)]
    if len(named) > 3:
        more, words = len(named) - 3, ("process", "processes") if verdict.processes_at_fault else ("rank", "ranks")
        who.append(ScreenLine(f"  and {more} more {words[more != 1]}"))
    for node in verdict.nodes_at_fault[:3]:
        who += [ScreenLine(text, "strong") for text in _wrap(node_words(node), room, "  ")[:3]]
    for text in verdict.blamed_before or ():
        who += [ScreenLine(part) for part in _wrap(clean(text), room, "  ")]
    step, where = _command(next_step(verdict)), _place(place, clean(bundle_path), room, clean(cwd))
    command = [*step, *_details(verdict.cause, page, room), *where]
    space = MAX_LINES - len(title) - len(head) - len(who) - len(command) - 1
    tail = _tail(verdict, room, space)
    space -= len(tail)
    lines = [
        *(ScreenLine(text, "strong" if is_healthy(verdict) else "title") for text in title),
        *head,
        *who,
        *_claims(verdict, room, max(space, 0)),
    ]
    lines = [*lines[: MAX_LINES - len(command) - len(tail)], *tail, *command]
    texts = [line.shown(color) for line in lines]
    return "".join(f"{PREFIX}{text}\n" for text in texts)


def _with_lost_peers(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Shortens the error messages of ranks that failed only because they lost a peer."""
    named = {culprit.rank for culprit in verdict.culprits}
    lost = [rank.rank for rank in evidence.ranks if rank.rank not in named and has_lost_a_peer(rank)]
    texts = {}
    for rank in lost:
        peers = set(range(evidence.world_size)) - {rank}
        peer = rank_words(named) if named == peers else "a peer"
        texts[f"ranks/{rank}/exception.json"] = f"rank {rank}: lost its connection to {peer} (a consequence)"
    claims = (replace(claim, claim=texts.get(claim.file, claim.claim)) for claim in verdict.evidence)
    return replace(verdict, evidence=tuple(dict.fromkeys(claims)))


_SUMMARY_LINES = 6
_EVIDENCE_LINES = 3  # for the evidence, below a second piece of advice
_SPACE = "\0"  # a space that never breaks a line


def _wrap(text: str, room: int, indent: str = "") -> list[str]:
    lines = wrapped(text, room, indent, indent + "  " * bool(indent))
    return [line.replace(_SPACE, " ") for line in lines]


def _cut(lines: list[str], most: int, room: int) -> list[str]:
    if len(lines) <= most or most <= 0:
        return lines[: max(most, 0)]
    last = lines[most - 1]
    last = last if len(last) + 2 <= room else last.rsplit(" ", 1)[0]
    return [*lines[: most - 1], f"{last} …"]


def _unbroken(text: str) -> str:
    return clean(text).replace(" ", _SPACE)


def _quoted(lines: Sequence[str]) -> list[str]:
    """Colours text in backquotes, even if it continues on the next line."""
    result, inside = [], False
    for line in lines:
        parts = line.split("`")
        painted = []
        for number, part in enumerate(parts):
            painted.append(_painted(part, "condition") if inside and part else part)
            inside = inside != (number < len(parts) - 1)
        result.append("`".join(painted))
    return result


def _who(culprit: Culprit | ProcessAtFault, room: int, read_line: ReadLine | None) -> list[ScreenLine]:
    who = f"rank {culprit.rank}" if isinstance(culprit, Culprit) else clean(culprit.label)
    pid = [f"pid {culprit.pid}"] if str(culprit.pid) not in who or isinstance(culprit, Culprit) else []
    facts = pid if culprit.process == "main" else [culprit.process]
    facts = facts if culprit.pid or culprit.process != "main" else []  # a Flight Recorder dump names no process
    facts += [f"step {culprit.step}"] if culprit.step is not None else []
    facts += [f"on {culprit.host}"] if culprit.host else []
    name = f"{who} ({clean(', '.join(facts))})" if facts else who
    frame = culprit.frame
    if frame is None:
        return [ScreenLine(text, "strong") for text in _wrap(name, room, "  ")]
    text = f"{name} at {_unbroken(f'{frame.file}:{frame.line}')}"
    text += f" in {clean(frame.function)}" if frame.function else ""
    lines = [ScreenLine(text, "strong") for text in _wrap(text, room, "  ")]
    source = read_line(frame.file, frame.line) if read_line else None
    if source:
        lines.append(ScreenLine(cut(f"    > {clean(source).strip()}", room), "strong"))
    return lines


def _files(files: Sequence[str], most: int = 3) -> str:
    more = [f"and {len(files) - most} more"] if len(files) > most else []
    return ", ".join([*map(_unbroken, files[:most]), *more])


def _claims(verdict: Verdict, room: int, space: int) -> list[ScreenLine]:
    """Returns as many of the first five claims as fit into ``space`` lines. Only the first can be shortened."""
    picked = _spread(merged_claims(verdict.evidence, clean(verdict.summary)), min(5, space - 1))
    lines: list[str] = []
    for text, files in picked:
        whole = _wrap(f"{text}  [{_files(files)}]", room, "    ")
        lines += whole if len(lines) + len(whole) < space else []
    if picked and not lines:
        text, (file, *_) = picked[0]
        lines.append(cut(f"    {text}", room - len(file) - 4) + f"  [{file}]")
    return [ScreenLine("  evidence:"), *map(ScreenLine, lines)] if lines else []


def _spread(claims: Sequence[tuple[str, tuple[str, ...]]], count: int) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the first ``count`` claims in an order in which each file's first claim precedes any second one."""
    counts = Counter[str]()
    order = []
    for index, (text, files) in enumerate(claims):
        order.append((counts[files[0]], index, (text, files)))
        counts[files[0]] += 1
    return [claim for _, _, claim in sorted(order, key=lambda item: item[:2])[: max(count, 0)]]


def _tail(verdict: Verdict, room: int, space: int) -> list[ScreenLine]:
    """Returns the part below the evidence, in ``space`` lines.

    Advice is never shortened. A second piece of advice is included only if it fits.
    """
    parts = []
    if proved := proof_words(verdict):
        parts.append(_cut(_wrap(clean(proved), room, "  "), 3, room))
    if verdict.doubts and verdict.confidence != "high":
        of = " of the cause" if proved else ""
        parts.append(_cut(_wrap(f"unsure{of}: {clean(verdict.doubts[0])}", room, "  "), 2, room))
    if verdict.victims:
        what = "blocked by it" if verdict.culprits or verdict.processes_at_fault else "waiting"
        parts.append([cut(f"  {what}: {rank_words(verdict.victims)}", room)])
    if verdict.missing:
        parts.append([cut(f"  missing: {clean('; '.join(verdict.missing))}", room)])
    now = _wrap(f"now: {clean(text)}", room, "  ") if (text := now_words(verdict)) else []
    first, *second = [_wrap(f"next: {clean(text)}", room, "  ") for text in beside_next(verdict)[:2]] or [[]]
    lines: list[str] = []
    for part in parts:
        lines += _cut(part, min(len(part), space - len(first) - len(now) - len(lines)), room)
    lines += [*now, *first]
    for advice in second:
        lines += advice if len(lines) + len(advice) + _EVIDENCE_LINES <= space else []
    return list(map(ScreenLine, lines))


def _command(step: NextStep | None) -> list[ScreenLine]:
    if step is None:
        return []
    return [ScreenLine(f"  {clean(step.why)}:"), ScreenLine(f"    {clean(step.command)}", "command", whole=True)]


def _details(cause: str, page: str, room: int) -> list[ScreenLine]:
    """Returns the command that explains the cause, and the name of the page, on one line if they fit."""
    explain = f"safelaunch explain {clean(cause)}"
    details = f"  details: {page} in the bundle"
    together = (f"{details}; {explain}", f"  details: {page}; {explain}") if page else ()
    fitting = next((text for text in together if len(text) <= room), "")
    if fitting:
        return [ScreenLine(fitting)]
    return [ScreenLine(f"  more: {explain}", whole=True), *([ScreenLine(details)] if page else [])]


def _place(place: str, path: str, room: int, cwd: str) -> list[ScreenLine]:
    """Returns the path of the evidence; if it doesn't fit, relative to ``cwd`` or on its own line."""
    line = f"{place}: {path}"
    if cwd and len(line) > room:
        short = path.removeprefix(f"{cwd}/")
        line = f"{place}: {short}"
        if len(line) > room:
            return [ScreenLine(f"{place}:"), ScreenLine(short, whole=True)]
    return [ScreenLine(line, whole=True)]
