"""A verdict as text: one screen on stderr, ``report.md``. The page is :mod:`safelaunch.report.page`'s.

Whatever comes from the job (messages, function names, paths, output) is untrusted: control and escape characters never
reach the terminal, and Markdown is escaped.
"""

from __future__ import annotations

import html
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from safelaunch.model import (
    Artifact,
    Claim,
    Culprit,
    Evidence,
    NcclWitness,
    NextStep,
    NodeAtFault,
    NodeEvidence,
    ProcessAtFault,
    RankEvidence,
    Verdict,
    format_ranks,
    rank_words,
)
from safelaunch.model.words import size as words
from safelaunch.report.about import in_status
from safelaunch.report.overview import (
    Alike,
    ReadLine,
    alike,
    batches,
    culprit_lines,
    devices,
    frame_text,
    frames_at_fault,
    merged_stacks,
    row_of,
    stack_groups,
    stack_lines,
    tree_lines,
    world,
)
from safelaunch.report.tables import hosts_word
from safelaunch.system.console import PREFIX, cut, wrapped
from safelaunch.system.printable import clean, clean_lines, is_clean
from safelaunch.verdict.exits import has_lost_a_peer
from safelaunch.verdict.gpu_memory import shortage_of
from safelaunch.verdict.groups import mesh
from safelaunch.verdict.rank_state import CaseFacts

MAX_LINES = 22
_LOG_LINES = 15
_STACK_GROUPS = 40
_NCCL_LINES = 16
_MEMORY_FRAMES = 6

OUTCOMES = {
    "hang": "the job hangs",
    "suspect": "the job may be hung",
    "crash": "the job crashed",
    "dump": "snapshot",
}


# --- one screen ---------------------------------------------------------------------------------------------------

TextStyle = Literal["", "title", "strong", "condition", "command"]
_SGR: Mapping[TextStyle, str] = {"title": "1;31", "strong": "1", "condition": "33", "command": "1;36"}


@dataclass(frozen=True)
class ScreenLine:
    """One line of a screen. ``whole``: it may be longer than the screen is wide, as it is to be pasted."""

    text: str
    style: TextStyle = ""
    whole: bool = False

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
    """The summary for stderr: at most ``MAX_LINES`` lines of at most ``width`` columns, each starting ``safelaunch: ``.

    No line breaks within a word, a path or a command. Longer than ``width`` are only such words, and the commands and
    paths that are to be copied: the next command, and, as the last line, the bundle's path after the word ``place``.
    ``page``: the file in the bundle to open for more. It is named above the path, with the command that explains the
    cause.
    ``read_line`` gives the text of a source line. ``cwd``: below it, a path may be relative where it fits only so.
    ``evidence``: with it, the error of a rank that lost a peer is one line.
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
    """Without the long messages of the ranks that only lost their connection to a peer."""
    named = {culprit.rank for culprit in verdict.culprits}
    lost = [rank.rank for rank in evidence.ranks if rank.rank not in named and has_lost_a_peer(rank)]
    texts = {}
    for rank in lost:
        others = set(range(evidence.world_size)) - {rank}
        peer = rank_words(named) if named == others else "a peer"
        texts[f"ranks/{rank}/exception.json"] = f"rank {rank}: lost its connection to {peer} (a consequence)"
    claims = (replace(one, claim=texts.get(one.file, one.claim)) for one in verdict.evidence)
    return replace(verdict, evidence=tuple(dict.fromkeys(claims)))


def is_healthy(verdict: Verdict) -> bool:
    """The job works, and nothing in it is at fault: no alarm."""
    named = verdict.culprits or verdict.processes_at_fault or verdict.nodes_at_fault
    return verdict.cause == "slow-not-stuck" and not named


_SUMMARY_LINES = 6
_EVIDENCE_LINES = 3  # what a second piece of advice leaves to the evidence
_SPACE = "\0"  # stands for one at which no line may break; ``clean`` leaves none in a text


def _wrap(text: str, room: int, indent: str = "") -> list[str]:
    lines = wrapped(text, room, indent, indent + "  " * bool(indent))
    return [line.replace(_SPACE, " ") for line in lines]


def _cut(lines: list[str], most: int, room: int) -> list[str]:
    """At most so many of them, the last one with ``…`` where it is not their end."""
    if len(lines) <= most or most <= 0:
        return lines[: max(most, 0)]
    last = lines[most - 1]
    last = last if len(last) + 2 <= room else last.rsplit(" ", 1)[0]
    return [*lines[: most - 1], f"{last} …"]


def _unbroken(text: str) -> str:
    return clean(text).replace(" ", _SPACE)


def _quoted(lines: Sequence[str]) -> list[str]:
    """The lines of one text with what stands between backquotes in colour, also across lines."""
    found, inside = [], False
    for line in lines:
        parts = line.split("`")
        painted = []
        for number, part in enumerate(parts):
            painted.append(_painted(part, "condition") if inside and part else part)
            inside = inside != (number < len(parts) - 1)
        found.append("`".join(painted))
    return found


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


def node_words(node: NodeAtFault) -> str:
    """``node a (ranks 0-7): its safelaunch was not heard for 20 s``."""
    ranks = f" ({rank_words(node.ranks)})" if node.ranks else ""
    return clean(f"node {node.host}{ranks}: {node.reason}")


def _files(files: Sequence[str], most: int = 3) -> str:
    more = [f"and {len(files) - most} more"] if len(files) > most else []
    return ", ".join([*map(_unbroken, files[:most]), *more])


_OF_RANK = re.compile(r"rank (\d+): ")


def _claims(verdict: Verdict, room: int, space: int) -> list[ScreenLine]:
    """At most ``space`` lines: as many of the first five claims as fit whole; the first one alone may be shortened."""
    picked = _spread(merged_claims(verdict.evidence, clean(verdict.summary)), min(5, space - 1))
    lines: list[str] = []
    for text, files in picked:
        whole = _wrap(f"{text}  [{_files(files)}]", room, "    ")
        lines += whole if len(lines) + len(whole) < space else []
    if picked and not lines:
        text, (file, *_) = picked[0]
        lines.append(cut(f"    {text}", room - len(file) - 4) + f"  [{file}]")
    return [ScreenLine("  evidence:"), *map(ScreenLine, lines)] if lines else []


def merged_claims(claims: Sequence[Claim], told: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """Each claim once, with all files that show it; what is true of several ranks as one claim about them.

    Without those that ``told``, a text that stands before, has word for word.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for claim in claims:
        text = clean(claim.claim)
        of = _OF_RANK.match(text)
        rest, ranks = (text[of.end() :], (int(of[1]),)) if of else (text, ())
        if text.rstrip(".") not in told:
            files, file = found.setdefault(rest, {}), clean(claim.file)
            files[file] = (*files.get(file, ()), *ranks)
    return [(_of_ranks(rest, files), tuple(files)) for rest, files in found.items()]


