"""Determines which rank, process, container or node printed a line.

Launchers nest prefixes: ``[rank3]:``, ``[default3]:``, `` 3: `` (``srun -l``), ``[1,3]<stderr>:`` (``mpirun``),
``(Worker pid=…)`` (Ray), ``[pod/…]`` (``kubectl``), ``host: `` (``pdsh``), ``worker-1  | `` (Docker Compose). Prefixes
are removed one at a time; if several name a rank, torch's ``[rank3]`` wins. Other prefixes, such as torchrun's
``--log-line-prefix-template``, are learned from tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from safelaunch.addons.logs.lines import MAX_RANKS, TORCHRUN_TREE, LogLine

Speaker = int | str  # rank, or the name of a process, container, task or node
LOCAL = " local rank "  # joins the name of a node and a local rank
_TIME = re.compile(
    r"(?:  \| )?\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?: (?:stderr|stdout) [FP]| \|)? ?"
    r"|\d\d:\d\d:\d\d[.,]\d+ |[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=\[)"
)
_TORCH_RANK = re.compile(r".{0,120}?\[rank(?P<rank>\d{1,6})\]: ?")  # after any other prefixes


# Pattern, and the meaning of its number: 2 global rank, 1 rank local to a node, 0 no rank.
_PREFIXES: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d{1,6})(?:,algo-\d+)?\]<std(?:err|out|diag)>: ?"), 2),
    (re.compile(r"\[\d+,(?P<rank>\d{1,6})\]: ?"), 2),
    (re.compile(r"(?:[0-9a-f]{8} )?\[rank=(?P<rank>\d{1,6})\] \|\| ?"), 2),
    (re.compile(r"\[?(?:rank|Rank|RANK)[:=]? ?(?P<rank>\d{1,6})(?:/\d{1,6})?(?:\]:? |: )"), 2),
    (re.compile(r"\[(?P<role>[A-Za-z_]{1,40})(?P<rank>\d{1,5})\]: ?"), 1),
    (re.compile(r"[a-z][\w-]*(?:\.[\w-]+){2,} (?P<rank>\d{1,6}): ?"), 2),
    (re.compile(r"\(\w+ rank=(?P<rank>\d{1,6}),? ?pid=\d+(?:, ip=[\w.:]+)?\) ?"), 2),
    (re.compile(r"\((?P<name>\w+,? ?pid=\d+(?:, ip=[\w.:]+)?)\) ?"), 0),
    (re.compile(r"\[(?P<name>pod/[^\]\s]+)\] ?"), 0),
)


# Names of nodes and containers contain a number (pdsh, Docker Compose, GNU parallel); tasks are one (``srun -l``).
_MARKS = (r":(?: |$)", r" *\|(?: |$)", r"\t")
_HOST = re.compile(rf" {{0,6}}(?P<name>(?=[a-zA-Z._-]*\d)[\w.-]{{1,80}})(?P<mark>{'|'.join(_MARKS)})")


# c10d's own lines. Older versions give the rank in the group, which is global only for the default group.
_C10D_RANK = re.compile(
    r"\[[EFW][^\]]*ProcessGroup\w+\.cpp:\d+\] \[(?:PG (?:ID )?0 (?:PG GUID 0\S* )?)?Rank (?P<rank>\d{1,6})\]"
)


# A field in a logger's format.
_RANK_FIELD = re.compile(r".{0,100}?(?<![A-Za-z])[Rr](?:ank|ANK)[ =:_#-]?(?P<rank>\d{1,5})(?:/\d+)?(?= *[|\]>):,]| - )")
_LOGGER = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\d\d:\d\d")
_ERROR_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Error|EXCEPTION)\b")


# A traceback that begins after an unknown prefix or an unfinished progress bar.
_TRACEBACK_SUFFIX = re.compile(r".*\S(?P<space> ?)(?=Traceback \(most recent call last\):$)")
_IN_NAME = re.compile(r"(?<![A-Za-z])(?<!lora[_-])[Rr]ank[_-]?(?P<rank>\d{1,6})(?![\dA-Za-z]|[_-]?lora)")
_NUMBERED = re.compile(r"(?P<stem>.*[_-])t?(?P<rank>\d{1,6})\.(?:out|err|log|txt)(?:\.gz)?$")


@dataclass(frozen=True)
class LogEntry:
    line: LogLine
    text: str
    speaker: Speaker | None
    timed: bool  # the prefixes contain a time
    label: str = ""  # second name, besides the rank


@dataclass
class PrefixParser:
    file_speaker: Speaker | None
    hosts: re.Pattern[str] | None  # pattern for names of nodes or Slurm tasks
    has_field: bool = False  # a logger names the rank in each line
    template: re.Pattern[str] | None = None  # prefix pattern learned from tracebacks
    _record: Speaker | None = None  # speaker of the error record that contains the last line

    def parse(self, line: LogLine, ahead: Iterable[LogLine | None] = ()) -> LogEntry:
        text = line.text.removeprefix("stderr: ").removeprefix("stdout: ")
        speaker, worth, timed, label = self.file_speaker, int(isinstance(self.file_speaker, int)), False, ""
        if "[rank" in text and (rank_prefix := _TORCH_RANK.match(text)) and int(rank_prefix["rank"]) < MAX_RANKS:
            speaker, worth, text = int(rank_prefix["rank"]), 3, text[rank_prefix.end() :]
        if self.hosts is not None and (host := self.hosts.match(text)):
            speaker, worth, text = (host["name"], -1, text[host.end() :]) if speaker is None else (speaker, 0, text)
        for _ in range(6):
            has_prefix = False
            if text[:1] in "[(0123456789RFMSTWabcdefghijklmnopqrstuvwxyz" or text.startswith("  | "):
                if match := _TIME.match(text):
                    text, has_prefix, timed = text[match.end() :], True, True
                for pattern, value in _PREFIXES:
                    if match := pattern.match(text):
                        number = match.groupdict().get("rank")
                        name: Speaker = int(number) if number is not None else match["name"]
                        if value == 1:
                            name = f"{speaker if isinstance(speaker, str) else ''}{LOCAL}{name}"
                        if (value > worth or speaker is None) and (isinstance(name, str) or name < MAX_RANKS):
                            label = speaker if isinstance(speaker, str) else label
                            speaker, worth = name, value
                        text, has_prefix = text[match.end() :], True
                        break
            if not has_prefix and (behind := _TRACEBACK_SUFFIX.match(text)):
                self.template = self.template or _template(behind[0], ahead)
            if not has_prefix and self.template is not None and (match := self.template.match(text)):
                number = match.groupdict().get("rank")
                template_name = int(number) if number else None if _LOGGER.search(match[0]) else match[0].strip(" :")
                speaker, worth = (template_name, 2) if worth < 2 and template_name is not None else (speaker, worth)
                text, has_prefix = text[match.end() :], True
            elif not has_prefix and behind is not None and not behind["space"]:
                text, has_prefix = text[behind.end() :], True
            if not has_prefix:
                break
        if not isinstance(speaker, int) and (rank_prefix := _C10D_RANK.match(text)):
            label, speaker = speaker or "", int(rank_prefix["rank"])
        if self.has_field and speaker is None:
            speaker = self._by_field(text, timed=timed)
        return LogEntry(line, text, speaker, timed, label)

    def _by_field(self, text: str, *, timed: bool) -> Speaker | None:
        if field := _RANK_FIELD.match(text):
            self._record = int(field["rank"]) if _ERROR_LEVEL.search(text) else None
            return int(field["rank"])
        self._record = None if timed else self._record  # lines without a time continue the previous record
        return self._record


def has_rank_field(lines: Sequence[str]) -> bool:
    """Returns whether most lines contain a rank in the same position, as in a logger's format."""
    texts = [line for line in lines if _TIME.match(line)] or [line for line in lines if line.strip()]
    fields = [field for line in texts if (field := _RANK_FIELD.match(line))]
    return len(fields) > 3 and 2 * len(fields) > len(texts)


