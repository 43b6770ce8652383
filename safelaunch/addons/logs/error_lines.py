"""Finds lines that look like errors, so that errors that no other module understands are shown, too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from safelaunch.addons.logs.lines import LogLine
from safelaunch.addons.logs.speakers import LogEntry, Speaker
from safelaunch.verdict.exceptions import one_line

MOST_EVENTS, _MOST_SHOWN = 300, 5
_EVENT = re.compile(
    "|".join(
        (
            r"(?P<memory>CUDA out of memory|[Oo]ut[ -]of[ -][Mm]emory|\bOOM[ -]?[Kk]ill\w*|oom[-_]kill|Cannot allocate"
            r" memory|can't allocate memory)",
            r"(?P<device>\bXid\b|fallen off the bus|\bECC error|illegal memory access|unspecified launch failure"
            r"|device-side assert|cudaError\w+|CUDA error)",
            r"(?P<limit>DUE TO (?:TIME LIMIT|PREEMPTION)|\bCANCELLED AT\b|[Ww]alltime|TIME LIMIT)",
            r"(?P<signal>\bSIG(?:KILL|SEGV|ABRT|BUS|FPE|ILL|TERM|HUP)\b|\b[Ss]ignal:? ?\(?\d+|on signal \d"
            r"|[Ss]egmentation fault|core dumped|Bus error|^(?:\S+: line \d+: +)?\d* *(?:Killed|Aborted|Terminated)\b"
            r"|is killed by|terminate called|\bkernel panic)",
            r"(?P<exit>(?i:exit(?:ed)?(?: with)?(?: a| an)?(?: non-?zero)?[ _]?(?:exit )?(?:code|status)?"
            r"[ :=]{0,3}\(?)(?P<code>-?[1-9]\d{0,4})\b(?!\.\d))",
            r"(?P<errno>\berrno:? ?=?\d+|\[Errno \d+\]|[Aa]ddress already in use|EADDRINUSE|No space left on device"
            r"|[Cc]onnection (?:refused|reset by peer|timed out)|[Nn]o route to host|[Nn]ame or service not known"
            r"|[Tt]emporary failure in name resolution|Permission denied|No such file or directory"
            r"|Too many open files)",
            r"(?P<stalled>\b(?:loss|grad_norm|grad norm)\W{1,3}(?:nan|NaN|inf)\b"
            r"|[Nn]o progress (?:for|in|since) |^FAILED )",
            r"(?P<watchdog>[Ww]atchdog (?:caught|got stuck|thread terminated)|[Hh]eartbeat monitor timed out"
            r"|NCCL WARN|wait timeout|[Tt]imed out (?:after|waiting|initializing))",
            r"(?P<raised>(?<![\w.])(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*(?:Error|Exception|Died\w*|Interrupt|Expired|Failed)"
            r"|TimeoutExpired|SystemExit|OutOfMemory|error|Empty)(?:\(\w+\))?: \S"
            r"|(?:^|: )(?:\w+\.)*[A-Z]\w*(?:Error|Exception)$)",
            r"(?P<level>\b(?:ERROR|FATAL|CRITICAL|SEVERE|Error|Fatal)\b(?=[\]:|>)]| - | {1,3}\S)|^\[?[EF]\d{3,4} "
            r"|\[[EF]\d* )",
        )
    )
)
# Not errors: metrics with such names, exit code 0, information levels.
_NO_EVENT = re.compile(
    r"\b(?:Error|ERROR|error)s?\b(?:[ _](?:rate|norm|count))?s?[ :=(]{1,3}[-+\d.]+(?:e[-+]?\d+)?(?:[ ,%|)]|$)"
    r"|exit(?:ed)?(?: with)? (?:code|status)?:? ?0\b|\b(?:INFO|DEBUG)\b|\[?\b[ID]\d{4} |\[I\d* "
)
_HARMLESS = re.compile(
    r"NCCL WARN|\b(?:WARN|WARNING|Warning|warning)\b(?!\.py)|\[?\bW\d{4} |\[W\d* |Warning: |Exception ignored in"
    r"|(?i:retry|try(?:ing)? again|attempt \d|\bretries\b|will be ignored|ignoring|skipping|recovered"
    r"|fall(?:ing)? ?back)"
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
# Usually effects of an earlier failure, so shown last.
_EFFECT = re.compile(
    r"ChildFailedError|SignalException|SIGTERM|Terminated|closed by|reset by peer|ncclRemoteError|failed to recv"
    r"|Broken pipe|terminate called|[Tt]erminating|CANCELLED|Job step aborted|exit|DistBackendError|srun: error"
    r"|CalledProcessError|failed \(exitcode"
)
PROGRESS = re.compile(
    r"(?i:\b(?:global[ _]?)?(?:step|iter|iteration|epoch|batch|it)s?\b\W{0,4}\d)|\d+%\||\bloss\W{1,3}\d"
)
_ENDS = ("omplete", "inished", "done")
_FINISHED = re.compile(
    r"(?i:\b(?:training|run|job|all|finetuning|evaluation)\b.{0,40}\b(?:complete|completed|finished|done)\b)"
)


@dataclass
class ErrorLine:
    kind: str
    text: str
    line: LogLine
    last: LogLine
    speaker: Speaker | None
    harmless: bool
    count: int = 1  # number of lines that differ only in their numbers
    since: int = 0  # progress lines that the speaker printed afterwards

    @property
    def speaker_name(self) -> str:
        return f"rank {self.speaker}" if isinstance(self.speaker, int) else self.speaker or ""

    @property
    def description(self) -> str:
        """Place, speaker and text of the error: ``job.log:17 rank 3: ValueError: bad``."""
        times = f" ({self.count} times)" if self.count > 1 else ""
        name = f" {self.speaker_name}:" if self.speaker_name else ":"
        return f"{self.line.where}{name} {one_line(self.text)}{times}"

    @property
    def is_effect(self) -> bool:
        return self.kind == "effect" or _EFFECT.search(self.text) is not None

    @property
    def survived(self) -> bool:
        return self.since > 2


@dataclass
class ErrorLines:
    by_shape: dict[str, ErrorLine] = field(default_factory=dict)  # by text without numbers
    _end: LogLine | None = None

    def note_progress(self, entry: LogEntry) -> None:
        if not self.by_shape:
            return
        if PROGRESS.search(entry.text):
            for error in self.by_shape.values():
                error.since += error.speaker in (None, entry.speaker)
        if any(word in entry.text for word in _ENDS) and _FINISHED.search(entry.text):
            self._end = entry.line

    def read_line(self, entry: LogEntry, *, may_report: bool) -> None:
        """Adds the line if it reports an error.

        Args:
            may_report: False if it can't report one: it has no typical word, or is part of a traceback.
        """
        text = entry.text
        match = _EVENT.search(text) if may_report else None
        if match is None or _NO_EVENT.search(text):
            return
        harmless = _HARMLESS.search(text) is not None
        self.add(str(match.lastgroup or ""), text, entry, harmless=harmless)

    def add(self, kind: str, text: str, entry: LogEntry, *, harmless: bool) -> None:
        shape = _NUMBERS.sub("0", text)
        if (earlier := self.by_shape.get(shape)) is not None:
            earlier.count += 1
            earlier.since, earlier.last = 0, entry.line
        elif len(self.by_shape) < MOST_EVENTS:
            self.by_shape[shape] = ErrorLine(kind, text, entry.line, entry.line, entry.speaker, harmless)

    @property
    def finished(self) -> bool:
        end = self._end
        last = [error.last for error in self.errors()]
        return end is not None and all(line.file == end.file and line.number < end.number for line in last)

    def first(self, most: int) -> list[ErrorLine]:
        """Returns the errors to show first: fatal errors before survived ones, and causes before effects."""
        return sorted(self.errors(), key=lambda error: (error.survived, error.is_effect))[:most]

    def summary(self, shown: str = "") -> tuple[str, ...]:
        """Summarizes a log that nothing else explains: its first errors or, if there are none, its first warnings.

        Args:
            shown: Text that has been shown already; lines that it cites are left out.
        """
        first = [error for error in self.first(MOST_EVENTS) if f"[{error.line.where}]" not in shown][:_MOST_SHOWN]
        if shown and all(error.is_effect for error in first):  # effects of what is already shown
            return ()
        if first and not self.finished and not all(error.survived for error in first):
            head = "not understood; the first errors are:"
        elif first:
            head = "no failure seen: the job worked on after its errors:"
        else:
            first = self.warnings()[: _MOST_SHOWN - 2]
            head = "no failure seen; the first warnings are:"
        return (head, *(f"  {error.description}" for error in first)) if first else ()

    def causes(self) -> list[ErrorLine]:
        fatal = [error for error in self.errors() if error.kind == "thread" or not (error.survived or error.is_effect)]
        return sorted(fatal, key=lambda error: error.kind not in ("traceback", "thread"))

    def errors(self) -> list[ErrorLine]:
        return [error for error in self.by_shape.values() if not error.harmless]

    def warnings(self) -> list[ErrorLine]:
        return [warning for warning in self.by_shape.values() if warning.harmless]