def _of_ranks(text: str, files: Mapping[str, tuple[int, ...]]) -> str:
    ranks = {rank for of in files.values() for rank in of}
    return f"{'each of ' if len(ranks) > 1 else ''}{rank_words(ranks)}: {text}" if ranks else text


def _spread(claims: Sequence[tuple[str, tuple[str, ...]]], count: int) -> list[tuple[str, tuple[str, ...]]]:
    """The first claim of each file before the second of any: a screen should show the breadth of the evidence."""
    seen = Counter[str]()
    order = []
    for index, (text, files) in enumerate(claims):
        order.append((seen[files[0]], index, (text, files)))
        seen[files[0]] += 1
    return [claim for _, _, claim in sorted(order, key=lambda item: item[:2])[: max(count, 0)]]


def _tail(verdict: Verdict, room: int, space: int) -> list[ScreenLine]:
    """What is below the evidence, in ``space`` lines. What to do is never cut, and a second piece of advice is left out
    if it doesn't fit.
    """
    parts = []
    if proved := proof_words(verdict):
        parts.append(_cut(_wrap(clean(proved), room, "  "), 3, room))
    if verdict.doubts and verdict.confidence != "high":
        of = " of the cause" if proved else ""  # that it hangs is certain
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


def confidence_words(verdict: Verdict) -> str:
    """``confidence: medium``. If the hang is proved, only its cause is in doubt."""
    level = verdict.confidence
    return f"proved hang; cause: {level} confidence" if _is_proved(verdict) else f"confidence: {level}"


def confidence_sentence(verdict: Verdict) -> str:
    """``Medium confidence``; ``Proved hang · cause: medium confidence``."""
    words = f"{verdict.confidence} confidence"
    return sentence(f"proved hang · cause: {words}" if _is_proved(verdict) else words)


def _is_proved(verdict: Verdict) -> bool:
    """And the cause is not certain."""
    return bool(verdict.proof) and verdict.confidence != "high"


def now_words(verdict: Verdict) -> str:
    """What can be done about a job that continues although it may be hung; empty for any other."""
    if verdict.outcome != "suspect":
        return ""
    name = f" {shlex.quote(clean(verdict.run))}" if verdict.run else ""
    return (
        f"the job was left running: `safelaunch status{name}` shows whether it has moved since, "
        f"`safelaunch dump{name}` collects the evidence again, and Ctrl-C where it runs ends it."
    )