def _template(prefix: str, ahead: Iterable[LogLine | None]) -> re.Pattern[str] | None:
    """Returns a pattern for prefixes similar to ``prefix``, if the frames of a traceback have such prefixes, else None.

    The number in the prefix that has the most different values is the rank.
    """
    parts, digits = [re.escape(piece) for piece in re.split(r"\d{1,6}", prefix)], r"(\d{1,6})"
    quoted = re.compile(rf'{digits.join(parts)}(?:  File ".*", line \d+|Traceback \(most)')
    lines = [match for line in ahead if line is not None and (match := quoted.search(line.text))]
    if not any("  File" in match[0] for match in lines):
        return None
    columns = list(zip(*(match.groups() for match in lines), strict=True))
    most = max((len({*column}) for column in columns), default=0)
    best = [at for at, column in enumerate(columns) if len({*column}) == most]
    if len({columns[at] for at in best}) == 1:
        parts[best[-1] : best[-1] + 2] = [r"(?P<rank>\d{1,5})".join(parts[best[-1] : best[-1] + 2])]
    return re.compile(r"\d{1,6}".join(parts))


_CUT_LINE = re.compile(
    r".*ProcessGroup\w+\.cpp:\d+\](?:(?: \[[^\]]*\])?|.*operation timeout: (?!.*ran for \d+ milliseconds).*)$"
)
_REST_OF_LINE = re.compile(r"[ \w(][^\[]")


def join_wrapped(line: LogLine, following: LogLine | None) -> LogLine | None:
    """Returns a c10d line joined with its continuation if a terminal wrapped it, else None."""
    if following is None or following.number != line.number + 1 or "ProcessGroup" not in line.text:
        return None
    if not _CUT_LINE.match(line.text) or not _REST_OF_LINE.match(following.text) or _TIME.match(following.text):
        return None
    is_other = following.text.startswith(("Traceback", "terminate", "  File"))
    return None if is_other else LogLine(line.file, line.number, line.text + following.text)


def speakers_by_file(names: Sequence[str]) -> dict[str, Speaker]:
    """Returns file name → speaker. A number is a rank only if the files are numbered from 0 or 1 without gaps."""
    speakers: dict[str, Speaker] = {}
    numbered: dict[str, dict[int, str]] = {}
    for name in names:
        match = TORCHRUN_TREE.search(name) or _IN_NAME.search(name)
        if match is not None:
            speakers[name] = int(match["rank"])
        elif suffix := _NUMBERED.match(name):
            numbered.setdefault(suffix["stem"], {})[int(suffix["rank"])] = name
    for is_multi_node in numbered.values():
        if (
            len(is_multi_node) > 1
            and max(is_multi_node) < len(is_multi_node) + min(is_multi_node)
            and min(is_multi_node) < 2
        ):
            speakers |= {name: str(rank) for rank, name in is_multi_node.items()}
    return speakers


def host_pattern(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern for the node, task or container names with which nearly all lines begin; None if they don't.

    It also matches other names that differ only in their numbers. The launcher's first lines might lack a name.
    """
    matches = [_HOST.match(line) for line in lines if line.strip()]
    matches_from_first = [match for match in dropwhile(lambda match: match is None, matches) if match is not None]
    names = {match["name"] for match in matches_from_first}
    tasks = len(names) > 1 and names == {str(task) for task in range(len(names))}
    if len(matches_from_first) < max(
        3,
        (2 - tasks) * len(names),
        0.8 * (len(matches) - matches.index(matches_from_first[0]) if matches_from_first else 0),
    ):
        return None
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(match["name"])) for match in matches_from_first}
    marks = {next(mark for mark in _MARKS if re.match(mark, match["mark"])) for match in matches_from_first}
    return re.compile(rf" {{0,6}}(?P<name>{'|'.join(sorted(shapes))})(?:{'|'.join(sorted(marks))})")