def proof_words(verdict: Verdict) -> str:
    """Why the job cannot go on, in a line: what the ranks wait for, which nobody outside of these waits can give."""
    waits = [f"{_does(edge.who, 'need')} {edge.why}" for edge in verdict.proof if edge.who.startswith("rank")]
    never = next((edge for edge in verdict.proof if not edge.waits_for), None)
    if never is not None and " of group " in never.who:  # a call, which is at odds with itself
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
    """``rank 1 waits``, ``ranks 0-1 wait``."""
    return f"{who} {verb}" if who.startswith("ranks ") or ", " in who else f"{who} {verb}s"


def beside_next(verdict: Verdict) -> list[str]:
    """The suggestions that the next command does not carry out."""
    why = verdict.next.why if verdict.next is not None else ""
    carried_out = (why.startswith(text.partition(": `safelaunch ")[0]) for text in verdict.suggestions)
    return [text for text, done in zip(verdict.suggestions, carried_out, strict=True) if not done]


def next_step(verdict: Verdict) -> NextStep | None:
    """The next command, unless it is what was typed: the user knows that one."""
    step = verdict.next
    try:
        words = shlex.split(step.command) if step is not None else []
    except ValueError:  # somebody else's bundle
        return step
    is_as_typed = len(words) == len(verdict.command) and all(
        word == typed or word in ("N", f"{typed.partition('=')[0]}=N")
        for word, typed in zip(words, verdict.command, strict=True)
    )
    return None if is_as_typed else step


def _command(step: NextStep | None) -> list[ScreenLine]:
    """What to paste, on a line of its own."""
    if step is None:
        return []
    return [ScreenLine(f"  {clean(step.why)}:"), ScreenLine(f"    {clean(step.command)}", "command", whole=True)]


def _details(cause: str, page: str, room: int) -> list[ScreenLine]:
    """The command that explains the cause, and the page in the bundle: on one line if they fit."""
    explain = f"safelaunch explain {clean(cause)}"
    details = f"  details: {page} in the bundle"
    together = (f"{details}; {explain}", f"  details: {page}; {explain}") if page else ()
    fitting = next((text for text in together if len(text) <= room), "")
    if fitting:
        return [ScreenLine(fitting)]
    return [ScreenLine(f"  more: {explain}", whole=True), *([ScreenLine(details)] if page else [])]


def _place(place: str, path: str, room: int, cwd: str) -> list[ScreenLine]:
    """Where the evidence is. With ``cwd``, in a form that the terminal doesn't break: relative, or on its own line."""
    line = f"{place}: {path}"
    if cwd and len(line) > room:
        short = path.removeprefix(f"{cwd}/")
        line = f"{place}: {short}"
        if len(line) > room:
            return [ScreenLine(f"{place}:"), ScreenLine(short, whole=True)]
    return [ScreenLine(line, whole=True)]


# --- report.md ----------------------------------------------------------------------------------------------------

# A word that Markdown or a tracker could read as markup; in the middle of a word, an underscore is none.
_MARKUP = re.compile(r"[\\*<~$]|(?<![^\W_])_|_(?![^\W_])|\][(\[:]|&#?\w+;|(?<!\w)[#@]\w")
_FIRST = re.compile(r"(?:[-+=|#]+|\d{1,9}[.)])$|[>\[]")  # and at the begin of a paragraph or of an item


def md(text: object) -> str:
    """``text`` as Markdown shows it: what could be markup stands as code, where nothing needs to be escaped.

    Code that is marked already, as the verdict's sentences have it, stays as it is.
    """
    *parts, last = clean(str(text)).strip().split("`")
    if len(parts) % 2:  # the last backquote closes nothing
        last = f"{parts.pop()}'{last}"
    shown = ""
    for number, part in enumerate([*parts, last]):
        made = (f"`{part.strip()}`" if part.strip() else "''") if number % 2 else _words(part, first=not number)
        shown += f" {made}" if shown.endswith("`") and made.startswith("`") else made
    return shown


def _words(text: str, *, first: bool) -> str:
    """Words as Markdown; several that need it are one piece of code. ``first``: they begin a paragraph."""
    found: list[list[str]] = []
    for number, word in enumerate(text.split(" ")):
        begins = first and not number and _FIRST.match(word)
        if word and (begins or _MARKUP.search(word)):
            if found and found[-1][0]:
                found[-1].append(word)
            else:
                found.append(["`", word])
        else:
            found.append(["", word])
    return " ".join(f"{ticks}{' '.join(words)}{ticks}" for ticks, *words in found)


def in_cell(text: object) -> str:
    """``md`` in a table, whose cells a bar parts also where it is code or escaped."""
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
    """``report.md``: verdict, culprits with their stacks, the ranks, merged stacks, evidence, what is missing.

    ``facts``: those of ``evidence``, where they are known already.
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
        _md_list("Wrong results", [one.words for one in evidence.wrong_results]),
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
    """When, where and what: what a reader needs who gets this file alone."""
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


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def contract_words(evidence: Evidence, facts: CaseFacts) -> str:
    """World size, mesh, batch and devices, as far as they are known."""
    found = (
        world(evidence.world_size, mesh(facts)),
        f"batch: {batch}" if (batch := batches(evidence)) else "",
        f"devices: {kinds}" if (kinds := devices(evidence)) else "",
    )
    text = "; ".join(filter(None, found))
    return f"The job: {text}." if text else ""


def _md_list(title: str, items: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {md(item)}" for item in items) if items else ""


def _md_culprits(culprits: Sequence[Culprit], evidence: Evidence, read_line: ReadLine | None) -> list[str]:
    """A section for each rank at fault. A stack that several share is in the first one."""
    found: list[str] = []
    shown: dict[tuple[str, ...], int] = {}
    for culprit in culprits:
        stack = tuple(culprit_lines(culprit, evidence, read_line))
        first = shown.setdefault(stack, culprit.rank)
        excerpt = [f"The same stack as rank {first}."] if first != culprit.rank else [_fence(stack)]
        found.append(_md_culprit(culprit, evidence, excerpt if stack else []))
    return found


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
    """What fills the GPU of a rank that ran out of its memory, the largest first, with the stacks that asked for it."""
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


def node_state(node: NodeEvidence) -> str:
    """What is known of a node, in a few words."""
    parts = []
    if node.is_gone:
        parts.append(f"not heard for {node.silent_s:.0f} s" if node.silent_s else "not heard")
    elif node.last in ("failing", "stopping", "ended"):
        parts.append({"failing": "its ranks failed", "stopping": "stopped by a user", "ended": "ended"}[node.last])
    parts += [f"torchrun {node.agent}"] if node.agent in ("stopped", "gone") else []
    parts += [node.trouble] if node.trouble else []
    return "; ".join(parts) or ("this node" if node.here else "heard")


def nccl_lines(witness: NcclWitness | None) -> list[str]:
    """What NCCL's RAS service has said, in a few lines; empty where it was not heard."""
    if witness is None:
        return []
    everybody = (*witness.processes, *(process for comm in witness.communicators for process in comm.processes))
    said = {(one.host, one.pid, one.gpu): one.state for one in everybody}
    numbers = {state: sum(1 for one in said.values() if one == state) for state in ("answers", "unresponsive", "dead")}
    answers = [f"answers from {numbers['answers']}"] if witness.communicators else []
    silent = [f"none from {numbers['unresponsive']}", f"{numbers['dead']} given up"]
    head = f"NCCL {witness.version}, of its processes: {', '.join([*answers, *silent])}"
    gone = [(host, pid, gpu, state) for (host, pid, gpu), state in said.items() if state != "answers"]
    lines = [f"pid {pid} on {host}, GPU {gpu}: {state}" for host, pid, gpu, state in gone[:_NCCL_LINES]]
    return [head, *lines, f"The raw answer: {witness.file}"]


def _md_stacks(facts: CaseFacts, culprits: Sequence[Culprit]) -> str:
    """Each stack once, folded. Those of the ranks at fault are above."""
    groups, without = stack_groups(facts)
    sides = {rank: one.evidence for rank, one in facts.ranks.items()}
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


def stalled_words(evidence: Evidence) -> str:
    """How long there was no progress, and why that was too long; empty where the bundle is not about that."""
    if not evidence.threshold_s:
        return ""
    why = f" ({evidence.threshold_why})" if evidence.threshold_why else ""
    worked = f" Work observed in that time: {'; '.join(evidence.work[:2])}." if evidence.work else ""
    return f"No progress for {evidence.stall_s:.0f} s; suspected after {evidence.threshold_s:.4g} s{why}.{worked}"


def early_lines(evidence: Evidence) -> list[str]:
    """What was seen while the job was quiet, and when."""
    return [f"{time.strftime('%H:%M:%S', time.gmtime(one.unix_s))} UTC, {in_status(one)}" for one in evidence.early]
